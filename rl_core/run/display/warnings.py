"""Warnings about problems of a run, in plain words with a suggestion: printed once when a problem
begins, and kept in warnings.jsonl.

Each warning is a row of RULES. Warnings depend only on the rows of metrics.jsonl, so that a resumed
run, which reads these again, repeats none.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rl_core.algorithms import ADVANTAGES, make_algorithm
from rl_core.config import Config
from rl_core.data.rows import write_whole
from rl_core.errors import counted

SHORT, LONG = 5, 20  # Steps over which a value is judged.
AGAIN = 10  # Steps without the problem before its warning is printed again.
COLLAPSE = 0.1  # Entropy below this fraction of its start has collapsed.
MOST = 0.5  # Fraction of the episodes of the first step.
# Equal to `above` in metric_table.yaml, which is slow to read.
TRUNCATED, MISMATCH = 0.2, 0.01
OFF_POLICY = 10.0  # Factor of the mismatch bound where stale weights sample.

FAILED = "failed episodes"  # Kind of the warnings of failures().
MAX_REASONS = 50  # Most reasons that are printed in a run; the viewer and rl-core show have all.


# Conditions of rules. `values`: the metric's values in the last steps, all finite.


def is_most_of_first_step(values: list[float], run: RunWarnings, name: str) -> bool:
    return len(run.history[name]) == 1 and values[0] > MOST


def is_in_first_step(values: list[float], run: RunWarnings, name: str) -> bool:
    return len(run.history[name]) == 1


def is_often_truncated(values: list[float], run: RunWarnings, name: str) -> bool:
    return fmean(values) > TRUNCATED


def is_without_signal(values: list[float], run: RunWarnings, name: str) -> bool:
    return run.compares_groups and min(values) == 1.0 and not is_solved(values, run, name)


def is_solved(values: list[float], run: RunWarnings, name: str) -> bool:
    rewards = run.history.get(name.replace("zero_signal_frac", "reward_mean"), [])
    is_passed = min(rewards[-len(values) :], default=-math.inf) >= run.config.eval.pass_reward
    return run.compares_groups and min(values) == 1.0 and is_passed


def is_constant(values: list[float], run: RunWarnings, name: str) -> bool:
    # In a zero-sum game the mean reward of both players is constant.
    signal = run.history.get(name.replace("reward_mean", "zero_signal_frac"), [1.0])
    return len(set(run.history[name])) == 1 and signal[-1] == 1.0


def is_constant_part(values: list[float], run: RunWarnings, name: str) -> bool:
    if name.endswith("reward/truncated"):  # truncated_reward, a constant of the environment.
        return False
    actor, _, _ = name.partition("reward/")
    parts = [other for other in run.history if other.startswith(f"{actor}reward/")]
    return len(set(run.history[name])) == 1 and len(parts) > 1


def is_off_policy(values: list[float], run: RunWarnings, name: str) -> bool:
    is_stale = run.config.max_staleness or run.config.rollout.stale_policy_frac
    return min(values) > MISMATCH * (OFF_POLICY if is_stale else 1.0)


def is_collapsed(values: list[float], run: RunWarnings, name: str) -> bool:
    rewards = run.history.get(
        re.sub("learn/(.+)/entropy_nats", r"rollout/\1/reward_mean", name), []
    )
    if len(rewards) < SHORT:
        return False
    start, goal = fmean(rewards[:SHORT]), run.config.eval.pass_reward
    # A policy that has learned the task has low entropy too.
    is_learned = fmean(rewards[-SHORT:]) - start >= (goal - start) / 2
    return fmean(values) < COLLAPSE * fmean(run.history[name][:SHORT]) and not is_learned


@dataclass(frozen=True, slots=True)
class Rule:
    kind: str
    metric: str  # regular expression of the metric's name
    num_steps: int  # number of last steps whose values are judged
    holds: Callable[[list[float], RunWarnings, str], bool]
    # Follows the metric's name; {value} is the mean, {more} a larger --max_tokens.
    text: str


CONSTANT = (
    "has been {value:.4g} since the first step: this reward seems constant; check reward_fn with "
    "rl-core check, and whether an episode can earn another reward"
)
OVERRIDDEN = "is {value:.3g} per episode: requests set"
RULES = (
    Rule(
        "truncated",
        "rollout/[^/]+/truncated_frac",
        1,
        is_most_of_first_step,
        "is {value:.2f} in the first step: most turns are cut off in the middle. After such a turn "
        "interact() is not called, and the reward is for the episode so far; try {more}, or "
        "truncated_reward in the environment, and read some replies: {show}",
    ),
    Rule(
        "truncated",
        "rollout/[^/]+/truncated_frac",
        SHORT,
        is_often_truncated,
        f"is {{value:.2f}} over {SHORT} steps: these episodes hit a length limit before they "
        "ended; try {more}, --max_turns or a --sampling.stop, --algo.truncation_penalty soft, "
        "and read some replies: {show}",
    ),
    Rule(
        "overridden",
        "rollout/[^/]+/agent_overridden_(?!response_format$|tools$).+",
        1,
        is_in_first_step,
        f"{OVERRIDDEN} this, and the run decides it (--sampling.temperature, --seed); check that "
        "the program can do without",
    ),
    Rule(
        "overridden",
        "rollout/[^/]+/agent_overridden_response_format",
        1,
        is_in_first_step,
        f"{OVERRIDDEN} a JSON schema, and nothing makes replies fit it: check that the program "
        "asks again for another reply, or give --agents.response_format enforce",
    ),
    Rule(
        "overridden",
        "rollout/[^/]+/agent_overridden_tools",
        1,
        is_in_first_step,
        f"{OVERRIDDEN} tools that the model is not shown: a server would run them, or the chat "
        "template renders no tools; try functions of the program, another template with "
        "--actors.NAME.chat_template FILE, or a message that names the tools",
    ),
    Rule(
        "no signal",
        "rollout/[^/]+/zero_signal_frac",
        3,
        is_without_signal,
        "is 1 for 3 steps: the episodes of each group have the same reward, so that "
        "nothing is learned; try easier tasks, a larger --group_size, or a reward with partial "
        "credit",
    ),
    Rule(
        "all solved",
        "rollout/[^/]+/zero_signal_frac",
        3,
        is_solved,
        "is 1 for 3 steps at a mean reward of --eval.pass_reward or more: the tasks are solved; "
        "try harder ones, or end the run",
    ),
    Rule(
        "constant reward",
        "rollout/[^/]+/reward_mean",
        SHORT,
        is_constant,
        CONSTANT,
    ),
    Rule("constant reward", "rollout/[^/]+/reward/.+", LONG, is_constant_part, CONSTANT),
    Rule(
        "mismatch",
        "learn/[^/]+/mismatch_kl_nats",
        3,
        is_off_policy,
        "is {value:.2g} over 3 steps: the engine samples with other probabilities than the learner "
        "computes; try --algo.importance_correction tis, --learner.dtype float32, a smaller "
        "--max_staleness, "
        "and look at canary_max_diff",
    ),
    Rule(
        "entropy",
        "learn/[^/]+/entropy_nats",
        SHORT,
        is_collapsed,
        "fell to {value:.2g}, under a tenth of its start, without a gain in reward: the policy "
        "hardly explores; try a smaller --optim.lr, --algo.clip_high 0.28, --algo.entropy_coef "
        "0.001, or an earlier checkpoint",
    ),
)
WATCHED = re.compile("|".join(rule.metric for rule in RULES))


class RunWarnings:
    """Warnings of the run in the folder `out`, up to the steps in its metrics.jsonl."""

    def __init__(self, config: Config, out: Path):
        self.config, self.file = config, out / "warnings.jsonl"
        self.compares_groups = all(compares_groups(config.of(name)) for name in config.trained)
        # Metric -> its finite values of all steps, for metrics that a rule reads.
        self.history: dict[str, list[float]] = {}
        # (kind, metric) -> the last step at which the warning held, its text.
        self.now: dict[tuple[str, str], tuple[int, str]] = {}
        self.reasons: set[str] = set()  # Of failed episodes.
        if (out / "metrics.jsonl").exists() or self.file.exists():
            self.read(out / "metrics.jsonl")

    def read(self, metrics: Path) -> None:
        """Reads the steps of a resumed run, and drops warnings of later steps."""
        last_step = -1
        for row in read_lines(metrics):
            last_step = row["step"]
            if "time/step_s" in row:  # Not an evaluation.
                self.look(last_step, row)
        lines = [line for line in read_lines(self.file) if line["step"] <= last_step]
        if self.file.exists():
            write_whole(self.file, "".join(json.dumps(line) + "\n" for line in lines))
        self.reasons = {line["reason"] for line in lines if line["kind"] == FAILED}

    def step(self, step: int, values: dict[str, float]) -> list[str]:
        """Warnings that begin with this step. `values`: the step's metrics."""
        began = self.look(step, values)
        if not began:
            return []
        self.keep(step, began)
        # One line where several actors, or parts of a reward, have the same problem.
        names: dict[str, list[str]] = {}
        for line in began:
            about = line["text"].removeprefix(line["metric"])
            names.setdefault(about, []).append(line["metric"])
        return [", ".join(metrics) + about for about, metrics in names.items()]

    def failures(self, step: int, reasons: dict[str, int]) -> list[str]:
        """A warning for each new reason of failures. `reasons`: reason -> number of failed
        episodes.
        """
        lines = []
        for reason, num in reasons.items():
            if reason not in self.reasons and len(self.reasons) < MAX_REASONS:
                self.reasons.add(reason)
                text = f"{counted(num, 'episode')} failed: {reason}"
                lines.append({"kind": FAILED, "metric": "failed", "text": text, "reason": reason})
        return self.keep(step, lines) if lines else []

    def keep(self, step: int, lines: list[dict[str, str]]) -> list[str]:
        with open(self.file, "a") as file:
            file.writelines(json.dumps({"step": step} | line) + "\n" for line in lines)
        return [line["text"] for line in lines]

    def look(self, step: int, values: Mapping[str, float | None]) -> list[dict[str, str]]:
        """Problems that begin with this step."""
        watched = []
        for name, value in values.items():
            if WATCHED.fullmatch(name) and value is not None and math.isfinite(value):
                self.history.setdefault(name, []).append(value)
                watched.append(name)
        tokens = self.config.max_tokens
        more = f"--max_tokens {2 * tokens} (it is {tokens})"
        show = f"rl-core show {shlex.quote(str(self.file.parent))}"
        began = []
        for rule in RULES:
            for name in filter(re.compile(rule.metric).fullmatch, watched):
                last = self.history[name][-rule.num_steps :]
                if len(last) < rule.num_steps or not rule.holds(last, self, name):
                    continue
                text = f"{name} {rule.text.format(value=fmean(last), more=more, show=show)}"
                if (rule.kind, name) not in self.now:
                    began.append({"kind": rule.kind, "metric": name, "text": text})
                self.now[rule.kind, name] = step, text
        self.now = {key: held for key, held in self.now.items() if step - held[0] < AGAIN}
        return began


def compares_groups(config: Config) -> bool:
    """True if an actor with these settings learns nothing from groups of equal rewards. Other
    actors also learn from the batch, a critic, a teacher, or the rewards of turns."""
    algorithm = make_algorithm(config.algorithm, config.algo)
    has_others = algorithm.turn_discount is not None or algorithm.teacher
    is_running = algorithm.baseline == "running"
    return ADVANTAGES[algorithm.advantage].needs_group and not has_others and not is_running


def read_lines(file: Path) -> list[dict]:
    """The objects of a .jsonl file, without a line that a kill cut short; [] without a file."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
