"""Held-out sets of a run (--data.eval, load_tasks of environments)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from glob import glob

from rl_core.config import Config
from rl_core.errors import split


def held_out(config: Config, envs: Iterable[str]) -> Iterator[tuple[str, str, str, str | None]]:
    """(name, environment, split, source of the rows or None) of each held-out set."""
    envs = list(envs)
    for env in envs:
        for set_name, path in named_sets(config.env(env).eval or config.data.eval).items():
            if not set_name:
                yield env, env, "eval", path
            elif len(envs) > 1:
                yield f"{env}/{set_name}", env, f"eval/{set_name}", path
            else:
                yield set_name, env, f"eval/{set_name}", path


def named_sets(value: str | None) -> dict[str, str | None]:
    """Name -> sources of each held-out set in "gsm8k=a.jsonl,aime=b.jsonl,c.jsonl". Sources before
    the first name have the name "". An existing path with "=", such as year=2024/rows.jsonl, is a
    source without a name."""
    name, sets = "", {}
    for source in split(value):
        match = re.fullmatch(r"([A-Za-z][\w-]*)=(.+)", source)
        if match and not glob(source):
            name, source = match.groups()
        sets[name] = f"{sets[name]},{source}" if name in sets else source
    return sets or {"": None}
