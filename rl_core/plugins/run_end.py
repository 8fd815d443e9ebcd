"""What a run says when it ends: steps and time, scores before and after, how to look at it, and how
it goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rl_core.data.rows import read_json
from rl_core.plugin import Plugin

Row = Mapping[str, float | None]
# The first of these that a run measured at least twice is told.
SCORES = (
    r"eval/((?:[^/]+/)*(?:greedy_score|avg@\d+|pass@\d+|accuracy|loss))",
    r"rollout/([^/]+/reward)_mean",
    r"learn/([^/]+/loss)",
)
MOST_STEPS = 10  # whose mean is told, of values that are of a step's own tasks


class RunEnd(Plugin):
    def after_run(self) -> None:
        """Prints the lines. The run's files are complete."""
        trainer, config = self.trainer, self.trainer.config
        say, done = trainer.log.say, trainer.step
        taken = timedelta(seconds=int(time.monotonic() - trainer.began_at))
        file = trainer.out / "metrics.jsonl"
        rows = list(read_json(file)) if file.exists() else []
        how = trainer.ended_by
        if not trainer.signal and done >= config.num_steps:
            how = "done"
        say(f"{how}: step {done} of {config.num_steps} in {taken}")
        for line in before_and_after(rows):
            say(f"  {line}")
        say(f"  look at it: rl-core view {trainer.out}")
        if done < config.num_steps:
            go_on = "the same command with --resume"
            if trainer.plan.on_step is not None:  # it is no command
                go_on = "train() again, with Config(resume=True)"
            say(f"  go on: {go_on}")


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
