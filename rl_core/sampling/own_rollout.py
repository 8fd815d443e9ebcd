"""The episodes of a file's rollout()."""

from __future__ import annotations

from rl_core.data.messages import shorten
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.episode import check_name, is_list
from rl_core.sampling.hooks import Hook, refuse_none
from rl_core.sampling.reward_parts import finite, plain
from rl_core.types import Task, Trajectory


def checked(returned: object, path: str, actors: EpisodeActors) -> list[Trajectory]:
    """Validated result of the user's rollout(). Raises ValueError unless it is a list of scored
    trajectories."""
    refuse_none(returned, "rollout()", path)
    if not returned or not is_list(returned, Trajectory):
        raise ValueError(
            f"{path}: what rollout() returned is {shorten(returned)}; it must be a list of at "
            "least one Trajectory: return [reply.trajectory(reward=...)]"
        )
    last = [id(t.turns[-1]) for t in returned if t.turns]
    if len(set(last)) < len(last):
        raise ValueError(
            f"{path}: two trajectories of rollout() end in the same reply; fork() it before"
        )
    for t in returned:
        check_name(path, t.actor, actors, "a trajectory that rollout() returned")
        source = f"{path}: a trajectory of {t.actor!r} that rollout() returned"
        t.reward = finite(t.reward, f"the reward of {source}")
        if t.turn_rewards and len(t.turn_rewards) != len(t.turns):
            raise ValueError(
                f"{source} has {len(t.turn_rewards)} turn_rewards for {len(t.turns)} turns"
            )
        # Records and checkpoints are JSON.
        t.turn_rewards = [plain(value) for value in t.turn_rewards]
        t.metrics = {name: plain(value) for name, value in t.metrics.items()}
    return list(returned)


async def play(hook: Hook, task: Task, actors: EpisodeActors) -> list[Trajectory]:
    """Plays an episode by the file's rollout()."""
    returned = await hook(task, {"task": task, "actors": actors})
    return checked(returned, hook.path, actors)
