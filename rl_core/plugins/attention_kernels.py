"""Attention kernels: each run of queries with its segment of keys, separate forward and backward,
with the log-sum-exp.

T tokens, H heads of queries, G of keys (H is a multiple of G), D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from rl_core.learning.attention import AttentionPlan, Kernel, Segments
from rl_core.learning.logprobs import capped_

MAX_PADDING = 0.25  # of the tokens of a block; less padding means more and smaller blocks
HIDDEN = 1e9  # log-sum-exp of a padded query: all its probabilities are 0


def has_flash(q: Tensor) -> bool:
    return q.device.type != "cpu" and q.dtype in (torch.float16, torch.bfloat16)


def fused_on_cpu(q: Tensor) -> bool:
    return q.device.type == "cpu"


def window_sizes(segments: Segments) -> tuple[int, int]:
    """How many keys before and after its own a query sees, in the flash kernels' way; -1 for
    all."""
    if segments.window is not None:
        return segments.window - 1, 0
    return -1, (0 if segments.is_causal else -1)


def torch_forward(q, k, v, segments, scale, cap=None):
    """Of torch.nn.attention.varlen.varlen_attn, whose own backward ignores the gradient of the
    log-sum-exp."""
    if cap is not None or not has_flash(q):
        return dense_forward(q, k, v, segments, scale, cap)
    left, right = window_sizes(segments)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        0.0,
        (left, right) == (-1, 0),
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def torch_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    if cap is not None or not has_flash(q):
        return dense_backward(dout, q, k, v, out, lse, segments, scale, cap)
    left, right = window_sizes(segments)
    # No dropout.
    seed, unused = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )
    return torch.ops.aten._flash_attention_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        lse.contiguous(),
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        0.0,
        (left, right) == (-1, 0),
        seed,
        unused,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )


def flash_attn_forward(q, k, v, segments, scale, cap=None):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    left, right = window_sizes(segments)
    out, lse, *_ = _flash_attn_varlen_forward(
        q,
        k,
        v,
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        0.0,
        scale,
        causal=segments.is_causal,
        window_size_left=left,
        window_size_right=right,
        softcap=cap or 0.0,
    )
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def flash_attn_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    left, right = window_sizes(segments)
    grads = dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    _flash_attn_varlen_backward(
        dout.contiguous(),
        q,
        k,
        v,
        out,
        lse.contiguous(),
        dq,
        dk,
        dv,
        segments.cu_q,
        segments.cu_k,
        segments.max_q,
        segments.max_k,
        0.0,
        scale,
        segments.is_causal,
        window_size_left=left,
        window_size_right=right,
        softcap=cap or 0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return grads


def zigzag_ring(q, k, v, plan: AttentionPlan, scale):
    from ring_flash_attn import zigzag_ring_flash_attn_varlen_func

    causal = plan.by_source[plan.rank][0]
    return zigzag_ring_flash_attn_varlen_func(
        q, k, v, causal.cu_q, causal.max_k, softmax_scale=scale, causal=True, group=plan.group
    )


@dataclass(kw_only=True, slots=True)
class Layout:
    """Runs of one length, or padded to it, as blocks that a kernel for dense tensors takes."""

    blocks: list[tuple[int, int, int]]  # number of runs, queries and keys of each
    tokens: Tensor | None = None  # the token in each place of the blocks; None: all in their order
    places: Tensor | None = None  # [T] each token's place


def layout_of(segments: Segments, device: torch.device) -> Layout:
    if segments.layout is None:
        lengths = np.array(segments.lengths)
        if segments.is_causal and (lengths[:, 0] == lengths[:, 1]).all():
            segments.layout = padded_layout(lengths[:, 0], device)
        else:
            same = itertools.groupby(segments.lengths)
            segments.layout = Layout(blocks=[(len(list(runs)), *pair) for pair, runs in same])
    return segments.layout


def padded_layout(lengths: np.ndarray, device: torch.device) -> Layout:
    """Padding at its end changes nothing under a causal mask: no token sees it."""
    order, ends = lengths.argsort(kind="stable"), lengths.cumsum()
    members, begin = [], 0
    while begin < len(order):
        longest = lengths[order[begin:]]
        is_full = longest.cumsum() >= (1 - MAX_PADDING) * longest * np.arange(1, len(longest) + 1)
        members.append(order[begin:] if is_full.all() else order[begin : begin + is_full.argmin()])
        begin += len(members[-1])
    blocks, tokens = [], []
    # Where all runs of a block are equally long, no token moves.
    for runs in sorted(members, key=lambda runs: runs[0]):
        column = np.arange(lengths[runs[-1]])
        is_token = column < lengths[runs][:, None]
        tokens.append(np.where(is_token, (ends - lengths)[runs][:, None] + column, -1).ravel())
        blocks.append((len(runs), len(column), len(column)))
    flat = np.concatenate(tokens)
    if np.array_equal(flat, np.arange(ends[-1])):
        return Layout(blocks=blocks)
    places = np.empty(ends[-1], np.int64)
    places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    flat, places = (torch.from_numpy(x).to(device) for x in (flat.clip(0), places))
    return Layout(blocks=blocks, tokens=flat, places=places)


def padded(x: Tensor, layout: Layout) -> Tensor:
    # embedding() copies rows several times faster than index_select() does.
    return (
        x
        if layout.tokens is None
        else embedding(layout.tokens, x.flatten(1)).view(-1, *x.shape[1:])
    )


def unpadded(parts: list[Tensor], layout: Layout) -> Tensor:
    """[T, H, D] of blocks [runs, H, length, D]."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    x = torch.cat(rows) if len(rows) > 1 else rows[0]
    return (
        x
        if layout.places is None
        else embedding(layout.places, x.flatten(1)).view(-1, *x.shape[1:])
    )


def blocks_of(
    layout: Layout, segments: Segments, queries: list[Tensor], keys: list[Tensor]
) -> Iterator[tuple]:
    """(is causal, mask, the block of each of `queries`, and of each of `keys`)"""
    sizes_q, sizes_k = (
        [num * m for num, m, _ in layout.blocks],
        [num * n for num, _, n in layout.blocks],
    )
    parts = [x.split(sizes_q) for x in queries] + [x.split(sizes_k) for x in keys]
    for (num, m, n), *blocks in zip(layout.blocks, *parts, strict=True):
        mask, window = None, segments.window
        if window is not None and not m == n <= window:
            is_seen = (
                queries[0].new_ones((m, n), dtype=torch.bool).tril(n - m).triu(n - m - window + 1)
            )
            mask = queries[0].new_zeros(m, n).masked_fill_(~is_seen, -torch.inf)
        yield (
            segments.is_causal and mask is None,
            mask,
            *(x.view(num, -1, *x.shape[1:]).transpose(1, 2) for x in blocks),
        )


def dense_forward(q, k, v, segments, scale, cap=None):
    layout = layout_of(segments, q.device)
    of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    forward = of_cpu if fused_on_cpu(q) and cap is None else partial(math_forward, cap=cap)
    outs, lses = [], []
    for is_causal, mask, *qkv in blocks_of(
        layout, segments, [padded(q, layout)], [padded(x, layout) for x in (k, v)]
    ):
        out, lse = forward(*qkv, 0.0, is_causal, attn_mask=mask, scale=scale)
        outs.append(out)
        lses.append(lse.transpose(0, 1).flatten(1))
    lse = torch.cat(lses, 1)
    return unpadded(outs, layout), lse if layout.places is None else lse[:, layout.places]


def dense_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    layout = layout_of(segments, q.device)
    of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    backward = of_cpu if fused_on_cpu(q) and cap is None else partial(math_backward, cap=cap)
    lse, grads = lse.T, []
    if layout.places is not None:  # padded queries have no probabilities, and so no gradient
        lse = lse.new_full((len(layout.tokens), lse.shape[1]), HIDDEN).index_copy_(
            0, layout.places, lse
        )
    dout, q, k, v, out = (padded(x, layout) for x in (dout, q, k, v, out))
    queries = [dout, q, out, lse[:, :, None]]
    for is_causal, mask, dout_b, q_b, out_b, lse_b, k_b, v_b in blocks_of(
        layout, segments, queries, [k, v]
    ):
        lse_b = lse_b[..., 0].contiguous()
        grads.append(
            backward(
                dout_b, q_b, k_b, v_b, out_b, lse_b, 0.0, is_causal, attn_mask=mask, scale=scale
            )
        )
    return [unpadded(list(parts), layout) for parts in zip(*grads, strict=True)]


def math_forward(q, k, v, dropout, is_causal, attn_mask=None, scale=1.0, cap=None):
    """Attention written out, where no fused kernel fits; fp32 inside, or fp64."""
    scores = math_scores(q, k, is_causal, attn_mask, scale, cap)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ repeated(v, q)
    return out.to(q.dtype), lse


def math_backward(dout, q, k, v, out, lse, dropout, is_causal, attn_mask=None, scale=1.0, cap=None):
    scores = math_scores(q, k, is_causal, attn_mask, scale, cap)
    probs = (scores - lse[..., None]).exp()
    dout = dout.to(probs.dtype)
    dprobs = dout @ repeated(v, q).mT
    dscores = probs * (dprobs - (dout * out).sum(-1, keepdim=True)) * scale
    if cap is not None:
        dscores *= 1 - (scores.clamp(min=-cap) / cap) ** 2  # masked ones are -inf
    dq = dscores @ repeated(k, q)
    dk, dv = (
        x.unflatten(1, (k.shape[1], -1)).sum(2)
        for x in (dscores.mT @ q.to(probs.dtype), probs.mT @ dout)
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def math_scores(
    q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    k = repeated(k, q)
    scores = capped_(q.to(k.dtype) @ k.mT * scale, cap)
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """[B, H, length, D]: the heads of keys or values, each as often as heads of queries share it,
    wide."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(
        q.shape[1] // x.shape[1], 1
    )


TORCH = Kernel(forward=torch_forward, backward=torch_backward)
FLASH_ATTN = Kernel(forward=flash_attn_forward, backward=flash_attn_backward)
RING_FLASH_ATTN = Kernel(forward=flash_attn_forward, backward=flash_attn_backward, ring=zigzag_ring)
