"""--data.streaming: checkpoints keep the position in the stream of training rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.data.tasks.streaming import StreamedTasks
from rl_core.plugin import Plugin

if TYPE_CHECKING:
    from rl_core.types import JSONObject


class StreamState(Plugin):
    @property
    def tasks(self) -> StreamedTasks:
        tasks = self.trainer.plan.train
        assert isinstance(tasks, StreamedTasks)
        return tasks

    def load(self, state: JSONObject) -> None:
        self.tasks.load(state.get("stream", {}))

    def state(self) -> JSONObject:
        return {"stream": self.tasks.state()}
