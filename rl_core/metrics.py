"""Values that add up over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch

from rl_core.distributed import Ranks, all_gather_json


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: float = 1.0

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
    values: list[float]

    def __add__(self, other: Percentile) -> Percentile:
        return Percentile(self.percent, self.values + other.values)

    @property
    def value(self) -> float:
        return float(np.percentile(self.values, self.percent)) if self.values else math.nan


Metric = Mean | Sum | Max | Percentile
KINDS = {kind.__name__: kind for kind in (Mean, Sum, Max, Percentile)}


def count_once(ranks: Ranks) -> Sum:
    """1 over all ranks, each of which counts it."""
    return Sum(1 / ranks.size)


def add_metrics(into: dict[str, Metric], more: dict[str, Metric], prefix: str = "") -> None:
    for name, metric in more.items():
        name = prefix + name
        into[name] = into[name] + metric if name in into else metric


def reduce_metrics(metrics: dict[str, Metric], ranks: Ranks) -> dict[str, float]:
    """Name -> value over all ranks; a rank may lack names that others have."""
    sent: dict[str, list] = {}
    on_device = []
    for name, metric in metrics.items():
        sent[name] = [type(metric).__name__]
        for field in fields(metric):
            value = torch.as_tensor(getattr(metric, field.name), dtype=torch.float64)
            if value.ndim == 0 and value.device.type != "cpu":
                on_device.append((name, len(sent[name]), value))
            sent[name].append(value)
    # The device is waited for once.
    numbers = torch.stack([value for *_, value in on_device]).tolist() if on_device else []
    for (name, place, _), number in zip(on_device, numbers, strict=True):
        sent[name][place] = number
    for values in sent.values():
        values[1:] = [v.tolist() if torch.is_tensor(v) else v for v in values[1:]]
    merged: dict[str, Metric] = {}
    for received in all_gather_json(sent, ranks):
        for name, (kind, *numbers) in received.items():
            add_metrics(merged, {name: KINDS[kind](*numbers)})
    return {name: merged[name].value for name in sorted(merged)}
