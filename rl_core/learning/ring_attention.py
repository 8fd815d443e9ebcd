"""Exact attention over a packed batch whose sequences are cut over the ranks of a group, each rank holding 1/cp of them.

With cp ranks, sequence n is padded at its end to 2 * cp * c_n tokens and cut into 2 * cp chunks. Rank r holds, for each
sequence in order, chunk r and then chunk 2cp-1-r: all ranks have the same work under a causal mask. Padding attends like
any token; nobody reads it.

Keys and values travel round the ring while the block at hand is computed (Ring Attention, arXiv 2310.01889):

    from                its keys            seen by the queries
    this rank           both chunks         both, causal: the two chunks lie in their order
    a lower rank        the first chunk     both: it ends before either begins
    a higher rank       both chunks         the second only: it begins after either ends

T local tokens, N sequences, H heads of queries, G of keys (H is a multiple of G), D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface

from rl_core.learning.block_kernels import KERNELS, Kernel, Pairs, Rows, kernel_name, make_pairs, rows_of

NAME = "rl_core_ring"
EVERY = slice(None)


@dataclass(kw_only=True, slots=True)
class Ring:
    """This rank's place in the group, and what its attention needs to know about one batch. Made by make_ring()."""

    group: dist.ProcessGroup | None  # None: this process alone
    rank: int
    size: int
    cu_seqlens: Tensor  # [N+1] int32 on the host, 2 * c_n local tokens each
    device: torch.device
    backend: str | None  # None: what suits the device
    first: Rows  # [T/2] the first chunk of each sequence
    second: Rows
    own: Pairs
    lower: Pairs
    higher: Pairs
    windows: dict[int, tuple[Pairs, Tensor]] = field(default_factory=dict)  # see window_pairs()

    def block(self, source: int) -> tuple[Pairs, Rows, Rows]:
        """Pairs of this rank's queries with the keys of rank `source`, and which tokens those queries and keys are."""
        if source == self.rank:
            return self.own, EVERY, EVERY
        return (self.lower, EVERY, self.first) if source < self.rank else (self.higher, self.second, EVERY)


def make_ring(
    cu_seqlens_local: Tensor, group: dist.ProcessGroup | None, device: torch.device, backend: str | None = None
) -> Ring:
    """The Ring of one batch, to be made once and given to every layer. `backend` is a key of KERNELS, or "ring_flash_attn"
    for that library's own schedule."""
    if backend not in (None, "ring_flash_attn", *KERNELS):
        raise ValueError(f"backend={backend!r} is unknown; choose from {[*KERNELS, 'ring_flash_attn']}")
    starts = cu_seqlens_local.tolist()
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    assert starts[-1] > 0 and all(n % 2 == 0 for n in lengths), lengths
    halves = [n // 2 for n in lengths]
    return Ring(
        group=group,
        rank=0 if group is None else group.rank(),
        size=1 if group is None else group.size(),
        cu_seqlens=cu_seqlens_local.to("cpu", torch.int32),
        device=torch.device(device),
        backend=backend,
        first=rows_of([range(a, a + n) for a, n in zip(starts, halves, strict=False)], device),
        second=rows_of([range(a + n, a + 2 * n) for a, n in zip(starts, halves, strict=False)], device),
        own=make_pairs(lengths, lengths, device, is_causal=True),
        lower=make_pairs(lengths, halves, device, is_causal=False),
        higher=make_pairs(halves, lengths, device, is_causal=False),
    )


def ring_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, ring: Ring, scale: float, sliding_window: int | None = None
) -> Tensor:
    """[T, H, D]: what this rank's tokens see of their whole sequences, causal. With a sliding window a token sees that
    many, itself included. Every rank of the group must call it, and run its backward, in the same order."""
    assert len(query_THD) == ring.cu_seqlens[-1], (query_THD.shape, ring.cu_seqlens)
    kernel = KERNELS[kernel_name(query_THD, ring.backend)]
    if sliding_window is not None and sliding_window < ring.size * ring.own.max_k:
        return WindowAttention.apply(query_THD, key_TGD, value_TGD, ring, kernel, scale, sliding_window)
    if ring.backend == "ring_flash_attn":
        from ring_flash_attn import zigzag_ring_flash_attn_varlen_func

        pairs = ring.own
        return zigzag_ring_flash_attn_varlen_func(
            query_THD, key_TGD, value_TGD, pairs.cu_q, pairs.max_k, softmax_scale=scale, causal=True, group=ring.group
        )
    return RingAttention.apply(query_THD, key_TGD, value_TGD, ring, kernel, scale)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TGD, v_TGD, ring, kernel, scale):
        out, lse = attend(q_THD, passed_round(torch.stack((k_TGD, v_TGD), 1), ring), ring, kernel, scale)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out, lse)
        ctx.ring, ctx.kernel, ctx.scale = ring, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        ring = ctx.ring
        dq, dkv = torch.zeros(q.shape, dtype=lse.dtype, device=q.device), None
        for source, kv in passed_round(torch.stack((k, v), 1), ring):
            # The gradient of these keys so far arrives from the rank before, which has just added its own part.
            arriving = None if dkv is None else Shift(dkv, ring)
            dq_part, dkv_part = block_gradients(dout, q, kv, out, lse, source, ring, ctx.kernel, ctx.scale)
            dkv = torch.zeros(kv.shape, dtype=lse.dtype, device=q.device) if dkv is None else arriving.wait()
            _, q_rows, k_rows = ring.block(source)
            dq[q_rows] += dq_part
            dkv[k_rows] += dkv_part
            del dq_part, dkv_part  # not while the next block is computed
        if ring.size > 1:
            dkv = Shift(dkv, ring).wait()
        return dq.to(q.dtype), *dkv.to(k.dtype).unbind(1), None, None, None


class Shift:
    """One step round the ring: the tensor leaves for the next rank, and wait() gives that of the rank before."""

    def __init__(self, tensor: Tensor, ring: Ring):
        self.sent, self.received = tensor, torch.empty_like(tensor)
        to, source = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
        send = dist.P2POp(dist.isend, tensor, group=ring.group, group_peer=to)
        receive = dist.P2POp(dist.irecv, self.received, group=ring.group, group_peer=source)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.sent = self.works = None
        return self.received


def passed_round(kv: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """Each rank and its keys and values, this rank first. The next travel while the caller works on these."""
    for step in range(ring.size):
        arriving = Shift(kv, ring) if step + 1 < ring.size else None
        yield (ring.rank - step) % ring.size, kv
        kv = arriving.wait() if arriving else kv


def attend(
    q: Tensor, sources: Iterable[tuple[int, Tensor]], ring: Ring, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """[T, H, D] and the log-sum-exp of its scores [H, T], merged in float32 or float64 from the blocks of all ranks."""
    out = lse = None
    for source, kv in sources:
        pairs, q_rows, k_rows = ring.block(source)
        part, part_lse = kernel.forward(q[q_rows], *kv[k_rows].unbind(1), pairs, scale)
        if out is None:
            out, lse = (part if ring.size == 1 else part.to(part_lse.dtype)), part_lse
            continue
        before = lse[:, q_rows]
        share = torch.sigmoid(part_lse - before).T[:, :, None]
        out[q_rows] = torch.lerp(out[q_rows], part.to(out.dtype), share)
        lse[:, q_rows] = torch.logaddexp(before, part_lse)
    return out.to(q.dtype), lse


def block_gradients(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, source: int, ring: Ring, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """What one block adds to the gradients of its queries and of its keys and values. With out and lse of the whole row
    the probabilities are the final ones, so that the parts only need adding."""
    pairs, q_rows, k_rows = ring.block(source)
    dq, dk, dv = kernel.backward(
        dout[q_rows], q[q_rows], *kv[k_rows].unbind(1), out[q_rows], lse[:, q_rows], pairs, scale
    )
    return dq, torch.stack((dk, dv), 1)


class WindowAttention(torch.autograd.Function):
    """Few keys lie within a window, and mostly near: all are gathered, and each chunk takes its own."""

    @staticmethod
    def forward(ctx, q_THD, k_TGD, v_TGD, ring, kernel, scale, window):
        pairs, rows = window_pairs(ring, window)
        near = gathered(torch.stack((k_TGD, v_TGD), 1), ring)[rows]
        out, lse = kernel.forward(q_THD, *near.unbind(1), pairs, scale)
        out = out.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out, lse)
        ctx.ring, ctx.kernel, ctx.scale, ctx.window = ring, kernel, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        pairs, rows = window_pairs(ctx.ring, ctx.window)
        near = gathered(torch.stack((k, v), 1), ctx.ring)[rows]
        dq, dk, dv = ctx.kernel.backward(dout, q, *near.unbind(1), out, lse, pairs, ctx.scale)
        size = ctx.ring.size
        dkv = torch.zeros(len(k) * size, 2, *k.shape[1:], dtype=lse.dtype, device=q.device)
        dkv.index_add_(0, rows, torch.stack((dk, dv), 1).to(lse.dtype))
        if size > 1:
            summed = torch.empty(len(k), *dkv.shape[1:], dtype=lse.dtype, device=q.device)
            dist.reduce_scatter(summed, list(dkv.chunk(size)), group=ctx.ring.group)
            dkv = summed
        return dq.to(q.dtype), *dkv.to(k.dtype).unbind(1), None, None, None, None


def gathered(kv: Tensor, ring: Ring) -> Tensor:
    """[cp * T, 2, G, D]: rank by rank."""
    if ring.size == 1:
        return kv
    out = kv.new_empty(ring.size * len(kv), *kv.shape[1:])
    dist.all_gather(list(out.chunk(ring.size)), kv, group=ring.group)
    return out


def window_pairs(ring: Ring, window: int) -> tuple[Pairs, Tensor]:
    """Each local chunk with the keys that its queries may see, and which of the gathered tokens those keys are."""
    if window not in ring.windows:
        starts = ring.cu_seqlens.tolist()
        q_lengths, k_lengths, rows = [], [], []
        for start, end in itertools.pairwise(starts):
            length = (end - start) // 2
            for chunk in (ring.rank, 2 * ring.size - 1 - ring.rank) if length else ():
                seen = torch.arange(max(0, chunk * length - window + 1), (chunk + 1) * length)
                its_chunk = seen // length
                owner = torch.minimum(its_chunk, 2 * ring.size - 1 - its_chunk)
                place = start + (its_chunk >= ring.size) * length + seen % length
                rows.append(owner * starts[-1] + place)
                q_lengths.append(length)
                k_lengths.append(len(seen))
        pairs = make_pairs(q_lengths, k_lengths, ring.device, is_causal=True, window=window)
        ring.windows[window] = pairs, torch.cat(rows).to(ring.device)
    return ring.windows[window]


def refuse_more(more: dict, dropout: float = 0.0) -> None:
    """Raises ValueError if a model's attention asks for what would be left out silently."""
    unknown = [name for name in ("softcap", "s_aux") if more.get(name) is not None]
    if dropout or unknown:
        raise ValueError(f"attention here has no {' or '.join(unknown) or 'dropout'}; train a model without it")


def ring_attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, ring=None, sliding_window=None, **more
):
    """[1, T, H, D]. query [1, H, T, D], key and value [1, G, T, D]; `ring` comes through the model's forward."""
    refuse_more(more, dropout)
    assert len(query) == 1, query.shape
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    return ring_attention(q, k, v, ring, scale, sliding_window)[None], None


AttentionInterface.register(NAME, ring_attention_forward)
# The ring says all that a mask would.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
