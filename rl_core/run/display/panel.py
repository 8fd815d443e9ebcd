"""The live panel below the log lines of a run, if stdout is a terminal."""

from __future__ import annotations

import time
from contextlib import suppress

from rich.console import Group
from rich.live import Live
from rich.text import Text

from rl_core.run.display.terminal import Terminal, results, short

REFRESH_PER_S = 4


class Panel(Terminal):
    """Terminal with a panel below the lines."""

    live: Live | None = None

    async def start(self) -> None:
        await super().start()
        self.live = Live(
            get_renderable=self.panel, refresh_per_second=REFRESH_PER_S, transient=True
        )
        self.live.start()
        self.live.console.show_cursor(True)  # A killed run leaves the cursor visible.

    async def tell_progress(self) -> None:
        """Prints nothing: the panel has the progress."""

    async def close(self) -> None:
        await super().close()
        if self.live is not None:
            self.live.stop()

    def panel(self) -> Group:
        """The phase and the groups of the step that are done; rewards, tokens per second and time
        left as of the step before; warnings."""
        trainer, config = self.trainer, self.trainer.config
        total = "" if config.online.on else f"/{config.num_steps}"
        doing = [f"step {trainer.step}{total}", trainer.phases.name]
        if trainer.phases.name == "generate" and config.is_rl:
            # If the store's rank has ended, the run notices that elsewhere.
            with suppress(RuntimeError):
                done, num_groups, more = self.groups_of_step()
                groups = f"{done}/{num_groups} groups{more}"
                doing.append(self.own_progress() or groups)
        doing.append(f"{time.monotonic() - trainer.phases.began:.0f} s")
        above, facts = results(self.metrics, config.trained, config.is_rl), []
        if len(above) == 1:
            above, facts = [], above
        for phase in ("generate", "learn"):
            if speed := self.metrics.get(f"time/{phase}_tokens_per_s"):
                facts.append(f"{phase} {short(speed)} tokens/s")
        if self.left is not None:
            facts.append(f"ETA {self.left}")
        lines = [Text("  ".join(doing)), *map(Text, above), Text("  ".join(facts))]
        for _, text in list(self.warnings.now.values()):
            lines.append(Text(f"! {text}", style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)
