"""Weights that transformers makes of several of a checkpoint, such as all experts of a layer: each
rank makes its own part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from rl_core.learning.loading import forget_pages

CONVERT = WeightConverter.convert


class FusedWeight:
    """What transformers would make of weights in files. An index reads only the experts that it
    names."""

    def __init__(
        self,
        converter: WeightConverter,
        parts: dict[str, list[Tensor]],
        name: str,
        like: Tensor,
        how: dict,
    ):
        self.converter, self.parts, self.name, self.like, self.how = (
            converter,
            parts,
            name,
            like,
            how,
        )
        first, *rest = converter.operations
        self.is_by_expert = isinstance(first, MergeModulelist) and first.dim == 0
        self.is_by_expert &= all(isinstance(op, Concatenate) and op.dim != 0 for op in rest)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        if not self.like[slices].numel():  # more ranks than experts
            return torch.empty(self.like[slices].shape)
        experts = slices[0] if self.is_by_expert else slice(None)
        rest = (slice(None), *slices[1:]) if self.is_by_expert else slices
        parts = {pattern: tensors[experts] for pattern, tensors in self.parts.items()}
        found = converted(self.converter, parts, self.name, self.how)[self.name][rest]
        forget(parts)
        return found


def converted(
    converter: WeightConverter, parts: dict[str, list[Tensor]], name: str, how: dict
) -> dict[str, Tensor]:
    converter.collected_tensors = {pattern: list(tensors) for pattern, tensors in parts.items()}
    return {
        key: v[0] if isinstance(v, list) else v
        for key, v in CONVERT(converter, name, **how).items()
    }


def forget(parts: dict[str, list[Tensor]]) -> None:
    for tensor in itertools.chain(*parts.values()):
        forget_pages(tensor)


@contextmanager
def fused_later() -> Iterator[dict[str, Any]]:
    """Inside, what transformers converts while it loads stays on "meta". Gives its names with a
    FusedWeight each."""
    found: dict[str, Any] = {}

    def convert(converter: WeightConverter, layer_name: str, **how) -> dict[str, Tensor]:
        parts = converter.materialize_tensors()  # from files that are mapped
        forget(parts)
        shapes = {
            pattern: [tensor.to("meta") for tensor in tensors] for pattern, tensors in parts.items()
        }
        made = converted(converter, shapes, layer_name, how)
        for name, like in made.items():
            found[name] = FusedWeight(converter, parts, name, like, how)
        return made

    with patch.object(WeightConverter, "convert", convert):
        yield found
