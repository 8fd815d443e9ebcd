"""An environment: what plays an episode, and what its hooks may name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.episode import Dialogue
from rl_core.sampling.hooks import Hook
from rl_core.types import Task, Trajectory

# What each hook may name besides the data's columns. `state` joins SPOKEN if there is a start().
BEFORE = frozenset({"messages", "prompt", "task"})
SPOKEN = BEFORE | {"completion", "trajectory", "actor", "actors"}
OF_GROUP = frozenset({"trajectories", "prompt", "task", "actor", "actors"})
ARGUMENTS = {
    "start": BEFORE | {"actor", "actors"},
    "interact": SPOKEN,
    "state_key": SPOKEN,  # before the actor's turn: what it said last, if it spoke
    "turns": BEFORE | {"actors"},  # their names: they cannot speak yet
    "rollout": frozenset({"task", "actors"}),
    "agent": frozenset({"task", "llm"}),
    "task_weight": frozenset({"tries", "success_rate", "mean_reward"}),
    "oracle": frozenset({"task"}),
    # Before a learner's next step, of an episode that is scored.
    "teacher_prompt": BEFORE | {"completion", "trajectory", "trajectories", "actor"},
}
# Hashes of the files that an episode's sessions at a service began with, the newest last. Two
# workers may hold two files.
SESSION_CODES: ContextVar[list[str]] = ContextVar("SESSION_CODES")


@dataclass(kw_only=True)
class Env:
    name: str  # the file's stem
    path: str
    # One episode.
    rollout: Callable[[Task, EpisodeActors], Awaitable[list[Trajectory]]]
    hooks: dict[str, Hook]  # for who calls one by its name: a service, the curriculum, a check
    dialogue: Dialogue  # what the file says of turns; of no use to a rollout() of its own
    load_tasks: Callable[[str], Sequence[dict[str, Any]]] | None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None  # rewards of a group -> advantages
    row_to_prompt: Callable[..., Any] | None  # Columns -> the prompt of a row that has none.
    max_turns: int  # of all actors together
    turns_from: str  # the source of max_turns, for errors: "of --max_turns"
    tools: list[dict[str, Any]] | None
    # Raises RuntimeError if this machine makes no boxes for the file, which opens some.
    check_machine: Callable[[], None] | None
    # Hash of the file; of a served one, which may change, the last that was heard.
    code: Callable[[], str]

    @property
    def rewards(self) -> list[Hook]:
        return self.dialogue.rewards

    @property
    def group_rewards(self) -> list[Hook]:
        return [hook for hook in self.rewards if hook.batched]

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        """The task with the order of speakers in info["turns"], drawn once for a group. Raises
        ValueError, HookError or TimeoutError if `turns` fails."""
        if self.dialogue.turns is None:
            return task
        order = await self.dialogue.turns.draw(task, names, seed)
        return replace(task, info=task.info | {"turns": order})
