"""The loop, which fits on one screen, and the four things that it does: sample, learn, evaluate, save."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path

from rl_core.build import Run, imitation
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import all_gather_json
from rl_core.learning.algorithms import Algorithm, group_advantages, overlong_penalty
from rl_core.learning.checkpoint import save_checkpoint
from rl_core.learning.model import export_policy, reads_in_place
from rl_core.metrics import Mean, Sum
from rl_core.sampling.rollout import RolloutPlan, refuse_failures, rollout, rollout_metrics, write_trajectories
from rl_core.types import SamplingParams, TrainingSample, Trajectory


async def train(run: Run) -> None:
    """All steps from run.start on. Steps are counted by how many are done, in files and metrics alike."""
    config, learner = run.config, run.learner
    gc.collect()
    gc.freeze()  # rows and modules live as long as the run; looking through them again and again costs tenths of a second
    await sync_engine(run, run.start)
    if config.eval_every and run.start == 0:
        await evaluate(run, 0)
    for step in range(run.start, config.num_steps):
        run.metrics = {}
        with run.timed("step"):
            with run.timed("generate"):
                samples = await gather_samples(run, step)
            with run.timed("learn"):
                minibatches, packing = learner.shard(samples)
                learner.annotate(minibatches)
                run.note("learn/policy/", learner.step(minibatches, step))
            with run.timed("sync"):
                await sync_engine(run, step + 1)
        run.note("", packing)
        note_speed(run)
        done = step + 1
        run.log.progress(done, run.log.write(done, run.metrics))
        if is_due(done, config.eval_every, config.num_steps) and config.eval_every:
            await evaluate(run, done)
        if is_due(done, config.save_every, config.num_steps):
            save(run, done)


def note_speed(run: Run) -> None:
    """Tokens per second of each phase, summed over ranks."""
    for phase, tokens in (("generate", "rollout/policy/tokens"), ("learn", "pack/tokens")):
        if tokens in run.metrics:
            run.note(
                "time/",
                {f"{phase}_tokens_per_s": Sum(run.metrics[tokens].value / run.metrics[f"time/{phase}_s"].value)},
            )


def is_due(done: int, every: int, num_steps: int) -> bool:
    return done == num_steps or (every > 0 and done % every == 0)


async def gather_samples(run: Run, step: int) -> list[TrainingSample]:
    """This rank's part of the step's samples: of episodes that it rolled out, or of rows that are to be imitated."""
    config, n = run.config, run.config.tasks_per_step
    if not run.algorithm.is_rl:
        positions = range(run.position + run.ranks.rank, run.position + n, run.ranks.size)
        run.position += n
        return [s for p in positions for s in imitation(run, run.train.tasks(p, 1)[0], f"{p:012d}")]

    trajectories = await roll_out_step(run, f"train/{step:06d}")
    await run.engine.sleep()
    run.note("rollout/policy/", rollout_metrics(trajectories))
    if config.rollout.save:
        write_trajectories(Path(config.out) / "rollouts", f"step_{step + 1:06d}", trajectories, run.ranks)
    groups = baseline_groups(trajectories)
    if run.algorithm.refill_rounds:
        groups = [g for g in groups if has_signal(g)]
    return samples_of(groups, run.algorithm, config.max_tokens, run.env.advantage_fn)


async def roll_out_step(run: Run, name: str) -> list[Trajectory]:
    """The step's trajectories on this rank. With refilling, further tasks replace groups without signal (DAPO's dynamic
    sampling, arXiv:2503.14476, section 3.2), which are given back too."""
    config, rounds = run.config, run.algorithm.refill_rounds
    params = sampling_params(run, temperature=config.sampling.temperature)
    found: list[Trajectory] = []
    missing = config.tasks_per_step
    for number in range(rounds + 1):
        plan = RolloutPlan(
            name=f"{name}/refill_{number}" if number else name,
            tasks=run.train.tasks(run.position, missing),
            group_size=config.group_size,
            params=params,
            seed=config.seed,
        )
        # A refill can be so small that one failure is a large fraction; the step's own is what counts.
        limits = dataclasses.replace(config.rollout, max_failed_fraction=1.0) if number else config.rollout
        found += await rollout(run.env, run.actors, plan, limits, run.ranks)
        run.position += missing
        if not rounds:
            return found
        if number:
            refuse_failures(found, config.rollout.max_failed_fraction, plan, run.ranks)
        with_signal = sum(map(has_signal, baseline_groups(found)))
        missing = config.tasks_per_step - sum(all_gather_json(with_signal, run.ranks))
        if missing <= 0:
            break
    run.note("rollout/policy/", {"refill_rounds": Mean(number), "groups_missing": Mean(max(0, missing))})
    return found


def baseline_groups(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """Those that did not fail, by what shares a baseline: (env, group, actor, seat)."""
    groups: dict[tuple, list[Trajectory]] = {}
    for t in trajectories:
        if t.status != "failed":
            groups.setdefault((t.env, t.group_id, t.actor, t.seat), []).append(t)
    return list(groups.values())


def has_signal(group: list[Trajectory]) -> bool:
    return len({t.reward for t in group}) > 1


def samples_of(
    groups: list[list[Trajectory]],
    algorithm: Algorithm,
    max_tokens: int,
    advantage_fn: Callable[[list[float]], list[float]] | None = None,
) -> list[TrainingSample]:
    """Each trajectory's samples with its advantage over its group. Overlong ones may be penalised before, or left out
    after: they count in the baseline, but neither in the loss nor in its denominator."""
    samples = []
    for group in groups:
        rewards = [t.reward for t in group]
        if algorithm.overlong == "soft":
            longest = [max((len(turn.completion.token_ids) for turn in t.turns), default=0) for t in group]
            penalties = [overlong_penalty(n, max_tokens, algorithm.overlong_buffer) for n in longest]
            rewards = [r + p for r, p in zip(rewards, penalties, strict=True)]
        advantages = group_advantages(rewards, algorithm.advantage, advantage_fn)
        for trajectory, advantage in zip(group, advantages, strict=True):
            if algorithm.overlong != "mask" or trajectory.status != "truncated":
                samples += samples_from_turns(trajectory.turns, advantage, trajectory.group_id)
    return samples


async def sync_engine(run: Run, version: int) -> None:
    """The engine's weights become the learner's; one that reads them in place only forgets what it computed with the old."""
    if run.engine is not None:
        await run.engine.update_weights(
            None if reads_in_place(run.learner.policy) else run.learner.named_weights(), version
        )


async def evaluate(run: Run, step: int) -> None:
    """Held-out tasks: the greedy score, avg@k and pass@k; for rows to be imitated, their loss."""
    run.metrics = {}
    with run.timed("eval"):
        if run.algorithm.is_rl:
            await evaluate_episodes(run, step)
        else:
            tasks = list(run.eval)[run.ranks.rank :: run.ranks.size]
            minibatches, _ = run.learner.shard([s for t in tasks for s in imitation(run, t, t.id)])
            run.learner.annotate(minibatches)
            run.note("eval/", run.learner.evaluate(minibatches))
    values = run.log.write(step, run.metrics)
    shown = [f"{k.removeprefix('eval/')} {v:.4g}" for k, v in values.items() if k.startswith("eval/")]
    run.log.say("  ".join([f"eval at step {step}", *shown]))


async def evaluate_episodes(run: Run, step: int) -> None:
    config, k = run.config, run.config.eval.samples
    tasks = list(run.eval)[: config.eval.num_tasks or None]
    for label, count in [("greedy", 1), ("sampled", k)] if k else [("greedy", 1)]:
        sampled = {n: getattr(config.eval, n) for n in ("temperature", "top_p", "top_k", "min_p")}
        params = sampling_params(run, **(sampled if label == "sampled" else {"temperature": 0.0}))
        name = f"eval/{step:06d}/{label}"
        plan = RolloutPlan(name=name, tasks=tasks, group_size=count, params=params, seed=config.seed)
        trajectories = await rollout(run.env, run.actors, plan, config.rollout, run.ranks)
        if config.rollout.save:
            write_trajectories(Path(config.out) / "rollouts", f"eval_{step:06d}_{label}", trajectories, run.ranks)
        groups: dict[str, list[float]] = {}
        for t in trajectories:
            if t.reward is not None:
                groups.setdefault(t.group_id, []).append(t.reward)
        scores = [sum(g) / len(g) for g in groups.values()]
        passes = [max(g) >= config.eval.pass_reward for g in groups.values()]
        score, passed = (f"avg@{k}", f"pass@{k}") if label == "sampled" else ("greedy_score", "greedy_pass")
        found = {score: Mean(sum(scores), len(scores)), passed: Mean(sum(passes), len(passes))}
        run.note(f"eval/{run.env.name}/", found)


def sampling_params(run: Run, **drawn) -> SamplingParams:
    return SamplingParams(max_tokens=run.config.max_tokens, stop=tuple(run.config.sampling.stop), **drawn)


def save(run: Run, step: int) -> None:
    """A checkpoint, and the model as a Hugging Face folder."""
    out = Path(run.config.out)
    state = {"step": step, "position": run.position, "seed": run.config.seed}
    save_checkpoint(
        out / "checkpoints" / f"step_{step:06d}", {"policy": run.learner}, state, run.ranks, run.config.keep_checkpoints
    )
    export_policy(run.learner.policy, run.chat.tokenizer, out / "hf" / "policy", run.ranks)
    run.log.say(f"saved step {step} to {out / 'checkpoints'} and {out / 'hf' / 'policy'}")
