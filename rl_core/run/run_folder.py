"""A run's folder: its lock, metrics.jsonl, files of lost steps and errors of full disks."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zstandard

from rl_core.data.rows import write_whole
from rl_core.distributed import Ranks
from rl_core.metrics import Metric, reduce_metrics

FAILURE = "failure.txt"
# Files that are named by their step: episodes, values of their tokens, traces.
OF_STEP = re.compile(
    r"\.?(step|eval)_(\d{6,})[._].*jsonl\.zst(?:\.tmp)?|trace_(step)_(\d{6,})_rank_\d+\.json"
)

IMAGE = re.compile(r'"image": "(images/[0-9a-f]{16}\.[a-z]+)"')


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
        for wait_s in (0.1, 0.0):  # A reader that probes the lock holds it for an instant.
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(wait_s)
        else:
            file.seek(0)
            holder = file.read().strip() or "process unknown"
            raise ValueError(
                f"--out {out} is used by another run ({holder}); wait for it, or name "
                "another folder"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        # A process that a hook forks may outlive the run, and must not hold its lock. The kernel
        # frees a lock once every copy of the open file is closed.
        os.register_at_fork(after_in_child=file.close)
        yield


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

    def __init__(self, out: Path, ranks: Ranks, resume_step: int, is_evaluated_again: bool = False):
        self.ranks, self.path = ranks, out / "metrics.jsonl"
        if ranks.is_writer:
            # Without a checkpoint the run starts again.
            drop_lost_steps(out, resume_step or -1, is_evaluated_again)

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


def drop_lost_steps(out: Path, step: int, is_evaluated_again: bool) -> None:
    """Deletes lines and files of steps after the checkpoint `step`, and of that step's evaluation
    if it is repeated. A resumed run may have other ranks or settings and not replace each file, and
    readers would count such steps twice."""
    if (out / "metrics.jsonl").exists():
        keep_lines_until(out / "metrics.jsonl", step, is_evaluated_again)
    lost: list[Path] = []
    for file in (*out.glob("*"), *out.glob("rollouts/*"), *out.glob("tokens/*")):
        if match := OF_STEP.fullmatch(file.name):
            kind, number = filter(None, match.groups())
            is_again = is_evaluated_again and kind == "eval"
            if int(number) > step or (int(number) == step and is_again):
                lost.append(file)
    drop_images(out, lost)
    for file in lost:
        file.unlink()


def drop_images(out: Path, lost: list[Path]) -> None:
    """Deletes images that only the files `lost` name, and no other rollout or checkpoint."""
    names: set[str] = set()
    for file in lost:
        if file.parent.name == "rollouts":
            with suppress(zstandard.ZstdError):  # A crash may have cut the file.
                names |= named_images(file)
    kept = {*out.glob("rollouts/*.jsonl.zst"), *out.glob("checkpoints/*/*.jsonl.zst")} - {*lost}
    with suppress(zstandard.ZstdError):  # A file that cannot be read may name any image.
        if names:
            for file in kept:
                names -= named_images(file)
        for name in names:
            (out / "rollouts" / name).unlink(missing_ok=True)


def named_images(file: Path) -> set[str]:
    with zstandard.open(file, "rt", encoding="utf-8", errors="replace") as lines:
        return {name for line in lines for name in IMAGE.findall(line)}


def keep_lines_until(path: Path, step: int, is_evaluated_again: bool) -> None:
    """Drops lines after the checkpoint from which a run resumes, the evaluation of that step if it
    is repeated, and invalid lines, such as one cut short by a crash."""
    kept = []
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
            # Lines of an evaluation have no time/step_s.
            is_again = is_evaluated_again and "time/step_s" not in row
            if row["step"] < step or (row["step"] == step and not is_again):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    write_whole(path, "".join(kept))
