"""The embedded engine's cache of keys and values, and the attention that writes it and reads it.

Legend: n rows in a forward, S new tokens per row, L cached tokens, H heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "rl_core_slots"

Snapshot = list[tuple[Tensor, Tensor]]  # per layer, keys and values [K, L, D] of one row


class SlotCache:
    """Keys and values, per layer [num_slots, K, max_tokens + 1, D]; the last column takes what padding writes."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, allocated when it is first seen in the shape and type of what it stores."""
        if index not in self.layers:
            # Zeros, because what a mask hides still has to be finite.
            self.layers[index] = tuple(
                x.new_zeros(self.num_slots, x.shape[1], self.max_tokens + 1, x.shape[3]) for x in (key, value)
            )
        return self.layers[index]

    def copy_row(self, source: int, target: int, length: int) -> None:
        for pair in self.layers.values():
            for cache in pair:
                cache[target, :, :length] = cache[source, :, :length]

    def snapshot(self, row: int, length: int) -> Snapshot:
        return [(k[row, :, :length].clone(), v[row, :, :length].clone()) for k, v in self.layers.values()]

    def restore(self, row: int, kept: Snapshot, length: int) -> None:
        for pair, kept_pair in zip(self.layers.values(), kept, strict=True):
            for cache, kept_cache in zip(pair, kept_pair, strict=True):
                cache[row, :, :length] = kept_cache[:, :length]


@dataclass(kw_only=True, slots=True)
class ForwardPlan:
    """Where one forward's tokens go in the cache and what they see. It reaches slot_attention as a model argument."""

    cache: SlotCache
    rows: slice
    length: int  # L, the longest of its rows with the new tokens
    fresh: bool  # nothing is cached before these tokens
    positions: Tensor  # [n, S] column that each token is written to; [1, S] if fresh
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window, built once for all layers
    write_index: Tensor | None = None  # [n * K] decode only

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [n, K, S, D] keys and values and returns views of the caches [n, K, L, D]."""
        caches = self.cache.layer(layer, key, value)
        for cache, new in zip(caches, (key, value), strict=True):
            if self.fresh:
                cache[self.rows, :, : self.length] = new
            elif new.shape[2] == 1:
                num_heads, size = cache.shape[1], cache.shape[2]
                if self.write_index is None or len(self.write_index) != len(new) * num_heads:
                    heads = torch.arange(self.rows.start * num_heads, self.rows.stop * num_heads, device=new.device)
                    self.write_index = heads * size + self.positions.repeat_interleave(num_heads)
                cache.view(-1, cache.shape[3]).index_copy_(0, self.write_index, new.reshape(-1, new.shape[3]))
            else:
                rows = torch.arange(self.rows.start, self.rows.stop, device=new.device)[:, None]
                cache[rows, :, self.positions] = new.transpose(1, 2)
        return tuple(cache[self.rows, :, : self.length] for cache in caches)

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, S, L] bool, True where a query sees a key."""
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, None, :, None]
            seen = keys <= queries
            self.masks[window] = seen if window is None else seen & (keys > queries - window)
        return self.masks[window]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,  # [n, H, S, D]
    key: Tensor,  # [n, K, S, D]
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    slot_plan: ForwardPlan | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [n, S, H, D] over the slots, after the new keys and values were written into them."""
    keys, values = slot_plan.write(module.layer_idx, key, value)
    if slot_plan.fresh and (sliding_window is None or slot_plan.length <= sliding_window):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    elif query.shape[2] == 1:
        out = decode_attention(query, keys, values, slot_plan.mask(sliding_window), scaling)
    else:
        mask = slot_plan.mask(sliding_window)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention output [n, H, 1, D] of one query per row. The heads that share keys are folded into its length."""
    folded = query.reshape(*keys.shape[:2], -1, query.shape[-1])
    if query.dtype == torch.float32:
        # For one query plain products are quicker than the fused kernel, by a third at head dimension 32 on a CPU.
        scores = (folded * scaling) @ keys.transpose(2, 3)
        out = scores.masked_fill_(~mask, -torch.inf).softmax(-1) @ values
    else:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return out.view(*query.shape[:3], -1)


# No mask function is registered under this name, which is how transformers is told to build no mask.
AttentionInterface.register(ATTENTION, slot_attention)
