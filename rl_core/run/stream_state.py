"""--data.streaming: checkpoints keep the position in the stream of training rows."""

from __future__ import annotations

from typing import Any

from rl_core.plugin import Plugin


class StreamState(Plugin):
    def load(self, state: dict[str, Any]) -> None:
        self.trainer.plan.train.load(state.get("stream", {}))

    def state(self) -> dict[str, Any]:
        return {"stream": self.trainer.plan.train.state()}
