"""The parts of a step: rollouts, samples, learning, new weights for engines; evaluation and saving between steps."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from rl_core.build import Plan, Run
from rl_core.data.rows import write_trajectories
from rl_core.distributed import Ranks, all_gather_json, barrier
from rl_core.learning.advantages import baseline_groups, group_results, has_signal, samples_of
from rl_core.learning.checkpoint import save_checkpoint
from rl_core.learning.model import export_policy
from rl_core.metrics import Max, Mean, Sum
from rl_core.models import is_read
from rl_core.run_folder import naming
from rl_core.sampling.actor import Actor
from rl_core.sampling.outcomes import lag_metrics, part_metrics, refuse_failures, rollout_metrics
from rl_core.sampling.rollout import Group, in_order, make_group, rollout
from rl_core.types import RunError, Task, TrainingSample, Trajectory, option

MFU = "rl_core.options.mfu:mfu"


async def start(run: Run) -> None:
    """Engines get the learners' weights. A new run that evaluates does so before its first step."""
    for engine in run.all_engines:  # one starts while no other has memory, which it would take for its own
        await engine.wake()
        await engine.sleep()
    barrier(run.ranks)  # an engine elsewhere that receives the first learner's weights answers nobody's wake()
    for name, learner in run.learners.items():
        with learner.on_device():
            await sync_engine(run, name, run.start)
            if run.older:
                await run.older.restore(name, run.start, checkpoint_folder(run, run.start))
    run.worker.version = run.start
    if run.config.eval_every and run.to_evaluate:
        await evaluate(run, run.start)


async def resume(run: Run, version: int) -> None:
    """Groups continue, and new ones begin, with the new weights."""
    run.worker.version = version
    for engine in run.all_engines if run.config.max_staleness else ():
        await engine.resume()


async def finish(run: Run) -> None:
    """Checks the engines' weights after the last update, which no next step checks."""
    if run.canary:
        await run.canary.sample()
        await sleep_engines(run)
        for name, learner in run.learners.items():
            with learner.on_device():
                await run.canary.check(name)


async def close(run: Run) -> None:
    """Ends everything that the run started."""
    run.keeper.close()
    run.terminal.close()
    await run.worker.close()
    for speaker in (*run.plan.endpoints.values(), *run.all_engines):
        await speaker.close()
    with closing(run.trackers) if run.trackers else nullcontext():
        if run.writing is not None:
            await run.writing


def profiled(run: Run, step: int) -> AbstractContextManager:
    """Writes what this rank does in --profile_step as a Chrome trace."""
    if step != run.config.profile_step:
        return nullcontext()
    file = run.out / f"trace_step_{step:06d}_rank_{run.ranks.rank}.json"
    return torch.profiler.profile(on_trace_ready=lambda profile: profile.export_chrome_trace(str(file)))


def draw_groups(run: Run, num_groups: int) -> list[Group]:
    """Groups of the next training tasks. Those that a resumed run had left come first."""
    config, groups = run.config, []
    left, run.pending = run.pending[:num_groups], run.pending[num_groups:]
    first, run.position = run.position, run.position + num_groups - len(left)
    for position in (*left, *range(first, run.position)):
        step, number = divmod(position, config.tasks_per_step)
        place = {"batch": f"train/{step:06d}", "number": number, "position": position, "size": config.group_size}
        task, drawn = run.plan.train.task(position), {"temperature": config.sampling.temperature}
        groups.append(make_group(config, task, drawn, **place))
    return groups


def num_to_begin(run: Run, step: int) -> int:
    """Groups of a step and of max_staleness further steps may have begun."""
    config = run.config
    first = step if step == run.start else step + config.max_staleness
    return config.tasks_per_step * max(0, min(step + config.max_staleness + 1, config.num_steps) - first)


async def sample(run: Run, step: int) -> dict[str, list[TrainingSample]]:
    """This rank's part of the step's samples, of each actor that learns."""
    plan, config = run.plan, run.config
    if plan.imitated:
        return imitated_samples(run)
    if config.engine_tp > 1:
        barrier(run.ranks)  # no learner has a device that an engine on another rank takes now
    if run.canary:
        await run.canary.sample(is_first=step == run.start)
    place = place_in_data(run)
    run.worker.submit(draw_groups(run, num_to_begin(run, step)))
    trajectories = await collect(run, step)
    await sleep_engines(run)
    await write(run, f"step_{step + 1:06d}", trajectories)
    refuse_or_save(run, step, trajectories, run.failed_rows, f"step {step + 1}", place)
    if plan.curriculum:
        results = group_results(trajectories, run.learners, config.eval.pass_reward, run.ranks)
        plan.curriculum.record(results, min([*run.begun, run.position]))
    await note_rollouts(run, step, trajectories)
    return training_samples(plan, trajectories, run.ranks)


def training_samples(plan: Plan, trajectories: list[Trajectory], ranks: Ranks) -> dict[str, list[TrainingSample]]:
    """This rank's samples of these episodes, of each actor that learns. Every rank must call it."""
    samples, advantage_fns = {}, {name: env.advantage_fn for name, env in plan.envs.items()}
    for name in plan.config.trained:
        groups = baseline_groups([t for t in trajectories if t.actor == name])
        if plan.algorithm.refill_rounds:
            groups = [g for g in groups if has_signal(g, plan.algorithm)]
        longest = plan.config.actors[name].max_tokens or plan.config.max_tokens
        samples[name] = samples_of(groups, plan.algorithm, longest, ranks, advantage_fns)
    return samples


def imitated_samples(run: Run) -> dict[str, list[TrainingSample]]:
    """This rank's samples of the rows that a step imitates."""
    plan, first = run.plan, run.position
    run.position += run.config.tasks_per_step
    positions = range(first + run.ranks.rank, run.position, run.ranks.size)
    rows = (plan.imitated.samples(plan.train.task(p), f"{p:012d}") for p in positions)
    return {run.config.trained[0]: [sample for row in rows for sample in row]}


async def collect(run: Run, step: int) -> list[Trajectory]:
    """This rank's trajectories of a step. With refilling, further groups replace those without signal (DAPO's dynamic
    sampling, arXiv:2503.14476, section 3.2); these are returned too."""
    config, algorithm, collected = run.config, run.plan.algorithm, []
    missing = config.tasks_per_step
    for number in range(algorithm.refill_rounds + 1):
        if number:
            run.worker.submit(draw_groups(run, missing))
        groups = await run.worker.collect(missing, oldest=step - config.max_staleness)
        collected += groups
        if config.max_staleness:
            ages = [step - group.version for group in groups]
            run.note("rollout/", {"staleness": Mean(sum(ages), len(ages)), "staleness_max": Max(max(ages, default=0))})
        if algorithm.refill_rounds:
            groups = baseline_groups(in_order(collected))
            with_signal = len({group[0].group_id for group in groups if has_signal(group, algorithm)})
            missing = max(0, config.tasks_per_step - sum(all_gather_json(with_signal, run.ranks)))
            if not missing:
                break
    if algorithm.refill_rounds:
        run.note("rollout/", {"refill_rounds": Mean(number), "groups_missing": Mean(missing)})
    return in_order(collected)


async def write(run: Run, name: str, trajectories: list[Trajectory]) -> None:
    """Writes in a thread. The file is complete before the next one begins, or when the run ends."""
    if run.writing is not None:
        await run.writing
    if run.config.rollout.save:
        suffix = f".rank_{run.ranks.rank:05d}" if run.ranks.size > 1 else ""
        file = run.out / "rollouts" / f"{name}{suffix}.jsonl.zst"
        run.writing = asyncio.get_running_loop().run_in_executor(
            None, naming(file)(write_trajectories), file, trajectories
        )


async def note_rollouts(run: Run, step: int, trajectories: list[Trajectory]) -> None:
    envs = run.plan.envs
    for name in run.learners:
        own = [t for t in trajectories if t.actor == name]
        run.note(f"rollout/{name}/", rollout_metrics(own) | (lag_metrics(own, step) if run.older else {}))
        for env in envs if len(envs) > 1 else ():
            run.note(f"rollout/{name}/{env}/", rollout_metrics([t for t in own if t.env == env]))
    for name, actor in run.plan.endpoints.items():
        run.note(f"rollout/{name}/", actor.take_metrics())
    if lease := run.lease:
        run.note("rollout/", {"engine_switches": Sum(lease.num_switches), "engine_switch_s": Sum(lease.switch_s)})
        lease.num_switches, lease.switch_s = 0, 0.0
    for engine in run.all_engines:
        run.note("", await engine.take_metrics())


async def learn(run: Run, name: str, samples: list[TrainingSample], step: int) -> None:
    """One step of a learner. Where engines are elsewhere it runs in a thread, so that conversations go on."""
    if run.canary:
        run.note(f"learn/{name}/", await run.canary.check(name))
    if run.ranks.engine_ranks:
        await asyncio.to_thread(learn_here, run, name, samples, step)
    else:
        learn_here(run, name, samples, step)


def learn_here(run: Run, name: str, samples: list[TrainingSample], step: int) -> None:
    if run.ranks.device.type == "cuda":
        torch.cuda.set_device(run.ranks.device)  # each thread has its own
    learner, prefix, began = run.learners[name], f"learn/{name}/", time.monotonic()
    minibatches, packing = learner.shard(samples)
    run.note(prefix, learner.annotate(minibatches))
    run.note(prefix, learner.step(minibatches, step))
    run.note("", packing)
    if run.ranks.device.type == "cuda":
        run.note(prefix, option(MFU)(learner, packing, time.monotonic() - began, torch.cuda.get_device_name()))


async def sync_engine(run: Run, name: str, version: int) -> None:
    """The engine gets the learner's weights. One that reads them in place only drops what it computed with the old."""
    if name not in run.engines:
        return
    engine, learner = run.engines[name], run.learners[name]
    weights = learner.engine_weights(is_read(learner))
    if engine is not None:
        await engine.update(weights, version, adapter=run.actors[name].adapter)
    else:
        for _ in weights or ():
            pass  # gathering a weight is a collective
    if run.older:
        await run.older.sync(name, version)
    if run.lease is not None and engine is not None:
        await engine.sleep()  # a learner has the device


async def sleep_engines(run: Run) -> None:
    """Every rank must call it: when it returns no engine has a device, those that hold several ranks' devices included."""
    for engine in run.all_engines:
        if run.config.max_staleness:
            await engine.pause()
        await engine.sleep()
    if run.config.engine_tp > 1:
        barrier(run.ranks)


def note_speed(run: Run) -> None:
    """Tokens per second of each phase, summed over ranks and actors."""
    spoken = [f"rollout/{name}/tokens" for name in run.learners]
    for phase, names in (("generate", spoken), ("learn", ["pack/tokens"])):
        tokens = sum(run.metrics[name].value for name in names if name in run.metrics)
        if tokens:
            run.note("time/", {f"{phase}_tokens_per_s": Sum(tokens / run.metrics[f"time/{phase}_s"].value)})
    if run.ranks.engine_ranks:
        waited = run.metrics["time/generate_s"].value, run.metrics["time/step_s"].value
        run.note("time/", {"learners_idle_frac": Mean(*waited)})


async def evaluate(run: Run, step: int) -> dict[str, float]:
    """Metrics of held-out tasks: the greedy score, avg@k and pass@k; of rows to be imitated, their loss."""
    run.metrics, config = {}, run.config.eval
    with run.timed("eval"):
        for name, source in run.plan.eval.items():
            tasks = list(islice(source, config.num_tasks or None))
            if run.plan.imitated:
                own = tasks[run.ranks.rank :: run.ranks.size]
                evaluate_rows(run, own, "eval/" if source.split == "eval" else f"eval/{name}/")
                continue
            await evaluate_tasks(run, step, name, tasks, "greedy", 1)
            if config.samples:
                await evaluate_tasks(run, step, name, tasks, "sampled", config.samples)
    values = run.write_metrics(step)
    is_shown = re.compile(r"eval/(?!.*/(greedy|sampled)_(?!(score|pass)$))")  # others are in the file alone
    shown = [f"{name.removeprefix('eval/')} {value:.4g}" for name, value in values.items() if is_shown.match(name)]
    run.log.say("  ".join([f"eval at step {step}", *shown]))
    if run.config.keep_best and run.keeper.is_best(values):
        export(run, run.out / "best")
        run.keeper.note_best(step)
    return values


def evaluate_rows(run: Run, tasks: list[Task], prefix: str) -> None:
    [learner] = run.learners.values()
    minibatches, _ = learner.shard([s for t in tasks for s in run.plan.imitated.samples(t, t.id)])
    learner.annotate(minibatches)
    run.note(prefix, learner.evaluate(minibatches))


async def evaluate_tasks(run: Run, step: int, source: str, tasks: list[Task], label: str, count: int) -> None:
    config, plan = run.config, run.plan
    drawn = config.eval.sampling if label == "sampled" else {"temperature": 0.0}
    name = f"eval/{step:06d}/{label}" + (f"/{source}" if len(plan.eval) > 1 else "")
    place = {"batch": f"eval/{source}", "label": name, "size": count}
    groups = [make_group(config, task, drawn, number=number, **place) for number, task in enumerate(tasks)]
    newest = {n: replace(a, older=None) if isinstance(a, Actor) else a for n, a in run.actors.items()}
    trajectories = await rollout(plan.envs, newest, groups, config.rollout, run.ranks, config.timeout_s)
    await write(run, name.replace("/", "_"), trajectories)
    run.terminal.episodes(trajectories if label == "greedy" else [])
    refuse_or_save(run, step, trajectories, {}, name, place_in_data(run), min_rows=1)
    score, passed = (f"avg@{count}", f"pass@{count}") if label == "sampled" else ("greedy_score", "greedy_pass")
    for actor in config.trained:
        own = [t for t in trajectories if t.actor == actor and t.status != "failed"]
        rewards = [[t.reward for t in group] for group in baseline_groups(own)]
        scores = [sum(g) / len(g) for g in rewards]
        passes = [max(g) >= config.eval.pass_reward for g in rewards]
        found = {f"{label}_{name}": value for name, value in part_metrics(own).items()}
        found |= {score: Mean(sum(scores), len(scores)), passed: Mean(sum(passes), len(passes))}
        run.note(f"eval/{source}/{actor}/" if len(config.trained) > 1 else f"eval/{source}/", found)


def checkpoint_folder(run: Run, step: int) -> Path:
    return run.out / "checkpoints" / f"step_{step:06d}"


def place_in_data(run: Run) -> dict[str, int | list[int]]:
    return {"position": run.position, "pending": run.begun}


def refuse_or_save(run: Run, step: int, trajectories: list, rows: dict, name: str, place: dict, **limits) -> None:
    """Saves what was learned before too many failures end the run."""
    try:
        refuse_failures(trajectories, rows, run.config.rollout.max_failed_fraction, name, run.ranks, **limits)
    except RunError:
        if step > run.start:
            save(run, step, place)
        raise


def save(run: Run, step: int, place: dict | None = None) -> None:
    """A checkpoint of all that learns, and each model as a Hugging Face folder. `place`: in the data, if it is not this."""
    if step == run.keeper.saved_step:
        return
    run.terminal.show("save")
    state = {"step": step, "seed": run.config.seed, "to_evaluate": run.to_evaluate}
    state |= place or place_in_data(run)
    if run.plan.curriculum:
        state["curriculum"] = run.plan.curriculum.state()
    older = run.older.files_to_save(step) if run.older else []
    folder, keep = checkpoint_folder(run, step), run.config.keep_checkpoints
    with naming(folder):
        save_checkpoint(folder, run.learners, state, run.ranks, keep, older)
    export(run, run.out / "hf")
    run.keeper.saved(step)
    exported = ", ".join(str(run.out / "hf" / name) for name in run.learners)
    run.log.say(f"saved step {step} to {run.out / 'checkpoints'} and {exported}")


def export(run: Run, folder: Path) -> None:
    for name, learner in run.learners.items():
        with naming(folder / name), learner.on_device():
            export_policy(learner.policy, run.plan.chats[name].tokenizer, folder / name, run.ranks, learner.adapter)
