"""What a run says when it ends: steps and time, scores before and after, how to look at it, and how
it goes on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
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


def tell_end(run: Any, ended: str = "ended", go_on: str = "the same command with --resume") -> None:
    """Prints the lines. The run's files are complete. `ended`: how, if neither its last step nor a
    signal that it heard ended it."""
    done = run.terminal.step_done
    taken = timedelta(seconds=int(time.monotonic() - run.terminal.started))
    file = run.out / "metrics.jsonl"
    rows = list(read_json(file)) if file.exists() else []
    run.log.say(f"{reason(run, done, ended)}: step {done} of {run.config.num_steps} in {taken}")
    for line in before_and_after(rows):
        run.log.say(f"  {line}")
    for line in failed_lines(run):
        run.log.say(f"  {line}")
    run.log.say(f"  look at it: rl-core view {run.out}")
    if done < run.config.num_steps:
        run.log.say(f"  go on: {go_on}")


def reason(run: Any, done: int, ended: str) -> str:
    if run.keeper.signal:
        return f"ended by {signal.Signals(run.keeper.signal).name}"
    return "done" if done >= run.config.num_steps else ended


def failed_lines(run: Any) -> list[str]:
    """How many episodes of this process failed, and the command that counts why."""
    lines = []
    for kind, tally in run.tallies.items():
        if not tally["failed"]:
            continue
        of = " of evaluations" if kind == "eval" else ""
        line = f"{tally['failed']} of {tally['episodes']} episodes{of} failed"
        if run.config.rollout.save:
            line += f": rl-core show {run.out} --reasons"
            line += " --eval" if kind == "eval" else ""
        lines.append(line)
    return lines


def before_and_after(rows: Sequence[Row]) -> list[str]:
    """`sort/greedy_score 0.25 -> 0.75` for each score of the first kind that was measured twice."""
    for pattern in SCORES:
        lines = []
        for name in sorted({name for row in rows for name in row}):
            match = re.fullmatch(pattern, name)
            values = [row[name] for row in rows if row.get(name) is not None]
            if match and len(values) > 1:
                # Evaluations are of the same tasks each time; a step's value is mostly the luck of
                # its tasks.
                count = 1 if name.startswith("eval/") else min(MOST_STEPS, len(values) // 2)
                first = sum(values[:count]) / count
                last = sum(values[-count:]) / count
                of = f" (means of {count} steps)" if count > 1 else ""
                lines.append(f"{match[1]} {first:.4g} -> {last:.4g}{of}")
        if lines:
            return lines
    return []
