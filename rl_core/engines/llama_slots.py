"""Prefills and decode steps of models in Llama's layout over slots.

A decode step of a small model, or of few rows, is dominated by overhead: a Hugging Face layer takes
about 60 calls of torch. Decode steps in fp32 take about 30 calls per layer here; all other forwards
are llama_layers(). Linear layers with adapters or quantised weights are called as modules.

Legend: n rows, S new tokens of each, L cached tokens, E hidden size, H heads, K key-value heads, G
heads that share keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_core.engines.kv_slots import ForwardPlan, SlotCache, SlotModel, new_zeros, slot_attention
from rl_core.models.kernels.llama_cpu import (
    is_plain,
    llama_layers,
    normed,
    padded_product,
    rows_for_onednn,
    window_of,
)

# Types of rotary embeddings whose frequencies depend on the length of a forward's rows.
CHANGING_ROTARY = ("dynamic", "longrope")


class LlamaCache(SlotCache):
    """One tensor for all layers, so that one call copies a row."""

    def __init__(self, num_slots: int, max_tokens: int, num_layers: int) -> None:
        super().__init__(num_slots, max_tokens)
        self.num_layers = num_layers
        self.stack: Tensor | None = None  # [layers, 2, num_slots, K, max_tokens + 1, D]
        self.flat: list[Tensor] = []  # Per layer [2 * num_slots * K * (max_tokens + 1), D].
        # [num_slots, 2 K] First index of each row's keys and values in `flat`.
        self.firsts: Tensor | None = None

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.stack is None:
            num_keys, length = key.shape[1], self.max_tokens + 1
            shape = (self.num_layers, 2, self.num_slots, num_keys, length, key.shape[3])
            self.stack = new_zeros(key, shape)
            self.layers = {i: tuple(both) for i, both in enumerate(self.stack)}
            self.flat = [both.view(-1, key.shape[3]) for both in self.stack]
            firsts = torch.arange(2 * self.num_slots * num_keys, device=key.device)
            firsts = firsts.view(2, self.num_slots, num_keys).transpose(0, 1) * length
            self.firsts = firsts.reshape(self.num_slots, -1)
        return self.layers[index]

    @property
    def tensors(self) -> list[Tensor]:
        return [] if self.stack is None else [self.stack]


class DecodeLinear:
    """A linear layer, computed without its module if it has no adapters or quantised weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        plain = is_plain(module)
        self.weight = module.weight if plain else None  # [out, in]
        self.weight_t = module.weight.T if plain else None
        self.bias = module.bias if plain else None
        # Rows from which on oneDNN is faster.
        self.large_from = rows_for_onednn(module.weight) if plain else math.inf

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, in] @ W.T + bias"""
        if self.weight is None:
            return self.module(x[:, None])[:, 0]
        if len(x) >= self.large_from:
            return padded_product(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def into(self, out: Tensor, x: Tensor) -> None:
        """out [n, out] = x [n, in] @ W.T + bias"""
        if self.weight is None or len(x) >= self.large_from:
            out.copy_(self(x))
        elif self.bias is None:
            torch.mm(x, self.weight_t, out=out)
        else:
            torch.addmm(self.bias, x, self.weight_t, out=out)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total [n, out] += x [n, in] @ W.T + bias"""
        if self.weight is None or len(x) >= self.large_from:
            total += self(x)
            return
        total.addmm_(x, self.weight_t)
        if self.bias is not None:
            total += self.bias


class Norm:
    """An RMSNorm in fp32 with fewer calls: x / sqrt(sum of squares + D eps) * sqrt(D) weight."""

    def __init__(self, norm: nn.Module) -> None:
        num = norm.weight.shape[0]
        self.weight = norm.weight * num**0.5
        self.least = self.weight.new_full((), (num * norm.variance_epsilon) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        return (x / self.size(x)).mul_(self.weight)

    def size(self, x: Tensor) -> Tensor:
        """[..., 1] divisor of x [..., D]."""
        return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.least)


class DecodeLayer:
    """A layer's parts. Matrices are not copied."""

    def __init__(self, layer: nn.Module) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.index, self.scaling, self.window = attn.layer_idx, attn.scaling, window_of(attn)
        self.norms = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.head_norms = None
        if hasattr(attn, "q_norm"):
            self.head_norms = Norm(attn.q_norm), Norm(attn.k_norm)
        self.inputs = (
            DecodeLinear(attn.q_proj),
            DecodeLinear(attn.k_proj),
            DecodeLinear(attn.v_proj),
        )
        self.out = DecodeLinear(attn.o_proj)
        self.gate, self.up = DecodeLinear(mlp.gate_proj), DecodeLinear(mlp.up_proj)
        self.down, self.act = DecodeLinear(mlp.down_proj), mlp.act_fn


@dataclass(kw_only=True, slots=True)
class DecodeStep:
    """Tensors that all layers of a decode step share."""

    columns: Tensor  # [n] Column of each row's new token.
    length: int
    is_even: bool  # True if every row has this length.
    targets: Tensor  # [n, 2 K] Indices of the new keys and values in the flat cache.
    keys: tuple[Tensor, ...]  # Per layer [n * K, D, L].
    values: tuple[Tensor, ...]  # Per layer [n * K, L, D].
    cos: Tensor  # [n, 1, D]
    sin: Tensor  # [n, 1, D] The first half is negative.
    # Buffers of a layer's projections, contiguous in memory.
    projected: list[Tensor]  # Queries [n, H * D], keys [n, K * D], values [n, K * D].
    rotated: Tensor  # [n, H + K, D] View of queries and keys.
    stored: Tensor  # [n, 2 K, D] View of keys and values.
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # Key: sliding window.

    def mask(self, window: int | None, num_keys: int, num_shared: int) -> Tensor | None:
        """Additive mask of scores [n * K, G, L]; None if every key is seen."""
        if window is not None and window >= self.length:
            window = None
        if self.is_even and window is None:
            return None
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.columns.device)
            last = self.columns[:, None]
            hidden = keys > last
            if window is not None:
                hidden |= keys <= last - window
            added = torch.zeros_like(hidden, dtype=self.cos.dtype)
            added.masked_fill_(hidden, -torch.inf)
            of_heads = added[:, None, None].expand(-1, num_keys, num_shared, -1)
            self.masks[window] = of_heads.reshape(-1, num_shared, self.length)
        return self.masks[window]


class DecodeParts:
    """Parameters of a decoder in fp32 for decode steps; valid until its weights change."""

    @torch.no_grad()
    def __init__(self, decoder: nn.Module) -> None:
        self.layers = [DecodeLayer(layer) for layer in decoder.layers]
        self.norm, self.embedding = Norm(decoder.norm), decoder.rotary_emb
        self.rotary: Tensor | None = None  # [positions, 2 D] cos and sin
        attn = decoder.layers[0].self_attn
        self.head_dim = attn.head_dim
        self.num_heads = attn.q_proj.out_features // attn.head_dim

    def step(
        self, cache: LlamaCache, rows: slice, x: Tensor, starts: Tensor, length: int, is_even: bool
    ) -> DecodeStep:
        targets = cache.firsts[rows] + starts[:, None]
        num_rows, num_stored = targets.shape
        heads = x.new_empty(num_rows, self.num_heads + num_stored, self.head_dim)
        of_keys = num_stored // 2 * self.head_dim
        sizes = [self.num_heads * self.head_dim, of_keys, of_keys]
        seen = cache.stack[:, :, rows, :, :length].flatten(2, 3)
        cos, sin = self.rotary_at(x, starts, length)
        return DecodeStep(
            columns=starts,
            length=length,
            is_even=is_even,
            targets=targets,
            keys=seen[:, 0].mT.unbind(),
            values=seen[:, 1].unbind(),
            cos=cos,
            sin=sin,
            projected=heads.view(num_rows, -1).split(sizes, 1),
            rotated=heads[:, : -num_stored // 2],
            stored=heads[:, self.num_heads :],
        )

    def rotary_at(self, x: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [n, 1, D] of rotary embeddings."""
        if self.embedding.rope_type in CHANGING_ROTARY:
            return signed(*self.embedding(x, starts[:, None]))
        if self.rotary is None or length > len(self.rotary):
            positions = torch.arange(max(256, 2 * length), device=x.device)
            both = signed(*self.embedding(x, positions[None]))
            self.rotary = torch.cat(both, -1)[0]
        both = self.rotary[starts]
        return both[:, None].chunk(2, -1)


class LlamaSlots(SlotModel):
    """A SlotModel of Llama, Mistral, Qwen2 or Qwen3."""

    parts: DecodeParts | None = None

    def make_cache(self, num_slots: int, max_tokens: int) -> LlamaCache:
        return LlamaCache(num_slots, max_tokens, len(self.decoder.layers))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """See SlotModel. The parameters for decode steps are collected each time, because weights
        change and move in between."""
        with super().borrowed():
            if self.model.dtype == torch.float32:
                self.parts = DecodeParts(self.decoder)
            try:
                yield
            finally:
                self.parts = None

    def forward(
        self,
        cache: LlamaCache,
        rows: slice,
        tokens: Tensor,
        starts: Tensor | None,
        length: int,
        sizes: Tensor | None = None,
        is_even: bool = False,
    ) -> Tensor:
        if starts is not None and tokens.shape[1] == 1:
            return self.decode_step(cache, rows, tokens, starts, length, is_even=is_even)
        return super().forward(cache, rows, tokens, starts, length, sizes)

    def decode_step(
        self,
        cache: LlamaCache,
        rows: slice,
        tokens: Tensor,
        starts: Tensor,
        length: int,
        *,
        is_even: bool,
    ) -> Tensor:
        """[n, 1, E]; see forward()."""
        if self.parts is None:
            return super().forward(cache, rows, tokens, starts, length)
        x = self.decoder.embed_tokens(tokens)[:, 0]
        step = self.parts.step(cache, rows, x, starts, length, is_even)
        for layer in self.parts.layers:
            decode_layer(layer, x, step, cache.flat[layer.index])
        return self.parts.norm(x)[:, None]

    def hidden(self, tokens: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        decoder, size = self.decoder, tokens.shape
        x = decoder.embed_tokens(tokens)
        cos, sin = signed(*decoder.rotary_emb(x, position_ids))

        def attend(attn: nn.Module, *qkv: Tensor) -> Tensor:
            out, _ = slot_attention(
                attn,
                *(heads.transpose(1, 2) for heads in qkv),
                None,
                scaling=attn.scaling,
                sliding_window=window_of(attn),
                slot_plan=plan,
            )
            return out.reshape(*size, -1)

        x = llama_layers(decoder, x, (cos[:, :, None], sin[:, :, None]), attend)
        return normed(decoder.norm, x)


def decode_layer(layer: DecodeLayer, x: Tensor, step: DecodeStep, cache: Tensor) -> None:
    """Adds a layer's attention and MLP to x [n, E]. cache: LlamaCache.flat of the layer."""
    h = layer.norms[0](x)
    for product, out in zip(layer.inputs, step.projected, strict=True):
        product.into(out, h)
    out = decode_attention(layer, step, cache)
    layer.out.add_to(x, out.view(x.shape[0], -1))
    h = layer.norms[1](x)
    gate, up = layer.gate(h), layer.up(h)
    layer.down.add_to(x, layer.act(gate).mul_(up))


def decode_attention(layer: DecodeLayer, step: DecodeStep, cache: Tensor) -> Tensor:
    """Attention output [n * K, G, D]. Changes the buffers of the step in place."""
    rotated, stored = step.rotated, step.stored
    _, num_both, head_dim = rotated.shape
    num_keys = stored.shape[1] // 2
    query = rotated[:, :-num_keys]
    if layer.head_norms:
        query_norm, key_norm = layer.head_norms
        rotated /= query_norm.size(rotated)
        query *= query_norm.weight
        stored[:, :num_keys] *= key_norm.weight
    rolled = rotated.roll(head_dim // 2, -1)
    rotated.mul_(step.cos).addcmul_(rolled, step.sin)
    cache.index_put_((step.targets,), stored)
    num_shared = num_both // num_keys - 1
    scaled = query * layer.scaling
    query = scaled.view(-1, num_shared, head_dim)
    keys = step.keys[layer.index]
    mask = step.mask(layer.window, num_keys, num_shared)
    if mask is None:
        scores = torch.bmm(query, keys)
    else:
        scores = torch.baddbmm(mask, query, keys)
    return torch.bmm(scores.softmax(-1), step.values[layer.index])


def signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., D] with the first half of sin negated, so that rotate_half() is a roll."""
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)
