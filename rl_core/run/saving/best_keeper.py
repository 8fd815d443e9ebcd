"""--keep_best: the best models by an evaluation."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress

from rl_core.data.rows import write_whole
from rl_core.plugin import Plugin, RunState
from rl_core.run.saving.checkpoint import read_object
from rl_core.run.saving.checkpointer import export
from rl_core.types import RunError

# Names of sets and actors before a metric. A component of the reward keeps its greedy_reward/.
ROOM = r"^eval/(?:(?!greedy_|sampled_)[^/]+/)*(?=.)"


class BestKeeper(Plugin):
    """--keep_best: exports the models when the mean of an evaluation's metric over environments,
    such as greedy_score, is better than in all evaluations before."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        assert trainer.config.keep_best
        self.metric: str = trainer.config.keep_best
        self.folder = trainer.out / "best"
        # A loss is best where it is lowest.
        self.sign = -1 if self.metric.endswith("loss") else 1
        self.best: float | None = None
        with suppress(FileNotFoundError):
            self.best = read_object(self.folder / "best.json").get(self.metric)

    async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if self.is_best(metrics):
            await export(self.trainer, self.folder)
            await self.trainer.resume()
            self.write(step)

    def write(self, step: int) -> None:
        if self.trainer.ranks.is_writer:
            self.folder.mkdir(exist_ok=True)
            write_whole(
                self.folder / "best.json", json.dumps({"step": step, self.metric: self.best})
            )

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Raises RunError if the evaluation lacks the metric."""
        known = [name for name in metrics if name.startswith("eval/")]
        values = [metrics[name] for name in known if re.sub(ROOM, "", name) == self.metric]
        if not values:
            names = sorted({re.sub(ROOM, "", name) for name in known})
            raise RunError(
                f"--keep_best {self.metric} is not a metric of this evaluation; it has "
                f"{', '.join(names)}"
            )
        value = sum(values) / len(values)
        is_first = self.best is None and not math.isnan(value)
        if is_first or (self.best is not None and self.sign * value > self.sign * self.best):
            self.best = value
            return True
        return False
