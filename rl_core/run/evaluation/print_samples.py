"""--print_samples: prints greedy episodes of each evaluation."""

from __future__ import annotations

from rl_core.errors import printable
from rl_core.plugin import Plugin
from rl_core.types import JSON, Trajectory

CHARS = 300  # Longest message that is printed whole.


class LogSamples(Plugin):
    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        """Prints some of this rank's episodes, evenly spread."""
        if "/greedy" not in name:
            return
        say, num = self.trainer.log.say, self.trainer.config.print_samples
        for t in trajectories[:: max(1, len(trajectories) // num)][:num]:
            parts = [f"{name} {value:.4g}" for name, value in t.reward_parts.items()]
            result = f"reward {t.reward} ({', '.join(parts)}), {t.status} {cut(t.error)}"
            say(f"-- {t.task_id} {t.actor}: {result.rstrip()}")
            for message in t.messages:
                say(f"   {message['role']}: {cut(message.get('content'))}")


def cut(content: JSON) -> str:
    """The content as one short line."""
    text = printable(" ".join(str(content or "").split()))
    return text if len(text) <= CHARS else f"{text[: CHARS // 2]} [...] {text[-CHARS // 2 :]}"
