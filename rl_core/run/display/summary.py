"""The last lines of a run: steps and time, scores before and after, and commands to view and resume
the run."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean

from rl_core.plugin import RunState

Row = Mapping[str, float | None]
# The first pattern with a metric that was measured at least twice is printed.
SCORES = (
    r"eval/((?:[^/]+/)*(?:greedy_score|greedy_pass|avg@\d+|pass@\d+|accuracy|loss))",
    r"rollout/([^/]+/reward)_mean|learn/([^/]+/teacher_kl_nats)",
    r"learn/([^/]+/(?:accuracy|loss))",
)
MOST_STEPS = 10  # Most steps to average for metrics of training, whose tasks differ.


def print_summary(trainer: RunState) -> None:
    """Prints the lines. The run's files are complete."""
    config, say, done = trainer.config, trainer.log.say, trainer.step
    duration = timedelta(seconds=int(time.monotonic() - trainer.phases.run_began))
    reason = "done" if done >= config.num_steps and not trainer.signal else trainer.ended_by
    since = f" (from step {trainer.first_step})" if trainer.first_step else ""
    say(f"{reason}: step {done} of {config.num_steps} in {duration}{since}")
    file = trainer.out / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    for line in before_and_after(list(map(json.loads, lines))):
        say(f"  {line}")
    say(f"  look at it: rl-core view {shlex.quote(str(trainer.out))}")
    # A signal in the last step leaves its evaluation to the resumed run.
    if done < config.num_steps or (trainer.signal and config.eval_every):
        is_command = not trainer.plan.custom.is_script
        again = "the same command with --resume"
        say(f"  resume: {again if is_command else 'train() again, with Config(resume=True)'}")


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
                # Evaluations repeat the same tasks; a step's value depends on the luck of its
                # tasks.
                count = 1 if name.startswith("eval/") else min(MOST_STEPS, len(values) // 2)
                note = f" (means of {count} steps)" if count > 1 else ""
                first, last = fmean(values[:count]), fmean(values[-count:])
                note += failed_note(curves, name)
                lines.append(f"{match[match.lastindex or 0]} {first:.4g} -> {last:.4g}{note}")
        if lines:
            return lines
    return []


def failed_note(curves: Mapping[str, Sequence[float]], name: str) -> str:
    """A note if episodes of the first or the last evaluation failed, since the scores then cover
    different tasks. "" for other metrics."""
    prefix, _, score = name.rpartition("/")
    label = "greedy" if score.startswith("greedy") else "sampled"
    failed = curves.get(f"{prefix}/{label}_failed", (0.0,))
    if not failed[0] and not failed[-1]:
        return ""
    return f" (without {failed[0]:g} and {failed[-1]:g} failed episodes)"
