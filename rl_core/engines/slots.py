"""The embedded engine on the device: a KV cache in slots, the attention that writes and reads it, a
model's forward over it, and sampling. Nothing here waits for the device but the check of a model
before its first step.

Legend: n rows in a forward, S new tokens per row, L cached tokens, H heads, K key-value heads, D
head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rl_core.learning.logprobs import capped_, logits_of
from rl_core.types import option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "rl_core_slots"
# Of the cache's memory at most, where it does not hold all slots and as many parked sessions.
SLOTS_FRAC = 0.75

Snapshot = list[tuple[Tensor, Tensor]]  # per layer, keys and values [K, L, D] of one row


class SlotCache:
    """Keys and values, per layer [num_slots, K, max_tokens + 1, D]; padding writes to the last
    column."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, allocated when it is first seen in the shape and type of
        what it stores."""
        if index not in self.layers:
            # Zeros, because what a mask hides still has to be finite.
            self.layers[index] = tuple(
                x.new_zeros(self.num_slots, x.shape[1], self.max_tokens + 1, x.shape[3])
                for x in (key, value)
            )
        return self.layers[index]

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for pair in self.layers.values() for cache in pair)

    def copy_row(self, source: int, target: int, length: int) -> None:
        for pair in self.layers.values():
            for cache in pair:
                cache[target, :, :length] = cache[source, :, :length]

    def snapshot(self, row: int, length: int) -> Snapshot:
        return [
            (k[row, :, :length].clone(), v[row, :, :length].clone())
            for k, v in self.layers.values()
        ]

    def restore(self, row: int, kept: Snapshot, length: int) -> None:
        for pair, kept_pair in zip(self.layers.values(), kept, strict=True):
            for cache, kept_cache in zip(pair, kept_pair, strict=True):
                cache[row, :, :length] = kept_cache[:, :length]


@dataclass(kw_only=True, slots=True)
class ForwardPlan:
    """Where one forward's tokens are written, and which keys they see. A model argument that
    slot_attention gets."""

    cache: SlotCache
    rows: slice
    length: int  # L, the longest of its rows with the new tokens
    fresh: bool  # nothing is cached before these tokens
    positions: Tensor  # [n, S] column that each token is written to; [1, S] if fresh
    # By sliding window, built once for all layers.
    masks: dict[int | None, Tensor] = field(default_factory=dict)
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
                    heads = torch.arange(
                        self.rows.start * num_heads, self.rows.stop * num_heads, device=new.device
                    )
                    self.write_index = heads * size + self.positions.repeat_interleave(num_heads)
                cache.view(-1, cache.shape[3]).index_copy_(
                    0, self.write_index, new.reshape(-1, new.shape[3])
                )
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [n, S, H, D] over the slots, after the new keys and values were written into
    them."""
    keys, values = slot_plan.write(module.layer_idx, key, value)
    if softcap is not None or s_aux is not None:
        out = plain_attention(
            query, keys, values, slot_plan.mask(sliding_window), scaling, softcap, s_aux
        )
    elif slot_plan.fresh and (sliding_window is None or slot_plan.length <= sliding_window):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
    elif query.shape[2] == 1:
        out = decode_attention(query, keys, values, slot_plan.mask(sliding_window), scaling)
    else:
        mask = slot_plan.mask(sliding_window)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2), None


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention output [n, H, S, D] with scores that a cap bounds, or with one more key of each
    head, of score sinks [H] and value 0."""
    folded = query.unflatten(1, (keys.shape[1], -1)).float() * scaling  # [n, K, H / K, S, D]
    scores = capped_(folded @ keys[:, :, None].float().mT, cap).masked_fill_(
        ~mask[:, :, None], -torch.inf
    )
    lse = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = lse.logaddexp(sinks.float().view(1, keys.shape[1], -1, 1, 1))
    return ((scores - lse).exp().to(values.dtype) @ values[:, :, None]).flatten(1, 2)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attention output [n, H, 1, D] of one query per row. The heads that share keys are folded into
    its length."""
    folded = query.reshape(*keys.shape[:2], -1, query.shape[-1])
    if query.dtype == torch.float32:
        # For one query plain products are quicker than the fused kernel, by a third at head
        # dimension 32 on a CPU.
        scores = (folded * scaling) @ keys.transpose(2, 3)
        out = scores.masked_fill_(~mask, -torch.inf).softmax(-1) @ values
    else:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
    return out.view(*query.shape[:3], -1)


# No mask function is registered under this name, which is how transformers is told to build no
# mask.
AttentionInterface.register(ATTENTION, slot_attention)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


class SlotModel:
    """A causal language model that reads and writes a SlotCache. It is borrowed inside
    `borrowed`."""

    make_cache = SlotCache
    is_batched = True  # rows are computed together, and several tokens may follow cached ones

    def __init__(self, model: PreTrainedModel):
        self.model, self.decoder = model, model.get_decoder()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside, the model is in evaluation mode and has the slots' attention; then it is put back
        as it was."""
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
    ) -> Tensor:
        """Hidden states [n, S, hidden size] of tokens [n, S] that come at `starts` [n] of their
        rows; None: all at 0. `length`: of the longest row with them. `sizes` [n]: without
        padding."""
        columns = torch.arange(tokens.shape[1], device=tokens.device)[None]
        position_ids = positions = columns if starts is None else starts[:, None] + columns
        if starts is not None and sizes is not None:
            positions = position_ids.masked_fill(columns >= sizes[:, None], cache.max_tokens)
            position_ids = positions.clamp(max=cache.max_tokens - 1)
        plan = ForwardPlan(
            cache=cache, rows=rows, length=length, fresh=starts is None, positions=positions
        )
        return self.decoder(
            input_ids=tokens, position_ids=position_ids, use_cache=False, slot_plan=plan
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(self.model, hidden)


def choose_model(model: PreTrainedModel) -> Any:
    """A SlotModel, if it computes what the model does; else a RowModel, which is slower. Raises
    ValueError if neither does."""
    own = option("rl_core.plugins.padded:OwnHeadModel")(model)
    samplers = [option("rl_core.plugins.padded:RowModel")(model), own]
    if not option("rl_core.plugins.padded:own_layers")(model):
        samplers = [SlotModel(model), *samplers]
    for sampler in samplers:
        problem = problem_of(sampler, own)
        if not problem:
            return sampler
    raise ValueError(
        f"{type(model).__name__} does not sample token by token as it reads: {problem}; use "
        "another engine"
    )


@torch.inference_mode()
def problem_of(sampler: Any, own: Any) -> str:
    """How the third token's logits differ from those of the model's own forward; "" if they do
    not."""
    model, cache = sampler.model, sampler.make_cache(1, 3)
    ids = torch.tensor([[1, 2, 3]], device=model.device) % model.config.get_text_config().vocab_size
    with own.borrowed():
        expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    try:
        with sampler.borrowed():
            sampler.forward(cache, slice(0, 1), ids[:, :2], None, 2)
            hidden = sampler.forward(
                cache, slice(0, 1), ids[:, 2:], torch.full((1,), 2, device=model.device), 3
            )
            error = (sampler.logits(hidden[0, -1]) - expected).abs().max()
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as problem:
        return str(problem).splitlines()[0]
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * expected.abs().max()
    # Where weights are NaN, both are.
    return f"its logits differ by {error:.2g}" if error > tolerance else ""


@torch.inference_mode()
def bytes_per_token(slots: SlotModel) -> float:
    """What the cache keeps of a token, in all layers."""
    cache = slots.make_cache(1, 1)
    with slots.borrowed():
        slots.forward(
            cache,
            slice(0, 1),
            torch.zeros(1, 1, dtype=torch.long, device=slots.model.device),
            None,
            1,
        )
    return cache.num_bytes / (cache.max_tokens + 1)


def share_cache(wanted: int, max_tokens: int, room: float) -> tuple[int, int]:
    """(slots, tokens of parked sessions) in a cache with room for so many tokens. Slots come first;
    sessions that are not parked are prefilled again."""
    row = max_tokens + 1
    if 2 * wanted * row <= room:
        return wanted, wanted * row  # no more conversations are open than there are slots
    num_slots = max(1, min(wanted, int(SLOTS_FRAC * room) // row))
    return num_slots, max(0, int(room) - num_slots * row)


def sample(logits: Tensor, numbers: Tensor) -> Tensor:
    """[2, n] fp32 on the device: tokens, which are exact in fp32, and their logprobs. logits [n, V]
    fp32; numbers: uniforms in [0, 1), is greedy; then temperatures; then top_k, top_p, min_p."""
    if len(numbers) > 2:
        logits = logits / numbers[2, :, None].float()
    if len(numbers) > 3:
        logits = truncated_logits(logits, *numbers[3:].float())
    return torch.stack(sample_tokens(logits, numbers[0].float(), numbers[1].bool()))


def truncated_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [n, V] with -inf where top-k, then top-p of the rest, then min-p exclude; limits [n]
    are per row."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    excluded = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(excluded, -torch.inf))


def sample_tokens(logits: Tensor, uniforms: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n] by inverse CDF at uniforms [n] in [0, 1), or the most likely where greedy, and
    their logprobs [n]."""
    logprobs = logits.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1)
    # Scaled by the last entry, a uniform below 1 stays below it: rounding can never pick an
    # excluded token.
    drawn = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)
    # NaN ends up behind the last token; the caller sees its logprob.
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
