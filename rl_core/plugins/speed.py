"""Tokens per second of each phase, summed over ranks and actors."""

from __future__ import annotations

from rl_core.metrics import Mean, Sum
from rl_core.plugin import Plugin


class Speed(Plugin):
    async def before_log(self, step: int) -> None:
        trainer, metrics = self.trainer, self.trainer.metrics
        spoken = [f"rollout/{name}/tokens" for name in trainer.learners]
        for phase, names in (("generate", spoken), ("learn", ["pack/tokens"])):
            tokens = sum(metrics[name].value for name in names if name in metrics)
            if tokens:
                speed = Sum(tokens / metrics[f"time/{phase}_s"].value)
                trainer.note("time/", {f"{phase}_tokens_per_s": speed})
        if trainer.ranks.engine_ranks:
            waited = Mean(metrics["time/generate_s"].value, metrics["time/step_s"].value)
            trainer.note("time/", {"learners_idle_frac": waited})
