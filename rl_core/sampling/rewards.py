"""What the reward hooks of a user's file give: numbers, parts, a value for each of a group."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_core.data.tasks import shorten
from rl_core.sampling.hooks import Hook, describe_error, wait_for_all
from rl_core.types import Message, RunError, Task, Trajectory


@dataclass(kw_only=True, slots=True, frozen=True)
class Reward:
    """A hook that scores: reward_fn, group_reward_fn, or a function marked by @reward."""

    hook: Hook
    weight: float = 1.0  # 0: only logged
    batched: bool = False  # called once for a group

    @property
    def is_per_actor(self) -> bool:
        return self.hook.is_given("actor") or self.hook.is_given("trajectory")


def marked_rewards(module_values: Mapping[str, Any]) -> dict[str, tuple[Callable, float, bool]]:
    """Name -> (function, weight, whether it is batched), of a module's reward hooks in their order. One that has two names
    counts once."""
    found: dict[str, tuple[Callable, float, bool]] = {}
    for name, value in module_values.items():
        plain = {"reward_fn": (1.0, False), "group_reward_fn": (1.0, True)}.get(name)
        mark = vars(value).get("reward_mark", plain) if hasattr(value, "__dict__") else plain
        if mark and callable(value) and all(value is not known[0] for known in found.values()):
            found[name] = (value, mark[0], mark[1] or name == "group_reward_fn")
    return found


async def score_group(
    rewards: Sequence[Reward], task: Task, trajectories: Sequence[Trajectory], actors: Mapping[str, Any]
) -> None:
    """Adds what the batched rewards give to the trajectories of one group that did not fail; each is asked once for every
    actor and seat. Raises ValueError unless it gives one finite number for each."""
    groups: dict[tuple[str, str], list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.status != "failed":
            groups.setdefault((trajectory.actor, trajectory.seat), []).append(trajectory)
    asked = [(reward, group) for reward in rewards for group in groups.values()]
    given = await wait_for_all([group_values(reward, task, group, actors) for reward, group in asked])
    for (reward, group), values in zip(asked, given, strict=True):
        for trajectory, value in zip(group, values, strict=True):
            add_group_reward(trajectory, reward, value)


async def group_values(
    reward: Reward, task: Task, group: Sequence[Trajectory], actors: Mapping[str, Any]
) -> list[float]:
    hook, name = reward.hook, reward.hook.name
    given = {
        "trajectories": lambda: copy.deepcopy(group),
        "task": lambda: task_copy(task),
        "prompt": lambda: copied(task.messages),
        "actor": lambda: group[0].actor,
        "actors": lambda: actors,
    }
    values = await hook(task.id, task.row, given)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(group):
        raise ValueError(
            f"{hook.path}: {name}() returned {shorten(values)}; it must return a list of {len(group)} numbers, one for each "
            "of the trajectories that it got"
        )
    try:
        return [finite_reward(value) for value in values]
    except ValueError as error:
        raise ValueError(f"{hook.path}: a value in the list that {name}() returned {error}") from None


def add_group_reward(trajectory: Trajectory, reward: Reward, value: float) -> None:
    if not reward.weight:
        trajectory.metrics[reward.hook.name] = value
        return
    value *= reward.weight
    add_rewards(trajectory.reward_parts, {reward.hook.name: value}, reward.hook.path)
    trajectory.reward += value
    if trajectory.turn_rewards:
        trajectory.turn_rewards[-1] += value


def reward_parts(value: Any, name: str, path: str) -> dict[str, float]:
    """A dict's parts, or the one number under its hook's name."""
    parts = value if isinstance(value, dict) else {name: value}
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{path}: {name}() returned {shorten(value)}; a dict must name each part, as 'format': 0.5")
    checked = {}
    for part, number in parts.items():
        try:
            checked[part] = finite_reward(number)
        except ValueError as error:
            where = f"part {part!r} of what {name}() returned" if isinstance(value, dict) else f"what {name}() returned"
            raise ValueError(f"{path}: {where} {error}") from None
    return checked


def add_rewards(rewards: dict[str, float], parts: dict[str, float], path: str) -> None:
    for part in rewards.keys() & parts.keys():
        raise ValueError(f"{path}: the reward part {part!r} is given by two hooks; name it otherwise in one of them")
    rewards.update(parts)


def finite_reward(value: Any) -> float:
    """A Python float of a bool, an int, a float, or a scalar of numpy or torch."""
    number = value
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        number = value.item()
    if not isinstance(number, numbers.Real):
        raise ValueError(f"is {shorten(value)}; a reward must be a finite number, or a dict of them")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"is {shorten(value)}; a reward must be finite")
    return number


def advantages_of(advantage_fn: Callable, rewards: list[float], path: str) -> list[float]:
    """What the user's advantage_fn(rewards) gives for a group. Raises RunError unless it is a finite number for each."""
    try:
        values = advantage_fn(list(rewards))
        values = values.tolist() if hasattr(values, "tolist") else list(values)
    except Exception as error:
        raise RunError(f"{path}: advantage_fn({rewards}) failed: {describe_error(error, path)}") from error
    if len(values) != len(rewards):
        raise RunError(f"{path}: advantage_fn({rewards}) gave {len(values)} values; it must give one for each reward")
    try:
        return [finite_reward(value) for value in values]
    except ValueError:
        raise RunError(f"{path}: advantage_fn({rewards}) gave {values}; all must be finite numbers") from None


def weight_of_task(hook: Hook, task_id: str, row: dict[str, Any], known: Mapping[str, float]) -> float:
    """What the user's task_weight() gives for a task of which so much is known. Raises ValueError unless it is a finite
    number of at least 0."""
    try:
        weight = hook.function(**hook.arguments(row, {name: lambda v=value: v for name, value in known.items()}))
        problem = None if is_weight(weight) else f"gave {shorten(weight)}; it must give a finite number of at least 0"
    except Exception as error:
        problem = f"failed: {describe_error(error, hook.path)}"
    if problem:
        given = ", ".join(f"{name}={value:.4g}" for name, value in known.items())
        raise ValueError(f"{hook.path}: task_weight() for task {task_id} with {given} {problem}")
    return finite_reward(weight)


def is_weight(value: Any) -> bool:
    try:
        return finite_reward(value) >= 0
    except ValueError:
        return False


def copied(messages: Sequence[Message]) -> list[Message]:
    return [dict(message) for message in messages]


def task_copy(task: Task) -> Task:
    """For a hook, which may spoil it."""
    return Task(id=task.id, env=task.env, row=dict(task.row), messages=copied(task.messages), info=dict(task.info))
