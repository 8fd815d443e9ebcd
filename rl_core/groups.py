"""Where the groups come from that a step learns from: rolled out on this rank between its own learning, or all the time by
ranks that do nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core import canary
from rl_core.build import Run, compute_dtype
from rl_core.credit import baseline_groups, has_signal
from rl_core.distributed import all_gather_json
from rl_core.learning.model import engine_weights
from rl_core.link import Link
from rl_core.metrics import Max, Mean, Metric, Sum, add_metrics, metric_fields, metrics_of
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import Engine
from rl_core.sampling.rollout import (
    RolloutPlan,
    groups_at_once,
    in_order,
    packed,
    part_metrics,
    refuse_failures,
    rollout,
    run_group,
    unpacked,
    write_trajectories,
)
from rl_core.sampling.stream import ALLOWED, POLL_S, Group, GroupStream, Intake
from rl_core.types import SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def open_intake(run: Run) -> Intake:
    """Every rank that learns must call it, once for the steps of RL."""
    config = run.config
    how = {
        "per_step": config.tasks_per_step,
        "total": config.tasks_per_step * (config.num_steps - run.start),
        "max_staleness": config.max_staleness,
    }
    if run.ranks.link is not None:
        how |= {"patience_s": config.rollout.episode_timeout_s + config.timeout_s}
        how |= {"limits": "--rollout.episode_timeout_s plus --timeout_s"}
        return LinkIntake(run.ranks, run.ranks.link, **how)
    how |= {"patience_s": config.timeout_s, "limits": "--timeout_s"}
    return Intake(run.ranks, GroupStream(roll_out_of(run), run.ranks, width_of(run)), **how)


def width_of(run: Run) -> int:
    config = run.config
    ahead = config.tasks_per_step * (1 + config.max_staleness)
    return groups_at_once(run.actors, config.rollout, ahead, config.group_size, run.ranks)


def position_of(run: Run, number: int) -> int:
    """Where in the order of the data the task of a group stands: first come those that a resumed run had left."""
    return run.pending[number] if number < len(run.pending) else run.position + number - len(run.pending)


def places(run: Run) -> dict[str, Any]:
    """What a checkpoint holds of the order of the data: where new tasks begin, and what before that is to be done."""
    if run.intake is None:
        return {"position": run.position, "pending": run.pending}
    num_begun = max(run.intake.allowed, len(run.pending))
    numbers = [*run.intake.unfinished(), *range(run.intake.allowed, num_begun)]
    return {"position": position_of(run, num_begun), "pending": [position_of(run, n) for n in numbers]}


def record_results(run: Run, results: list[tuple[str, str, float, float]]) -> None:
    """What came of a step's groups, for the order of the tasks that have not begun."""
    run.curriculum.record(results, position_of(run, run.intake.lowest))
    if run.ranks.link is not None and run.ranks.rank == 0:
        run.ranks.link.say({"results": results, "position": position_of(run, run.intake.lowest)})


def roll_out_of(run: Run) -> Callable[[int], Awaitable[list[Trajectory]]]:
    config = run.config
    params = sampling_params(run, temperature=config.sampling.temperature)

    async def roll_out(number: int) -> list[Trajectory]:
        position = position_of(run, number)
        step, place = divmod(position, config.tasks_per_step)
        plan = RolloutPlan(name=f"train/{step:06d}", group_size=config.group_size, params=params, seed=config.seed)
        [task] = run.train.tasks(position, 1)
        return await run_group(run.envs, run.actors, plan, task, place, config.rollout)

    return roll_out


async def roll_out_step(run: Run, step: int) -> list[Trajectory]:
    """What this rank learns from in a step. With refilling, further groups replace those without signal (DAPO's dynamic
    sampling, arXiv:2503.14476, section 3.2), which are given back too."""
    config, rounds, intake = run.config, run.algorithm.refill_rounds, run.intake
    intake.advance(step)
    found: list[Trajectory] = []
    missing = config.tasks_per_step
    for number in range(rounds + 1):
        groups = await intake.take(missing)
        note_staleness(run, groups)
        found += [t for g in groups for t in g.trajectories]
        refuse_failures(found, config.rollout.max_failed_fraction, f"step {step + 1}", run.ranks)
        if not rounds:
            break
        with_signal = len({g[0].group_id for g in baseline_groups(found) if has_signal(g, run.algorithm)})
        missing = config.tasks_per_step - sum(all_gather_json(with_signal, run.ranks))
        if missing <= 0 or number == rounds:
            run.note("rollout/", {"refill_rounds": Mean(number), "groups_missing": Mean(max(0, missing))})
            break
        intake.allow(missing)
    return in_order(found)


def note_staleness(run: Run, groups: list[Group]) -> None:
    """How many versions ago the oldest tokens of a step's groups were sampled."""
    intake = run.intake
    if not run.config.max_staleness:
        return
    ages = [intake.version - g.version for g in groups]
    run.note("rollout/", {"staleness": Mean(sum(ages), len(ages)), "staleness_max": Max(max(ages, default=0))})


class LinkIntake(Intake):
    """Of ranks that learn, while others sample."""

    def __init__(self, ranks, link: Link, **how):
        super().__init__(ranks, None, **how)
        self.link, self.num_seen = link, 0
        self.headers: dict[int, dict[str, Any]] = {}  # of what is complete and not taken, by its number
        self.metrics: dict[str, Metric] = {}  # of the ranks that sample, since they were last asked

    def allow(self, n: int) -> None:
        self.allowed += n
        if self.ranks.rank == 0:
            self.ranks.add(ALLOWED, n)

    async def look_again(self) -> None:
        await asyncio.sleep(POLL_S)

    def take_metrics(self) -> dict[str, Metric]:
        found, self.metrics = self.metrics, {}
        return found

    def complete(self) -> list[tuple[int, int]]:
        [new, *_] = all_gather_json(self.link.headers(self.num_seen) if self.ranks.rank == 0 else None, self.ranks)
        for header in new:
            self.headers[header["number"]] = header | {"index": self.num_seen}
            self.num_seen += 1
            if self.ranks.rank == 0:
                add_metrics(self.metrics, metrics_of(header["metrics"]))
        return [(header["version"], number) for number, header in self.headers.items()]

    def fetch(self, numbers: list[int]) -> list[Group]:
        found = []
        for place, number in enumerate(numbers):
            header = self.headers.pop(number)
            if place % self.ranks.size == self.ranks.rank:
                trajectories = unpacked(self.link.payload(header["index"]))
                found.append(Group(number=number, version=header["version"], trajectories=trajectories))
        return found

    async def close(self) -> None: ...


class HandingStream(GroupStream):
    """Of a rank that only samples: what it finishes it gives away, with the metrics of its own since the last time."""

    def __init__(self, run: Run):
        super().__init__(roll_out_of(run), run.ranks, width_of(run))
        self.run, self.idle_s, self.since = run, 0.0, time.monotonic()

    def add(self, group: Group) -> None:
        now = time.monotonic()
        metrics: dict[str, Metric] = {"time/engines_idle_frac": Mean(self.idle_s, now - self.since)}
        self.idle_s, self.since = 0.0, now
        for name, actor in self.run.remote.items():
            add_metrics(metrics, actor.take_metrics(), prefix=f"rollout/{name}/")
        add_metrics(metrics, restarts_of(self.run))
        header = {"number": group.number, "version": group.version, "metrics": metric_fields(metrics)}
        self.ranks.link.hand(header, packed(group.trajectories))


async def sample_for_learners(run: Run) -> None:
    """What a rank does that only samples, until the learners say that they are done."""
    stream, link = HandingStream(run), run.ranks.link
    while True:
        word = link.hear() or {}
        if "weights" in word:
            version = word["weights"]
            await load_sent_weights(run, version)
            stream.version = version
            link.answer(f"weights/{version}", run.ranks.rank, None)
        elif "evaluate" in word:
            run.metrics = {}
            await evaluate_episodes(run, word["evaluate"])
            link.answer(f"evaluate/{word['evaluate']}", run.ranks.rank, metric_fields(run.metrics))
        elif name := word.pop("canary", None):
            link.answer(f"canary/{name}", run.ranks.rank, await canary.answer(run.actors[name], run.ranks.rank, **word))
        elif "results" in word:
            run.curriculum.record(map(tuple, word["results"]), word["position"])
        elif "stop" in word:
            await stream.close()
            link.answer("stop", run.ranks.rank, None)
            return
        else:
            stream.allowed = run.ranks.add(ALLOWED, 0)
            stream.fill()
            is_idle, now = not stream.open, time.monotonic()
            await asyncio.sleep(POLL_S)
            stream.idle_s += (time.monotonic() - now) * is_idle
        if stream.error is not None:
            raise stream.error


async def load_sent_weights(run: Run, version: int) -> None:
    """Between two tokens of what is under way, which goes on by the new weights."""
    for engine in run.all_engines:
        await engine.pause()
    for name in run.config.trained:
        weights = run.ranks.link.receive_weights()
        await update_engine(run.engines[name], weights, version, run.actors[name].adapter)
    for engine in run.all_engines:
        await engine.resume()


async def update_engine(
    engine: Engine | None, weights: Iterable[tuple[str, Tensor]] | None, version: int, adapter: str
) -> None:
    """Every rank must call it: gathering a weight is a collective."""
    if engine is not None:
        await engine.update(weights, version, adapter=adapter)
        return
    for _ in weights or ():
        pass


def send_weights(run: Run, version: int) -> None:
    """The learners' weights to all ranks that only sample. Every learner must call it; it returns once they are there."""
    link, is_first = run.ranks.link, run.ranks.rank == 0
    if is_first:
        link.say({"weights": version})
    for learner in run.learners.values():
        with learner.on_device():
            weights = engine_weights(learner.policy, in_place=False)
            link.send_weights(weights, compute_dtype(run.config))
    if is_first:
        link.answers(f"weights/{version}")


def evaluate_elsewhere(run: Run, step: int) -> None:
    """On ranks that only sample, which keep their weights until they are done."""
    link, ranks, name = run.ranks.link, run.ranks, f"evaluate/{step}"
    if ranks.rank == 0:
        link.say({"evaluate": step})
    while not all_gather_json(ranks.rank == 0 and link.has_answers(name), ranks)[0]:
        time.sleep(POLL_S)
    for fields in link.answers(name) if ranks.rank == 0 else ():
        run.note("", metrics_of(fields))


async def evaluate_episodes(run: Run, step: int) -> None:
    k = run.config.eval.samples
    for env, source in run.eval.items():
        tasks = list(source)[: run.config.eval.num_tasks or None]
        for label, count in [("greedy", 1), ("sampled", k)] if k else [("greedy", 1)]:
            await evaluate_tasks(run, step, env, tasks, label, count)


async def evaluate_tasks(run: Run, step: int, env: str, tasks: list[Task], label: str, count: int) -> None:
    config = run.config
    params = sampling_params(run, **(config.eval.sampling if label == "sampled" else {"temperature": 0.0}))
    name = f"eval/{step:06d}/{label}" + (f"/{env}" if len(run.eval) > 1 else "")
    plan = RolloutPlan(
        name=name, tasks=tasks, group_size=count, params=params, seed=config.seed, drawn_as=f"eval/{env}"
    )
    newest = {n: replace(a, older=None) if isinstance(a, Actor) else a for n, a in run.actors.items()}
    trajectories = await rollout(run.envs, newest, plan, config.rollout, run.ranks)
    if config.rollout.save:
        file = name.replace("/", "_")
        write_trajectories(Path(config.out) / "rollouts", file, trajectories, run.ranks)
    score, passed = (f"avg@{count}", f"pass@{count}") if label == "sampled" else ("greedy_score", "greedy_pass")
    for actor in config.trained:
        own = [t for t in trajectories if t.actor == actor and t.status != "failed"]
        groups = [[t.reward for t in group] for group in baseline_groups(own)]
        scores = [sum(g) / len(g) for g in groups]
        passes = [max(g) >= config.eval.pass_reward for g in groups]
        found = {f"{label}_{name}": value for name, value in part_metrics(own).items()}
        found |= {score: Mean(sum(scores), len(scores)), passed: Mean(sum(passes), len(passes))}
        run.note(f"eval/{env}/{actor}/" if len(config.trained) > 1 else f"eval/{env}/", found)


def restarts_of(run: Run) -> dict[str, Metric]:
    """Of engines that died, since the last time; nothing where none can. What actors share counts for the first."""
    found = {}
    for name, engine in (*run.engines.items(), *run.older.items()):
        if hasattr(engine, "num_restarts"):
            add_metrics(found, {f"rollout/{name}/engine_restarts": Sum(engine.num_restarts)})
            engine.num_restarts = 0
    return found


def sampling_params(run: Run, **drawn) -> SamplingParams:
    return SamplingParams(max_tokens=run.config.max_tokens, stop=tuple(run.config.sampling.stop), **drawn)
