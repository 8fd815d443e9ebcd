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
from rl_core.sampling.actor import Actor, Speaker
from rl_core.sampling.env import Env
from rl_core.types import RunError, SamplingParams, Task, Trajectory, counter_seed


@dataclass(kw_only=True, slots=True)
class RolloutPlan:
    """What to sample. `name` is unique in the run, such as "train/12": seeds and the counter of groups hang on it."""

    name: str
    tasks: Sequence[Task]
    group_size: int
    params: SamplingParams
    seed: int


async def rollout(
    env: Env, actors: Mapping[str, Actor], plan: RolloutPlan, config: RolloutConfig, ranks: Ranks
) -> list[Trajectory]:
    """The trajectories of the groups that this rank drew, failed ones included, sorted by group and index. Every rank
    must call it. Raises RunError on all ranks alike if more than max_failed_fraction of the episodes failed."""
    numbers = ranks.counter(plan.name)
    episodes = min(config.max_concurrent, min(a.engine.capacity for a in actors.values()))
    share = -(
        -len(plan.tasks) // ranks.size
    )  # at most an even share at once, so that no rank takes all before the others come
    found: list[Trajectory] = []

    async def draw_groups() -> None:
        for number in numbers:
            if number >= len(plan.tasks):
                return
            runs = [run_episode(env, actors, plan, number, index, config) for index in range(plan.group_size)]
            for trajectories in await asyncio.gather(*runs):
                found.extend(trajectories)

    await asyncio.gather(*(draw_groups() for _ in range(max(1, min(share, episodes // plan.group_size)))))
    refuse_failures(found, config.max_failed_fraction, plan, ranks)
    return sorted(found, key=lambda t: (t.group_id, t.index))


async def run_episode(
    env: Env, actors: Mapping[str, Actor], plan: RolloutPlan, number: int, index: int, config: RolloutConfig
) -> list[Trajectory]:
    """One attempt at one task. What goes wrong in it ends here, as a failed trajectory with its reason."""
    task = plan.tasks[number]
    group_id = f"{plan.name}/{number:06d}"
    seed = counter_seed(plan.seed, plan.name, number, task.id, index)
    speakers = {name: Speaker(actor, plan.params, seed, f"{group_id}/{index}/{name}") for name, actor in actors.items()}
    try:
        trajectories = await asyncio.wait_for(env.rollout(task, speakers), config.episode_timeout_s)
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, asyncio.TimeoutError) and not str(error):
            reason = f"the episode took longer than --rollout.episode_timeout_s={config.episode_timeout_s}"
        trajectories = [
            Trajectory(
                task_id=task.id, env=task.env, group_id="", messages=task.messages, status="failed", error=reason
            )
        ]
    finally:
        for speaker in speakers.values():
            speaker.close()
    for trajectory in trajectories:
        trajectory.group_id, trajectory.index = group_id, index
    return trajectories


def refuse_failures(trajectories: list[Trajectory], limit: float, plan: RolloutPlan, ranks: Ranks) -> None:
    failed = [t for t in trajectories if t.status == "failed"]
    first = f"{failed[0].task_id}: {failed[0].error}" if failed else ""
    counts = all_gather_json([len(failed), len(trajectories), first], ranks)
    num_failed, total = sum(c[0] for c in counts), sum(c[1] for c in counts)
    if num_failed > limit * total:
        raise RunError(
            f"{num_failed} of {total} episodes of {plan.name} failed, more than "
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
    groups: dict[str, list[float]] = {}
    for t in done:
        groups.setdefault(t.group_id, []).append(t.reward)
    metrics["zero_signal_frac"] = Mean(sum(len(set(g)) == 1 for g in groups.values()), len(groups))
    for kind in ("reward_parts", "metrics"):
        for name in sorted({k for t in done for k in getattr(t, kind)}):
            values = [getattr(t, kind)[name] for t in done if name in getattr(t, kind)]
            metrics[f"{'reward/' if kind == 'reward_parts' else ''}{name}"] = Mean(sum(values), len(values))
    return metrics


def jsonable(value: Any) -> Any:
    """A dataclass as a dictionary; what JSON does not know, as text."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return str(value)


def write_trajectories(folder: Path, name: str, trajectories: list[Trajectory], ranks: Ranks) -> None:
    """rollouts/NAME.jsonl.zst; with several ranks each writes its own file, so that nothing is sent to be written."""
    suffix = f".rank_{ranks.rank:05d}" if ranks.size > 1 else ""
    lines = "".join(json.dumps(t, default=jsonable) + "\n" for t in trajectories)
    beside = folder / f".{name}{suffix}.tmp"
    beside.write_bytes(zstandard.ZstdCompressor(level=3).compress(lines.encode()))
    os.replace(beside, folder / f"{name}{suffix}.jsonl.zst")
