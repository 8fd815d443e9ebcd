"""The loop, which fits on one screen, and the four things that it does: sample, learn, evaluate, save."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_core.build import Run, compute_dtype, imitation
from rl_core.canary import check_canary, sample_canaries
from rl_core.credit import baseline_groups, group_results, has_signal, samples_of
from rl_core.distributed import barrier
from rl_core.groups import (
    evaluate_elsewhere,
    evaluate_episodes,
    open_intake,
    places,
    record_results,
    restarts_of,
    roll_out_step,
    sample_for_learners,
    send_weights,
    update_engine,
)
from rl_core.learning.checkpoint import load_older_weights, older_file, save_checkpoint
from rl_core.learning.model import engine_weights, export_policy
from rl_core.metrics import Mean, Sum
from rl_core.sampling.rollout import lag_metrics, rollout_metrics, write_trajectories
from rl_core.sampling.stream import HeldClock
from rl_core.types import TrainingSample

if TYPE_CHECKING:
    from torch import Tensor

OLDER_POLICY = "rl_core.options.older_policy"


async def run_rank(run: Run) -> None:
    gc.collect()
    gc.freeze()  # rows and modules live as long as the run; looking through them again and again costs tenths of a second
    try:
        for engine in run.all_engines:  # one starts while no other has memory, which it would take for its own
            await engine.wake()
            await engine.sleep()
        if run.ranks.link is not None and run.ranks.link.is_engine:
            await sample_for_learners(run)
        else:
            await train(run)
    finally:  # nothing that it started is left
        for speaker in (*run.remote.values(), *run.all_engines):
            await speaker.close()


async def train(run: Run) -> None:
    """All steps from run.start on. Steps are counted by how many are done, in files and
    metrics alike."""
    if run.ranks.link is not None:
        send_weights(run, run.start)
    for name, learner in run.learners.items():
        with learner.on_device():
            await sync_engine(run, name, run.start)
            await restore_older(run, name)
    if run.config.eval_every and run.start == 0:
        await evaluate(run, 0)
    await train_steps(run)
    if run.ranks.link is not None and run.ranks.rank == 0:
        run.ranks.link.say({"stop": True})
        run.ranks.link.answers("stop")


async def train_steps(run: Run) -> None:
    """The steps of one algorithm, which are counted from 0 where seeds, data and learning rates depend on them."""
    config, clock, link = run.config, HeldClock(), run.ranks.link
    if run.algorithm.is_rl:
        run.intake = open_intake(run)
    for step in range(run.start, config.num_steps):
        run.metrics, done = {}, step + 1
        is_evaluated = is_due(step + 1, config.eval_every, config.num_steps)
        with run.timed("step"), profiled(run, done):
            with run.timed("generate"):
                samples = await gather_samples(run, step)
            for name, learner in run.learners.items():
                with learner.on_device():
                    await check_canary(run, name)
                    with run.timed("learn"), clock.stopped():
                        learn(run, name, samples[name], step)
                    with run.timed("sync"):
                        if run.algorithm.is_rl or is_evaluated:
                            await sync_engine(run, name, done)
            if link is not None:
                with run.timed("sync"):
                    send_weights(run, done)
            for engine in run.all_engines if config.max_staleness else ():
                await engine.resume()
        note_speed(run)
        run.log.progress(done, run.log.write(done, run.metrics))
        if is_evaluated and config.eval_every:
            await evaluate(run, done)
        if is_due(step + 1, config.save_every, config.num_steps):
            await save(run, done)
    if run.intake is not None:
        await run.intake.close()
    if run.algorithm.is_rl:  # what the last update gave the engines has no next step that checks it
        await sample_canaries(run)
        await sleep_engines(run)
        for name, learner in run.learners.items():
            with learner.on_device():
                await check_canary(run, name)


@contextmanager
def profiled(run: Run, step: int):
    """Writes what this rank does in --profile_step as a Chrome trace."""
    if step != run.config.profile_step:
        yield
        return
    with torch.profiler.profile() as profile:
        yield
    profile.export_chrome_trace(str(Path(run.config.out) / f"trace_step_{step:06d}_rank_{run.ranks.rank}.json"))


def learn(run: Run, name: str, samples: list[TrainingSample], step: int) -> None:
    learner, room = run.learners[name], f"learn/{name}/"
    minibatches, packing = learner.shard(samples)
    run.note(room, learner.annotate(minibatches))
    run.note(room, learner.step(minibatches, step))
    run.note("", packing)


def note_speed(run: Run) -> None:
    """Tokens per second of each phase, summed over ranks and actors."""
    spoken = [f"rollout/{name}/tokens" for name in run.learners]
    for phase, names in (("generate", spoken), ("learn", ["pack/tokens"])):
        tokens = sum(run.metrics[name].value for name in names if name in run.metrics)
        if tokens:
            run.note("time/", {f"{phase}_tokens_per_s": Sum(tokens / run.metrics[f"time/{phase}_s"].value)})
    if run.ranks.link is not None:
        waited = {"learners_idle_frac": Mean(run.metrics["time/generate_s"].value, run.metrics["time/step_s"].value)}
        run.note("time/", waited)
        run.note("", run.intake.take_metrics())


def is_due(done: int, every: int, num_steps: int) -> bool:
    return done == num_steps or (every > 0 and done % every == 0)


async def gather_samples(run: Run, step: int) -> dict[str, list[TrainingSample]]:
    """This rank's part of the step's samples of each actor that learns: of episodes that it rolled out, or of rows that are
    to be imitated."""
    config, n = run.config, run.config.tasks_per_step
    if not run.algorithm.is_rl:
        await sleep_engines(run)
        positions = range(run.position + run.ranks.rank, run.position + n, run.ranks.size)
        run.position += n
        rows = (imitation(run, run.train.tasks(p, 1)[0], f"{p:012d}") for p in positions)
        return {config.trained[0]: [sample for row in rows for sample in row]}

    if config.engine_tp > 1:
        barrier(run.ranks)  # no learner has a device that an engine on another rank takes now
    await sample_canaries(run, is_first=step == run.start)
    trajectories = await roll_out_step(run, step)
    await sleep_engines(run)
    if run.curriculum:
        results = group_results(trajectories, run.learners, config.eval.pass_reward, run.ranks)
        record_results(run, results)
    if config.rollout.save:
        write_trajectories(Path(config.out) / "rollouts", f"step_{step + 1:06d}", trajectories, run.ranks)
    run.note("", restarts_of(run))
    for name, actor in run.remote.items():
        run.note(f"rollout/{name}/", actor.take_metrics())
    if run.lease is not None:
        lease = run.lease
        run.note("rollout/", {"engine_switches": Sum(lease.num_switches), "engine_switch_s": Sum(lease.switch_s)})
        lease.num_switches, lease.switch_s = 0, 0.0
    samples, advantage_fns = {}, {env: e.advantage_fn for env, e in run.envs.items()}
    for name in run.learners:
        own = [t for t in trajectories if t.actor == name]
        run.note(f"rollout/{name}/", rollout_metrics(own))
        if config.rollout.lagged_frac:
            run.note(f"rollout/{name}/", lag_metrics(own, step))
        for env in run.envs if len(run.envs) > 1 else ():
            run.note(f"rollout/{name}/{env}/", rollout_metrics([t for t in own if t.env == env]))
        groups = baseline_groups(own)
        if run.algorithm.refill_rounds:
            groups = [g for g in groups if has_signal(g, run.algorithm)]
        samples[name] = samples_of(groups, run.algorithm, config.turn_tokens(name), run.ranks, advantage_fns)
    return samples


async def sleep_engines(run: Run) -> None:
    """Every rank must call it: when it returns no engine has a device, those that hold several ranks' devices included."""
    for engine in run.all_engines:
        if run.config.max_staleness:
            await engine.pause()
        await engine.sleep()
    if run.config.engine_tp > 1:
        barrier(run.ranks)


async def sync_engine(run: Run, name: str, version: int) -> None:
    """The engine's weights become the learner's; one that reads them in place only forgets what it computed with the old."""
    if name not in run.engines:
        return
    engine, policy = run.engines[name], run.learners[name].policy
    in_place = run.config.engine_of(name) == "embedded"
    await update_engine(engine, engine_weights(policy, in_place), version, run.actors[name].adapter)
    if is_renewed(run, name, version):
        await renew_older(run, name, engine_weights(policy, in_place=False), version)
    if run.lease is not None and engine is not None:
        await engine.sleep()  # a learner has the device


def is_renewed(run: Run, name: str, version: int) -> bool:
    return name in run.older and version % run.config.rollout.lagged_every == 0


async def renew_older(run: Run, name: str, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    older, file = run.older[name], older_file(Path(run.config.out) / "older", name)
    dtype = compute_dtype(run.config)
    await import_module(OLDER_POLICY).renew(older, weights, version, dtype, file if run.ranks.rank == 0 else None)
    if older is not None:
        await older.sleep()


async def restore_older(run: Run, name: str) -> None:
    """When a run goes on, older weights are those of its checkpoint, or the newest where it has none."""
    if name in run.older and not is_renewed(run, name, run.start):
        if found := load_older_weights(checkpoint_folder(run, run.start), name):
            version, weights = found
            await renew_older(run, name, weights.items(), version)
        else:
            await renew_older(run, name, engine_weights(run.learners[name].policy, in_place=False), run.start)


async def evaluate(run: Run, step: int) -> None:
    """Held-out tasks: the greedy score, avg@k and pass@k; for rows to be imitated, their loss."""
    run.metrics = {}
    with run.timed("eval"):
        if run.ranks.link is not None:
            evaluate_elsewhere(run, step)
        elif run.engines:
            await evaluate_episodes(run, step)
        else:
            [learner] = run.learners.values()
            [rows] = run.eval.values()
            tasks = list(rows)[run.ranks.rank :: run.ranks.size]
            minibatches, _ = learner.shard([s for t in tasks for s in imitation(run, t, t.id)])
            learner.annotate(minibatches)
            run.note("eval/", learner.evaluate(minibatches))
    values = run.log.write(step, run.metrics)
    is_part = re.compile(r"/(greedy|sampled)_(?!(score|pass)$)")  # these are in the file alone
    scores = {k: v for k, v in values.items() if k.startswith("eval/") and not is_part.search(k)}
    shown = [f"{k.removeprefix('eval/')} {v:.4g}" for k, v in scores.items()]
    run.log.say("  ".join([f"eval at step {step}", *shown]))


def checkpoint_folder(run: Run, step: int) -> Path:
    return Path(run.config.out) / "checkpoints" / f"step_{step:06d}"


async def save(run: Run, step: int) -> None:
    """A checkpoint of all that learns, and each model as a Hugging Face folder."""
    out, learners = Path(run.config.out), run.learners
    state = {"step": step, "seed": run.config.seed, **places(run)}
    if run.curriculum:
        state["curriculum"] = run.curriculum.state()
    older = {}
    for name in run.older if run.algorithm.is_rl and run.ranks.rank == 0 else ():
        if not is_renewed(run, name, step):
            older[name] = load_older_weights(out / "older", name)
    save_checkpoint(checkpoint_folder(run, step), learners, state, run.ranks, run.config.keep_checkpoints, older)
    for name, learner in learners.items():
        with learner.on_device():
            export_policy(learner.policy, run.chats[name].tokenizer, out / "hf" / name, run.ranks)
    exported = ", ".join(str(out / "hf" / name) for name in learners)
    run.log.say(f"saved step {step} to {out / 'checkpoints'} and {exported}")
