"""The training tasks of several environments."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_core.data.task_rows import TaskSource
from rl_core.types import Task


class TaskMix:
    """The tasks of several sources in turn: among the first n each has its share by weight, to
    within one task."""

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float] | None):
        """`weights` None: the numbers of rows, so that all sources have equal epochs."""
        self.sources, self.given_weights = sources, weights

    @property
    def weights(self) -> Sequence[float]:
        # Rows that are too long are left out later.
        return self.given_weights or [float(len(source)) for source in self.sources]

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def task(self, position: int) -> Task:
        """The task at a position, which counts the tasks of all sources."""
        counts = self.num_before(position)
        i = self.next_source(counts)
        return self.sources[i].task(counts[i])

    def num_before(self, position: int) -> list[int]:
        """Number of tasks of each source before a position."""
        # Task k of a source is due at (k + 0.5) / weight. All that is due by this time certainly
        # comes before.
        weights = self.weights
        time = max(0, position - len(self.sources)) / sum(weights)
        counts = [math.floor(time * weight + 0.5) for weight in weights]
        while sum(counts) < position:
            counts[self.next_source(counts)] += 1
        return counts

    def next_source(self, counts: list[int]) -> int:
        """The source with the earliest next task; on a tie the one named first."""
        weights = self.weights
        return min(range(len(counts)), key=lambda i: ((counts[i] + 0.5) / weights[i], i))
