"""Resends weights to an engine that lost them between updates: its server died, or slept without
keeping a copy. All ranks take part, because gathering is a collective: they agree before a rollout,
and while they wait for each other's groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.distributed import all_gather_json
from rl_core.plugin import Plugin, RunState
from rl_core.sampling.actor import revived

if TYPE_CHECKING:
    from rl_core.types import JSONObject


class WeightRecovery(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.versions: dict[str, int] = {}  # Actor -> version of the weights in its engine.
        self.num_times = 0  # Number of recoveries.

    def load(self, state: JSONObject) -> None:
        self.trainer.worker.set_meeting(self)

    async def after_sync(self, actor: str, version: int) -> None:
        self.versions[actor] = version

    async def before_rollout(self, step: int) -> None:
        """Recovers before the canary samples, which takes part in no collective while it waits."""
        ranks = self.trainer.ranks
        # With separate engine ranks, rank 0 wakes all engines.
        if not ranks.rollout_ranks or ranks.rank == 0:
            await revived(self._wake, self.trainer.speakers.values(), "the start of a rollout")
        await self.meet()

    async def _wake(self) -> None:
        for engine in self.trainer.device.engines:
            await engine.wake()

    async def finish(self) -> None:
        """Recovers before the canary's last check."""
        await self.before_rollout(self.trainer.step)

    @property
    def is_wanted(self) -> bool:
        """True if an engine of any rank lacks weights."""
        ranks, flag = self.trainer.ranks, f"weights_again/{self.num_times}"
        if any(engine.lacks_weights for engine in self.trainer.device.engines):
            ranks.set_number(flag, 1)
        return bool(ranks.number(flag))

    async def meet(self) -> bool:
        """Resends weights if a rank needs it, and returns True then. Every rank must call it."""
        if not any(all_gather_json(self.is_wanted, self.trainer.ranks)):
            return False
        self.num_times += 1
        device = self.trainer.device
        for engine in device.engines:
            await engine.pause()
        await device.sleep()
        # To all engines, since this sleep may have dropped the weights of others.
        for name, learner in self.trainer.learners.items():
            with learner.on_device():
                await self.trainer.actors[name].sync(self.versions[name])
        device.release_device()
        for engine in device.engines:
            await engine.resume()
        return True
