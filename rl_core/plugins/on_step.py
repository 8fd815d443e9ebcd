"""A function of the user's script that is called after each step, and may end the run."""

from __future__ import annotations

from typing import Any

from rl_core.plugin import Plugin


class OnStep(Plugin):
    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.evaluated: dict[str, float] = {}  # since the last call

    async def before_step(self, step: int) -> None:
        self.evaluated = {}

    async def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.evaluated = metrics

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        self.trainer.plan.on_step(self.trainer, metrics | self.evaluated)
