"""--data.columns: rows whose columns have other names than hooks and rl_core give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rl_core.data.context_columns import CONTEXT_COLUMNS
from rl_core.data.messages import json_value
from rl_core.data.task_rows import PROMPT_COLUMNS
from rl_core.errors import nearest
from rl_core.types import AnyJSON, Row

NUM_ROWS = 200  # The first rows of each file are searched for a column.
MISSING = object()


class RenamedColumns(Sequence):
    """Rows with their own columns and the renamed ones: new name -> column, or a path into a nested
    column such as reward_model.ground_truth. A renamed prompt is read before the prompt columns
    that would come first. One of CONTEXT_COLUMNS loses the old name."""

    def __init__(self, rows: Sequence[Row], columns: dict[str, str]):
        self.rows, self.columns = rows, columns
        # `input` next to `instruction` is no prompt.
        names = [name for name in columns if name in PROMPT_COLUMNS and name != "input"]
        prompts = [PROMPT_COLUMNS.index(name) for name in names]
        context = [path for path in columns.values() if path in CONTEXT_COLUMNS]
        self.hidden = (*PROMPT_COLUMNS[: min(prompts, default=0)], *context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        values = {name: nested_value(row, path) for name, path in self.columns.items()}
        renamed = {name: value for name, value in values.items() if value is not MISSING}
        return {name: value for name, value in row.items() if name not in self.hidden} | renamed


def nested_value(value: AnyJSON, path: str) -> AnyJSON:
    """The value at a path of names and numbers of list items, with dots between them; MISSING if
    there is none. A name that has dots itself comes before a path. Objects and lists may be JSON
    text."""
    if isinstance(value, dict) and path in value:
        return value[path]
    names = path.split(".")
    for number in range(len(names) - 1, 0, -1):
        inner = child(value, ".".join(names[:number]))
        if inner is not MISSING:
            return nested_value(inner, ".".join(names[number:]))
    return child(value, path)


def child(value: AnyJSON, name: str) -> AnyJSON:
    value = json_value(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        return value.get(name, MISSING)
    if isinstance(value, (list, tuple)) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return MISSING


def nested_names(value: AnyJSON, prefix: str = "") -> Iterator[str]:
    """The columns of a row and the paths to the keys of nested objects."""
    value = json_value(value) if isinstance(value, str) and prefix else value
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield prefix + name
        yield from nested_names(inner, f"{prefix}{name}.")


def check_columns_exist(
    rows: Sequence[Row], columns: dict[str, str], source: str, is_train: bool = True
) -> None:
    """Raises ValueError for a column that no file of the source has. Held-out rows may have the new
    name instead: they need not be renamed as the training rows are."""
    first: list[Row] = []
    for of_file in getattr(rows, "datasets", [rows]):
        first += [of_file[index] for index in range(min(len(of_file), NUM_ROWS))]
    for name, path in columns.items():
        is_known = any(nested_value(row, path) is not MISSING for row in first)
        if first and not is_known and (is_train or all(name not in row for row in first)):
            known = dict.fromkeys(known for row in first for known in nested_names(row))
            raise ValueError(
                f"--data.columns {name}={path}: {source} has no column {path!r}; "
                f"{nearest(path, known)}"
            )
