"""row_to_prompt() of an environment's file: prompts of rows that have columns for hooks alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from rl_core.data.task_rows import PROMPT_COLUMNS, first_column
from rl_core.sampling.hooks import describe_error, refuse_none
from rl_core.types import JSON, Row


class MadePrompts(Sequence):
    """Rows with a column `prompt`: row_to_prompt() of the columns that it names, for a row that has
    none of PROMPT_COLUMNS. Raises ValueError if row_to_prompt() raises an exception."""

    def __init__(self, rows: Sequence[Row], row_to_prompt: Callable[..., JSON], path: str):
        self.rows, self.row_to_prompt, self.path = rows, row_to_prompt, path
        self.columns = list(inspect.signature(row_to_prompt).parameters)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        if first_column(row, PROMPT_COLUMNS) is not None or not row.keys() >= set(self.columns):
            return row
        try:
            prompt = self.row_to_prompt(**{name: row[name] for name in self.columns})
            refuse_none(prompt, "row_to_prompt()", self.path)
        except Exception as error:
            raise ValueError(
                f"{self.path}: row_to_prompt() failed for row {index + 1}: "
                f"{describe_error(error, self.path)}"
            ) from error
        return row | {"prompt": prompt}
