"""What a run says when it ends: steps and time, scores before and after, how to look at it, and how
it goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any

from rl_core.data.rows import read_json

Row = Mapping[str, float | None]
# The first of these that a run measured at least twice is told.
SCORES = (
    r"eval/((?:[^/]+/)*(?:greedy_score|avg@\d+|pass@\d+|accuracy|loss))",
    r"rollout/([^/]+/reward)_mean",
    r"learn/([^/]+/loss)",
)
MOST_STEPS = 10  # whose mean is told, of values that are of a step's own tasks


def tell_end(trainer: Any) -> None:
    """Prints the lines. The run's files are complete."""
    config, say, done = trainer.config, trainer.log.say, trainer.step
    taken = timedelta(seconds=int(time.monotonic() - trainer.began_at))
    how = "done" if done >= config.num_steps and not trainer.signal else trainer.ended_by
    say(f"{how}: step {done} of {config.num_steps} in {taken}")
    file = trainer.out / "metrics.jsonl"
    for line in before_and_after(list(read_json(file)) if file.exists() else []):
        say(f"  {line}")
    say(f"  look at it: rl-core view {trainer.out}")
    if done < config.num_steps:
        is_command = not trainer.plan.own_parts
        again = "the same command with --resume"
        say(f"  go on: {again if is_command else 'train() again, with Config(resume=True)'}")


def before_and_after(rows: Sequence[Row]) -> list[str]:
    """`sort/greedy_score 0.25 -> 0.75` for each score of the first kind that was measured twice."""
    curves: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                curves.setdefault(name, []).append(value)
    for pattern in SCORES:
        lines = []
        for name, values in sorted(curves.items()):
            match = re.fullmatch(pattern, name)
            if match and len(values) > 1:
                # Evaluations are of the same tasks each time; a step's value is mostly the luck of
                # its tasks.
                count = 1 if name.startswith("eval/") else min(MOST_STEPS, len(values) // 2)
                of = f" (means of {count} steps)" if count > 1 else ""
                first, last = fmean(values[:count]), fmean(values[-count:])
                of += failed_note(curves, name)
                lines.append(f"{match[1]} {first:.4g} -> {last:.4g}{of}")
        if lines:
            return lines
    return []


def failed_note(curves: Mapping[str, Sequence[float]], name: str) -> str:
    """A note where episodes of the first or the last evaluation failed: the scores are then of
    different tasks. "" for other metrics."""
    room, _, score = name.rpartition("/")
    label = "greedy" if score == "greedy_score" else "sampled"
    failed = curves.get(f"{room}/{label}_failed", (0.0,))
    if not failed[0] and not failed[-1]:
        return ""
    return f" (without {failed[0]:g} and {failed[-1]:g} failed episodes)"
