"""Attention over packed sequences: one mechanism for whole sequences, trees of them and, in
parallel/context_parallel.py, sequences cut over ranks.

Queries attend to segments of keys, which a kernel computes without a mask or padding. Where a query
sees several segments, their results are merged by log-sum-exp. The backward of each segment takes
the output and the log-sum-exp of whole rows: its probabilities are then the final ones, and the
gradients of all segments only need adding.

    queries                         segments of keys
    each piece                      itself, causal
    what follows a shared piece     that piece, all of it
    a block, such as an image       the later tokens of the block, if they are seen

T local tokens, H heads of queries, G of keys (H is a multiple of G), D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

from rl_core.models.kernels.segments import Kernel, Segments, added, merged

NAME = "rl_core_packed"

Results = tuple[Tensor, Tensor]  # Attention [T, H, D] and its log-sum-exp [H, T].


class AttentionPlan:
    """Attention metadata of one batch, made once and passed to every layer.

    Pieces start at cu_seqlens [N+1], on the CPU. Piece n continues piece parents[n] < n; -1: it
    begins a sequence."""

    def __init__(
        self, cu_seqlens: Tensor, parents: list[int], kernel: Kernel, device: torch.device
    ):
        self.kernel, self.device = kernel, device
        starts = cu_seqlens.tolist()
        self.num_tokens = starts[-1]
        self.pieces = np.split(np.arange(self.num_tokens), starts[1:-1])
        # The tokens of each piece's sequence, up to the end of the piece.
        self.sequences = {-1: np.arange(0)}
        for number, parent in enumerate(parents):
            before = self.sequences[parent]
            self.sequences[number] = np.concatenate([before, self.pieces[number]])
        self.longest = max(map(len, self.sequences.values()))
        self.causal = Segments([(p, p) for p in self.pieces], device, is_causal=True)
        self.segments = [self.causal]
        above = parents
        parent_of = {-1: -1} | dict(enumerate(parents))
        while max(above) >= 0:
            shared = Segments(self.shared_runs(above), device)
            if shared.lengths:
                self.segments.append(shared)
            above = [parent_of[n] for n in above]
        self.windows: dict[int, list[Segments]] = {}
        self.ahead: list[Segments] = []  # Further segments of layers with a window.
        # Results of the forward by attention module, for a backward that recomputes activations but
        # not attention. None: they are not kept; as a value: the forward calls the module twice.
        self.kept: dict[int, Results | None] | None = None

    def shared_runs(self, above: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(queries, keys) of each shared piece: all queries that follow it read its keys once."""
        runs = []
        for number, family in itertools.groupby(range(len(above)), above.__getitem__):
            if number >= 0:
                queries = np.concatenate([self.pieces[n] for n in family])
                runs.append((queries, self.pieces[number]))
        return runs

    def see_ahead(self, blocks: list[np.ndarray], in_full_attention: bool) -> None:
        """Lets each token of a block see the block's later tokens, in layers with a window and, if
        `in_full_attention`, in the others."""
        # In reverse order these are causal: the token before the last sees the last alone.
        runs = [(block[-2::-1], block[:0:-1]) for block in blocks]
        later = Segments(runs, self.device, is_causal=True)
        if later.lengths:
            self.ahead.append(later)
            self.segments += self.ahead * in_full_attention

    def window_runs(self, window: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(queries, keys) of each piece within the window. A ring has other keys."""
        runs = []
        for number, piece in enumerate(self.pieces):
            keys = self.sequences[number]
            runs.append((piece, keys[max(0, len(keys) - len(piece) + 1 - window) :]))
        return runs

    def near(self, window: int) -> list[Segments]:
        """The segments of layers in which a token sees `window` keys, itself included."""
        if window not in self.windows:
            runs = self.window_runs(window)
            near = Segments(runs, self.device, is_causal=True, window=window)
            self.windows[window] = [near, *self.ahead]
        return self.windows[window]

    def attend(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        sinks: Tensor | None = None,
        module: int = 0,
    ) -> Tensor:
        """[T, H, D] causal attention within each sequence, over the last `window` tokens, itself
        included, if there is a window. `cap` bounds scores. `sinks` [H]: the score of one more key
        of each head, with value 0. `module`: id() of the attention module. All ranks that share
        sequences must call it, and run its backward, in the same order."""
        assert len(query_THD) == self.num_tokens, (query_THD.shape, self.num_tokens)
        is_whole = all(segment in self.segments for segment in self.ahead)
        if window is not None and window >= self.longest and is_whole:
            window = None
        options = self, scale, cap, window, module
        return PackedAttention.apply(query_THD, key_TGD, value_TGD, sinks, *options)

    def results(self, module: int, compute: Callable[[], Results]) -> Results:
        """Calls compute() in the forward; returns the kept results if the backward recomputes."""
        assert self.kept is not None
        is_backward = torch._C._current_graph_task_id() != -1
        done = self.kept.pop(module, None) if is_backward else None
        out, lse = done or compute()
        if not is_backward:
            # Autograd would give `out` itself a history, which holds this plan.
            self.kept[module] = None if module in self.kept else (out.detach(), lse)
        return out, lse

    def computed(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        sinks: Tensor | None,
        scale: float,
        cap: float | None,
        window: int | None,
    ) -> Results:
        out = lse = None
        for (k, v), segments in self.sources([k_TGD, v_TGD], window):
            for segment in segments:
                rows, keys = segment.q_rows, segment.k_rows
                new = self.kernel.forward(q_THD[rows], k[keys], v[keys], segment, scale, cap)
                if out is None or lse is None:
                    out, lse = new
                else:
                    out, lse = merged(out, lse, new[0], new[1], rows)
        assert out is not None and lse is not None
        if sinks is not None:
            share = torch.sigmoid(lse - sinks[:, None])
            lse = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))
            out = out * share.T[:, :, None]
        return out.to(q_THD.dtype), lse

    def sources(self, kv: list[Tensor], window: int | None) -> Iterator[tuple[list, list]]:
        """Keys and values, and the segments in them, the local ones first."""
        yield kv, self.near(window) if window else self.segments

    def passed_on(self, kv_grads: list) -> Callable[[], list]:
        """Starts sending gradients to the rank of the next source. The result receives others."""
        return lambda: kv_grads

    def returned(self, kv_grads: list[Tensor], window: int | None) -> list[Tensor]:
        """Gradients of the local keys and values, once all sources were added."""
        return kv_grads


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TGD, v_TGD, sinks, plan, scale, cap, window, module):
        inputs = q_THD, k_TGD, v_TGD, sinks, scale, cap, window
        compute = partial(plan.computed, *inputs)
        out, lse = compute() if plan.kept is None else plan.results(module, compute)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out, lse, sinks)
        ctx.plan, ctx.window, ctx.scale_and_cap = plan, window, (scale, cap)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dsinks = None
        if sinks is not None:
            # The score of a key with value 0: dp = 0 in ds = p (dp - sum(dout * out))
            products = (dout.to(lse.dtype) * out).sum(-1).T
            dsinks = -((sinks[:, None] - lse).exp() * products).sum(1).to(sinks.dtype)
        dq = dk = dv = None
        plan = ctx.plan
        for (k_part, v_part), segments in plan.sources([k, v], ctx.window):
            arrived = plan.passed_on([dk, dv])
            grads = []
            for segment in segments:
                rows, keys = segment.q_rows, segment.k_rows
                tensors = dout[rows], q[rows], k_part[keys], v_part[keys], out[rows]
                args = *tensors, lse[:, rows], segment, *ctx.scale_and_cap
                grads.append((segment, *plan.kernel.backward(*args)))
            dk, dv = arrived()
            for segment, dq_part, dk_part, dv_part in grads:
                dq = added(dq, dq_part, segment.q_rows, len(q))
                dk = added(dk, dk_part, segment.k_rows, len(k_part))
                dv = added(dv, dv_part, segment.k_rows, len(v_part))
            del grads  # Frees the memory before the next segments are computed.
        assert dq is not None
        dk, dv = plan.returned([dk, dv], ctx.window)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, *[None] * 5


def attention_forward(
    module,
    query,
    key,
    value,
    mask,
    scaling=None,
    sliding_window=None,
    softcap=None,
    s_aux=None,
    *,
    attention_plan: AttentionPlan,
    **_,
):
    """[1, T, H, D]. query [1, H, T, D], key and value [1, G, T, D]; `attention_plan` comes through
    the model's forward. There is no dropout."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    width, head_dim = v.shape[2], q.shape[2]
    if width < head_dim:  # kernels want one head dim
        v = pad(v, (0, head_dim - width))
    scale = head_dim**-0.5 if scaling is None else scaling
    out = attention_plan.attend(q, k, v, scale, sliding_window, softcap, s_aux, id(module))
    return out[None, ..., :width], None


# No mask function is registered under this name, so that transformers builds no mask. The attention
# plan replaces masks, and building one would synchronise with the device.
AttentionInterface.register(NAME, attention_forward)
