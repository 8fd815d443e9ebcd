"""rl-core check --oracle: rewards of the solutions that an environment knows, and of doing
nothing."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rl_core.data.episodes import WROTE, episode_rewards, failure_reason
from rl_core.errors import keep_ends, printable
from rl_core.sampling.hooks import HookError
from rl_core.sampling.reward_parts import finite_parts
from rl_core.sandbox.boxes import NO_SANDBOX

if TYPE_CHECKING:
    from rl_core.sampling.env import Env
    from rl_core.types import JSONObject, Task, Trajectory

AT_ONCE = 4  # Concurrent tasks.
SOLVED = 1.0
MAX_LOGS = 20  # tasks whose output is shown
MAX_LINES = 30  # lines of the output of one task
MAX_REASON = 300  # characters


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The worth of a task for training."""

    task: str
    oracle: float | None  # the solution's reward; None if it failed or there is none
    nothing: float | None  # the reward of doing nothing; None if the episode failed
    seconds: float
    error: str = ""  # the reason of what failed
    log: str = ""  # output of the solution and the tests
    has_solution: bool = True

    @property
    def is_solved(self) -> bool:
        return self.oracle is not None and self.oracle >= SOLVED - 1e-9

    @property
    def is_good(self) -> bool:
        """True if the solution earns something, and more than doing nothing."""
        return self.has_solution and not self.fault

    @property
    def fault(self) -> str:
        """The reason why the task is not good to train on, or ""."""
        if self.error:
            return self.error
        assert self.nothing is not None
        if self.oracle is not None and self.oracle > max(self.nothing, 0.0):
            return ""
        if self.nothing >= SOLVED:
            return "doing nothing solves it"
        if not self.has_solution:
            return ""
        return f"its solution earns {self.oracle:.4g}, and doing nothing {self.nothing:.4g}"


@dataclass(kw_only=True, slots=True)
class Table:
    """The verdicts on an environment's tasks, counted."""

    verdicts: list[Verdict]
    refused: dict[str, list[str]] = field(default_factory=dict)  # reason -> tasks
    seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        judged = self.verdicts
        num_refused = sum(map(len, self.refused.values()))
        return {
            "tasks": len(judged) + num_refused,
            "playable": sum(v.nothing is not None for v in judged),
            "solved_by_solution": sum(v.is_solved for v in judged),
            "partly_solved_by_solution": sum(v.is_good and not v.is_solved for v in judged),
            "solved_by_nothing": sum(v.nothing is not None and v.nothing >= SOLVED for v in judged),
            "no_solution": sum(not v.has_solution for v in judged),
            "not_good": sum(bool(v.fault) for v in judged),
            "refused": num_refused,
        }

    def reasons(self) -> dict[str, list[str]]:
        """Reason -> tasks that are not good to train on for it."""
        reasons: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            if verdict.fault:
                reasons.setdefault(verdict.fault, []).append(verdict.task)
        return reasons

    def lines(self) -> list[str]:
        lines = []
        shown = {"not_good": self.reasons(), "refused": self.refused}
        for name, number in self.counts().items():
            lines.append(f"{name.replace('_', ' '):<26} {number:>6}")
            reasons = shown.get(name, {})
            for reason, tasks in sorted(reasons.items(), key=lambda item: -len(item[1])):
                first = f"{keep_ends(reason, MAX_REASON)} (the first: {tasks[0]})"
                lines.append(f"  {len(tasks):>6} {printable(first)}")
        return [*lines, f"{'seconds':<26} {self.seconds:>6.1f}", summary(self.verdicts)]

    def as_data(self) -> JSONObject:
        reasons = {reason: len(tasks) for reason, tasks in self.reasons().items()}
        more = {"reasons": reasons, "refused_tasks": self.refused}
        more |= {"seconds": self.seconds, "oracle": list(map(asdict, self.verdicts))}
        return self.counts() | more


async def judge_all(
    env: Env,
    tasks: Sequence[Task],
    play_nothing: Callable[[Task], Awaitable[list[Trajectory]]],
    report: Callable[[str], object],
) -> list[Verdict]:
    """A verdict for each task. `report` gets the lines of each as soon as the task is judged. Raises
    ValueError for an environment that knows no solutions."""
    if "oracle" not in env.hooks:
        raise ValueError(
            f"{env.path}: --oracle needs async def oracle(task), which plays a task's solution and "
            "gives its reward, (reward, text to show), or None for a task without a solution"
        )
    width = max(len(name_of(task)) for task in tasks)
    report(f"{'task':<{width}} {'oracle':>8} {'nothing':>8} {'seconds':>8}")
    slots = asyncio.Semaphore(AT_ONCE)
    num_logs = 0

    async def judge_one(task: Task) -> Verdict:
        nonlocal num_logs
        async with slots:
            verdict = await judge(env, task, play_nothing)
        report(described(verdict, width))
        if verdict.fault and verdict.log and num_logs < MAX_LOGS:
            num_logs += 1
            report(shown_log(verdict.log))
        return verdict

    return list(await asyncio.gather(*map(judge_one, tasks)))


async def judge(
    env: Env, task: Task, play_nothing: Callable[[Task], Awaitable[list[Trajectory]]]
) -> Verdict:
    started_s = time.monotonic()
    verdict = Verdict(task=name_of(task), oracle=None, nothing=None, seconds=0.0)
    try:
        result = await env.hooks["oracle"](task, {"task": task})
        verdict.has_solution = result is not None
        if verdict.has_solution:
            reward, verdict.log = result if isinstance(result, tuple) else (result, "")
            parts = finite_parts(reward, "oracle", f"{env.path}: what oracle() returned")
            verdict.oracle = math.fsum(parts.values())
    except (HookError, ValueError) as error:
        # A RuntimeError says itself what failed, and has its lines.
        cause = error.__cause__ if isinstance(error.__cause__, RuntimeError) else error
        verdict.error = failure_reason(str(cause) or repr(cause), task.id)
        verdict.log = str(cause).partition(WROTE)[2]
    played = await play_nothing(task)
    failed = [t.error for t in played if t.status == "failed"]
    if failed:
        verdict.error = verdict.error or failure_reason(failed[0], task.id)
    else:
        verdict.nothing = max(episode_rewards(played))
        verdict.log = verdict.log or played[0].log
    verdict.seconds = time.monotonic() - started_s
    return verdict


def name_of(task: Task) -> str:
    return str(task.row.get("name", task.id))


def described(verdict: Verdict, width: int) -> str:
    scores = []
    for score in (verdict.oracle, verdict.nothing):
        scores.append("failed" if score is None else f"{score:.4g}")
    oracle, nothing = scores
    oracle = oracle if verdict.has_solution else "none"
    line = f"{verdict.task:<{width}} {oracle:>8} {nothing:>8} {verdict.seconds:>8.1f}"
    return f"{line}  {printable(keep_ends(verdict.fault, MAX_REASON))}".rstrip()


def shown_log(log: str) -> str:
    """Lines of a task's output, the middle of many left out."""
    lines = printable(log, also="\n").split("\n")
    if (left_out := len(lines) - MAX_LINES) > 0:
        lines[MAX_LINES // 2 : -MAX_LINES // 2] = [f"[{left_out} lines left out]"]
    return "\n".join(f"    | {line}" for line in lines)


def summary(verdicts: Sequence[Verdict]) -> str:
    no_box = [verdict for verdict in verdicts if NO_SANDBOX in verdict.error]
    if no_box:
        return f"{NO_SANDBOX} for {len(no_box)} of {len(verdicts)} tasks, which were not judged"
    bad = sum(bool(verdict.fault) for verdict in verdicts)
    if bad:
        return f"{bad} of {len(verdicts)} tasks are not good to train on"
    without = sum(not verdict.has_solution for verdict in verdicts)
    more = f"; {without} more have no solution to play" if without else ""
    played = [verdict for verdict in verdicts if verdict.has_solution]
    if not played:
        return f"none of {without} tasks has a solution to play"
    if not all(verdict.is_solved for verdict in played):
        return f"{len(played)} tasks: solutions earn a reward, and doing nothing earns less{more}"
    return f"{len(played)} tasks: solutions solve them, and doing nothing does not{more}"
