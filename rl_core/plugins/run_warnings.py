"""What is going wrong in a run, in plain words and with what to try: told once when it begins, and
kept in warnings.jsonl.

A warning depends on the lines of metrics.jsonl alone, but for the reasons of failed episodes, which
warnings.jsonl keeps. So a resumed run reads both again, and repeats none.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.data.rows import write_whole
from rl_core.learning.algorithms import make_algorithm
from rl_core.plugins.metric_table import describe
from rl_core.rules import BASELINES

if TYPE_CHECKING:
    from rl_core.sampling.env import Env

SHORT, LONG = 5, 20  # steps over which a value is judged, and a tendency
AGAIN = 10  # steps without it before a warning is told again
COLLAPSE = 0.1  # of its start that is left of the entropy
DOMINATES = 0.98  # of the reward
MOST = 0.5  # of the episodes of the first step
OFF_POLICY = 10.0  # times the bound of the mismatch, where older weights sample

FAILED = "failed episodes"  # the kind of what failures() tells
MAX_REASONS = 50  # of one run; the viewer and rl-core show have all

Row = dict[str, float]


def bound(metric: str) -> float:
    return describe(metric).above


def unanswered(envs: Collection[Env]) -> str:
    """What these environments leave out after a turn that was cut off: `interact() is not called,
    and `."""
    text = ""
    if any("interact" in env.hooks for env in envs):
        text += "interact() is not called, "
    if any(env.tools for env in envs):
        text += "no tool answers, "
    return text and f"{text}and "


class RunWarnings:
    """Of the run in the folder `out`, after the steps that its metrics.jsonl has."""

    def __init__(self, config: Config, out: Path, envs: Collection[Env] = ()):
        self.config, self.file = config, out / "warnings.jsonl"
        self.unanswered = unanswered(envs)
        algorithm = make_algorithm(config.algorithm, config.algo)
        # Others learn from groups of equal rewards too: from the batch, a critic, or the turns' own
        # rewards.
        self.compares_groups = algorithm.advantage in BASELINES and algorithm.turn_discount is None
        self.first: list[Row] = []  # the first SHORT steps
        self.last: deque[Row] = deque(maxlen=LONG)
        self.range: dict[str, list[float]] = {}  # reward -> lowest, highest, number of steps
        # Warning -> the last step at which it held, its text.
        self.now: dict[str, tuple[int, str]] = {}
        before, metrics = [], out / "metrics.jsonl"
        last_step = -1
        for row in map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else ():
            last_step = row["step"]
            if "time/step_s" in row:  # no evaluation
                before += self.look(row["step"], row)
        self.reasons: set[str] = set()
        if self.file.exists():
            before += self.told_failures(last_step)
            before.sort(key=lambda line: json.loads(line)["step"])
            write_whole(self.file, "".join(before))
        elif before:
            write_whole(self.file, "".join(before))

    def told_failures(self, last_step: int) -> list[str]:
        """Lines of warnings.jsonl that failures() wrote until this step, whose reasons are known
        from now on."""
        kept = []
        for line in self.file.read_text().splitlines(keepends=True):
            with suppress(json.JSONDecodeError):  # cut short by a kill
                told = json.loads(line)
                if told["kind"] == FAILED and told["step"] <= last_step:
                    self.reasons.add(told["reason"])
                    kept.append(line)
        return kept

    def failures(self, step: int, reasons: dict[str, int]) -> list[str]:
        """A warning for each reason for which no episode had failed. `reasons`: reason -> episodes
        that failed for it."""
        texts = []
        for reason, num in reasons.items():
            if reason in self.reasons or len(self.reasons) >= MAX_REASONS:
                continue
            self.reasons.add(reason)
            text = f"{num} episode{'s' if num > 1 else ''} failed: {reason}"
            texts.append(text)
            line = {
                "step": step,
                "kind": FAILED,
                "metric": "failed",
                "text": text,
                "reason": reason,
            }
            with open(self.file, "a") as file:
                file.write(json.dumps(line) + "\n")
        return texts

    def step(self, step: int, values: Row) -> list[str]:
        """The warnings that begin with this step. `values`: its metrics."""
        lines = self.look(step, values)
        if lines:
            with open(self.file, "a") as file:
                file.writelines(lines)
        return [json.loads(line)["text"] for line in lines]

    def look(self, step: int, values: dict[str, float | None]) -> list[str]:
        """Lines of warnings.jsonl."""
        row = {
            name: value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }
        self.first += [row] * (len(self.first) < SHORT)
        self.last.append(row)
        for name in filter(re.compile(r"rollout/[^/]+/(reward_mean|reward/.+)").fullmatch, row):
            low, high, num = self.range.get(name, (row[name], row[name], 0))
            self.range[name] = [min(low, row[name]), max(high, row[name]), num + 1]
        began = []
        for kind, metric, text in self.found():
            key = f"{kind} {metric}"
            if key not in self.now:
                began.append(
                    json.dumps({"step": step, "kind": kind, "metric": metric, "text": text}) + "\n"
                )
            self.now[key] = step, text
        self.now = {key: told for key, told in self.now.items() if step - told[0] < AGAIN}
        return began

    def values(self, name: str, num: int) -> list[float]:
        """Of the last `num` steps; none where one lacks it."""
        rows = list(self.last)[-num:]
        found = [row[name] for row in rows if name in row]
        return found if len(found) == num else []

    def found(self) -> Iterator[tuple[str, str, str]]:
        """(kind, metric, text) of what holds after the last step."""
        for name in self.last[-1]:
            if match := re.fullmatch(r"rollout/([^/]+)/reward_mean", name):
                place, learn = f"rollout/{match[1]}/", f"learn/{match[1]}/"
                yield from self.of_episodes(place)
                yield from self.of_rewards(place)
                yield from self.of_learning(place, learn)

    def of_episodes(self, place: str) -> Iterator[tuple[str, str, str]]:
        name = f"{place}truncated_frac"
        first = self.values(name, 1)
        if len(self.first) == 1 and first and first[0] > MOST:
            yield (
                "truncated",
                name,
                f"{name} is {first[0]:.2f} in the first step: most turns are cut off in their "
                "middle. After such a turn "
                f"{self.unanswered}rewards are of what there is by then; try a larger "
                "--max_tokens, or truncated_reward in the environment, and read what is said "
                "(rl-core show)",
            )
        values = self.values(name, SHORT)
        if values and statistics.fmean(values) > bound(name):
            yield (
                "truncated",
                name,
                f"{name} is {statistics.fmean(values):.2f} over {SHORT} steps: these episodes hit "
                "a length limit before they "
                "ended; try a larger --max_tokens, --max_turns or a --sampling.stop, "
                "--algo.overlong soft, and read what is "
                "said (rl-core show)",
            )
        name = f"{place}zero_signal_frac"
        if self.compares_groups and self.values(name, 3) == [1.0] * 3:
            yield (
                "no signal",
                name,
                f"{name} is 1 for 3 steps: the episodes of each group have the same reward, so "
                "that nothing is learned; try "
                "easier tasks (harder ones, if all are solved), a larger --group_size, or a reward "
                "with partial credit",
            )

    def of_rewards(self, place: str) -> Iterator[tuple[str, str, str]]:
        parts = [name for name in self.range if name.startswith(f"{place}reward/")]
        for name, num in {
            f"{place}reward_mean": SHORT,
            **dict.fromkeys(parts if len(parts) > 1 else (), LONG),
        }.items():
            low, high, steps = self.range[name]
            is_shared = (
                name.endswith("reward_mean")
                and min(self.values(f"{place}zero_signal_frac", 1), default=1) < 1
            )
            # What one seat of a game wins the other loses.
            if low == high and steps >= num and not is_shared:
                yield (
                    "constant reward",
                    name,
                    f"{name} has been {low:.4g} since the first step: this reward seems constant; "
                    "check reward_fn with "
                    "rl-core check, and whether an episode can earn another one",
                )
        columns = {name: column for name in parts if (column := self.values(name, LONG))}
        largest = max(columns, key=lambda name: abs(statistics.fmean(columns[name])), default="")
        # A penalty that is 0 is learned; a part that never moved is told above.
        others = [
            name
            for name in columns
            if name != largest and self.range[name][0] < self.range[name][1] > 0
        ]
        if others:
            sizes, moves = (
                {n: abs(of(columns[n])) for n in (largest, *others)}
                for of in (statistics.fmean, statistics.pstdev)
            )
            if (
                min(part[largest] / (sum(part.values()) or 1.0) for part in (sizes, moves))
                > DOMINATES
            ):
                yield (
                    "one part",
                    largest,
                    f"{largest} is nearly all of the reward over {LONG} steps, and of its changes: "
                    "other parts teach almost "
                    "nothing; if that is not meant, bring the parts to one scale "
                    "(@reward(weight=...)), or make the others "
                    "easier to earn",
                )

    def of_learning(self, place: str, learn: str) -> Iterator[tuple[str, str, str]]:
        name, config = f"{learn}mismatch_kl_nats", self.config
        values, is_stale = self.values(name, 3), config.max_staleness or config.rollout.lagged[0]
        if values and min(values) > bound(name) * (OFF_POLICY if is_stale else 1.0):
            yield (
                "mismatch",
                name,
                f"{name} is {statistics.fmean(values):.2g} over 3 steps: the engine samples with "
                "other probabilities than the "
                "learner computes; try --algo.correction tis, --learner.dtype float32, a smaller "
                "--max_staleness, and look at "
                "canary_max_diff",
            )
        name, reward = f"{learn}entropy_nats", f"{place}reward_mean"
        begins = [row for row in self.first if name in row and reward in row]
        now, rewards = self.values(name, SHORT), self.values(reward, SHORT)
        if not (now and rewards and len(begins) == SHORT):
            return
        start, goal = statistics.fmean(row[reward] for row in begins), config.eval.pass_reward
        # A policy that has learned the task is sure of what it says too.
        is_learned = statistics.fmean(rewards) - start >= (goal - start) / 2
        if (
            statistics.fmean(now) < COLLAPSE * statistics.fmean(row[name] for row in begins)
            and not is_learned
        ):
            yield (
                "entropy",
                name,
                f"{name} fell to {statistics.fmean(now):.2g}, under a tenth of its start, without "
                "a reward that pays for it: "
                "the policy hardly tries anything else; try a smaller --optim.lr, --algo.clip_high "
                "0.28, "
                "--algo.entropy_coef 0.001, or a checkpoint from before",
            )
