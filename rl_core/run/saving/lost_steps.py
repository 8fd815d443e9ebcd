"""Removes lines and files of steps that a killed run made after its checkpoint."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import zstandard

from rl_core.data.rows import write_whole

# Files that are named by their step: episodes, values of their tokens, traces.
OF_STEP = re.compile(
    r"\.?(step|eval)_(\d{6,})[._].*jsonl\.zst(?:\.tmp)?|trace_(step)_(\d{6,})_rank_\d+\.json"
)

IMAGE = re.compile(r'"image": "(images/[0-9a-f]{16}\.[a-z]+)"')


def drop_lost_steps(out: Path, step: int, is_evaluated_again: bool) -> None:
    """Deletes lines and files of steps after the checkpoint `step` (-1: all), and of that step's
    evaluation if it is repeated. A resumed run may have other ranks or settings and not replace
    each file, and readers would count such steps twice."""
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
