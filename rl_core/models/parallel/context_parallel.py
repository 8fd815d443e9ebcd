"""Context parallelism (--cp): Ring Attention over sequences that are split over ranks
(arXiv:2310.01889).

With cp ranks, sequence n is padded at its end to 2 * cp * c_n tokens and cut into 2 * cp chunks.
Rank r holds, for each sequence in order, chunk r and then chunk 2cp-1-r: all ranks have the same
work under a causal mask. Keys and values travel around the ring while the current segments are
computed.

    keys from           segments        seen by the queries
    this rank           both chunks     both, causal: the two chunks lie in their order
    a lower rank        first chunk     both: it ends before either begins
    a higher rank       both chunks     the second only: it begins after either ends

Legend: T local tokens, G heads of keys, D head dim, M trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rl_core.models.attention import AttentionPlan
from rl_core.models.kernels.segments import Kernel, Segments
from rl_core.models.policy import Outputs, PackedForward, Policy
from rl_core.types import PackedBatch


class RingForward(PackedForward):
    """Computes this rank's shard of a batch that the ranks of `group` compute together."""

    def __init__(self, kernel: Kernel, group: dist.ProcessGroup):
        super().__init__(kernel)
        self.group = group

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float, outputs: Outputs
    ) -> tuple[Tensor, ...]:
        if batch.shard is None:  # Each rank computes the whole batch.
            return super().__call__(policy, batch, temperature, outputs)
        shard, ids = batch.shard, batch.input_ids
        plan = RingPlan(shard.cu_seqlens, self.kernel, ids.device, self.group)
        hidden_1TD = policy.hidden_states(
            input_ids=ids[None, shard.tokens],
            position_ids=batch.position_ids[None, shard.tokens],
            attention_plan=plan,
        )
        labels = batch.labels[shard.trained]
        of_shard = outputs(hidden_1TD[0, shard.logit_indices], labels, temperature)
        return tuple(FromShards.apply(shard, self.group, torch.stack(of_shard)))

    def tokens(self, batch: PackedBatch) -> Tensor:
        return super().tokens(batch) if batch.shard is None else batch.shard.tokens


class RingPlan(AttentionPlan):
    """An attention plan whose pieces are this rank's chunks of whole sequences."""

    def __init__(
        self, cu_seqlens: Tensor, kernel: Kernel, device: torch.device, group: dist.ProcessGroup
    ):
        super().__init__(cu_seqlens, [-1] * (len(cu_seqlens) - 1), kernel, device)
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.longest *= self.size
        halves = [np.array_split(piece, 2) for piece in self.pieces]
        both = list(zip(self.pieces, halves, strict=True))
        lower = Segments([(piece, first) for piece, (first, _) in both], device)
        higher = Segments([(second, piece) for piece, (_, second) in both], device)
        self.by_source = [[lower]] * self.rank + [self.segments]
        self.by_source += [[higher]] * (self.size - 1 - self.rank)

    def window_runs(self, window: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys are rows of all ranks' keys, in the order of the ranks."""
        runs, size = [], self.size
        for piece in self.pieces:
            length = len(piece) // 2
            if not length:
                continue
            chunk, offset = divmod(np.arange(2 * size * length), length)
            owner = np.minimum(chunk, 2 * size - 1 - chunk)
            rows = owner * self.num_tokens + piece[0] + (chunk >= size) * length + offset
            for n, chunk in enumerate((self.rank, 2 * size - 1 - self.rank)):
                first = chunk * length
                keys = rows[max(0, first - window + 1) : first + length]
                runs.append((piece[n * length : (n + 1) * length], keys))
        return runs

    def sources(self, kv: list[Tensor], window: int | None) -> Iterator[tuple[list, list]]:
        """(keys and values, segments) of each rank, this rank first. The next ones travel while the
        caller computes. With a window, the keys of all ranks at once."""
        if window is not None:
            yield [gathered_rows(x, self.group) for x in kv], self.near(window)
            return
        for step in range(self.size):
            is_last = step + 1 == self.size
            arrived = None if is_last else self.shifted(kv)
            yield kv, self.by_source[(self.rank - step) % self.size]
            if arrived:
                kv = arrived()

    def passed_on(self, kv_grads: list) -> Callable[[], list]:
        """Receives the gradient of these keys from the previous rank, which has just added its
        share."""
        return super().passed_on(kv_grads) if kv_grads[0] is None else self.shifted(kv_grads)

    def returned(self, kv_grads: list[Tensor], window: int | None) -> list[Tensor]:
        if window is None:
            return self.shifted(kv_grads)()
        return [self.scattered(x) for x in kv_grads]

    def shifted(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts one step around the ring: sends the tensors to the next rank. The returned
        function waits for those of the previous rank."""
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        moves = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in sent]
        for x in received:
            moves.append(dist.P2POp(dist.irecv, x, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(moves)

        def wait() -> list[Tensor]:
            while works:
                works.pop().wait()
            sent.clear()  # The buffers must live until the sends are done.
            return received

        return wait

    def scattered(self, grad: Tensor) -> Tensor:
        """[T, G, D], this rank's rows of the sum over ranks, in fp32 or fp64."""
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        return summed_rows(grad, self.group)


def gathered_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in their order. Each rank has equally many."""
    out = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather(list(out.chunk(group.size())), x.contiguous(), group=group)
    return out


def summed_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum over ranks."""
    summed = x.new_empty(len(x) // group.size(), *x.shape[1:])
    dist.reduce_scatter(summed, list(x.contiguous().chunk(group.size())), group=group)
    return summed


class FromShards(torch.autograd.Function):
    """[n, m] values of this rank's trained tokens -> [n, M] values of the whole batch. Every rank
    then computes the same loss from all values; a gradient flows back only to this rank's tokens,
    since the other ranks handle theirs."""

    @staticmethod
    def forward(ctx, shard, group, values):
        ctx.trained = shard.trained
        padded = pad(values, (0, max(shard.counts) - values.shape[1]))
        gathered = [torch.empty_like(padded) for _ in shard.counts]
        dist.all_gather(gathered, padded, group=group)
        shards = [values[:, :n] for values, n in zip(gathered, shard.counts, strict=True)]
        return torch.cat(shards, 1)[:, shard.gathered]

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad[:, ctx.trained]
