"""Values that add up over ranks, and where they are written: metrics.jsonl and the progress line."""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.distributed import Ranks, all_gather_json


@dataclass(slots=True)
class Mean:
    total: float = 0.0
    count: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


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


Metric = Mean | Sum | Max
KINDS = {"Mean": Mean, "Sum": Sum, "Max": Max}


def count_once(ranks: Ranks) -> Sum:
    """1 over all ranks, each of which counts it."""
    return Sum(1 / ranks.size)


def add_metrics(into: dict[str, Metric], more: dict[str, Metric], prefix: str = "") -> None:
    for name, metric in more.items():
        name = prefix + name
        into[name] = into[name] + metric if name in into else metric


def metric_fields(metrics: dict[str, Metric]) -> dict[str, list]:
    """As JSON holds them; metrics_of() reads it."""
    return {k: [type(m).__name__, *(float(getattr(m, f)) for f in m.__slots__)] for k, m in metrics.items()}


def metrics_of(fields: dict[str, list]) -> dict[str, Metric]:
    return {name: KINDS[kind](*values) for name, (kind, *values) in fields.items()}


def reduce_metrics(metrics: dict[str, Metric], ranks: Ranks) -> dict[str, float]:
    """Name -> value over all ranks; a rank may lack names that others have."""
    merged: dict[str, Metric] = {}
    for part in all_gather_json(metric_fields(metrics), ranks):
        add_metrics(merged, metrics_of(part))
    return {name: merged[name].value for name in sorted(merged)}


class RunLog:
    """metrics.jsonl, one object a line, and one line on the terminal for each step. Only rank 0 writes."""

    def __init__(self, out: Path, ranks: Ranks, num_steps: int, resume_step: int):
        self.ranks, self.num_steps, self.started = ranks, num_steps, time.monotonic()
        self.first_step, self.path = resume_step, out / "metrics.jsonl"
        if ranks.rank == 0 and self.path.exists():
            keep_lines_until(self.path, resume_step or -1)  # a run without a checkpoint evaluates its start again

    def write(self, step: int, metrics: dict[str, Metric]) -> dict[str, float]:
        values = reduce_metrics(metrics, self.ranks)
        if self.ranks.rank == 0:
            clean = {k: v if math.isfinite(v) else None for k, v in values.items()}  # JSON has no others
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **clean}) + "\n")
        return values

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, flush=True)

    def progress(self, step: int, values: dict[str, float]) -> None:
        """step 12/200  reward 0.412  tokens 24.1  loss 0.0123  1.4 s (generate 0.9, learn 0.5)  ETA 0:04:23"""
        shown = [f"step {step:>{len(str(self.num_steps))}}/{self.num_steps}"]
        matches = (re.fullmatch(r"(?:rollout|learn)/([^/]+)/(?:reward_mean|loss)", name) for name in values)
        actors = list(dict.fromkeys(match[1] for match in matches if match))
        for actor in actors:
            names = {"reward": f"rollout/{actor}/reward_mean", "tokens": f"rollout/{actor}/length_mean"}
            names |= {"loss": f"learn/{actor}/loss"}
            found = [f"{label} {values[name]:.4g}" for label, name in names.items() if name in values]
            shown += [f"{actor}:", *found] if len(actors) > 1 else found
        if failed := sum(values.get(f"rollout/{actor}/failed", 0) for actor in actors):
            shown.append(f"failed {failed:.4g}")
        phases = [
            f"{p} {values[f'time/{p}_s']:.2f}" for p in ("generate", "learn", "sync") if values.get(f"time/{p}_s")
        ]
        shown.append(f"{values['time/step_s']:.2f} s ({', '.join(phases)})")
        done = step - self.first_step
        eta = int((time.monotonic() - self.started) / done * (self.num_steps - step))
        self.say("  ".join([*shown, f"ETA {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}"]))


def keep_lines_until(path: Path, step: int) -> None:
    """Drops what a run wrote after the checkpoint that it goes on from, and a line cut short by its end."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            row: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(kept))
    os.replace(beside, path)
