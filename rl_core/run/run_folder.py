"""A run's folder: its lock, metrics.jsonl, and errors of full disks."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rl_core.distributed import Ranks
from rl_core.metrics import Metric, reduce_metrics

FAILURE = "failure.txt"


def make_folder(out: Path) -> None:
    """Makes the folder of a run. Raises ValueError if that fails, or if it may not be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--out {out} cannot be made: {error.strerror}; name a folder where you may write"
        ) from None
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out} may not be written; name a folder where you may write")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Locks the folder until the run ends. Raises ValueError if another run holds the lock."""
    make_folder(out)
    with open(out / ".lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)  # A reader that probes the lock holds it for an instant.
            lock_again(file, out)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        # A process that a hook forks may outlive the run, and must not hold its lock. The kernel
        # frees a lock once every copy of the open file is closed.
        os.register_at_fork(after_in_child=file.close)
        yield


def lock_again(file: IO[str], out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "process unknown"
        raise ValueError(
            f"--out {out} is used by another run ({holder}); wait for it, or name another folder"
        ) from None


@contextmanager
def keeping_failure(out: Path, is_writer: bool = True) -> Iterator[None]:
    """Keeps the first error of a run in OUT/failure.txt, with its traceback. The writer removes the
    file of an earlier failure."""
    file = out / FAILURE
    if is_writer:
        file.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(OSError), open(file, "x") as kept:
            kept.write(f"{type(error).__name__}: {' '.join(str(error).split())}\n\n")
            traceback.print_exception(error, file=kept)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises OSError with the path if the disk is full, because few libraries name it."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is not an Exception.
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            if (text := os.strerror(number)) in str(error):
                text = f"{path}: {text}; make room there, and continue with --resume"
                raise OSError(text) from error
        raise


class RunLog:
    """metrics.jsonl, one object a line, and lines on the terminal. One rank writes."""

    def __init__(self, out: Path, ranks: Ranks):
        self.ranks, self.path = ranks, out / "metrics.jsonl"

    def write(self, step: int, metrics: dict[str, Metric]) -> dict[str, float]:
        values = reduce_metrics(metrics, self.ranks)
        line: dict[str, float | None] = {"step": step}
        for name, value in values.items():
            if not name.startswith("keep/"):
                line[name] = value if math.isfinite(value) else None  # JSON has no NaN or infinity.
        # An interrupted evaluation has flags alone.
        if self.ranks.is_writer and len(line) > 1:
            with naming(self.path), open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
        return values

    def say(self, text: str) -> None:
        if self.ranks.is_writer:
            print(text, flush=True)
