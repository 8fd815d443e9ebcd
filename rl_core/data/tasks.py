"""Rows -> Tasks, and the order in which they come. The only state is a position: the number of tasks drawn so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rl_core.types import Message, Task, counter_seed

# Columns of the first messages; the first one that a row has is used.
PROMPT_COLUMNS = ("messages", "prompt", "question", "problem")


def make_task(row: dict[str, Any], index: int, env: str, split: str, is_pair: bool = False) -> Task:
    """The task of row `index` (from 0). Its messages are in the column `messages`, `prompt`, `question` or `problem`: a list of
    messages, or text, which becomes one user message. A preference pair has none."""
    if is_pair:
        return Task(id=f"{split}/{index}", env=env, row=row, messages=[])
    place = f"{split} row {index + 1}"
    column = next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)
    if column is None:
        have = ", ".join(map(str, row)) or "no columns"
        raise ValueError(f"{place}: needs one of the columns {', '.join(PROMPT_COLUMNS)}; has {have}")
    try:
        messages = column_messages(row, column)
    except ValueError as error:
        raise ValueError(f"{place}, {error}") from None
    return Task(id=f"{split}/{index}", env=env, row=row, messages=messages)


def column_messages(row: dict[str, Any], column: str, role: str = "user") -> list[Message]:
    """A column's messages; text, but in `messages`, is one message of `role`. Raises ValueError as check_messages."""
    if isinstance(row[column], str) and column != "messages":
        return [{"role": role, "content": row[column]}]
    try:
        return check_messages(row[column])
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def check_messages(messages: Any) -> list[Message]:
    """A copy of a conversation. Raises ValueError unless it is a list of at least one {"role", "content"}."""
    rule = 'must be a list of {"role": ..., "content": ...}'
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"{rule}, is {shorten(messages)}")
    checked = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"{rule}, message {number} is {shorten(message)}")
        # Tables give every message every key; a chat template may test whether a key is there.
        message = {key: value for key, value in message.items() if value is not None or key == "content"}
        content = message.get("content", message)
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{rule}, message {number} has no role in {shorten(message)}")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"{rule}, message {number} has no text as content in {shorten(message)}")
        checked.append(message)
    return checked


def shorten(value: Any, width: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


class RowOrder:
    """The row at each position: every epoch is a new permutation, drawn from the seed and its number."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool):
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self._epoch, self._permutation = -1, None

    def row_index(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_rows)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            # RandomState's stream never changes, unlike default_rng's: a run may resume with another numpy.
            random = np.random.RandomState(counter_seed(self.seed, "order", epoch))
            self._epoch, self._permutation = epoch, random.permutation(self.num_rows)
        return int(self._permutation[offset])


class TaskSource:
    """The tasks of one environment's split, in order."""

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, env: str, split: str, seed: int, shuffle: bool, is_pairs: bool = False
    ):
        if len(rows) == 0:
            raise ValueError(f"{env}: the {split} data set is empty; it must have at least one row")
        self.rows, self.env, self.split, self.seed, self.shuffle = rows, env, split, seed, shuffle
        self.is_pairs = is_pairs
        self.keep(range(len(rows)))

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[Task]:
        """Every task once, in the file's order."""
        return (make_task(self.rows[index], index, self.env, self.split, self.is_pairs) for index in self.kept)

    def tasks(self, position: int, n: int) -> list[Task]:
        """n tasks from a position on; it counts tasks drawn since the run began, over all epochs."""
        indices = [self.kept[self.order.row_index(p)] for p in range(position, position + n)]
        return [make_task(self.rows[index], index, self.env, self.split, self.is_pairs) for index in indices]

    def keep(self, indices: Sequence[int]) -> None:
        """Keeps these rows alone; they keep their ids."""
        if not indices:
            raise ValueError(f"{self.env}: no row of the {self.split} data set is left")
        self.kept = indices
        self.order = RowOrder(len(indices), self.seed, self.shuffle)


class TaskMix:
    """The tasks of several sources in turn: among the first n each has its share by weight, to within one task."""

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]):
        self.sources, self.weights = sources, weights

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def tasks(self, position: int, n: int) -> list[Task]:
        """n tasks from a position on; it counts the tasks of all sources."""
        drawn, found = self.drawn_before(position), []
        for _ in range(n):
            i = self.next_source(drawn)
            found += self.sources[i].tasks(drawn[i], 1)
            drawn[i] += 1
        return found

    def drawn_before(self, position: int) -> list[int]:
        """Number of tasks of each source before a position."""
        # Task k of a source is due at (k + 0.5) / weight. All that is due by this time certainly comes before.
        time = max(0, position - len(self.sources)) / sum(self.weights)
        drawn = [math.floor(time * weight + 0.5) for weight in self.weights]
        while sum(drawn) < position:
            drawn[self.next_source(drawn)] += 1
        return drawn

    def next_source(self, drawn: list[int]) -> int:
        """The source with the earliest next task; on a tie the one named first."""
        return min(range(len(drawn)), key=lambda i: ((drawn[i] + 0.5) / self.weights[i], i))
