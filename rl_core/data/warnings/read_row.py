"""A row that knows which of its columns were read."""

from __future__ import annotations

from rl_core.data.messages import is_filled
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
