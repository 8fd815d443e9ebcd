"""A run's folder: its lock, config.yaml and metrics.jsonl."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from rl_core.config import Config, flat, to_yaml
from rl_core.data.rows import write_whole
from rl_core.distributed import Ranks
from rl_core.metrics import Metric, reduce_metrics

MAY_DIFFER = ("resume", "out", "num_steps")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Holds the folder until the run ends, however it ends. Raises ValueError if another run has it."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as file:
        for wait_s in (0.1, 0.0):  # who looks whether a run goes on holds it for an instant
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(wait_s)
        else:
            raise ValueError(f"--out {out} belongs to a run that is going on; wait for it, or name another folder")
        yield


def keep_config(out: Path, config: Config) -> list[str]:
    """Writes config.yaml, or leaves that of the first run. Gives the settings that differ from it, as `name was -> is`."""
    path = out / "config.yaml"
    if not path.exists():
        write_whole(path, to_yaml(config))
        return []
    before, now = (flat(yaml.safe_load(text) or {}) for text in (path.read_text(), to_yaml(config)))
    names = [n for n in now if n not in MAY_DIFFER and n in before and before[n] != now[n]]
    return [f"--{name} {before[name]} -> {now[name]}" for name in names]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises OSError that names the path where a disk is full: few libraries do."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        texts = (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        text = next((text for text in texts if text in str(error)), None)
        if text is None:
            raise
        raise OSError(f"{path}: {text}; make room there, and go on with --resume") from error


class RunLog:
    """metrics.jsonl, one object a line, and lines on the terminal. One rank writes."""

    def __init__(self, out: Path, ranks: Ranks, resume_step: int):
        self.ranks, self.path = ranks, out / "metrics.jsonl"
        if ranks.is_writer and self.path.exists():
            keep_lines_until(self.path, resume_step or -1)  # a run without a checkpoint evaluates its start again

    def write(self, step: int, metrics: dict[str, Metric]) -> dict[str, float]:
        values = reduce_metrics(metrics, self.ranks)
        if self.ranks.is_writer:
            shown = ((k, v) for k, v in values.items() if not k.startswith("keep/"))
            clean = {k: v if math.isfinite(v) else None for k, v in shown}  # JSON has no others
            with naming(self.path), open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **clean}) + "\n")
        return values

    def say(self, text: str) -> None:
        if self.ranks.is_writer:
            print(text, flush=True)


def keep_lines_until(path: Path, step: int) -> None:
    """Drops what a run wrote after the checkpoint that it goes on from, and a line cut short by its end."""
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        with suppress(json.JSONDecodeError):
            kept += [line] if json.loads(line)["step"] <= step else []
    write_whole(path, "".join(kept))
