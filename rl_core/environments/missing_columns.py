"""Errors about columns that a row lacks."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from rl_core.data.context_columns import CONTEXT_COLUMNS
from rl_core.data.task_rows import PROMPT_COLUMNS, first_column, make_task
from rl_core.environments.file_hints import OF_PEERS
from rl_core.errors import near_name
from rl_core.sampling.env import Env
from rl_core.types import Row


def missing_column(
    env: Env, missing: set[str], ours: Collection[str], row: Row, source: str, is_file: bool
) -> str:
    """The end of an error about columns that a row lacks. Raises ValueError if it has no prompt,
    because such a row is rarely meant for these hooks."""
    name = min(missing, key=lambda name: (name not in OF_PEERS, name))
    hint = OF_PEERS.get(name) or column_hint(env, name, ours, row, is_file)
    if name == "state":
        hint = "it needs start(task)"
    has_prompt = first_column(row, PROMPT_COLUMNS) is not None
    if not has_prompt and name not in PROMPT_COLUMNS:
        make_task(row, 0, env.name, "", location=source)
    return f"{name!r}; {source} has {', '.join(row)}" + (f"; {hint}" if hint else "")


def column_hint(env: Env, name: str, ours: Collection[str], row: Row, is_file: bool) -> str:
    """The argument or column that is spelled most like `name`, and the flag that reads a column by
    the name that a hook wants: that one, or the only one that nothing else reads."""
    close = difflib.get_close_matches(name, sorted({*ours, *row}), n=1, cutoff=0.8)
    if close and close[0] in ours:
        return f"did you mean {close[0]!r}?"
    meant = f"did you mean {close[0]!r}?" if close else ""
    if not is_file:
        return meant
    read = {*PROMPT_COLUMNS, *CONTEXT_COLUMNS}.union(*(hook.named for hook in env.hooks.values()))
    free = [column for column in row if column not in read]
    column = near_name(name, free) or (free[0] if len(free) == 1 else "COLUMN")
    read = f"{'Read' if meant else 'read'} one by --data.columns {name}={column}"
    return f"{meant} {read}".strip()
