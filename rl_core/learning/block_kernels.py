"""Attention of pieces of a packed batch to other pieces, forward and backward apart, with the log-sum-exp that a ring needs.

The gradient of a block takes the output and the log-sum-exp of whole rows: its probabilities are then the final ones, and
the gradients of all blocks only need adding.

T tokens, P pieces, B of them of equal length, H heads of queries, G of keys (H is a multiple of G), D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

Rows = slice | Tensor  # which tokens


@dataclass(kw_only=True, slots=True)
class Pairs:
    """P pieces of queries, each with the piece of keys that it attends to. If causal, the last of both is one token."""

    cu_q: Tensor  # [P+1] int32 on the device
    cu_k: Tensor  # [P+1]
    lengths: list[tuple[int, int]]  # P times queries and keys
    max_q: int
    max_k: int
    is_causal: bool
    window: int | None = None  # a query sees this many keys, itself included
    groups: list[tuple[int, int, Rows, Rows]] | None = None  # see equal_lengths()


def make_pairs(q_lengths: list[int], k_lengths: list[int], device, is_causal: bool, window: int | None = None) -> Pairs:
    starts = [list(itertools.accumulate(x, initial=0)) for x in (q_lengths, k_lengths)]
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in starts)
    lengths = list(zip(q_lengths, k_lengths, strict=True))
    # One query a sequence sends the flash kernels down their path for decoding, which lays out its results otherwise.
    max_q, max_k = max(2, *q_lengths), max(k_lengths)
    return Pairs(cu_q=cu_q, cu_k=cu_k, lengths=lengths, max_q=max_q, max_k=max_k, is_causal=is_causal, window=window)


def rows_of(ranges: list[range], device) -> Rows:
    """The tokens of these ranges, one after the other: a slice, which costs no copy, where nothing lies between them."""
    if all(a.stop == b.start for a, b in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).to(device)


@dataclass(kw_only=True, slots=True)
class Kernel:
    """forward(q, k, v, pairs, scale) -> out [T, H, D], lse [H, T] of float32, or float64 for float64
    backward(dout, q, k, v, out, lse, pairs, scale) -> dq, dk, dv"""

    forward: Callable
    backward: Callable


def equal_lengths(pairs: Pairs) -> list[tuple[int, int, Rows, Rows]]:
    """Pieces of equal lengths together, so that they need no padding: queries and keys of each, and where they all are."""
    if pairs.groups is None:
        ends_q, ends_k = (list(itertools.accumulate(x)) for x in zip(*pairs.lengths, strict=True))
        found: dict[tuple[int, int], list] = {}
        for (num_q, num_k), end_q, end_k in zip(pairs.lengths, ends_q, ends_k, strict=True):
            # Without a single query or key torch's kernel for the CPU divides by zero.
            if num_q and num_k:
                found.setdefault((num_q, num_k), []).append((range(end_q - num_q, end_q), range(end_k - num_k, end_k)))
        pairs.groups = [
            (*lengths, *(rows_of(list(x), pairs.cu_q.device) for x in zip(*places, strict=True)))
            for lengths, places in found.items()
        ]
    return pairs.groups


def additive_mask(pairs: Pairs, num_q: int, num_k: int, like: Tensor) -> Tensor | None:
    """[num_q, num_k] with -inf where nothing is seen; None if causal from the first token on, or nothing, is all."""
    if pairs.window is None or num_q == num_k <= pairs.window:
        return None
    distance = torch.arange(num_k - num_q, num_k, device=like.device)[:, None] - torch.arange(num_k, device=like.device)
    is_hidden = (distance < 0) | (distance >= pairs.window)
    return torch.zeros_like(distance, dtype=like.dtype).masked_fill_(is_hidden, -torch.inf)


def to_dense(x: Tensor, rows: Rows, length: int) -> Tensor:
    """[B, H, length, D]"""
    return x[rows].unflatten(0, (-1, length)).transpose(1, 2)


def from_dense(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def forward_by_length(dense: Callable, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, scale: float):
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], len(q), dtype=wide, device=q.device)
    for num_q, num_k, q_rows, k_rows in equal_lengths(pairs):
        mask = additive_mask(pairs, num_q, num_k, q)
        qkv = to_dense(q, q_rows, num_q), to_dense(k, k_rows, num_k), to_dense(v, k_rows, num_k)
        part, part_lse = dense(*qkv, 0.0, pairs.is_causal and mask is None, attn_mask=mask, scale=scale)
        out[q_rows] = from_dense(part)
        lse[:, q_rows] = part_lse.transpose(0, 1).flatten(1).to(wide)
    return out, lse


def backward_by_length(dense: Callable, dout, q, k, v, out, lse, pairs: Pairs, scale: float):
    grads = dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    for num_q, num_k, q_rows, k_rows in equal_lengths(pairs):
        mask = additive_mask(pairs, num_q, num_k, q)
        qkv = to_dense(q, q_rows, num_q), to_dense(k, k_rows, num_k), to_dense(v, k_rows, num_k)
        dout_part, out_part = to_dense(dout, q_rows, num_q), to_dense(out, q_rows, num_q)
        lse_part = lse[:, q_rows].unflatten(1, (-1, num_q)).transpose(0, 1)
        parts = dense(
            dout_part, *qkv, out_part, lse_part, 0.0, pairs.is_causal and mask is None, attn_mask=mask, scale=scale
        )
        dq[q_rows], dk[k_rows], dv[k_rows] = map(from_dense, parts)
    return grads


def math_forward(q, k, v, dropout, is_causal, attn_mask=None, scale=1.0):
    """Attention written out, for what has no fused kernel; float32 inside, or float64."""
    scores = math_scores(q, k, is_causal, attn_mask, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ repeated(v, q)
    return out.to(q.dtype), lse


def math_backward(dout, q, k, v, out, lse, dropout, is_causal, attn_mask=None, scale=1.0):
    probs = (math_scores(q, k, is_causal, attn_mask, scale) - lse[..., None]).exp()
    dout = dout.to(probs.dtype)
    dprobs = dout @ repeated(v, q).mT
    dscores = probs * (dprobs - (dout * out).sum(-1, keepdim=True)) * scale
    dq = dscores @ repeated(k, q)
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dscores.mT @ q.to(probs.dtype), probs.mT @ dout))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def math_scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    k = repeated(k, q)
    scores = q.to(k.dtype) @ k.mT * scale
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """[B, H, length, D]: the heads of keys or values, each as often as heads of queries share it, wide."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(q.shape[1] // x.shape[1], 1)


def window_sizes(pairs: Pairs) -> tuple[int, int]:
    """How many keys before and after its own a query sees, in the flash kernels' way; -1 for all."""
    if pairs.window is not None:
        return pairs.window - 1, 0
    return -1, (0 if pairs.is_causal else -1)


def torch_forward(q, k, v, pairs, scale):
    left, right = window_sizes(pairs)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, pairs.cu_q, pairs.cu_k, pairs.max_q, pairs.max_k, 0.0, (left, right) == (-1, 0), False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def torch_backward(dout, q, k, v, out, lse, pairs, scale):
    left, right = window_sizes(pairs)
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # no dropout
    return torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse.contiguous(), pairs.cu_q, pairs.cu_k, pairs.max_q, pairs.max_k,
        0.0, (left, right) == (-1, 0), seed, unused, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip


def flash_attn_forward(q, k, v, pairs, scale):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    left, right = window_sizes(pairs)
    out, lse, *_ = _flash_attn_varlen_forward(
        q, k, v, pairs.cu_q, pairs.cu_k, pairs.max_q, pairs.max_k, 0.0, scale, causal=pairs.is_causal,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def flash_attn_backward(dout, q, k, v, out, lse, pairs, scale):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    left, right = window_sizes(pairs)
    grads = dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    _flash_attn_varlen_backward(
        dout.contiguous(), q, k, v, out, lse.contiguous(), dq, dk, dv, pairs.cu_q, pairs.cu_k, pairs.max_q, pairs.max_k,
        0.0, scale, pairs.is_causal, window_size_left=left, window_size_right=right, softcap=0.0, alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return grads


def by_length(forward: Callable, backward: Callable) -> Kernel:
    return Kernel(forward=partial(forward_by_length, forward), backward=partial(backward_by_length, backward))


KERNELS = {
    "cpu": by_length(
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
    "math": by_length(math_forward, math_backward),
    "torch": Kernel(forward=torch_forward, backward=torch_backward),
    "flash_attn": Kernel(forward=flash_attn_forward, backward=flash_attn_backward),
}


def kernel_name(query: Tensor, backend: str | None) -> str:
    if backend in KERNELS:
        return backend
    if query.device.type == "cpu":
        return "cpu"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "math"
    return "flash_attn" if find_spec("flash_attn") else "torch"
