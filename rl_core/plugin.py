"""Plugin: how an option extends a run. A plugin overrides the methods that it needs; the trainer
calls all plugins in the order of run/options.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rl_core.actors import ActorRuntime, Device, Speaker
    from rl_core.config import Config
    from rl_core.distributed import Ranks
    from rl_core.learning.learner import Learner
    from rl_core.metrics import Metric
    from rl_core.plan.plan import Plan
    from rl_core.run.run_folder import RunLog
    from rl_core.sampling.engine import Engine
    from rl_core.sampling.rollout import Group, RolloutWorker
    from rl_core.types import JSONObject, Task, TrainingSample, Trajectory


class LearnerRank(Protocol):
    """The attributes of a rank with learners."""

    plan: Plan
    ranks: Ranks
    learners: dict[str, Learner]
    actors: dict[str, ActorRuntime]


class RunState(LearnerRank, Protocol):
    """The attributes and methods of the Trainer that plugins use."""

    config: Config
    out: Path
    device: Device
    worker: RolloutWorker
    log: RunLog
    checkpoint: Path | None
    plugins: list[Plugin]
    step: int
    first_step: int
    position: int
    pending: list[int]
    metrics: dict[str, Metric]
    reduced_flags: dict[str, float]
    data_state: JSONObject
    ended_by: str
    is_interrupted: bool
    began_at: float
    phase: str
    phase_began: float

    @property
    def speakers(self) -> dict[str, Speaker]: ...
    @property
    def signal(self) -> int: ...
    async def call(self, name: str, *args: object) -> None: ...
    async def resume(self) -> None: ...
    def timed(self, phase: str) -> AbstractContextManager[None]: ...
    def begin_phase(self, phase: str) -> None: ...
    def add_metrics(self, prefix: str, metrics: dict[str, Metric]) -> None: ...
    def make_group(self, position: int, task: Task) -> Group: ...
    def draw_groups(self, num_groups: int) -> list[Group]: ...
    def log_metrics(self) -> dict[str, float]: ...
    def read_data_state(self) -> JSONObject: ...
    def end(self, reason: str, is_interrupted: bool = False) -> None: ...


class Plugin:
    """Every rank has the same plugins and calls them at the same places: their collectives match.

    A plugin reads the trainer, calls its methods, and changes only its own state. It never assigns
    to an attribute of another object: an option that changes what happens returns another class (an
    engine, an optimizer, a source of tasks, a forward pass). `step` counts the steps that are done.
    """

    def __init__(self, trainer: RunState):
        """No model is loaded yet: what can be refused is refused here."""
        self.trainer = trainer

    def load(self, state: JSONObject) -> None:
        """Models and engines are made. `state`: of the checkpoint, or of a new run."""

    async def start(self) -> None:
        """Engines have the learners' weights."""

    async def before_step(self, step: int) -> None:
        """Before all that the step is timed by."""

    async def before_rollout(self, step: int) -> None:
        """Engines are awake."""

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        """Engines sleep. `groups`: this rank's part of the step."""

    async def refill(self, groups: list[Group]) -> list[Group]:
        """Further groups of the step, of this rank."""
        return []

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        """They were played, for a step or an evaluation (`step 7`, `eval/000007/greedy`)."""

    async def on_failures(self, step: int, reasons: dict[str, int]) -> None:
        """Reason -> how many episodes of a step, or of an evaluation, failed for it on all
        ranks."""

    async def on_samples(self, step: int, samples: dict[str, list[TrainingSample]]) -> None:
        """This rank's part of what each actor learns from in this step."""

    async def before_learn(self, actor: str, step: int) -> None:
        """The learner is on the device, with the weights that sampled."""

    async def after_sync(self, actor: str, version: int) -> None:
        """The engine has the new weights."""

    async def after_learn(self, step: int) -> None:
        """Called once all learners of this rank have made their updates, within the step."""

    def reduced_flags(self) -> dict[str, Metric]:
        """Metrics that are reduced with every log line, also an evaluation's, but not written. Read
        the values from `trainer.reduced_flags`."""
        return {}

    async def before_log(self, step: int) -> None:
        """Called before the step is logged: metrics that are noted here count for this step."""

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics are the same on all ranks."""

    async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """The same, of an evaluation."""

    async def give_up(self) -> None:
        """Too many episodes fail: the run ends with an error."""

    async def files(self, scratch: Path) -> list[Path]:
        """Further files of a checkpoint, which may be written into the folder `scratch`. Rank 0
        copies its own."""
        return []

    async def export(self, folder: Path) -> None:
        """Saves further models as Hugging Face folders with those of this rank's learners."""

    def state(self) -> JSONObject:
        """The state of the plugin for a checkpoint, as JSON."""
        return {}

    async def finish(self) -> None:
        """All steps are done."""

    async def close(self) -> None:
        """The run ends, however it ends."""

    def after_run(self) -> None:
        """Ranks have parted. On the rank that writes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CustomComponents:
    """Components of a script: train(config, loss=..., optimizer=..., engine=..., plugins=...).
    api/custom_components.py checks and makes them."""

    is_script: bool = False  # train() was called, not the command.
    token_loss: Callable | None = None  # A learner.TokenLoss.
    make_optimizer: Callable | None = None  # (named parameters, config.optim) -> Optimizer.
    engine: type[Engine] | None = None
    plugins: tuple[Callable[[RunState], Plugin], ...] = ()
