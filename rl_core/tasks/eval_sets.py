"""Which held-out tasks a run is evaluated on (--data.eval, load_tasks of environments)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from glob import glob

from rl_core.config import Config
from rl_core.errors import split


def held_out(config: Config, envs: Iterable[str]) -> Iterator[tuple[str, str, str, str | None]]:
    """(name of the set, its environment, its split, the rows' source or None) of each."""
    envs = list(envs)
    for env in envs:
        for own, path in named_sets(config.env(env).eval or config.data.eval).items():
            if not own:
                yield env, env, "eval", path
            elif len(envs) > 1:
                yield f"{env}/{own}", env, f"eval/{own}", path
            else:
                yield own, env, f"eval/{own}", path


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
