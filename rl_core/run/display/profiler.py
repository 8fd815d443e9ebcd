"""--profile_step: a Chrome trace of one step on each rank."""

from __future__ import annotations

import torch

from rl_core.plugin import Plugin, RunState


class Profiler(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.profile: torch.profiler.profile | None = None

    async def before_step(self, step: int) -> None:
        if step + 1 == self.trainer.config.profile_step:
            self.profile = torch.profiler.profile()
            self.profile.start()

    async def before_log(self, step: int) -> None:
        self.write(step)

    async def close(self) -> None:
        """Writes the trace of a step that failed, too."""
        self.write(self.trainer.step + 1)

    def write(self, step: int) -> None:
        if self.profile is not None:
            self.profile.stop()
            name = f"trace_step_{step:06d}_rank_{self.trainer.ranks.rank}.json"
            self.profile.export_chrome_trace(str(self.trainer.out / name))
            self.profile = None
