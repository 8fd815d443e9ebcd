"""--data.columns: rows whose columns have other names than hooks and rl_core give them."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.data.rows import Row
from rl_core.data.tasks import PROMPT_COLUMNS
from rl_core.rules import nearest


class RenamedColumns(Sequence):
    """Rows with the columns that they have, and these: new name -> theirs. A new prompt's column is
    read even where the rows have one that would come before it."""

    def __init__(self, rows: Sequence[Row], columns: dict[str, str]):
        self.rows, self.columns = rows, columns
        prompts = [PROMPT_COLUMNS.index(name) for name in columns if name in PROMPT_COLUMNS]
        self.hidden = PROMPT_COLUMNS[: min(prompts, default=0)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        renamed = {name: row[theirs] for name, theirs in self.columns.items() if theirs in row}
        return {name: value for name, value in row.items() if name not in self.hidden} | renamed


def check_columns_exist(
    rows: Sequence[Row], columns: dict[str, str], source: str, is_train: bool = True
) -> None:
    """Raises ValueError for a column that no file of the source has. Held-out rows may have the new
    name instead: they need not be renamed as the training rows are."""
    known: dict[str, None] = {}
    for part in getattr(rows, "datasets", [rows]):
        if len(part):
            known |= dict.fromkeys(part[0])
    for name, theirs in columns.items():
        if known and theirs not in known and (is_train or name not in known):
            raise ValueError(
                f"--data.columns {name}={theirs}: {source} has no column {theirs!r}; "
                f"{nearest(theirs, known)}"
            )
