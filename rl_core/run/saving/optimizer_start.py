"""--optim.init_from: starts a new run from the optimizer state of another run, but not its
weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.learning.learner import Learner
from rl_core.plugin import Plugin, RunState
from rl_core.run.saving.checkpoint import (
    checkpoints_in,
    optimizer_tensors,
    read_object,
    trained_learners,
)
from rl_core.run.saving.resume import check_optimizer, fill, find_damage, make_state

if TYPE_CHECKING:
    from rl_core.types import JSONObject


class OptimizerStart(Plugin):
    def __init__(self, trainer: RunState):
        """Raises ValueError if there is no such checkpoint, or if it lacks an actor."""
        super().__init__(trainer)
        self.folders: dict[str, Path] = {}
        for name in trainer.plan.local_algorithms:
            if path := trainer.config.of(name).optim.init_from:
                self.folders[name] = checkpoint_at(Path(path), name)

    def load(self, state: JSONObject) -> None:
        """Loads the state, except in a resumed run, whose checkpoint has it."""
        if self.trainer.checkpoint is not None:
            return
        for name, folder in self.folders.items():
            if damage := find_damage(folder, self.trainer.ranks):
                raise ValueError(f"--optim.init_from: {damage}; name another checkpoint")
            saved = read_object(folder / "state.json")["optimizers"]
            for learner in trained_learners({name: self.trainer.learners[name]}).values():
                if facts := saved.get(learner.name):
                    load_optimizer(folder / learner.name, learner, facts)


def checkpoint_at(path: Path, actor: str) -> Path:
    """The checkpoint at a path, or the newest one of the run there. Raises ValueError unless it has
    this actor's optimizer state."""
    folders = [path] if (path / "manifest.json").exists() else checkpoints_in(path / "checkpoints")
    if not folders:
        raise ValueError(
            f"--optim.init_from={path} has no checkpoint; name a run's folder, or one of its "
            "checkpoints/step_N"
        )
    folder = folders[-1]
    saved = read_object(folder / "state.json")["optimizers"]
    if actor not in saved:
        raise ValueError(
            f"--optim.init_from: {folder} has no actor {actor!r}; it has {', '.join(saved)}"
        )
    if not saved[actor]["steps"] or not saved[actor]["is_saved"]:
        raise ValueError(
            f"--optim.init_from: {folder} has no optimizer state of {actor}; name a run that "
            "made an "
            "update and has --save_optimizer true"
        )
    return folder


def load_optimizer(folder: Path, learner: Learner, facts: JSONObject) -> None:
    """Loads the optimizer state. The learner keeps its weights and its count of updates, so
    schedules start anew."""
    check_optimizer(folder, learner, facts["name"], facts["layout"])
    make_state(learner, facts["steps"], facts.get("fewer_steps"))
    fill(folder, optimizer_tensors(learner, dict(learner.trained_parameters())))
