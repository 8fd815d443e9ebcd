"""Warnings about columns and messages of a data set."""

from __future__ import annotations

from collections.abc import Iterator

from rl_core.data.context_columns import SYSTEM_COLUMNS
from rl_core.data.messages import shorten
from rl_core.data.rows import row_place
from rl_core.data.warnings.read_row import ColumnUse
from rl_core.data.warnings.unread_columns import fix_of, name_columns

MIN_EQUAL = 10  # Rows of one prompt, if they are most, are warned of.


def use_warnings(use: ColumnUse, warned: set[str]) -> Iterator[str]:
    """Warnings about the columns and messages of a data set. `warned`: columns and remarks of the
    environment that were warned of before; it grows."""
    source, env = use.source, use.env
    among = f"of the first {use.num_rows} rows of {source.env}"

    def is_new(about: str) -> bool:
        is_known = about in warned
        warned.add(about)
        return not is_known

    for remark, rows in use.remarks.items():
        if is_new(remark):
            location = row_place(rows[0], source.files, source.split)
            yield f"{len(rows)} {among}, such as {location}: {remark}"
    prompt = name_columns(use).prompt
    for column, num in use.lost.items():
        if is_new(column):
            yield (
                f"column {column!r}, which {num} {among} have, is not read: prompts are made "
                f"of {', '.join(prompt)}; {fix_of(column, prompt, use.lost, use.nested)}"
            )
    if use.equal >= MIN_EQUAL and 2 * use.equal > use.num_rows and is_new("equal"):
        yield (
            f"{use.equal} {among} have the same prompt, {shorten(use.equal_prompt)}; "
            "--data.columns prompt=NAME reads another column"
        )
    if others := [repr(column) for column in use.long if is_new(column)]:
        yield (
            f"nothing reads the long texts or lists in {', '.join(others)} {among}; "
            "--data.columns NAME=COLUMN reads one (docs/runs.md)"
        )
    if keys := [repr(key) for key in use.keys if is_new(f"key {key}")]:
        yield (
            f"nothing reads the keys {', '.join(keys)} of assistants' messages {among}; "
            '"train": false leaves a message out of the loss (docs/sft.md)'
        )
    if not env or not env.turn_loop.system_prompts:
        return
    replaced = [column for column in SYSTEM_COLUMNS if column in prompt]
    if replaced and is_new("system_prompts"):
        yield (
            f"system_prompts of {env.path} replace the rows' column {replaced[0]!r}: the "
            f"actors {', '.join(env.turn_loop.system_prompts)} do not read it"
        )
