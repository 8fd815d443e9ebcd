"""Sampling for models that the embedded engine's slots do not support: by the model's own layers,
row by row.

This is slower, and exact. Legend: n rows, S new tokens of an engine's row.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from rl_core.engines.kv_slots import ForwardImages, SlotModel, evaluating, logits_of
from rl_core.learning.padded_forward import ERRORS, own_attention, own_layers
from rl_core.models import attention
from rl_core.models.loading import set_attention
from rl_core.models.policy import backbone

# Names of the cache argument in models: since transformers 5.24, and before.
CACHE_NAMES = ("cache", "cache_params", "past_key_values")


def choose_sampler(model: PreTrainedModel, *slot_models: type[SlotModel]) -> SlotModel | RowModel:
    """The first of `slot_models` (default: SlotModel) whose logits equal the model's, else a
    RowModel. Raises ValueError if none has these logits."""
    exact = OwnHeadModel(model)
    samplers = [RowModel(model), exact]
    if not own_layers(model):
        samplers = [*(make(model) for make in slot_models or [SlotModel]), *samplers]
    for sampler in samplers:
        problem = problem_of(sampler, exact)
        if not problem:
            return sampler
        if sampler.is_optional:
            print(f"sampling without {type(sampler).__name__}: {problem}", file=sys.stderr)
    raise ValueError(
        f"{type(model).__name__} gives other logits token by token than for whole sequences: "
        f"{problem}; use another engine"
    )


@torch.inference_mode()
def problem_of(sampler: SlotModel | RowModel, exact: RowModel) -> str:
    """The difference of the third token's logits from the model's own forward; "" if they are
    equal."""
    model, cache = sampler.model, sampler.make_cache(1, 3)
    ids = torch.tensor([[1, 2, 3]], device=model.device) % model.config.get_text_config().vocab_size
    start = torch.full((1,), 2, device=model.device)
    with exact.borrowed():
        expected = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    try:
        with sampler.borrowed():
            sampler.forward(cache, slice(0, 1), ids[:, :2], None, 2)
            hidden = sampler.forward(cache, slice(0, 1), ids[:, 2:], start, 3)
            error = (sampler.logits(hidden[0, -1]) - expected).abs().max()
    except ERRORS as problem:
        return str(problem).splitlines()[0]
    tolerance = (1e-3 if model.dtype == torch.float32 else 0.1) * expected.abs().max()
    # Where weights are NaN, both outputs are.
    return f"its logits differ by {error:.2g}" if error > tolerance else ""


class RowCaches:
    """transformers' cache of each row. The cache is never cut, because recurrent layers keep a
    state, not tokens."""

    def __init__(self, *_) -> None:
        self.rows: dict[int, Cache] = {}

    def swap(self, row: int, other: int, length: int) -> None:
        """Moves row `other` to `row`, whose cache is not used again."""
        self.rows[row] = self.rows.pop(other)

    def snapshot(self, row: int, length: int) -> Cache:
        return copy.deepcopy(self.rows[row])

    def restore(self, rows: list[int], kept: Cache, length: int) -> None:
        for row in rows:
            self.rows[row] = copy.deepcopy(kept)


class RowModel:
    """A causal language model that samples by its own layers, row by row."""

    make_cache = RowCaches
    is_optional = False
    is_batched = False  # Each prompt is one forward, and no cache outlives its request.

    def __init__(self, model: PreTrainedModel):
        self.model, self.decoder = model, backbone(model)
        arguments = inspect.signature(self.decoder.forward).parameters
        self.cache_name = next(name for name in CACHE_NAMES if name in arguments)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """A context in which the model is in evaluation mode and has its own attention."""
        before = self.model.config._attn_implementation
        if before == attention.NAME:
            set_attention(self.model, own_attention(self.model))
        try:
            with evaluating(self.model):
                yield
        finally:
            set_attention(self.model, before)

    def forward(
        self,
        cache: RowCaches,
        rows: slice,
        tokens: Tensor,
        starts: Tensor | None,
        length: int,
        sizes: Tensor | None = None,
        is_even: bool = False,
        images: ForwardImages | None = None,
    ) -> Tensor:
        """[n, S, hidden size]; every position has the hidden state of the row's last token.
        `images`: of one row if it has images."""
        nums = [tokens.shape[1]] * len(tokens) if sizes is None else sizes.tolist()
        hidden = []
        for number, (ids, size) in enumerate(zip(tokens, nums, strict=True)):
            row = rows.start + number
            kept = None if starts is None else cache.rows[row]
            inputs = {"input_ids": ids[None, :size], self.cache_name: kept}
            if images is not None:
                positions = images.position_ids[..., number : number + 1, :size]
                inputs |= {"position_ids": positions, **images.tensors}
            decoder = self.decoder if images is None else images.model or self.decoder
            last, cache.rows[row] = self.read(decoder, use_cache=True, **inputs)
            hidden.append(last)
        return torch.stack(hidden)[:, None].expand(-1, tokens.shape[1], -1)

    def read(self, decoder: PreTrainedModel, **inputs: object) -> tuple[Tensor, Cache]:
        """([hidden size] of the last token, the updated cache)"""
        out = decoder(**inputs)
        return out.last_hidden_state[0, -1], out[self.cache_name]

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(self.model, hidden)


class OwnHeadModel(RowModel):
    """A RowModel for a head that cannot be computed outside of the model. Its hidden states are
    logits, in the model's dtype."""

    def read(self, decoder: PreTrainedModel, **inputs: object) -> tuple[Tensor, Cache]:
        out = self.model(**inputs)
        return out.logits[0, -1].float(), out[self.cache_name]

    def logits(self, logits: Tensor) -> Tensor:
        return logits
