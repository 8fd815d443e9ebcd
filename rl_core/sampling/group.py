"""One group: all episodes of one task, with their deadlines and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rl_core.config import RolloutConfig
from rl_core.sampling.actor import Actor, Cast
from rl_core.sampling.engine import EngineDied
from rl_core.sampling.env import Env
from rl_core.sampling.hooks import LoopClock
from rl_core.types import RunError, SamplingParams, Task, Trajectory, counter_seed

MAX_REVIVALS = 3  # times that one group may lose an engine


@dataclass(kw_only=True, slots=True)
class Group:
    """All episodes of one task, for example number 3 of the batch "train/000012"."""

    task: Task
    batch: str  # seeds depend on it
    number: int  # place in the batch
    size: int
    params: SamplingParams
    seed: int
    seed_name: str = ""  # instead of `batch`: evaluations of all steps have the same, and so the same seeds
    position: int = 0  # of the task in the order of the training data
    version: int = -1  # of the weights by which it began
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.batch}/{self.number:06d}"

    @property
    def session(self) -> str:
        return f"{self.seed_name or self.batch}/{self.number:06d}"

    def seed_of(self, *parts: int | str) -> int:
        return counter_seed(self.seed, self.seed_name or self.batch, self.number, *parts)


def make_groups(
    tasks: Iterable[Task], batch: str, size: int, params: SamplingParams, seed: int, seed_name: str = ""
) -> list[Group]:
    """One group of each task. `batch` must be unique in the run."""
    more = {"batch": batch, "size": size, "params": params, "seed": seed, "seed_name": seed_name}
    return [Group(task=task, number=number, **more) for number, task in enumerate(tasks)]


async def run_group(
    envs: Mapping[str, Env], actors: Mapping[str, Actor], config: RolloutConfig, group: Group
) -> list[Trajectory]:
    """The trajectories of one group. If an engine dies it is started again, and the group is done again. Raises RunError if
    that does not help."""
    for _ in range(MAX_REVIVALS):
        try:
            return await play_group(envs[group.task.env], actors, config, group)
        except EngineDied as error:
            last = error
        try:
            for actor in actors.values():
                if isinstance(actor, Actor):  # an endpoint elsewhere has no engine
                    await actor.wake()
        except EngineDied as error:
            raise RunError(f"an engine died and cannot be started again: {error}") from error
    raise RunError(f"an engine died {MAX_REVIVALS} times in one group of {group.batch}: {last}") from last


async def play_group(env: Env, actors: Mapping[str, Actor], config: RolloutConfig, group: Group) -> list[Trajectory]:
    """The trajectories of one group. The order of speakers is drawn once. Group rewards come last; if they raise, the whole
    group has failed. Raises EngineDied once all its episodes have ended."""
    seed, found = group.seed_of("schedule"), []
    try:
        drawn = await env.draw(group.task, list(actors), seed)
        episodes = [run_episode(env, actors, config, group, drawn, index) for index in range(group.size)]
        ended = await asyncio.gather(*episodes, return_exceptions=True)
        for died in (e for e in ended if isinstance(e, BaseException)):
            raise died
        found = [t for trajectories in ended for t in trajectories]
        if env.group_rewards:
            cast = Cast(actors, group.params, counter_seed(seed, "group"), f"{group.session}/group")
            try:
                await asyncio.wait_for(env.score_group(group.task, found, cast), config.episode_timeout_s)
            finally:
                cast.close()
    except Exception as error:
        reason = reason_of(error, "what scores the group", config)
        if not found:
            return [t for index in range(group.size) for t in failures(actors, group, index, reason)]
        for t in found:
            if t.status != "failed":
                t.status, t.error, t.reward = "failed", reason, None
    return found


async def run_episode(
    env: Env, actors: Mapping[str, Actor], config: RolloutConfig, group: Group, task: Task, index: int
) -> list[Trajectory]:
    """One attempt at one task. What goes wrong in it ends here, as a failed trajectory of every actor, with its reason, but
    for the death of an engine, which is no fault of the episode: EngineDied."""
    cast = Cast(actors, group.params, group.seed_of(task.id, index), f"{group.session}/{index}")
    LoopClock.of_running_loop()  # a save or an update of the weights is not the episode's time
    try:
        trajectories = await asyncio.wait_for(env.rollout(task, cast), config.episode_timeout_s)
    except Exception as error:
        return failures(cast, group, index, reason_of(error, "the episode", config))
    finally:
        cast.close()
    for trajectory in trajectories:
        trajectory.group_id, trajectory.index = group.id, index
    return trajectories


def reason_of(error: Exception, timed: str, config: RolloutConfig) -> str:
    """Why an episode failed. Raises the EngineDied that caused the error, also where a hook that called an actor raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, EngineDied):
            raise cause
        cause = cause.__cause__
    if isinstance(error, asyncio.TimeoutError) and not str(error):
        return f"{timed} took longer than --rollout.episode_timeout_s={config.episode_timeout_s}"
    return str(error) or type(error).__name__


def failures(actors: Mapping[str, Actor], group: Group, index: int, reason: str) -> list[Trajectory]:
    """An episode that failed, with all that was said until then, and at least one trajectory of each actor that would have
    learned from it, or of all if none has a learner."""
    learn, task = [name for name, actor in actors.items() if actor.is_trainable] or list(actors), group.task
    same = {"task_id": task.id, "env": task.env, "group_id": group.id, "index": index}
    same |= {"status": "failed", "error": reason}
    said = [c.record() for actor in actors.values() for c in getattr(actor, "conversations", ()) if c.num_replies]
    silent = set(learn) - {t.actor for t in said}
    said += [Trajectory(**same, actor=name, messages=task.messages) for name in learn if name in silent]
    return [replace(t, **same) for t in said]
