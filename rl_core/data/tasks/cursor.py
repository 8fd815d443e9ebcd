"""The position of a run in its training tasks."""

from __future__ import annotations

from rl_core.types import JSONObject


class TaskCursor:
    """Draws positions in the order of the data."""

    def __init__(self, state: JSONObject, num_tasks: int | None):
        """`state`: a checkpoint's. `num_tasks`: length of --num_epochs, or None."""
        self.position: int = state["position"]  # Position of the next task.
        # Earlier positions that an interrupted run left.
        self.pending: list[int] = state.get("pending", [])
        self.num_tasks = num_tasks

    def draw(self, num: int) -> list[int]:
        """Positions of the next `num` tasks in the data, or of fewer at the end of --num_epochs.
        Tasks that an interrupted run left come first."""
        left, self.pending = self.pending[:num], self.pending[num:]
        first, most = self.position, self.num_tasks
        num -= len(left)
        self.position += num if most is None else max(0, min(num, most - first))
        return [*left, *range(first, self.position)]

    def state(self, unfinished: list[int]) -> JSONObject:
        """State for a checkpoint. `unfinished`: positions drawn but not trained on."""
        return {"position": self.position, "pending": unfinished + self.pending}
