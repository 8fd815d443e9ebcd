"""Durations and peak memory of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rl_core.distributed import Ranks, explain_timeouts
from rl_core.metrics import Max, Mean, Metric, add_metrics


class PhaseTimer:
    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.run_began = self.began = time.monotonic()
        self.name = "start"  # The current phase, which began at `began`.
        self.durations_s: dict[str, float] = {}  # Phase -> duration when it last ended.

    @contextmanager
    def timed(self, phase: str, metrics: dict[str, Metric]) -> Iterator[None]:
        """A context that is the phase, and adds its metrics."""
        began = self.began = time.monotonic()
        self.name = phase
        waiting = explain_timeouts(phase, self.ranks)
        with waiting, torch.profiler.record_function(phase):
            yield
        # The phase "step" contains the others.
        if self.ranks.device.type == "cuda" and phase != "step":
            peak = torch.cuda.max_memory_allocated() / 2**30
            add_metrics(metrics, {f"memory/{phase}_gib": Max(peak)})
            torch.cuda.reset_peak_memory_stats()
        name = f"time/{phase}_s"
        # Times of several actors in one step add up.
        count = 0.0 if name in metrics else 1.0
        self.durations_s[phase] = time.monotonic() - began
        add_metrics(metrics, {name: Mean(self.durations_s[phase], count)})
