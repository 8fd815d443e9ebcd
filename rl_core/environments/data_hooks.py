"""Calls of a file's functions that play no part in an episode: load_tasks(), advantage_fn()."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence

from rl_core.data.messages import shorten
from rl_core.sampling.episode import is_list
from rl_core.sampling.hooks import describe_error, refuse_none
from rl_core.sampling.reward_parts import finite
from rl_core.types import Row, RunError


def rows_of(load_tasks: Callable, split: str, path: str) -> Sequence[Row]:
    """Rows of the user's load_tasks(split): a table of `datasets`, or a list of rows."""
    try:
        rows = load_tasks(split)
        if inspect.iscoroutine(rows):
            rows = asyncio.run(rows)
        refuse_none(rows, "load_tasks()", path)
        if hasattr(rows, "column_names"):
            from rl_core.data.tables import without_null_keys

            rows = without_null_keys(rows)
        else:
            rows = list(rows)
    except Exception as error:
        raise ValueError(
            f"{path}: load_tasks({split!r}) failed: {describe_error(error, path)}"
        ) from error
    if isinstance(rows, list) and not is_list(rows, dict):
        raise ValueError(
            f"{path}: load_tasks({split!r}) must give dictionaries, not {shorten(rows)}"
        )
    return rows


def advantages_of(advantage_fn: Callable, rewards: list[float], path: str) -> list[float]:
    """Advantages of a group by the user's advantage_fn(rewards). Raises RunError unless the hook
    returns a finite number for each reward."""
    try:
        returned = advantage_fn(list(rewards))
        refuse_none(returned, "advantage_fn()", path)
        values = [finite(value, "an advantage") for value in returned]
        if len(values) != len(rewards):
            raise ValueError(f"it gave {len(values)} values; it must give one for each reward")
        return values
    except Exception as error:
        raise RunError(
            f"{path}: advantage_fn({rewards}) failed: {describe_error(error, path)}"
        ) from error
