"""Rewards of whole groups: batched hooks."""

from __future__ import annotations

from collections.abc import Sequence

from rl_core.data.episodes import baseline_groups
from rl_core.data.messages import shorten
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.deadlines import wait_for_all
from rl_core.sampling.hooks import Hook, refuse_none
from rl_core.sampling.reward_parts import add_parts, finite
from rl_core.types import AnyJSON, Task, Trajectory


async def group_rewards(
    hooks: Sequence[Hook], task: Task, trajectories: Sequence[Trajectory], actors: EpisodeActors
) -> list[tuple[Hook, list[Trajectory], list[float | None]]]:
    """(hook, trajectories, a value for each) of the batched rewards of one group. Each hook is
    called once per actor and player, with the trajectories that did not fail. Raises the errors of
    hooks, and ValueError unless a hook returns one finite number for each trajectory."""
    calls = []
    for group in baseline_groups(trajectories):
        calls += [group_reward(hook, task, group, actors) for hook in hooks]
    return await wait_for_all(calls)


async def group_reward(
    hook: Hook, task: Task, group: list[Trajectory], actors: EpisodeActors
) -> tuple[Hook, list[Trajectory], list[float | None]]:
    arguments = {"trajectories": group, "task": task, "prompt": task.messages}
    values: AnyJSON = await hook(task, arguments | {"actor": group[0].actor, "actors": actors})
    source = f"{hook.path}: what {hook.name}() returned"
    refuse_none(values, f"{hook.name}()", hook.path)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != len(group):
        raise ValueError(
            f"{source} is {shorten(values)}; it must be a list of {len(group)} numbers, one for "
            "each trajectory"
        )
    numbers = [v if v is None else finite(v, f"a number in {source}") for v in values]
    return hook, group, numbers


def add_group_rewards(rewards: list[tuple[Hook, list[Trajectory], list[float | None]]]) -> None:
    """Adds the result of group_rewards() to the trajectories."""
    for hook, group, values in rewards:
        for t, value in zip(group, values, strict=True):
            add_parts(t.reward_parts, t.metrics, hook, {hook.name: value})
            if value is None:
                continue
            assert t.reward is not None
            t.reward += hook.weight * value
            if t.turn_rewards:
                t.turn_rewards[-1] += hook.weight * value
