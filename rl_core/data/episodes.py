"""Trajectories as episodes. What compares or counts weighs an episode of an (env, task, actor,
player) as one, however many conversations it returned."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from rl_core.types import Trajectory

# Rewards that differ by at most this times max(1, |mean|) differ by rounding alone.
NO_SPREAD = 1e-6


def succeeded(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Trajectories that did not fail. Failed ones have no reward and are left out of baselines,
    counts and training."""
    return [t for t in trajectories if t.status != "failed"]


def grouped(items: Iterable[Trajectory], *names: str) -> list[list[Trajectory]]:
    """Groups of items with equal attributes, in the order of the first of each group."""
    groups: dict[tuple, list[Trajectory]] = {}
    key_of = attrgetter(*names)
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return list(groups.values())


def baseline_groups(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Groups that share a baseline, (env, group, actor, player), without failed trajectories."""
    counted = [t for t in trajectories if t.status != "failed"]
    return grouped(counted, "env", "group_id", "actor", "player")


def by_episode(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The conversations of each episode of an (env, group, actor, player), in the order of their
    first."""
    # rl-core check has several tasks in one group.
    return grouped(trajectories, "env", "task_id", "group_id", "index", "actor", "player")


# Stands in an error between the reason and the output of a task's script.
WROTE = "; it wrote, in "
# Follows the reason in a truncated episode, also where the truncation is not the cause.
CUT_OFF = "; the episode was truncated: a turn was cut off, as by --max_tokens"


def failure_reason(error: str, task_id: str) -> str:
    """The reason of a failed episode, in the same words for all tasks."""
    return error.replace(f" for task {task_id}", "").partition(WROTE)[0]


def episode_means(
    trajectories: Iterable[Trajectory], value: Callable[[Trajectory], float]
) -> list[float]:
    """[episodes] the mean of value(t) over the conversations of each."""
    means = []
    for episode in by_episode(trajectories):
        values = [value(t) for t in episode]
        # Unlike a sum that is divided, statistics.mean gives equal values back exactly. It is slow.
        means.append(values[0] if len(values) == 1 else statistics.mean(values))
    return means


def episode_rewards(trajectories: Iterable[Trajectory]) -> list[float]:
    """[episodes] the reward of each: the mean over its conversations."""
    return episode_means(trajectories, lambda t: cast(float, t.reward))


def has_spread(values: Sequence[float]) -> bool:
    """True if the values differ by more than rounding."""
    if not values:
        return False
    mean = sum(values) / len(values)
    return max(values) - min(values) > NO_SPREAD * max(1.0, abs(mean))
