"""Plugin: how an option extends a run. A plugin overrides the methods that it needs; the trainer
calls all plugins in the order of run/options.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rl_core.metrics import Metric
    from rl_core.sampling.groups import Group
    from rl_core.trainer import Trainer
    from rl_core.types import JSONObject, TrainingSample, Trajectory

RunState: TypeAlias = "Trainer"  # Plugins read it, and call its methods.


class NoEpisodes(Exception):
    """Raised by refill() on all ranks if the run ends without the step that has begun."""


class Plugin:
    """Hooks that the trainer calls around the steps of a run. Every rank has the same plugins and
    calls their hooks in the same order, so that hooks may use collectives.

    A plugin reads the trainer, calls its methods, and changes only its own state. A plugin never
    assigns to an attribute of another object. `step`: number of completed steps.
    """

    def __init__(self, trainer: RunState):
        """Called before any model is loaded. Raises ValueError for flags that cannot work."""
        self.trainer = trainer

    def load(self, state: JSONObject) -> None:
        """Called once models and engines exist. `state`: state of the checkpoint, or of a new
        run."""

    async def before_start(self) -> None:
        """Called when engines have the learners' weights, before any plugin's start()."""

    async def start(self) -> None:
        """Called before the first step, when engines have the learners' weights."""

    async def before_step(self, step: int) -> None:
        """Runs before the step timer starts."""

    async def before_rollout(self, step: int) -> None:
        """Called before the episodes of a step, while engines are awake."""

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        """Called after the episodes of a step, while engines sleep. `groups`: this rank's groups of
        the step."""

    async def refill(self, groups: list[Group]) -> list[Group]:
        """This rank's further groups of the step. May raise NoEpisodes."""
        return []

    def progress(self) -> str:
        """The progress of a step's episodes for the terminal, instead of their number."""
        return ""

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        """Called with the episodes of a step or an evaluation. `name`: `step 7`, or
        `eval/000007/greedy`."""

    async def on_failures(self, step: int, reasons: dict[str, int]) -> None:
        """Called with the number of failed episodes of all ranks by reason, after a step or an
        evaluation."""

    async def on_samples(self, step: int, samples: dict[str, list[TrainingSample]]) -> None:
        """Called with this rank's training samples of each actor in this step."""

    async def before_learn(self, actor: str, step: int) -> None:
        """Called when the learner is on the device and has the weights that sampled."""

    async def after_sync(self, actor: str, version: int) -> None:
        """Called when the engine has the new weights."""

    async def after_learn(self, step: int) -> None:
        """Called once all learners of this rank have made their updates, within the step."""

    def reduced_flags(self) -> dict[str, Metric]:
        """Metrics that are reduced with every log line, also an evaluation's, but not written. Read
        the values from `trainer.reduced_flags`."""
        return {}

    async def before_log(self, step: int) -> None:
        """Called before the step is logged. Metrics added here count for this step."""

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Called with the metrics of a step, which are equal on all ranks."""

    async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Called with the metrics of an evaluation, which are equal on all ranks."""

    async def give_up(self) -> None:
        """Called before the run ends within a step: too many episodes failed, or there are none."""

    async def files(self, scratch: Path) -> list[Path]:
        """Further files of a checkpoint, which may be written into the folder `scratch`. Rank 0
        copies the files that rank 0 returns."""
        return []

    async def export(self, folder: Path) -> None:
        """Saves further models as Hugging Face folders, next to the models of this rank's
        learners."""

    def state(self) -> JSONObject:
        """The state of the plugin for a checkpoint, as JSON."""
        return {}

    async def finish(self) -> None:
        """Called after the last step."""

    async def close(self) -> None:
        """Called at the end of the run, also after an error."""

    def after_run(self) -> None:
        """Called on the rank that writes, after all ranks have closed their process group."""
