"""rl-core check --oracle: what the solutions that an environment knows earn, and what doing nothing
does."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rl_core.data.episodes import episode_rewards
from rl_core.sampling.hooks import HookError, finite_parts
from rl_core.sandbox.boxes import NO_SANDBOX

if TYPE_CHECKING:
    from rl_core.sampling.env import Env
    from rl_core.types import Task, Trajectory

AT_ONCE = 4  # tasks that are played at once
SOLVED = 1.0


@dataclass(kw_only=True, slots=True)
class Verdict:
    """What a task is worth to train on."""

    task: str
    oracle: float | None  # the solution's reward; None if it failed
    nothing: float | None  # the reward of doing nothing
    seconds: float
    error: str = ""

    @property
    def is_good(self) -> bool:
        """The solution solves the task, and doing nothing does not."""
        if self.oracle is None or self.nothing is None:
            return False
        return abs(self.oracle - SOLVED) < 1e-9 and self.nothing < SOLVED


async def judge_all(
    env: Env,
    tasks: Sequence[Task],
    play_nothing: Callable[[Task], Awaitable[list[Trajectory]]],
    tell: Callable[[str], Any],
) -> list[Verdict]:
    """A verdict for each task. `tell` gets a line when one is there. Raises ValueError for an
    environment that knows no solutions."""
    if "oracle" not in env.hooks:
        raise ValueError(
            f"{env.path}: --oracle needs async def oracle(task), which plays a task's solution and "
            "gives its reward"
        )
    width = max(len(name_of(task)) for task in tasks)
    tell(f"{'task':<{width}} {'oracle':>8} {'nothing':>8} {'seconds':>8}")
    room = asyncio.Semaphore(AT_ONCE)

    async def judge_one(task: Task) -> Verdict:
        async with room:
            verdict = await judge(env, task, play_nothing)
        tell(described(verdict, width))
        return verdict

    return list(await asyncio.gather(*map(judge_one, tasks)))


async def judge(
    env: Env, task: Task, play_nothing: Callable[[Task], Awaitable[list[Trajectory]]]
) -> Verdict:
    begun = time.monotonic()
    verdict = Verdict(task=name_of(task), oracle=None, nothing=None, seconds=0.0)
    try:
        said = await env.hooks["oracle"](task, {"task": task})
        parts = finite_parts(said, "oracle", f"{env.path}: what oracle() returned")
        verdict.oracle = math.fsum(parts.values())
    except (HookError, ValueError) as error:
        verdict.error = str(error)
    played = await play_nothing(task)
    failed = [t.error for t in played if t.status == "failed"]
    if failed:
        verdict.error = verdict.error or failed[0]
    else:
        verdict.nothing = max(episode_rewards(played))
    verdict.seconds = time.monotonic() - begun
    return verdict


def name_of(task: Task) -> str:
    return str(task.row.get("name", task.id))


def described(verdict: Verdict, width: int) -> str:
    scores = []
    for score in (verdict.oracle, verdict.nothing):
        scores.append("failed" if score is None else f"{score:.4g}")
    oracle, nothing = scores
    line = f"{verdict.task:<{width}} {oracle:>8} {nothing:>8} {verdict.seconds:>8.1f}"
    if not verdict.is_good:
        line += f"  {verdict.error or fault_of(verdict)}"
    return line


def fault_of(verdict: Verdict) -> str:
    if verdict.nothing is not None and verdict.nothing >= SOLVED:
        return "doing nothing solves it"
    return "its solution does not solve it"


def summary(verdicts: Sequence[Verdict]) -> str:
    no_box = [verdict for verdict in verdicts if NO_SANDBOX in verdict.error]
    if no_box:
        return f"{NO_SANDBOX} for {len(no_box)} of {len(verdicts)} tasks, which were not judged"
    bad = sum(not verdict.is_good for verdict in verdicts)
    if bad:
        return f"{bad} of {len(verdicts)} tasks are no good to train on"
    return f"{len(verdicts)} tasks: solutions solve them, and doing nothing does not"


def as_data(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [asdict(verdict) for verdict in verdicts]
