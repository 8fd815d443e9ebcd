"""The embedded engine on the device: a KV cache in slots, the attention that writes and reads it, a
model's forward over it, and sampling. Nothing here waits for the device.

Legend: n rows in a forward, S new tokens per row, L cached tokens, H heads, K key-value heads, D
head dim, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from mmap import mmap
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rl_core.models.heads import logit_change
from rl_core.models.kernels.torch_logprobs import capped_, product
from rl_core.sampling.engine import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "rl_core_slots"
# From this number of ids a token is drawn in two stages, if blocks divide the vocabulary.
LARGE_VOCABULARY, NUM_BLOCKS = 8192, 128

Snapshot = list[Tensor]  # [..., K, L, D] of one row, of each of a cache's tensors


class SlotCache:
    """Keys and values, per layer [num_slots, K, max_tokens + 1, D]; padding writes to the last
    column."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.layers: dict[int | str, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int | str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, allocated at the first call with the shape and type of
        its arguments."""
        if index not in self.layers:
            self.layers[index] = self.zeros(key), self.zeros(value)
        return self.layers[index]

    def zeros(self, x: Tensor) -> Tensor:
        return new_zeros(x, (self.num_slots, x.shape[1], self.max_tokens + 1, x.shape[3]))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all layers, each [..., num_slots, K, max_tokens + 1, D]."""
        return list(chain.from_iterable(self.layers.values()))

    def swap(self, row: int, other: int, length: int) -> None:
        """Exchanges the tokens of two rows."""
        for cache in self.tensors:
            first, second = cache[..., row, :, :length, :], cache[..., other, :, :length, :]
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

    def clear(self, row: int, length: int) -> None:
        for cache in self.tensors:
            cache[..., row, :, :length, :] = 0

    def snapshot(self, row: int, length: int) -> Snapshot:
        return [cache[..., row, :, :length, :].clone() for cache in self.tensors]

    def restore(self, rows: list[int], kept: Snapshot, length: int) -> None:
        """Writes one snapshot into each of the rows."""
        numbers = torch.tensor(rows, device=kept[0].device)
        for cache, row in zip(self.tensors, kept, strict=True):
            cache[..., numbers, :, :length, :] = row[..., None, :, :length, :]


def new_zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros for a cache: masked values must be finite too. On a CPU the system allocates memory at
    the first write, and most of a cache is never written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # np.zeros asks for huge pages, of which the first tokens of each row and head would take one.
    raw = mmap(-1, math.prod(shape) * like.itemsize)
    return torch.frombuffer(raw, dtype=like.dtype).view(shape)


@dataclass(kw_only=True, slots=True)
class ForwardPlan:
    """Positions of one forward's tokens in the cache, and the keys that they see. A model argument
    that reaches slot_attention."""

    cache: SlotCache
    rows: slice
    length: int  # L, the length of the longest row with the new tokens.
    fresh: bool  # True if nothing is cached before these tokens.
    numbers: Tensor  # [n, 1] Numbers of the rows.
    positions: Tensor  # [n, S] Column that each token is written to; [1, S] if fresh.
    # Key: sliding window. Built once for all layers.
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    # [n, S] numbers from 1 of the blocks of tokens that see their later ones; 0 for other tokens.
    blocks: Tensor | None = None
    in_full_attention: bool = False  # Blocks are seen in layers without a window too.

    def write(self, layer: int | str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [n, K, S, D] keys and values and returns views of the caches [n, K, L, D]."""
        caches = self.cache.layer(layer, key, value)
        for cache, new in zip(caches, (key, value), strict=True):
            if self.fresh:
                cache[self.rows, :, : self.length] = new
            else:
                cache[self.numbers, :, self.positions] = new.transpose(1, 2)
        keys, values = caches
        return keys[self.rows, :, : self.length], values[self.rows, :, : self.length]

    def mask(self, window: int | None) -> Tensor:
        """[n, 1, S, L] bool, True where a query sees a key."""
        if window not in self.masks:
            keys = torch.arange(self.length, device=self.positions.device)
            queries = self.positions[:, None, :, None]
            seen = keys <= queries
            if self.blocks is not None and (window is not None or self.in_full_attention):
                seen = seen | self.in_block(self.blocks)
            self.masks[window] = seen if window is None else seen & (keys > queries - window)
        return self.masks[window]

    def in_block(self, blocks: Tensor) -> Tensor:
        """[n, 1, S, L] bool, True for a key in the query's block. No block begins in the cache."""
        of_keys = blocks.new_zeros(len(blocks), self.cache.max_tokens + 1)
        of_keys.scatter_(1, self.positions.expand_as(blocks), blocks)
        is_same = blocks[:, :, None] == of_keys[:, None, : self.length]
        return (is_same & (blocks[:, :, None] > 0))[:, None]


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,  # [n, H, S, D]
    key: Tensor,  # [n, K, S, D]
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    slot_plan: ForwardPlan,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention output [n, S, H, D] over the slots, after the new keys and values were written into
    them. Raises TypeError, one of padded_forward.ERRORS, in a model that drops `slot_plan`."""
    keys, values = slot_plan.write(cast(int, module.layer_idx), key, value)
    is_usual = softcap is None and s_aux is None
    sees_all = sliding_window is None or slot_plan.length <= sliding_window
    if is_usual and slot_plan.fresh and sees_all and slot_plan.blocks is None:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    mask = slot_plan.mask(sliding_window)
    if is_usual and query.shape[2] > 1:
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    elif is_usual and query.dtype != torch.float32:
        # The heads that share keys are folded into the length.
        folded = query.reshape(*keys.shape[:2], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        out = out.view(query.shape)
    else:
        out = folded_attention(
            query, keys, values, mask, scaling or query.shape[-1] ** -0.5, softcap, s_aux
        )
    return out.transpose(1, 2), None


def folded_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention output [n, H, S, D] by matrix products, with optional softcap of the scores and
    attention sinks: one more key per head, with score sinks [H] and value 0.

    For one query of a row this is quicker than the fused kernel in fp32, by a third at head
    dimension 32 on a CPU.
    """
    num_keys, length = keys.shape[1], query.shape[2]
    folded = query.float().reshape(len(query), num_keys, -1, query.shape[-1]) * scaling
    scores = capped_(folded @ keys.float().mT, cap).unflatten(2, (-1, length))  # [n, K, G, S, L]
    scores.masked_fill_(~mask[:, :, None], -torch.inf)
    if sinks is not None:
        sinks = sinks.float().view(1, num_keys, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    probs = scores.softmax(-1)[..., : keys.shape[2]].flatten(2, 3)
    return (probs.to(values.dtype) @ values).view(*query.shape[:3], -1)


# transformers builds no mask, because no mask function is registered under this name.
AttentionInterface.register(ATTENTION, slot_attention)


@dataclass(kw_only=True, slots=True)
class ForwardImages:
    """The images and positions of one forward."""

    position_ids: Tensor  # [n, S], or [3, n, S] for tokens of images.
    model: PreTrainedModel | None = None  # The multimodal model, if the tokens have images.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # Fields of ForwardPlan.
    blocks: Tensor | None = None
    in_full_attention: bool = False


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is in evaluation mode. Setting the mode visits all modules, so a model that
    is in evaluation mode is left alone."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


class SlotModel:
    """A causal language model that reads and writes a SlotCache inside `borrowed`."""

    make_cache = SlotCache
    is_optional = False  # True if choose_sampler() prints why it takes another class.
    is_batched = True  # Computes rows together, and several tokens behind cached ones.

    def __init__(self, model: PreTrainedModel):
        self.model, self.decoder = model, model.get_decoder()
        self.change = logit_change(model.config)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, the model is in evaluation mode with attention over slots. Afterwards its mode
        and attention are restored."""
        config = self.decoder.config
        implementation = config._attn_implementation
        try:
            config._attn_implementation = ATTENTION
            with evaluating(self.model):
                yield
        finally:
            config._attn_implementation = implementation

    def forward(
        self,
        cache: SlotCache,
        rows: slice,
        tokens: Tensor,
        starts: Tensor | None,
        length: int,
        sizes: Tensor | None = None,
        is_even: bool = False,
        images: ForwardImages | None = None,
    ) -> Tensor:
        """Hidden states [n, S, hidden size] of tokens [n, S] at columns `starts` [n] of their rows,
        by default 0. `length`: length of the longest row with them. `sizes` [n]: numbers of
        tokens without padding. is_even: all rows have one length. `images`: None if no row has an
        image."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)[None]
        position_ids = positions = columns if starts is None else starts[:, None] + columns
        if starts is not None and sizes is not None:
            positions = position_ids.masked_fill(columns >= sizes[:, None], cache.max_tokens)
            position_ids = positions.clamp(max=cache.max_tokens - 1)
        plan = ForwardPlan(
            cache=cache,
            rows=rows,
            length=length,
            fresh=starts is None,
            numbers=torch.arange(rows.start, rows.stop, device=tokens.device)[:, None],
            positions=positions,
        )
        if images is not None:
            plan.blocks, plan.in_full_attention = images.blocks, images.in_full_attention
            decoder = images.model or self.decoder
            inputs = {"input_ids": tokens, "position_ids": images.position_ids, **images.tensors}
            return decoder(**inputs, use_cache=False, slot_plan=plan).last_hidden_state
        return self.hidden(tokens, position_ids, plan)

    def hidden(self, tokens: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        """[n, S, hidden size] by the model's own modules."""
        return self.decoder(
            input_ids=tokens, position_ids=position_ids, use_cache=False, slot_plan=plan
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(self.model, hidden, self.change)


def head_weight(hf: PreTrainedModel) -> Tensor:
    """[V, hidden size] of the output layer. Raises AttributeError, one of padded_forward.ERRORS,
    for a model without one."""
    return cast(torch.nn.Linear, hf.get_output_embeddings()).weight


def logits_of(
    hf: PreTrainedModel, hidden: Tensor, change: tuple[float, float | None] | None = None
) -> Tensor:
    """[..., V] in fp32 from hidden states [..., D], by the matrix product of fused_logprobs. The
    head's forward would round logits to its dtype, by up to 0.1 nats in bf16. change: the result
    of logit_change()."""
    head, (scale, cap) = hf.get_output_embeddings(), change or logit_change(hf.config)
    logits = product(hidden.reshape(-1, hidden.shape[-1]), head_weight(hf).T)
    if (bias := getattr(head, "bias", None)) is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale
    return capped_(logits, cap).view(*hidden.shape[:-1], -1)


@torch.inference_mode()
def bytes_per_token(slots: Sampler) -> float:
    """Bytes of the cache per token, in all layers."""
    cache = slots.make_cache(1, 1)
    token = torch.zeros(1, 1, dtype=torch.long, device=slots.model.device)
    with slots.borrowed():
        slots.forward(cache, slice(0, 1), token, None, 1)
    return sum(tensor.nbytes for tensor in cache.tensors) / (cache.max_tokens + 1)


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, or the machine's memory divided by its ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


@dataclass(kw_only=True, slots=True)
class RowParams:
    """Sampling parameters of the rows of a batch."""

    numbers: Tensor  # [5, n] is greedy, temperatures, top_k, top_p, min_p
    is_scaled: bool = True  # A temperature differs from 1.
    has_no_greedy: bool = False
    num_ordered: int = 0  # Argument of truncated_logits(); 0 if no row has limits.
    num_kept: int = 0  # Largest number of ids that a token was sampled from.

    def of_fewer(self, num_rows: int) -> RowParams | None:
        """The parameters for num_rows rows, or None if rows differ. Rows with equal parameters
        share the memory of `numbers`."""
        if self.numbers.stride(1) > 0:
            return None
        return replace(self, numbers=self.numbers[:, :num_rows])


def sample(logits: Tensor, uniforms: Tensor, params: RowParams) -> Tensor:
    """[2 + num_kept, n] fp32 on the device: tokens, which are exact in fp32; their logprobs; the
    ids that each was sampled from, padded with -1. logits [n, V] fp32; uniforms [n] in [0, 1)."""
    greedy, temperatures, top_k, top_p, min_p = params.numbers
    if params.is_scaled:
        logits = logits / temperatures[:, None]
    kept = logits.new_zeros(params.num_kept, len(logits))
    if params.num_ordered:
        from rl_core.engines.sampling_limits import truncated_logits

        logits, kept = truncated_logits(logits, top_k, top_p, min_p, params.num_ordered)
        kept = kept[:, : params.num_kept].T
    sampled = sample_tokens(logits, uniforms, None if params.has_no_greedy else greedy.bool())
    return torch.cat([sampled.T, kept])


def sample_tokens(logits: Tensor, uniforms: Tensor, greedy: Tensor | None) -> Tensor:
    """[n, 2]: tokens by inverse CDF at uniforms [n] in [0, 1), or the most likely token where
    greedy [n] is True, and their logprobs."""
    probs = logits.softmax(-1)
    tokens = sampled = draw(probs, uniforms[:, None])
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), sampled)
    return torch.cat([tokens, probs.gather(-1, tokens).log_()], -1)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """[n, 1] ids by inverse CDF of probs [n, V] at uniforms [n, 1]. A large vocabulary is summed in
    blocks first, because a running sum is sequential: a sixth of the time for 151,936 ids on a
    CPU."""
    if probs.shape[-1] < LARGE_VOCABULARY or probs.shape[-1] % NUM_BLOCKS:
        return invert_cdf(probs, uniforms)[0]
    blocks = probs.unflatten(-1, (NUM_BLOCKS, -1))
    sums = blocks.sum(-1)
    block, targets, cdf = invert_cdf(sums, uniforms)
    in_block = blocks.take_along_dim(block[..., None], 1)[:, 0]
    # The position in [0, 1) of the target in its block's weight.
    weight = sums.gather(-1, block)
    uniforms = (targets - cdf.gather(-1, block) + weight) / weight
    index = invert_cdf(in_block, uniforms.clamp_(0, 1 - 2.0**-24))[0]
    return block * blocks.shape[-1] + index


def invert_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([n, 1] index of each row of `weights` [n, m] by inverse CDF, the value [n, 1] of the CDF
    that it was looked up at, the CDF [n, m])."""
    cdf = weights.cumsum(-1)
    # Scaled by the last entry, a uniform below 1 stays below it: rounding can never pick an
    # excluded token.
    targets = uniforms * cdf[:, -1:]
    # NaN gives an index behind the last one; the caller checks the logprob.
    index = torch.searchsorted(cdf, targets, right=True).clamp_(max=weights.shape[-1] - 1)
    return index, targets, cdf
