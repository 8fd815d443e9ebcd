"""Attention kernels: each run of queries with its segment of keys, separate forward and backward,
with the log-sum-exp.

T tokens, H heads of queries, G of keys (H is a multiple of G), D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from rl_core.learning.attention import AttentionPlan, Kernel, Segments
from rl_core.learning.logprobs import capped_

MAX_RATIO = 4 / 3  # of lengths in a block; less padding means more and smaller blocks
HIDDEN = 1e9  # log-sum-exp of a padded query: all its probabilities are 0


def find_kernel(name: str, device: torch.device) -> Kernel:
    """Raises ValueError if its library does not import here. "auto": flash-attn's on a GPU where it
    imports, else torch's."""
    if name == "auto":
        has_flash_attn = device.type == "cuda" and not import_error("flash_attn")
        name = "flash_attn" if has_flash_attn else "torch"
    if error := import_error(name):
        raise ValueError(
            f"--attention={name} needs {name}, which does not import here ({error}); "
            "install it, or leave --attention at auto"
        )
    return KERNELS[name]


def import_error(name: str) -> str:
    """Why the kernel's library does not import; "" if it does. A folder of the library's name is
    not the library: flash-attn-4, which SGLang requires, has none of flash-attn 2's functions."""
    try:
        if name in LIBRARIES:
            module, function = LIBRARIES[name]
            getattr(import_module(module), function)
    except Exception as error:  # whatever a library does when it is imported
        return f"{type(error).__name__}: {error}"
    return ""


def has_flash(q: Tensor) -> bool:
    return q.device.type != "cpu" and q.dtype in (torch.float16, torch.bfloat16)


def fused_on_cpu(q: Tensor) -> bool:
    return q.device.type == "cpu"


def sizes(segments: Segments) -> tuple:
    return segments.cu_q, segments.cu_k, segments.max_q, segments.max_k


def windows(segments: Segments) -> dict[str, int]:
    """How many keys before and after its own a query sees; -1 for all."""
    left, right = -1, -1
    if segments.is_causal:
        right = 0
    if segments.window is not None:
        left = segments.window - 1
    return {"window_size_left": left, "window_size_right": right}


def is_plainly_causal(segments: Segments) -> bool:
    return segments.is_causal and segments.window is None


def torch_forward(q, k, v, segments, scale, cap=None):
    """Of torch.nn.attention.varlen.varlen_attn, whose own backward ignores the gradient of the
    log-sum-exp."""
    if cap is not None or not has_flash(q):
        return dense_forward(q, k, v, segments, scale, cap)
    how = 0.0, is_plainly_causal(segments), False
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes(segments), *how, scale=scale, **windows(segments)
    )
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def torch_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    if cap is not None or not has_flash(q):
        return dense_backward(dout, q, k, v, out, lse, segments, scale, cap)
    # No dropout.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    how = 0.0, is_plainly_causal(segments), seed, torch.empty(0, device=q.device)
    tensors = dout.contiguous(), q, k, v, out, lse.contiguous()
    return torch.ops.aten._flash_attention_backward(
        *tensors, *sizes(segments), *how, scale=scale, **windows(segments)
    )


def flash_attn_forward(q, k, v, segments, scale, cap=None):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    more = {"causal": segments.is_causal, "softcap": cap or 0.0} | windows(segments)
    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *sizes(segments), 0.0, scale, **more)
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def flash_attn_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    tensors = dout.contiguous(), q, k, v, out, lse.contiguous(), *grads
    more = {"softcap": cap or 0.0, "alibi_slopes": None} | windows(segments)
    more["deterministic"] = torch.are_deterministic_algorithms_enabled()
    how = 0.0, scale, segments.is_causal
    _flash_attn_varlen_backward(*tensors, *sizes(segments), *how, **more)
    return grads


def zigzag_ring(q, k, v, plan: AttentionPlan, scale):
    from ring_flash_attn import zigzag_ring_flash_attn_varlen_func

    lengths = plan.causal.cu_q, plan.causal.max_k
    more = {"softmax_scale": scale, "causal": True, "group": plan.group}
    return zigzag_ring_flash_attn_varlen_func(q, k, v, *lengths, **more)


@dataclass(kw_only=True, slots=True)
class Layout:
    """Runs of one length, or padded to it, as blocks that a kernel for dense tensors takes."""

    blocks: list[tuple[int, int, int]]  # number of runs, queries and keys of each
    tokens: Tensor | None = None  # the token in each place of the blocks; None: all in their order
    places: Tensor | None = None  # [T] each token's place


def layout_of(segments: Segments) -> Layout:
    queries, keys = np.array(segments.lengths).T
    if segments.is_causal and (queries == keys).all():
        return padded_layout(queries, segments.cu_q.device)
    same = itertools.groupby(segments.lengths)
    return Layout(blocks=[(len(list(runs)), *pair) for pair, runs in same])


def padded_layout(lengths: np.ndarray, device: torch.device) -> Layout:
    """Padding at its end changes nothing under a causal mask: no token sees it."""
    starts = lengths.cumsum() - lengths
    kinds = np.floor(np.log(lengths) / np.log(MAX_RATIO))
    blocks = []
    tokens = []
    for kind in dict.fromkeys(kinds.tolist()):
        runs = np.flatnonzero(kinds == kind)
        column = np.arange(lengths[runs].max())
        places = np.where(column < lengths[runs, None], starts[runs, None] + column, -1)
        tokens.append(places.ravel())
        blocks.append((len(runs), len(column), len(column)))
    flat = np.concatenate(tokens)
    if np.array_equal(flat, np.arange(lengths.sum())):
        return Layout(blocks=blocks)
    places = np.empty(lengths.sum(), np.int64)
    places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    flat, places = (torch.from_numpy(x).to(device) for x in (flat.clip(0), places))
    return Layout(blocks=blocks, tokens=flat, places=places)


def rows(x: Tensor, places: Tensor | None) -> Tensor:
    """Those rows of x; None: all. embedding() copies rows several times faster than index_select()
    does."""
    return x if places is None else embedding(places, x.flatten(1)).view(-1, *x.shape[1:])


def unpadded(blocks: list[Tensor], layout: Layout) -> Tensor:
    """[T, H, D] of blocks [runs, H, length, D]."""
    return rows(torch.cat([x.transpose(1, 2).flatten(0, 1) for x in blocks]), layout.places)


def blocks_of(
    layout: Layout, segments: Segments, queries: list[Tensor], keys: list[Tensor]
) -> Iterator[tuple]:
    """(is causal, mask, the block of each of `queries`, and of each of `keys`)"""
    num_queries = [num * m for num, m, _ in layout.blocks]
    num_keys = [num * n for num, _, n in layout.blocks]
    parts = [x.split(num_queries) for x in queries] + [x.split(num_keys) for x in keys]
    for (num, m, n), *blocks in zip(layout.blocks, *parts, strict=True):
        mask, window = None, segments.window
        if window is not None and not m == n <= window:
            ones = queries[0].new_ones((m, n), dtype=torch.bool)
            is_seen = ones.tril(n - m).triu(n - m - window + 1)
            mask = queries[0].new_zeros(m, n).masked_fill_(~is_seen, -torch.inf)
        is_causal = segments.is_causal and mask is None
        yield is_causal, mask, *(x.unflatten(0, (num, -1)).transpose(1, 2) for x in blocks)


def dense_forward(q, k, v, segments, scale, cap=None):
    layout = segments.layout(layout_of)
    forward = partial(math_forward, cap=cap)
    if fused_on_cpu(q) and cap is None:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (rows(x, layout.tokens) for x in (q, k, v))
    outs, lses = [], []
    for is_causal, mask, *qkv in blocks_of(layout, segments, [q], [k, v]):
        out, lse = forward(*qkv, 0.0, is_causal, attn_mask=mask, scale=scale)
        outs.append(out)
        lses.append(lse.transpose(0, 1).flatten(1))
    lse = torch.cat(lses, 1)
    return unpadded(outs, layout), lse if layout.places is None else lse[:, layout.places]


def dense_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    layout = segments.layout(layout_of)
    backward = partial(math_backward, cap=cap)
    if fused_on_cpu(q) and cap is None:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    lse = lse.T
    if layout.places is not None:  # padded queries have no probabilities, and so no gradient
        hidden = lse.new_full((len(layout.tokens), lse.shape[1]), HIDDEN)
        lse = hidden.index_copy_(0, layout.places, lse)
    dout, q, k, v, out = (rows(x, layout.tokens) for x in (dout, q, k, v, out))
    queries = [dout, q, out, lse[:, :, None]]
    grads = []
    for is_causal, mask, dout_b, q_b, out_b, lse_b, *kv in blocks_of(
        layout, segments, queries, [k, v]
    ):
        of_forward = out_b, lse_b[..., 0].contiguous(), 0.0, is_causal
        grads.append(backward(dout_b, q_b, *kv, *of_forward, attn_mask=mask, scale=scale))
    return [unpadded(list(blocks), layout) for blocks in zip(*grads, strict=True)]


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
KERNELS = {"torch": TORCH, "flash_attn": FLASH_ATTN, "ring_flash_attn": RING_FLASH_ATTN}
# A function that each of them calls.
LIBRARIES = {
    "flash_attn": ("flash_attn.flash_attn_interface", "_flash_attn_varlen_backward"),
    "ring_flash_attn": ("ring_flash_attn", "zigzag_ring_flash_attn_varlen_func"),
}
