"""The columns of a data set that were read: of a row, and of its first rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rl_core.config import Config
from rl_core.data.messages import is_filled
from rl_core.data.task_rows import TaskSource
from rl_core.sampling.env import Env
from rl_core.types import JSON, Row


class ReadRow(dict):
    """A row that keeps the names of its columns of which a value was read."""

    def __init__(self, row: Row):
        super().__init__(row)
        self.read: dict[str, None] = {}
        self.made: set[str] = set()  # Columns that were made of others.

    def __or__(self, made: Row) -> ReadRow:
        """The row with columns made of others. Reading these adds no name."""
        row = ReadRow(super().__or__(made))
        row.read, row.made = self.read, self.made
        row.made |= made.keys()
        return row

    def __getitem__(self, name: str) -> JSON:
        return self.get(name) if name in self else super().__getitem__(name)

    def get(self, name: str, default: JSON = None) -> JSON:
        value = super().get(name, default)
        if is_filled(value) and name not in self.made:
            self.read[name] = None
        return value


@dataclass(kw_only=True, slots=True)
class ColumnUse:
    """The use of columns in the first rows of a data set."""

    config: Config
    source: TaskSource
    env: Env | None
    of_hooks: set[str]  # Columns that hooks name.
    num_rows: int = 0
    has_tools: bool = False  # True if one of the rows has tools.
    read: dict[str, None] = field(default_factory=dict)
    filled: dict[str, None] = field(default_factory=dict)
    of_messages: set[str] = field(default_factory=set)  # Columns that a form makes `messages` of.
    # Number of rows by unread column that may be part of their prompt.
    lost: Counter[str] = field(default_factory=Counter)
    nested: set[str] = field(default_factory=set)  # Lost columns of lists or objects.
    # Number of rows by another unread column of long texts or lists, and by key of an assistant's
    # message that neither rl_core nor the chat template reads.
    long: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    equal: int = 0  # Number of rows whose prompt is the most frequent one, but for RL.
    equal_prompt: str = ""
    # Numbers of the rows, from 0, by remark on their messages.
    remarks: dict[str, list[int]] = field(default_factory=dict)
