"""--data.columns: rows whose columns have other names than hooks and rl_core give them."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.data.rows import Row
from rl_core.data.tasks import PROMPT_COLUMNS
from rl_core.rules import nearest


class RenamedColumns(Sequence):
    """Rows with the columns that they have, and these: new name -> theirs. A new prompt's column is
    read even where the rows have one that would come before it. Strict: raises ValueError if the
    first row has neither name."""

    def __init__(
        self, rows: Sequence[Row], columns: dict[str, str], source: str, is_strict: bool = True
    ):
        self.rows, self.columns = rows, columns
        prompts = [PROMPT_COLUMNS.index(name) for name in columns if name in PROMPT_COLUMNS]
        self.hidden = PROMPT_COLUMNS[: min(prompts, default=0)]
        first = rows[0] if len(rows) else columns
        for name, theirs in columns.items():
            if is_strict and theirs not in first and name not in first:
                raise ValueError(
                    f"--data.columns {name}={theirs}: {source} has no column {theirs!r}; "
                    f"{nearest(theirs, first)}"
                )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        renamed = {name: row[theirs] for name, theirs in self.columns.items() if theirs in row}
        return {name: value for name, value in row.items() if name not in self.hidden} | renamed
