"""The parts of a step: rollouts, samples, learning, new weights for engines; evaluation and saving
between steps."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from rl_core import registry
from rl_core.build import Plan, Run
from rl_core.data.episodes import baseline_groups
from rl_core.data.rows import write_trajectories
from rl_core.distributed import Ranks, all_gather_json, barrier
from rl_core.host_copies import release_cached_memory
from rl_core.learning.advantages import group_results, has_signal, samples_of
from rl_core.learning.checkpoint import save_checkpoint, trained_learners
from rl_core.learning.learner import Learner
from rl_core.learning.policy import export_policy
from rl_core.metrics import Max, Mean, Sum
from rl_core.models import is_read
from rl_core.run_folder import naming
from rl_core.sampling import kept_groups
from rl_core.sampling.actor import Actor
from rl_core.sampling.outcomes import (
    held_out_metrics,
    lag_metrics,
    part_metrics,
    refuse_failures,
    rollout_metrics,
)
from rl_core.sampling.rollout import Group, in_order, make_group, rollout
from rl_core.sampling.under_way import GroupUnderWay
from rl_core.types import RunError, Task, TrainingSample, Trajectory

UNDER_WAY = "under_way"  # folder in which ranks write what a checkpoint gets


async def start(run: Run) -> None:
    """Engines get the learners' weights. A new run that evaluates does so before its first step."""
    for learner in run.learners.values():
        learner.leave_device()
    hand_over(run)
    # One starts while no other has memory, which it would take for its own.
    for engine in run.all_engines:
        await engine.wake()
        await engine.sleep()
    # An engine elsewhere that receives the first learner's weights answers nobody's wake()
    barrier(run.ranks)
    for name, learner in run.learners.items():
        async with on_device(run, learner):
            await sync_engine(run, name, run.start)
            if run.older:
                await run.older.restore(name, run.start, checkpoint_folder(run, run.start))
    await resume(run, run.start)
    if run.config.eval_every and run.to_evaluate:
        await evaluate(run, run.start)


async def resume(run: Run, version: int) -> None:
    """Groups continue, and new ones begin, with the new weights."""
    run.worker.version = version
    for engine in run.all_engines if run.config.max_staleness else ():
        await engine.resume()


async def finish(run: Run) -> None:
    """Checks the engines' weights after the last update, which no next step checks. Exports what a
    run before this one saved, if no step was left: it may have been killed between the two."""
    if run.canary:
        await run.canary.sample()
        for name, learner in run.learners.items():
            async with on_device(run, learner):
                await run.canary.check(name)
    if run.start and run.keeper.saved_step < 0:
        await export(run, run.out / "hf")


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
    return torch.profiler.profile(
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(file))
    )


def draw_groups(run: Run, num_groups: int) -> list[Group]:
    """Groups of the next training tasks. Those that a resumed run had left come first."""
    config, groups = run.config, []
    left, run.pending = run.pending[:num_groups], run.pending[num_groups:]
    first, run.position = run.position, run.position + num_groups - len(left)
    for position in (*left, *range(first, run.position)):
        step, number = divmod(position, config.tasks_per_step)
        place = {
            "batch": f"train/{step:06d}",
            "number": number,
            "position": position,
            "size": config.group_size,
        }
        kept, drawn = (
            run.kept_groups.pop(position, None),
            {"temperature": config.sampling.temperature},
        )
        begun = kept and begun_task(run, kept)
        task = begun or run.plan.train.task(position)
        group = make_group(config, task, drawn, **place)
        if config.max_staleness or config.rollout.fixed_order:
            group.under_way = GroupUnderWay()
        if begun:
            kept_groups.restore(group, kept)
        groups.append(group)
    return groups


def begun_task(run: Run, kept: dict) -> Task | None:
    """The task of a group that was under way: a curriculum draws another for the same position by
    now. None if the data no longer have it."""
    row = int(kept["task"].rpartition("/")[2])
    for source in run.plan.train.sources:
        if source.env == kept["env"] and row < len(source.rows):
            return source.task_of_row(row)
    return None


def num_to_begin(run: Run, step: int) -> int:
    """Groups of a step and of max_staleness further steps may have begun."""
    config = run.config
    first = step if step == run.start else step + config.max_staleness
    return config.tasks_per_step * max(
        0, min(step + config.max_staleness + 1, config.num_steps) - first
    )


async def sample(run: Run, step: int) -> dict[str, list[TrainingSample]]:
    """This rank's part of the step's samples, of each actor that learns."""
    plan, config = run.plan, run.config
    if plan.imitated:
        return imitated_samples(run)
    if run.canary:
        await run.canary.sample(is_first=step == run.start)
    place = place_in_data(run)
    run.worker.submit(draw_groups(run, num_to_begin(run, step)))
    trajectories = await collect(run, step)
    await sleep_engines(run)
    await write(run, f"step_{step + 1:06d}", trajectories)
    reasons = await refuse_or_save(
        run, step, trajectories, run.failed_rows, f"step {step + 1}", place
    )
    run.terminal.failures(step + 1, reasons)
    if plan.curriculum:
        results = group_results(trajectories, run.learners, config.eval.pass_reward, run.ranks)
        plan.curriculum.record(results, min([*run.begun, run.position]))
    await note_rollouts(run, step, trajectories)
    return training_samples(plan, trajectories, run.ranks)


def training_samples(
    plan: Plan, trajectories: list[Trajectory], ranks: Ranks
) -> dict[str, list[TrainingSample]]:
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
    """This rank's trajectories of a step. With refilling, further groups replace those without
    signal (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2); these are returned too."""
    config, algorithm, collected = run.config, run.plan.algorithm, []
    missing = config.tasks_per_step
    for number in range(algorithm.refill_rounds + 1):
        if number:
            run.worker.submit(draw_groups(run, missing))
        groups = await run.worker.collect(missing, oldest=step - config.max_staleness)
        collected += groups
        if config.max_staleness:
            ages = [step - group.version for group in groups]
            run.note(
                "rollout/",
                {
                    "staleness": Mean(sum(ages), len(ages)),
                    "staleness_max": Max(max(ages, default=0)),
                },
            )
        if algorithm.refill_rounds:
            learned = [t for t in in_order(collected) if t.actor in config.trained]
            groups = baseline_groups(learned)
            with_signal = len(
                {group[0].group_id for group in groups if has_signal(group, algorithm)}
            )
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
        run.note(
            f"rollout/{name}/", rollout_metrics(own) | (lag_metrics(own, step) if run.older else {})
        )
        for env in envs if len(envs) > 1 else ():
            run.note(f"rollout/{name}/{env}/", rollout_metrics([t for t in own if t.env == env]))
    for name, actor in run.plan.endpoints.items():
        run.note(f"rollout/{name}/", actor.take_metrics())
    if lease := run.lease:
        run.note(
            "rollout/",
            {"engine_switches": Sum(lease.num_switches), "engine_switch_s": Sum(lease.switch_s)},
        )
        lease.num_switches, lease.switch_s = 0, 0.0
    for engine in run.all_engines:
        run.note("", await engine.take_metrics())


async def learn(run: Run, name: str, samples: list[TrainingSample], step: int) -> None:
    """One step of a learner. Where engines are elsewhere it runs in a thread, so that conversations
    go on."""
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
        run.note(
            prefix,
            registry.mfu()(
                learner, packing, time.monotonic() - began, torch.cuda.get_device_name()
            ),
        )


async def sync_engine(run: Run, name: str, version: int) -> None:
    """The engine gets the learner's weights. One that reads them in place only drops what it
    computed with the old."""
    if name not in run.engines:
        return
    hand_over(run)  # an engine takes memory for its weights now
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


@asynccontextmanager
async def learners_lease(run: Run) -> AsyncIterator[None]:
    """A context in which learners may have the devices: engines sleep, on all ranks. Engines stay
    asleep afterwards; where episodes go on during an update, resume() ends their pause. Every rank
    must enter it."""
    await sleep_engines(run)
    yield
    hand_over(run)


@asynccontextmanager
async def on_device(run: Run, learner: Learner) -> AsyncIterator[None]:
    """The lease with this learner on the device. Every rank must enter it."""
    async with learners_lease(run):
        with learner.on_device():
            yield


def hand_over(run: Run) -> None:
    """What learners do before engines have the devices."""
    if run.engines and not run.ranks.engine_ranks:
        release_cached_memory()
    if run.config.engine_tp > 1:
        barrier(run.ranks)  # an engine on another rank may take this rank's device


async def sleep_engines(run: Run) -> None:
    """Every rank must call it: when it returns no engine has a device, those that hold several
    ranks' devices included."""
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
            run.note(
                "time/",
                {f"{phase}_tokens_per_s": Sum(tokens / run.metrics[f"time/{phase}_s"].value)},
            )
    if run.ranks.engine_ranks:
        waited = run.metrics["time/generate_s"].value, run.metrics["time/step_s"].value
        run.note("time/", {"learners_idle_frac": Mean(*waited)})


async def evaluate(run: Run, step: int) -> dict[str, float]:
    """Metrics of held-out tasks: the greedy score, avg@k and pass@k; of rows to be imitated, their
    loss."""
    run.metrics, config = {}, run.config.eval
    with run.timed("eval"):
        for name, source in run.plan.eval.items():
            tasks = list(islice(source, config.num_tasks or None))
            if run.plan.imitated:
                own = tasks[run.ranks.rank :: run.ranks.size]
                await evaluate_rows(
                    run, own, "eval/" if source.split == "eval" else f"eval/{name}/"
                )
                continue
            await evaluate_tasks(run, step, name, tasks, "greedy", 1)
            if config.samples:
                await evaluate_tasks(run, step, name, tasks, "sampled", config.samples)
    values = run.write_metrics(step)
    # Others are in the file alone.
    is_shown = re.compile(r"eval/(?!.*/(greedy|sampled)_(?!(score|pass)$))")
    shown = [
        f"{name.removeprefix('eval/')} {value:.4g}"
        for name, value in values.items()
        if is_shown.match(name)
    ]
    run.log.say("  ".join([f"eval at step {step}", *shown]))
    if run.config.keep_best and run.keeper.is_best(values):
        await export(run, run.out / "best")
        await resume(run, step)
        run.keeper.note_best(step)
    return values


async def evaluate_rows(run: Run, tasks: list[Task], prefix: str) -> None:
    [learner] = run.learners.values()
    minibatches, _ = learner.shard([s for t in tasks for s in run.plan.imitated.samples(t, t.id)])
    async with on_device(run, learner):
        learner.annotate(minibatches)
        run.note(prefix, learner.evaluate(minibatches))


async def evaluate_tasks(
    run: Run, step: int, source: str, tasks: list[Task], label: str, count: int
) -> None:
    config, plan = run.config, run.plan
    drawn = config.eval.sampling if label == "sampled" else {"temperature": 0.0}
    name = f"eval/{step:06d}/{label}" + (f"/{source}" if len(plan.eval) > 1 else "")
    place = {"batch": f"eval/{source}", "label": name, "size": count}
    groups = [
        make_group(config, task, drawn, number=number, **place) for number, task in enumerate(tasks)
    ]
    newest = {
        n: replace(a, older=None) if isinstance(a, Actor) else a for n, a in run.actors.items()
    }
    trajectories = await rollout(
        plan.envs, newest, groups, config.rollout, run.ranks, config.timeout_s
    )
    await write(run, name.replace("/", "_"), trajectories)
    run.terminal.episodes(trajectories if label == "greedy" else [])
    reasons = await refuse_or_save(
        run, step, trajectories, {}, name, place_in_data(run), min_rows=1
    )
    run.terminal.failures(step, reasons)
    score, passed = (
        (f"avg@{count}", f"pass@{count}") if label == "sampled" else ("greedy_score", "greedy_pass")
    )
    for actor in config.trained:
        own = [t for t in trajectories if t.actor == actor and t.status != "failed"]
        found = {f"{label}_{name}": value for name, value in part_metrics(own).items()}
        found |= held_out_metrics(own, score, passed, config.eval.pass_reward)
        run.note(f"eval/{source}/{actor}/" if len(config.trained) > 1 else f"eval/{source}/", found)


def checkpoint_folder(run: Run, step: int) -> Path:
    return run.out / "checkpoints" / f"step_{step:06d}"


def place_in_data(run: Run) -> dict[str, int | list[int]]:
    return {"position": run.position, "pending": run.begun, "collected": run.worker.num_collected}


async def refuse_or_save(
    run: Run, step: int, trajectories: list, rows: dict, name: str, place: dict, **limits
) -> dict[str, int]:
    """Reason -> how many episodes failed for it. Saves what was learned before too many failures
    end the run."""
    limit = run.config.rollout.max_failed_fraction
    kind = "eval" if name.startswith("eval/") else "train"
    limits["tally"] = run.tallies[kind]
    try:
        return refuse_failures(trajectories, rows, limit, name, run.ranks, **limits)
    except RunError as error:
        if kind == "eval":
            run.to_evaluate = True  # by the run that goes on
        if step > run.start:
            await save(run, step, place)
        if not run.config.rollout.save:
            raise
        flags = "--reasons --eval" if kind == "eval" else "--reasons"
        raise RunError(f"{error}; all reasons: rl-core show {run.out} {flags}") from error


def refuse_ruined(run: Run) -> None:
    """Raises RunError before the last save if no update was finite since this process began: the
    weights, which are no other ones, may be ruined, and must not take the place of what was
    exported before."""
    for name, learner in trained_learners(run.learners).items():
        if learner.nonfinite_in_a_row and learner.num_updates == run.updates_before[name]:
            raise RunError(
                f"every update of {name} was skipped, because its loss or gradient was NaN or "
                "infinite: its weights may be "
                "ruined, and nothing is saved; go on from an earlier checkpoint or model"
            )


def refuse_standstill(run: Run) -> None:
    """Raises RunError after the last save if nothing was learned from the first step to the
    last."""
    trained = trained_learners(run.learners).values()
    is_last = run.keeper.saved_step == run.config.num_steps
    if trained and is_last and not any(learner.num_updates for learner in trained):
        raise RunError(
            f"none of {run.config.num_steps} steps made an update, because no samples carried a "
            "signal: the model is as it "
            "was; look at the rewards by rl-core show, or train longer by --resume with a higher "
            "--num_steps"
        )


async def save(run: Run, step: int, place: dict | None = None) -> None:
    """A checkpoint of all that learns, and each model as a Hugging Face folder. `place`: in the
    data, if it is not this."""
    if step == run.keeper.saved_step:
        return
    run.terminal.show("save")
    state = {"step": step, "seed": run.config.seed, "to_evaluate": run.to_evaluate}
    state |= place or place_in_data(run)
    if run.plan.curriculum:
        state["curriculum"] = run.plan.curriculum.state()
    files = run.older.files_to_save(step) if run.older else []
    folder, keep = checkpoint_folder(run, step), run.config.keep_checkpoints
    async with learners_lease(run):
        files += await files_under_way(run)
        with naming(folder):
            save_checkpoint(folder, run.learners, state, run.ranks, keep, files)
    shutil.rmtree(run.out / UNDER_WAY, ignore_errors=True)
    await export(run, run.out / "hf")
    await resume(run, step)
    run.keeper.saved(step)
    exported = ", ".join(str(run.out / "hf" / name) for name in run.learners)
    run.log.say(f"saved step {step} to {run.out / 'checkpoints'} and {exported}")


async def files_under_way(run: Run) -> list[Path]:
    """What was sampled for later steps. Each rank writes its own file, and rank 0 copies them all
    into the checkpoint."""
    worker, folder = run.worker, run.out / UNDER_WAY
    if not run.config.max_staleness or not worker.pending:
        return []
    for engine in run.all_engines:
        await engine.catch_up()
    folder.mkdir(exist_ok=True)
    files = [folder / f"{kept_groups.FILE}{rank:05d}.jsonl.zst" for rank in range(run.ranks.size)]
    own = files[run.ranks.rank]
    with naming(own):
        kept_groups.write_groups(
            own, [worker.pending[number] for number in (*worker.done, *worker.running)]
        )
    return files


async def export(run: Run, folder: Path) -> None:
    for name, learner in run.learners.items():
        async with on_device(run, learner):
            with naming(folder / name):
                export_policy(
                    learner.policy,
                    run.plan.chats[name].tokenizer,
                    folder / name,
                    run.ranks,
                    learner.adapter,
                )
