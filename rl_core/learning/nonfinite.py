"""Updates whose loss or gradient is NaN or infinite are skipped and counted; several in a row stop the run."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from rl_core.distributed import Ranks, all_gather_json
from rl_core.metrics import Metric, count_once
from rl_core.types import PackedBatch, RunError

MAX_IN_A_ROW = 3


class NonfiniteUpdates:
    def __init__(self, ranks: Ranks):
        self.ranks, self.in_a_row = ranks, 0

    def skip(self, name: str, batches: list[PackedBatch], loss: float, grad_norm: float) -> dict[str, Metric]:
        """The metric of an update that was not made. Every rank must call it. Raises RunError on all ranks alike after
        more than MAX_IN_A_ROW in a row."""
        self.in_a_row += 1
        found = all_gather_json(what_is_not_finite(batches, loss, grad_norm), self.ranks)
        # All ranks see the same gradient; the one with more to say is where it came from.
        culprit = max(range(len(found)), key=lambda rank: len(found[rank]))
        text = f"{name}: not finite on rank {culprit}: {'; '.join(found[culprit])}"
        if self.in_a_row > MAX_IN_A_ROW:
            raise RunError(
                f"{text}. It is number {self.in_a_row} in a row, which stops the run; weights and optimizer are as before the "
                "first. Lower --optim.lr, or look at the rewards and rows of this step"
            )
        if self.ranks.rank == 0:
            print(f"{text}; skipped ({self.in_a_row} in a row)", flush=True)
        return {"nonfinite_updates": count_once(self.ranks)}


def what_is_not_finite(batches: list[PackedBatch], loss: float, grad_norm: float) -> list[str]:
    found = [
        f"{name} {value}" for name, value in (("gradient norm", grad_norm), ("loss", loss)) if not math.isfinite(value)
    ]
    for f in dataclasses.fields(PackedBatch):
        if any(is_broken(getattr(batch, f.name)) for batch in batches):
            found.append(f"{f.name} of the batch")
    return found


def is_broken(value: Tensor | object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())
