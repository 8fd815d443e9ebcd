"""A function of the user's script that is called after each step, and may end the run."""

from __future__ import annotations

from rl_core.plugin import Plugin


class OnStep(Plugin):
    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        self.trainer.plan.on_step(self.trainer, metrics)
