"""An environment: its episode function, and the arguments of its hooks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.episode import TurnLoop
from rl_core.sampling.hooks import Hook
from rl_core.types import JSONObject, Message, Row, Task, Trajectory

# Arguments that hooks can name in addition to columns of the data. With a start(), `state` is added
# to SPOKEN.
BEFORE = frozenset({"messages", "prompt", "task"})
SPOKEN = BEFORE | {"completion", "trajectory", "actor", "actors"}
OF_GROUP = frozenset({"trajectories", "prompt", "task", "actor", "actors"})
ARGUMENTS = {
    "start": BEFORE | {"actor", "actors"},
    "interact": SPOKEN,
    "state_key": SPOKEN,  # Called before the actor's turn; `completion` is its last turn, if any.
    "turns": BEFORE | {"actors"},  # `actors` are names only.
    "rollout": frozenset({"task", "actors"}),
    "agent": frozenset({"task", "llm"}),
    "task_weight": frozenset({"tries", "success_rate", "mean_reward"}),
    "oracle": frozenset({"task"}),
    "feedback_fn": frozenset({"text", "messages"}),  # With --online.
    # Called for scored episodes before the learner's next step.
    "teacher_prompt": BEFORE | {"completion", "trajectory", "trajectories", "actor"},
}
# Hashes of the environment file in an episode's sessions at a service, the newest last. Workers may
# hold different files.
SESSION_CODES: ContextVar[list[str]] = ContextVar("SESSION_CODES")


@dataclass(kw_only=True)
class Env:
    name: str  # Stem of the file.
    path: str
    # Plays one episode.
    rollout: Callable[[Task, EpisodeActors], Awaitable[list[Trajectory]]]
    hooks: dict[str, Hook]  # Hooks by name, for the service, the curriculum and checks.
    turn_loop: TurnLoop  # The default episode; unused if the file has a rollout().
    load_tasks: Callable[[str], Sequence[Row]] | None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None  # rewards of a group -> advantages
    # Columns -> the prompt of a row that has none.
    row_to_prompt: Callable[..., str | list[Message]] | None
    max_turns: int  # Limit for all actors together.
    turns_from: str  # Source of max_turns, for errors: "of --max_turns".
    tools: list[JSONObject] | None
    # Raises RuntimeError if the file opens boxes and this machine cannot make them.
    check_machine: Callable[[], object] | None
    # Hash of the file. For a served file, which may change, the last hash received.
    code: Callable[[], str]

    @property
    def rewards(self) -> list[Hook]:
        return self.turn_loop.rewards

    @property
    def group_rewards(self) -> list[Hook]:
        return [hook for hook in self.rewards if hook.batched]

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        """The task with the order of speakers in info["turns"], drawn once for a group. Raises
        ValueError, HookError or TimeoutError if `turns` fails."""
        if self.turn_loop.turns is None:
            return task
        order = await self.turn_loop.turns.draw(task, names, seed)
        return replace(task, info=task.info | {"turns": order})
