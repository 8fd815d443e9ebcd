"""Values that add up over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from rl_core.distributed import Ranks, all_gather_json, in_fp64


@dataclass(slots=True)
class Mean:
    total: float | torch.Tensor = 0.0
    count: float | torch.Tensor = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return float(self.total / self.count) if self.count else math.nan


@dataclass(slots=True)
class Sum:
    value: float = 0.0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(slots=True)
class Max:
    value: float = -math.inf

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(slots=True)
class Percentile:
    percent: float
    values: Sequence[float | torch.Tensor]  # Numbers, or tensors of one.

    def __add__(self, other: Percentile) -> Percentile:
        return Percentile(self.percent, [*self.values, *other.values])

    @property
    def value(self) -> float:
        numbers = [float(value) for value in self.values]
        return float(np.percentile(numbers, self.percent)) if numbers else math.nan


Metric = Mean | Sum | Max | Percentile
KINDS = {kind.__name__: kind for kind in (Mean, Sum, Max, Percentile)}


def count_once(ranks: Ranks) -> Sum:
    """1 divided by the number of ranks, because each rank counts it."""
    return Sum(1 / ranks.size)


def add_metrics(into: dict[str, Metric], more: Mapping[str, Metric], prefix: str = "") -> None:
    for name, metric in more.items():
        name = prefix + name
        if name in into:
            # A name has metrics of one kind.
            metric = into[name] + metric  # pyright: ignore[reportOperatorIssue]
        into[name] = metric


def reduce_metrics(metrics: dict[str, Metric], ranks: Ranks) -> dict[str, float]:
    """Name -> value over all ranks; a rank may lack names that others have."""
    sent: dict[str, list] = {}
    tensors: dict[tuple[str, int], torch.Tensor] = {}
    for name, metric in metrics.items():
        sent[name] = [type(metric).__name__]
        for position, field in enumerate(fields(metric), 1):
            value = getattr(metric, field.name)
            sent[name].append(value)
            if torch.is_tensor(value):
                tensors[name, position] = in_fp64(value, ranks.device)
    # The device is waited for once.
    numbers = torch.stack([*tensors.values()]).tolist() if tensors else []
    for (name, position), number in zip(tensors, numbers, strict=True):
        sent[name][position] = number
    merged: dict[str, Metric] = {}
    for received in all_gather_json(sent, ranks):
        for name, (kind, *values) in received.items():
            add_metrics(merged, {name: KINDS[kind](*values)})
    return {name: merged[name].value for name in sorted(merged)}
