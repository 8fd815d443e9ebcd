"""The slots' forward of models in Llama's layout, without their modules' Python.

A decode step of a small model, or of few rows, is mostly its overhead: a Hugging Face layer takes
some 60 calls of torch. Here a layer takes about 50, and in a decode step in fp32 about 30. Linear
layers with adapters or quantised weights are still called as modules.

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

from rl_core.engines.onednn import is_plain, linear, mlp, padded_product, rows_for_onednn
from rl_core.engines.slots import ForwardPlan, SlotCache, SlotModel, new_zeros, slot_attention

# Frequencies of these depend on how long the rows of a forward are.
CHANGING_ROTARY = ("dynamic", "longrope")


class LlamaCache(SlotCache):
    """One tensor for all layers, so that a row is copied at once."""

    def __init__(self, num_slots: int, max_tokens: int, num_layers: int) -> None:
        super().__init__(num_slots, max_tokens)
        self.num_layers = num_layers
        self.stack: Tensor | None = None  # [layers, 2, num_slots, K, max_tokens + 1, D]
        self.flat: list[Tensor] = []  # of each layer, [2 * num_slots * K * (max_tokens + 1), D]
        self.firsts: Tensor | None = None  # [num_slots, 2 K] where a row's keys and values begin

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


class Product:
    """A linear layer. One without adapters or quantised weights is its product alone."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        is_read = is_plain(module)
        self.weight = module.weight if is_read else None  # [out, in], read in place
        self.weight_t = module.weight.T if is_read else None
        self.bias = module.bias if is_read else None
        self.large_from = rows_for_onednn(module.weight) if is_read else math.inf  # rows

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
    """An RMSNorm in fp32 by fewer calls: x / sqrt(sum of squares + D eps) * sqrt(D) weight."""

    def __init__(self, norm: nn.Module) -> None:
        num = norm.weight.shape[0]
        self.weight = norm.weight * num**0.5
        self.least = self.weight.new_full((), (num * norm.variance_epsilon) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        return (x / self.size(x)).mul_(self.weight)

    def size(self, x: Tensor) -> Tensor:
        """[..., 1] what x [..., D] is divided by."""
        return torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.least)


class DecodeLayer:
    """A layer's parts. Matrices are read in place."""

    def __init__(self, layer: nn.Module) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self.index, self.scaling, self.window = attn.layer_idx, attn.scaling, window_of(attn)
        self.norms = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.head_norms = None
        if hasattr(attn, "q_norm"):
            self.head_norms = Norm(attn.q_norm), Norm(attn.k_norm)
        self.inputs = Product(attn.q_proj), Product(attn.k_proj), Product(attn.v_proj)
        self.out = Product(attn.o_proj)
        self.gate, self.up = Product(mlp.gate_proj), Product(mlp.up_proj)
        self.down, self.act = Product(mlp.down_proj), mlp.act_fn


@dataclass(kw_only=True, slots=True)
class DecodeStep:
    """What the layers of a decode step share."""

    columns: Tensor  # [n] where each row's new token is written
    length: int
    is_even: bool  # every row has this length
    targets: Tensor  # [n, 2 K] where keys and values are written
    keys: tuple[Tensor, ...]  # of each layer, [n * K, D, L]
    values: tuple[Tensor, ...]  # [n * K, L, D]
    cos: Tensor  # [n, 1, D]
    sin: Tensor  # the first half is negative
    # Room for a layer's products.
    projected: list[Tensor]  # queries [n, H * D], keys [n, K * D], values, side by side in memory
    turned: Tensor  # [n, H + K, D] queries and keys among them
    stored: Tensor  # [n, 2 K, D] keys and values among them
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window

    def mask(self, window: int | None, num_keys: int, num_shared: int) -> Tensor | None:
        """What is added to scores [n * K, G, L]; None if all keys are seen."""
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
    """What decode steps read of a decoder in fp32, until its weights change."""

    @torch.no_grad()
    def __init__(self, decoder: nn.Module) -> None:
        self.layers = [DecodeLayer(layer) for layer in decoder.layers]
        self.norm, self.embedding = Norm(decoder.norm), decoder.rotary_emb
        self.rotary: Tensor | None = None  # [positions, 2 D] cos and sin
        attn = decoder.layers[0].self_attn
        self.head_dim = attn.head_dim
        self.num_heads = attn.q_proj.out_features // attn.head_dim

    def step(
        self,
        cache: LlamaCache,
        rows: slice,
        x: Tensor,
        starts: Tensor,
        length: int,
        is_even: bool,
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
            turned=heads[:, : -num_stored // 2],
            stored=heads[:, self.num_heads :],
        )

    def rotary_at(self, x: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [n, 1, D] of rotary positions."""
        if self.embedding.rope_type in CHANGING_ROTARY:
            return signed(*self.embedding(x, starts[:, None]))
        if self.rotary is None or length > len(self.rotary):
            positions = torch.arange(max(256, 2 * length), device=x.device)
            both = signed(*self.embedding(x, positions[None]))
            self.rotary = torch.cat(both, -1)[0]
        both = self.rotary[starts]
        return both[:, None].chunk(2, -1)


class LlamaSlots(SlotModel):
    """A SlotModel of Llama, Mistral, Qwen2 or Qwen3. In fp32 norms are torch's; in other types they
    are the model's own, which round as the learner does."""

    parts: DecodeParts | None = None

    def make_cache(self, num_slots: int, max_tokens: int) -> LlamaCache:
        return LlamaCache(num_slots, max_tokens, len(self.decoder.layers))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """As SlotModel's. What a decode step reads is found again each time, because weights change
        and move, and nothing of it is kept."""
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
        is_decode = starts is not None and tokens.shape[1] == 1
        if not is_decode or self.parts is None:
            return super().forward(cache, rows, tokens, starts, length, sizes, is_even)
        x = self.decoder.embed_tokens(tokens)[:, 0]
        step = self.parts.step(cache, rows, x, starts, length, is_even)
        for layer in self.parts.layers:
            decode_layer(layer, x, step, cache.flat[layer.index])
        return self.parts.norm(x)[:, None]

    def hidden(self, tokens: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        decoder = self.decoder
        x = decoder.embed_tokens(tokens)
        cos, sin = signed(*decoder.rotary_emb(x, position_ids))
        rotary = cos[:, :, None], sin[:, :, None]
        for layer in decoder.layers:
            x = x + attention(layer.self_attn, normed(layer.input_layernorm, x), rotary, plan)
            h = normed(layer.post_attention_layernorm, x)
            x = x + mlp(layer.mlp, h, padded_product)
        return normed(decoder.norm, x)


def decode_layer(layer: DecodeLayer, x: Tensor, step: DecodeStep, cache: Tensor) -> None:
    """Adds to x [n, E] what a layer does. cache: of the layer, [tokens, D]."""
    h = layer.norms[0](x)
    for product, room in zip(layer.inputs, step.projected, strict=True):
        product.into(room, h)
    out = decode_attention(layer, step, cache)
    layer.out.add_to(x, out.view(x.shape[0], -1))
    h = layer.norms[1](x)
    gate, up = layer.gate(h), layer.up(h)
    layer.down.add_to(x, layer.act(gate).mul_(up))


def decode_attention(layer: DecodeLayer, step: DecodeStep, cache: Tensor) -> Tensor:
    """[n * K, G, D] from the projected queries, keys and values, which it changes."""
    turned, stored = step.turned, step.stored
    _, num_both, head_dim = turned.shape
    num_keys = stored.shape[1] // 2
    query = turned[:, :-num_keys]
    if layer.head_norms:
        of_query, of_key = layer.head_norms
        turned /= of_query.size(turned)
        query *= of_query.weight
        stored[:, :num_keys] *= of_key.weight
    rolled = turned.roll(head_dim // 2, -1)
    turned.mul_(step.cos).addcmul_(rolled, step.sin)
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


def attention(
    attn: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], plan: ForwardPlan
) -> Tensor:
    """[n, S, hidden size], by the slots' attention."""
    heads = (*x.shape[:-1], -1, attn.head_dim)
    query, key, value = (
        linear(layer, x, padded_product).view(heads)
        for layer in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    if hasattr(attn, "q_norm"):
        query, key = normed(attn.q_norm, query), normed(attn.k_norm, key)
    num_heads = query.shape[2]
    both = turned(torch.cat([query, key], 2), *rotary).transpose(1, 2)
    out, _ = slot_attention(
        attn,
        both[:, :num_heads],
        both[:, num_heads:],
        value.transpose(1, 2),
        None,
        scaling=attn.scaling,
        sliding_window=window_of(attn),
        slot_plan=plan,
    )
    return linear(attn.o_proj, out.reshape(*x.shape[:-1], -1), padded_product)


def signed(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [..., D] as if halves were turned: the first half of what is rolled is to be
    negative."""
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864) for x [n, S, H + K, D]; the first half of
    sin is negative."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def window_of(attn: nn.Module) -> int | None:
    """Of an attention layer; Mistral has one for all, and Llama none whatever its file says."""
    if attn.config.model_type == "mistral":
        return attn.config.sliding_window
    return getattr(attn, "sliding_window", None)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if x.dtype != torch.float32:
        return norm(x)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
