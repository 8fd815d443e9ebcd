"""What an option may do to a run. A plugin overrides the methods that it needs; the trainer calls
all plugins, in the registry's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.types import Trajectory


class Plugin:
    """Every rank has the same plugins and calls them at the same places: their collectives match.

    A plugin reads the trainer and changes only its own state. It never assigns to an attribute of
    another object: where it must change what happens, it is a class of its own that the registry
    returns instead of the default (an engine, an optimizer, a source of tasks, a forward pass).
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    async def start(self) -> None:
        """Models are loaded, and engines have the learners' weights."""

    async def before_rollout(self, step: int) -> None:
        """Engines are awake."""

    async def after_rollout(self, step: int, trajectories: list[Trajectory]) -> None:
        """Engines sleep."""

    async def before_learn(self, actor: str, step: int) -> None:
        """The learner is on the device, with the weights that sampled."""

    async def after_sync(self, actor: str, version: int) -> None:
        """The engine has the new weights."""

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics are the same on all ranks."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Takes what state() gave."""

    async def close(self) -> None: ...
