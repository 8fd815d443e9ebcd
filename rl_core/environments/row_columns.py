"""The columns that hooks of an environment name, and those that rows have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rl_core.data.rows import CHECKED_ROWS, is_trajectory, row_place
from rl_core.sampling.env import Env
from rl_core.types import Row


def check_columns(
    env: Env,
    rows: Sequence[Row],
    files: Sequence[tuple[str, int]] = (),
    split: str = "train",
) -> None:
    """Raises ValueError if a hook or a system prompt names an argument that neither we nor every
    row has, and for a file of a run's episodes."""
    if files and is_trajectory(rows[0]):
        raise ValueError(
            f"{files[0][0]} holds a run's episodes, which are for --algorithm sft; name rows"
        )
    wanted = []
    for hook in env.hooks.values():
        wanted.append((f"{hook.name}()", hook.required - hook.ours, hook.ours))
    for name, prompt in env.turn_loop.system_prompts.items():
        wanted.append((f"system_prompts[{name!r}]", prompt.columns, ()))
    columns = getattr(rows, "column_names", None)
    if columns is not None:  # All rows of a table have the same columns.
        rows = [dict.fromkeys(columns)]
    limit = len(rows) if isinstance(rows, list) else CHECKED_ROWS
    for index, row in enumerate(itertools.islice(rows, limit)):
        for user, names, ours in wanted:
            if missing := names - row.keys():
                from rl_core.environments.missing_columns import missing_column

                source = row_place(index, files, split)
                hint = missing_column(env, missing, ours, row, source, bool(files))
                raise ValueError(f"{env.path}: {user} asks for {hint}")
