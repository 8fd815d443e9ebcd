"""Attention over a packed batch as a transformers attention implementation, registered by name.

Sequences of similar length are padded to one block and go through torch's own kernel, causal and without a mask, so
that no work is done between sequences and nothing has the size [T, T]. H heads, D head dim, T tokens, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "rl_core_packed"
MAX_PADDING = 0.25  # of the tokens of a block; less padding means more and smaller blocks


@dataclass(kw_only=True, slots=True)
class Block:
    """N sequences of at most `length` tokens, which lie together in the packed batch."""

    first: int  # token of the packed batch
    last: int
    num: int
    length: int
    padded_from: Tensor | None  # [N * length] which token, counted from `first`, stands there; None: nothing is padded
    packed_from: Tensor | None  # [last - first] where in the padded block each token stands


def attention_blocks(lengths: list[int], device: torch.device) -> list[Block]:
    """Blocks that cover the sequences in their order. If they are sorted by length, blocks are few and padding is little."""
    blocks, start, first = [], 0, 0
    while start < len(lengths):
        end, longest, total = start, 0, 0
        while end < len(lengths):
            new_longest, new_total = max(longest, lengths[end]), total + lengths[end]
            if new_total < (1 - MAX_PADDING) * new_longest * (end + 1 - start):
                break
            end, longest, total = end + 1, new_longest, new_total
        blocks.append(make_block(lengths[start:end], first, device))
        start, first = end, first + total
    return blocks


def make_block(lengths: list[int], first: int, device: torch.device) -> Block:
    num, longest, total = len(lengths), max(lengths), sum(lengths)
    padded_from = packed_from = None
    if total < num * longest:
        sizes = torch.tensor(lengths)
        column = torch.arange(longest)
        is_token = column < sizes[:, None]
        starts = sizes.cumsum(0) - sizes
        padded_from = torch.where(is_token, starts[:, None] + column, 0).flatten().to(device)
        packed_from = is_token.flatten().nonzero()[:, 0].to(device)
    return Block(
        first=first, last=first + total, num=num, length=longest, padded_from=padded_from, packed_from=packed_from
    )


class Pad(torch.autograd.Function):
    """[tokens, ...] -> [N * length, ...]. What stands in a padded place reaches no token, so it has no gradient."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x.index_select(0, block.padded_from)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.block.packed_from), None


class Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block, ctx.rows = block, x.shape[0]
        return x.index_select(0, block.packed_from)

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        return out.index_copy_(0, ctx.block.packed_from, grad), None


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, blocks=None, sliding_window=None, **_
):
    """[1, T, H, D]. query [1, H, T, D], key and value [1, Hkv, T, D]; `blocks` comes through the model's forward."""
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    outs = []
    for block in blocks:
        q, k, v = (to_block(x[block.first : block.last], block) for x in (q_THD, k_THD, v_THD))
        mask = (
            window_mask(block.length, sliding_window, q.device)
            if sliding_window and block.length > sliding_window
            else None
        )
        out = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.transpose(1, 2).reshape(block.num * block.length, *q_THD.shape[1:])
        outs.append(out if block.packed_from is None else Unpad.apply(out, block))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


def to_block(x_THD: Tensor, block: Block) -> Tensor:
    """[N, H, length, D]"""
    if block.padded_from is not None:
        x_THD = Pad.apply(x_THD, block)
    return x_THD.unflatten(0, (block.num, block.length)).transpose(1, 2)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < window)


AttentionInterface.register(NAME, packed_attention)
# The blocks say all that a mask would; building one of [T, T] is what this file exists to avoid.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
