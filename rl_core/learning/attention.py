"""Attention over a packed batch as a transformers attention implementation, registered by name.

Pieces of similar length are padded to one block and go through torch's own kernel, so that no work is done between
sequences and nothing has the size [T, T]. Whole sequences and prompts need no mask beyond the causal one; what follows a
shared prompt attends to that prompt and to itself.

H heads, D head dim, T tokens, N pieces of a block, Q and K their padded queries and keys.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from rl_core.learning.ring_attention import refuse_more, ring_attention_forward
from rl_core.types import PackedBatch

NAME = "rl_core_packed"
MAX_PADDING = 0.25  # of the tokens of a block; less padding means more and smaller blocks
MAX_MASK = 1 << 24  # entries of a block's mask


@dataclass(kw_only=True, slots=True)
class Block:
    """N pieces of at most Q tokens, which lie together in the packed batch."""

    first: int  # token of the packed batch
    last: int
    shape: tuple[int, int]  # N, Q
    padded_from: Tensor | None  # [N * Q] which token, counted from `first`, stands there; None: nothing is padded
    packed_from: Tensor | None  # [last - first] where in the padded block each token stands
    keys_from: Tensor | None = None  # [N * K] which token of the batch is this key; None: the block's own tokens
    query_positions: Tensor | None = None  # [N, Q] place in the sequence
    key_positions: Tensor | None = None  # [N, K]; beyond every query where nothing stands
    masks: dict = field(default_factory=dict)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """[N or 1, 1, Q, K] to be added to the scores, made once for all layers; None if causal is all there is."""
        if self.keys_from is None and (window is None or self.shape[1] <= window):
            return None
        if window not in self.masks:
            queries = keys = torch.arange(self.shape[1], device=like.device)[None]
            if self.keys_from is not None:
                queries, keys = self.query_positions, self.key_positions
            distance = (queries[:, :, None] - keys[:, None, :])[:, None]
            is_seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            self.masks[window] = torch.zeros_like(is_seen, dtype=like.dtype).masked_fill_(~is_seen, -torch.inf)
        return self.masks[window]


def attention_blocks(batch: PackedBatch) -> list[Block]:
    """Blocks that cover the pieces in their order. If they are sorted by length, blocks are few and padding is little."""
    starts, device = batch.cu_seqlens.tolist(), batch.input_ids.device
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    blocks, begin = [], 0
    while begin < len(lengths):
        end, total = begin, 0
        while end < len(lengths) and (batch.parents[end] < 0) == (batch.parents[begin] < 0):
            # Pieces come sorted, so that the newest is the longest.
            num, longest, prompts = end + 1 - begin, lengths[end], batch.parents[begin : end + 1]
            keys = longest + (max(lengths[p] for p in prompts) if prompts[0] >= 0 else 0)
            if end > begin and (
                total + longest < (1 - MAX_PADDING) * num * longest
                or (prompts[0] >= 0 and num * longest * keys > MAX_MASK)
            ):
                break
            end, total = end + 1, total + longest
        block = make_block(lengths[begin:end], starts[begin], device)
        if batch.parents[begin] >= 0:
            parents = batch.parents[begin:end]
            prompts = [(starts[p], lengths[p]) for p in parents]
            add_prompts(block, list(zip(starts[begin:end], lengths[begin:end], strict=True)), prompts, device)
        blocks.append(block)
        begin = end
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
    last = first + total
    return Block(first=first, last=last, shape=(num, longest), padded_from=padded_from, packed_from=packed_from)


def add_prompts(block: Block, pieces: list, prompts: list, device: torch.device) -> None:
    """Keys of a block whose pieces follow prompts: each prompt's tokens, padded, then the piece's own, padded. `pieces`
    and `prompts` are (first token, length) of each."""
    (first, length), (prompt_first, prompt_length) = (torch.tensor(x).T[:, :, None] for x in (pieces, prompts))
    own, prompt = torch.arange(block.shape[1]), torch.arange(int(prompt_length.max()))
    nowhere = int(prompt_length.max()) + block.shape[1]
    is_prompt, is_own = prompt < prompt_length, own < length
    keys = torch.cat([torch.where(is_prompt, prompt_first + prompt, 0), torch.where(is_own, first + own, 0)], 1)
    places = torch.cat([torch.where(is_prompt, prompt, nowhere), torch.where(is_own, prompt_length + own, nowhere)], 1)
    block.keys_from = keys.flatten().to(device)
    block.key_positions = places.to(device)
    block.query_positions = (prompt_length + own).to(device)


class Pad(torch.autograd.Function):
    """[tokens, ...] -> [N * Q, ...]. What stands in a padded place reaches no token, so it has no gradient."""

    @staticmethod
    def forward(ctx, x_TC, block):
        ctx.block = block
        return embedding(block.padded_from, x_TC)

    @staticmethod
    def backward(ctx, grad):
        return embedding(ctx.block.packed_from, grad), None


class Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TC, block):
        ctx.block, ctx.rows = block, x_TC.shape[0]
        return embedding(block.packed_from, x_TC)

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_zeros(ctx.rows, grad.shape[1])
        return out.index_copy_(0, ctx.block.packed_from, grad), None


def packed_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    blocks=None,
    ring=None,
    sliding_window=None,
    **more,
):
    """[1, T, H, D]. query [1, H, T, D], key and value [1, Hkv, T, D]; `blocks`, or the `ring` of ranks that hold parts of
    the sequences, comes through the model's forward."""
    if ring is not None:
        return ring_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling,
            dropout,
            ring=ring,
            sliding_window=sliding_window,
            **more,
        )
    refuse_more(more)
    head_dim = query.shape[3]
    # embedding() copies rows several times faster than index_select() does, and adds their gradients faster too.
    q_TC, k_TC, v_TC = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    outs = []
    for block in blocks:
        own = slice(block.first, block.last)
        q = to_heads(padded(q_TC[own], block), block.shape[0], head_dim)
        k, v = (
            padded(x[own], block) if block.keys_from is None else embedding(block.keys_from, x) for x in (k_TC, v_TC)
        )
        k, v = (to_heads(x, block.shape[0], head_dim) for x in (k, v))
        mask, is_grouped = block.mask(sliding_window, q), q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )
        out = out.transpose(1, 2).reshape(-1, q_TC.shape[1])
        outs.append(out if block.packed_from is None else Unpad.apply(out, block))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).unflatten(1, (-1, head_dim))[None], None


def padded(x_TC: Tensor, block: Block) -> Tensor:
    return x_TC if block.padded_from is None else Pad.apply(x_TC, block)


def to_heads(x_TC: Tensor, num: int, head_dim: int) -> Tensor:
    """[N, H, length, D]"""
    return x_TC.reshape(num, -1, x_TC.shape[1] // head_dim, head_dim).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
# The blocks say all that a mask would; building one of [T, T] is what this file exists to avoid.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
