"""The rows of a .jsonl file that is too large for memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

from rl_core.data.rows import CHECKED_ROWS, Row, parse_rows


class JsonLines(Sequence):
    """Reads a row from disk whenever it is asked for; 12 bytes of each are in memory. The file must
    not change. Raises ValueError, with file and line, for a bad line among the first CHECKED_ROWS
    or the last; others are found when drawn."""

    def __init__(self, path: Path):
        self.path, self.starts, self.numbers, end = path, array("q"), array("I"), 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self.starts.append(end)
                    self.numbers.append(number)
                end += len(line)
        self.starts.append(end)
        for index in (*range(len(self))[:CHECKED_ROWS], *range(len(self))[-1:]):
            self[index]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]
        with open(self.path, "rb") as file:
            file.seek(self.starts[index])
            text = file.read(self.starts[index + 1] - self.starts[index])
        [row] = parse_rows(text, f"row {self.numbers[index]} of {self.path}")
        return row
