"""Where a row stands, for errors: `row 7 of rows.jsonl`."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path

from rl_core.data.rows import ROLLOUTS, load_source, read_bytes, suffix_of
from rl_core.plugins.tables import SEPARATORS, files_of
from rl_core.rules import split as comma_split


def row_place(task_id: str, origin: str) -> str:
    """`row N of FILE` of the task "train/17". N is the line where a file has lines, else the row's
    number from 1. `origin`: the files or names that were given for the rows; "": load_tasks()."""
    part, _, index = task_id.rpartition("/")
    split, left = "train" if part == "train" else "test", int(index)
    try:
        for source in comma_split(origin):
            files = files_of(source, split)
            if any(file.name.endswith(ROLLOUTS) for file in files):
                return f"episode {left + 1} of {origin}"
            for file in files or [source]:
                num_rows = len(load_source(str(file), split, None, None))
                if left < num_rows:
                    return f"row {line_of(file, left) if files else left + 1} of {file}"
                left -= num_rows
    except (
        OSError,
        ValueError,
    ):  # a file that changed meanwhile must not hide what is wrong with the row
        pass
    return f"row {int(index) + 1} of {origin or f'load_tasks({part!r})'}"


def line_of(file: Path, index: int) -> int:
    """The line in which row `index` (from 0) begins; in a file without lines index + 1."""
    lines = read_bytes(file).decode(errors="replace").split("\n")
    if (suffix := suffix_of(file)) == ".jsonl":
        return next(
            islice((number for number, line in enumerate(lines, 1) if line.strip()), index, None)
        )
    if suffix in SEPARATORS:
        reader = csv.reader((f"{line}\n" for line in lines), delimiter=SEPARATORS[suffix])
        for _ in islice(reader, index + 1):  # with the line of names
            pass
        return reader.line_num + 1
    return index + 1
