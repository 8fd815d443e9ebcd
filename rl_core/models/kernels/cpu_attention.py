"""Attention over dense blocks, for CPUs and for cases that flash kernels do not support: caps on a
GPU without flash-attn, and fp32. Sequences of queries, with their segments of keys, are padded to
blocks of one length.

Legend: T tokens, H heads of queries, G of keys (H is a multiple of G), D head dim.
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

from rl_core.models.kernels.segments import Kernel, Segments

# Cost of a block, and of copying a token to a block and back, in (query, key) pairs of the forward
# and backward.
BLOCK_PAIRS, TOKEN_PAIRS = 2000, 8
HIDDEN = 1e9  # Log-sum-exp of a padded query, so that all its probabilities are 0.


def is_fused(q: Tensor, cap: float | None) -> bool:
    """True if torch's flash kernel for CPUs computes this."""
    return q.device.type == "cpu" and cap is None


@dataclass(kw_only=True, slots=True)
class Layout:
    """Sequences as blocks of one length, with or without padding, for kernels of dense tensors."""

    blocks: list[tuple[int, int, int]]  # (sequences, queries, keys) of each block
    tokens: Tensor | None = None  # token at each position of the blocks; None: all, in their order
    indices: Tensor | None = None  # [T] position of each token in the blocks


def layout_of(segments: Segments) -> Layout:
    """The layout of least cost: neighbours of equal length as blocks, which copies nothing, or
    sequences padded to a common length."""
    same = itertools.groupby(segments.lengths)
    alone = [(len(list(sequences)), *pair) for pair, sequences in same]
    queries, keys = np.array(segments.lengths).T
    if segments.is_causal and (queries == keys).all():
        groups = similar_lengths(queries)
        padded = sum(len(members) * queries[members].max() ** 2 for members in groups)
        padding = (padded - (queries**2).sum()) / 2 + TOKEN_PAIRS * queries.sum()
        if padding < BLOCK_PAIRS * (len(alone) - len(groups)):
            return padded_layout(queries, groups, segments.cu_q.device)
    return Layout(blocks=alone)


def similar_lengths(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of the sequences of each block. A block takes shorter sequences until their padding
    costs as much as one more block."""
    groups: list[list[int]] = []
    longest = padding = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        padding += (longest**2 - lengths[index] ** 2) / 2
        if not groups or padding > BLOCK_PAIRS:
            groups.append([])
            longest, padding = lengths[index], 0
        groups[-1].append(index)
    return [np.sort(group) for group in groups]


def padded_layout(lengths: np.ndarray, groups: list[np.ndarray], device: torch.device) -> Layout:
    """Pads at the end, which changes nothing under a causal mask: no token sees the padding."""
    starts = lengths.cumsum() - lengths
    tokens = []
    blocks = []
    for members in groups:
        column = np.arange(lengths[members].max())
        indices = np.where(column < lengths[members, None], starts[members, None] + column, -1)
        tokens.append(indices.ravel())
        blocks.append((len(members), len(column), len(column)))
    flat = np.concatenate(tokens)
    indices = flat.argsort()[len(flat) - lengths.sum() :]  # Padding, -1, is sorted first.
    flat, indices = (torch.from_numpy(x).to(device) for x in (flat.clip(0), indices))
    return Layout(blocks=blocks, tokens=flat, indices=indices)


def rows(x: Tensor, indices: Tensor | None) -> Tensor:
    """The rows of x at `indices`; None: all. embedding() copies rows several times faster than
    index_select()."""
    return x if indices is None else embedding(indices, x.flatten(1)).view(-1, *x.shape[1:])


def unpadded(blocks: list[Tensor], layout: Layout) -> Tensor:
    """[T, H, D] from blocks [sequences, H, length, D]."""
    parts = [x.transpose(1, 2).flatten(0, 1) for x in blocks]
    # A single block is not copied.
    return rows(parts[0] if len(parts) == 1 else torch.cat(parts), layout.indices)


def blocks_of(
    layout: Layout, segments: Segments, queries: list[Tensor], keys: list[Tensor]
) -> Iterator[tuple]:
    """(is_causal, mask, the block of each of `queries` and of each of `keys`)"""
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
    if is_fused(q, cap):
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    else:
        from rl_core.models.kernels.math_attention import math_forward

        forward = partial(math_forward, cap=cap)
    q, k, v = (rows(x, layout.tokens) for x in (q, k, v))
    outs, lses = [], []
    for is_causal, mask, q_b, k_b, v_b in blocks_of(layout, segments, [q], [k, v]):
        out, lse = forward(q_b, k_b, v_b, 0.0, is_causal, attn_mask=mask, scale=scale)
        outs.append(out)
        lses.append(lse.transpose(0, 1).flatten(1))
    lse = torch.cat(lses, 1)
    return unpadded(outs, layout), lse if layout.indices is None else lse[:, layout.indices]


def dense_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    layout = segments.layout(layout_of)
    if is_fused(q, cap):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    else:
        from rl_core.models.kernels.math_attention import math_backward

        backward = partial(math_backward, cap=cap)
    lse = lse.T
    if layout.indices is not None:  # Padded queries have no probabilities and no gradient.
        hidden = lse.new_full((len(layout.tokens), lse.shape[1]), HIDDEN)
        lse = hidden.index_copy_(0, layout.indices, lse)
    dout, q, k, v, out = (rows(x, layout.tokens) for x in (dout, q, k, v, out))
    queries = [dout, q, out, lse[:, :, None]]
    grads = []
    for is_causal, mask, *blocks in blocks_of(layout, segments, queries, [k, v]):
        dout_b, q_b, out_b, lse_b, k_b, v_b = blocks
        tensors = dout_b, q_b, k_b, v_b, out_b, lse_b[..., 0].contiguous()
        grads.append(backward(*tensors, 0.0, is_causal, attn_mask=mask, scale=scale))
    return [unpadded(list(blocks), layout) for blocks in zip(*grads, strict=True)]


DENSE = Kernel(forward=dense_forward, backward=dense_backward)
