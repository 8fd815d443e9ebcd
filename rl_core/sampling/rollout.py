"""Tasks -> groups of scored trajectories: concurrency, deadlines, failures."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from rl_core.config import RolloutConfig
from rl_core.distributed import Ranks, all_gather_json
from rl_core.metrics import Mean, Metric, Sum
from rl_core.sampling.actor import Actor, Cast
from rl_core.sampling.engine import EngineDied
from rl_core.sampling.env import Env
from rl_core.sampling.hooks import LoopClock
from rl_core.types import Completion, RunError, SamplingParams, Task, Trajectory, Turn, counter_seed

MAX_REVIVALS = 3  # times that one group may lose an engine


@dataclass(kw_only=True, slots=True)
class RolloutPlan:
    """What to sample. `name` is unique in the run, such as "train/12": the counter of groups hangs on it, and seeds do unless
    `drawn_as` names what else they hang on, so that evaluations draw alike at every step."""

    name: str
    tasks: Sequence[Task] = ()  # one group of each
    group_size: int
    params: SamplingParams
    seed: int
    drawn_as: str = ""

    def __post_init__(self) -> None:
        self.drawn_as = self.drawn_as or self.name


async def rollout(
    envs: Mapping[str, Env], actors: Mapping[str, Actor], plan: RolloutPlan, config: RolloutConfig, ranks: Ranks
) -> list[Trajectory]:
    """The trajectories of the groups that this rank drew, failed ones included, sorted by group and index. Every rank
    must call it. Raises RunError on all ranks alike if more than max_failed_fraction of the episodes failed."""
    numbers = ranks.counter(plan.name)
    found: list[Trajectory] = []

    async def draw_groups() -> None:
        for number in numbers:
            if number >= len(plan.tasks):
                return
            found.extend(await run_group(envs, actors, plan, plan.tasks[number], number, config))

    width = groups_at_once(actors, config, len(plan.tasks), plan.group_size, ranks)
    await asyncio.gather(*(draw_groups() for _ in range(width)))
    refuse_failures(found, config.max_failed_fraction, plan.name, ranks)
    return in_order(found)


def groups_at_once(
    actors: Mapping[str, Actor], config: RolloutConfig, num_groups: int, group_size: int, ranks: Ranks
) -> int:
    """That one rank has under way: at most an even share, so that no rank takes all before the others come."""
    # Of engines that learn; what others cannot take at once waits there.
    capacities = [actor.capacity for actor in actors.values() if actor.is_trainable]
    episodes = min([config.max_concurrent, *capacities])
    if not episodes:
        return 0  # the engine is on another rank
    return max(1, min(-(-num_groups // ranks.size), episodes // group_size))


def in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.group_id, t.index, t.actor))


async def run_group(
    envs: Mapping[str, Env],
    actors: Mapping[str, Actor],
    plan: RolloutPlan,
    task: Task,
    number: int,
    config: RolloutConfig,
) -> list[Trajectory]:
    """The trajectories of one group. If an engine dies it is started again, and the group is done again. Raises RunError if
    that does not help."""
    for _ in range(MAX_REVIVALS):
        try:
            return await play_group(envs[task.env], actors, plan, task, number, config)
        except EngineDied as error:
            last = error
            await revive_engines(actors)
    raise RunError(f"an engine died {MAX_REVIVALS} times in one group of {plan.name}: {last}") from last


async def revive_engines(actors: Mapping[str, Actor]) -> None:
    try:
        for actor in actors.values():
            if isinstance(actor, Actor):  # an endpoint elsewhere has no engine
                await actor.wake()
    except EngineDied as error:
        raise RunError(f"an engine died and cannot be started again: {error}") from error


async def play_group(
    env: Env, actors: Mapping[str, Actor], plan: RolloutPlan, task: Task, number: int, config: RolloutConfig
) -> list[Trajectory]:
    """The trajectories of one group. Its order of speakers is drawn once; what scores it as a whole comes last, and if that
    goes wrong all of it has failed. Raises EngineDied once all its episodes have ended."""
    group_id = f"{plan.name}/{number:06d}"
    seed = counter_seed(plan.seed, plan.drawn_as, number, "schedule")

    found: list[Trajectory] = []
    try:
        drawn = await env.draw(task, list(actors), seed)
        runs = [run_episode(env, actors, plan, drawn, number, index, config) for index in range(plan.group_size)]
        ended = await asyncio.gather(*runs, return_exceptions=True)
        for died in (e for e in ended if isinstance(e, BaseException)):
            raise died
        found = [t for trajectories in ended for t in trajectories]
        if env.group_rewards:
            cast = Cast(actors, plan.params, counter_seed(seed, "group"), f"{plan.drawn_as}/{number:06d}/group")
            try:
                await asyncio.wait_for(env.score_group(task, found, cast), config.episode_timeout_s)
            finally:
                cast.close()
    except Exception as error:
        refuse_death(error)
        reason = reason_of(error, f"what scores the group took longer than {limit_of(config)}")
        if not found:
            indices = range(plan.group_size)
            return [t for index in indices for t in failures(actors, task, group_id, index, reason)]
        for t in found:
            if t.status != "failed":
                t.status, t.error, t.reward = "failed", reason, None
    return found


async def run_episode(
    env: Env, actors: Mapping[str, Actor], plan: RolloutPlan, task: Task, number: int, index: int, config: RolloutConfig
) -> list[Trajectory]:
    """One attempt at one task. What goes wrong in it ends here, as a failed trajectory of every actor, with its reason, but
    for the death of an engine, which is no fault of the episode: EngineDied."""
    group_id = f"{plan.name}/{number:06d}"
    seed = counter_seed(plan.seed, plan.drawn_as, number, task.id, index)
    cast = Cast(actors, plan.params, seed, f"{plan.drawn_as}/{number:06d}/{index}")
    LoopClock.of_running_loop()  # a save or an update of the weights is not the episode's time
    try:
        trajectories = await asyncio.wait_for(env.rollout(task, cast), config.episode_timeout_s)
    except Exception as error:
        refuse_death(error)
        reason = reason_of(error, f"the episode took longer than {limit_of(config)}")
        return failures(cast, task, group_id, index, reason)
    finally:
        cast.close()
    for trajectory in trajectories:
        trajectory.group_id, trajectory.index = group_id, index
    return trajectories


def limit_of(config: RolloutConfig) -> str:
    return f"--rollout.episode_timeout_s={config.episode_timeout_s}"


def refuse_death(error: BaseException) -> None:
    """Raises the EngineDied that an error came from, through hooks that asked an actor too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, EngineDied):
            raise cause
        cause = cause.__cause__


def reason_of(error: Exception, on_timeout: str) -> str:
    if isinstance(error, asyncio.TimeoutError) and not str(error):
        return on_timeout
    return str(error) or type(error).__name__


def failures(actors: Mapping[str, Actor], task: Task, group_id: str, index: int, reason: str) -> list[Trajectory]:
    """An episode that failed, with all that was said until then, and at least one trajectory of each actor that would have
    learned from it, or of all if none has a learner."""
    learn = [name for name, actor in actors.items() if actor.is_trainable] or list(actors)
    same = {"task_id": task.id, "env": task.env, "group_id": group_id, "index": index}
    same |= {"status": "failed", "error": reason}
    said = [c.record() for actor in actors.values() for c in getattr(actor, "conversations", ()) if c.num_replies]
    silent = set(learn) - {t.actor for t in said}
    said += [Trajectory(**same, actor=name, messages=task.messages) for name in learn if name in silent]
    return [dataclasses.replace(t, **same) for t in said]


def refuse_failures(trajectories: list[Trajectory], limit: float, name: str, ranks: Ranks) -> None:
    """Raises RunError on all ranks alike if more than this fraction of the episodes failed."""
    failed = [t for t in trajectories if t.status == "failed"]
    first = f"{failed[0].task_id}: {failed[0].error}" if failed else ""
    num_failed, total = (len({(t.env, t.group_id, t.index) for t in some}) for some in (failed, trajectories))
    counts = all_gather_json([num_failed, total, first], ranks)
    num_failed, total = sum(c[0] for c in counts), sum(c[1] for c in counts)
    if num_failed > limit * total:
        raise RunError(
            f"{num_failed} of {total} episodes of {name} failed, more than "
            f"--rollout.max_failed_fraction={limit} allows. The first: {next(c[2] for c in counts if c[2])}"
        )


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means over the episodes that did not fail."""
    done = [t for t in trajectories if t.status != "failed"]
    n = len(done)
    metrics: dict[str, Metric] = {
        "reward_mean": Mean(sum(t.reward for t in done), n),
        "length_mean": Mean(sum(t.num_tokens for t in done), n),
        "turns_mean": Mean(sum(len(t.turns) for t in done), n),
        "truncated_frac": Mean(sum(t.status == "truncated" for t in done), n),
        "failed": Sum(len(trajectories) - n),
        "tokens": Sum(sum(t.num_tokens for t in done)),
    }
    groups: dict[tuple, list[float]] = {}
    for t in done:
        groups.setdefault((t.env, t.group_id, t.actor, t.seat), []).append(t.reward)
    metrics["zero_signal_frac"] = Mean(sum(len(set(g)) == 1 for g in groups.values()), len(groups))
    return metrics | part_metrics(done)


def lag_metrics(trajectories: list[Trajectory], version: int) -> dict[str, Metric]:
    """Part of the sampled tokens that is of older weights than `version`, and by how many versions these are older."""
    turns = (turn for t in trajectories if t.status != "failed" for turn in t.turns)
    lags = [version - v for turn in turns for v in turn.completion.policy_versions]
    older = [lag for lag in lags if lag > 0]
    found: dict[str, Metric] = {"lagged_frac": Mean(len(older), len(lags))}
    return found | ({"lag_versions": Mean(sum(older), len(older))} if older else {})


def part_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means of what the environment gives: each part of the reward, and each metric."""
    metrics: dict[str, Metric] = {}
    for kind in ("reward_parts", "metrics"):
        for name in sorted({k for t in trajectories for k in getattr(t, kind)}):
            values = [getattr(t, kind)[name] for t in trajectories if name in getattr(t, kind)]
            metrics[f"{'reward/' if kind == 'reward_parts' else ''}{name}"] = Mean(sum(values), len(values))
    return metrics


def jsonable(value: Any) -> Any:
    """A dataclass as a dictionary; what JSON does not know, as text."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return str(value)


def packed(trajectories: list[Trajectory]) -> bytes:
    """As files hold them: one JSON object a line, compressed by zstd."""
    lines = "".join(json.dumps(t, default=jsonable) + "\n" for t in trajectories)
    return zstandard.ZstdCompressor(level=3).compress(lines.encode())


def unpacked(data: bytes) -> list[Trajectory]:
    found = []
    for line in zstandard.ZstdDecompressor().decompress(data).splitlines():
        fields = json.loads(line)
        turns = [Turn(**turn | {"completion": Completion(**turn["completion"])}) for turn in fields["turns"]]
        found.append(Trajectory(**fields | {"turns": turns}))
    return found


def write_trajectories(folder: Path, name: str, trajectories: list[Trajectory], ranks: Ranks) -> None:
    """rollouts/NAME.jsonl.zst; with several ranks each writes its own file, so that nothing is sent to be written."""
    suffix = f".rank_{ranks.rank:05d}" if ranks.size > 1 else ""
    beside = folder / f".{name}{suffix}.tmp"
    beside.write_bytes(packed(trajectories))
    os.replace(beside, folder / f"{name}{suffix}.jsonl.zst")
