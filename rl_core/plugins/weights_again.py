"""Weights that only all ranks together can give, for an engine that lacks them outside of an
update: its server died, or slept without keeping a copy. Ranks agree on it before a rollout, and
while they wait for each other's groups."""

from __future__ import annotations

from typing import Any

from rl_core.distributed import all_gather_json
from rl_core.plugin import Plugin
from rl_core.sampling.actor import revived


class WeightRecovery(Plugin):
    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.versions: dict[str, int] = {}  # of the weights that engines were given, by actor
        self.num_times = 0  # that weights were sent again

    def load(self, state: dict[str, Any]) -> None:
        self.trainer.worker.meet_by(self)

    async def after_sync(self, actor: str, version: int) -> None:
        self.versions[actor] = version

    async def before_rollout(self, step: int) -> None:
        """The canary, which samples next, meets nobody while it waits."""
        ranks = self.trainer.ranks
        # One learner speaks for engines on other ranks.
        if not ranks.engine_ranks or ranks.rank == 0:
            await revived(self._wake, self.trainer.speakers.values(), "the start of a rollout")
        await self.meet()

    async def _wake(self) -> None:
        for engine in self.trainer.device.engines:
            await engine.wake()

    async def finish(self) -> None:
        """Before the canary's last question."""
        await self.before_rollout(self.trainer.step)

    @property
    def is_wanted(self) -> bool:
        """Whether an engine of any rank lacks weights."""
        ranks, flag = self.trainer.ranks, f"weights_again/{self.num_times}"
        if any(engine.lacks_weights for engine in self.trainer.device.engines):
            ranks.set_flag(flag)
        return ranks.has_flag(flag)

    async def meet(self) -> bool:
        """Whether weights were sent again, because a rank wants it. Every rank must call it."""
        if not any(all_gather_json(self.is_wanted, self.trainer.ranks)):
            return False
        self.num_times += 1
        device = self.trainer.device
        for engine in device.engines:
            await engine.pause()
        await device.sleep()
        # To all engines: those that had weights may have lost them in this sleep.
        for name, learner in self.trainer.learners.items():
            with learner.on_device():
                await self.trainer.actors[name].sync(self.versions[name])
        device.hand_over()
        for engine in device.engines:
            await engine.resume()
        return True
