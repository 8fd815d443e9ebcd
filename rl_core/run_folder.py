"""A run's folder: one run at a time has it, and config.yaml holds the settings of the first."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from rl_core.config import Config, plain, to_yaml

MAY_DIFFER = ("resume", "dry_run", "debug", "out", "num_steps")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder until the run ends, however it ends. Raises ValueError if another run has it."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--out {out} belongs to a run that is going on; wait for it, or name another folder"
            ) from None
        yield


def keep_config(out: Path, config: Config) -> list[str]:
    """Writes config.yaml, or leaves that of the first run. Gives the settings that differ from it, as `name was -> is`."""
    path = out / "config.yaml"
    if not path.exists():
        path.write_text(to_yaml(config))
        return []
    before, now = flat(yaml.safe_load(path.read_text()) or {}), flat(plain(config))
    names = [n for n in now if n not in MAY_DIFFER and n in before and before[n] != now[n]]
    return [f"--{name} {before[name]} -> {now[name]}" for name in names]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
