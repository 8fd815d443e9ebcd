"""The loop, which fits on one screen, and the four things that it does: sample, learn, evaluate, save."""

from __future__ import annotations

import gc
from pathlib import Path

from rl_core.build import Run, imitation
from rl_core.data.samples import samples_from_turns
from rl_core.learning.algorithms import Algorithm, group_advantages
from rl_core.learning.checkpoint import save_checkpoint
from rl_core.learning.model import export_policy, is_sharded
from rl_core.metrics import Mean, Sum
from rl_core.sampling.rollout import RolloutPlan, rollout, rollout_metrics, write_trajectories
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
        positions = range(step * n + run.ranks.rank, (step + 1) * n, run.ranks.size)
        return [s for p in positions for s in imitation(run, run.train.tasks(p, 1)[0], f"{p:012d}")]

    tasks, params = run.train.tasks(step * n, n), sampling_params(run, temperature=config.sampling.temperature)
    name = f"train/{step:06d}"
    plan = RolloutPlan(name=name, tasks=tasks, group_size=config.group_size, params=params, seed=config.seed)
    trajectories = await rollout(run.env, run.actors, plan, config.rollout, run.ranks)
    await run.engine.sleep()
    run.note("rollout/policy/", rollout_metrics(trajectories))
    if config.rollout.save:
        write_trajectories(Path(config.out) / "rollouts", f"step_{step + 1:06d}", trajectories, run.ranks)
    return samples_of(trajectories, run.algorithm)


def samples_of(trajectories: list[Trajectory], algorithm: Algorithm) -> list[TrainingSample]:
    """Each scored trajectory's samples with its advantage over those that share its (env, group, actor, seat)."""
    groups: dict[tuple, list[Trajectory]] = {}
    for t in trajectories:
        if t.status != "failed":
            groups.setdefault((t.env, t.group_id, t.actor, t.seat), []).append(t)
    samples = []
    for group in groups.values():
        advantages = group_advantages([t.reward for t in group], algorithm.advantage)
        for trajectory, advantage in zip(group, advantages, strict=True):
            samples += samples_from_turns(trajectory.turns, advantage, trajectory.group_id)
    return samples


async def sync_engine(run: Run, version: int) -> None:
    """The engine's weights become the learner's; one that reads them in place only forgets what it computed with the old."""
    if run.engine is not None:
        await run.engine.update_weights(
            run.learner.named_weights() if is_sharded(run.learner.policy) else None, version
        )


async def evaluate(run: Run, step: int) -> None:
    """Held-out tasks: the greedy score, avg@k and pass@k; for rows to be imitated, their loss."""
    run.metrics = {}
    with run.timed("eval"):
        if run.algorithm.is_rl:
            await evaluate_episodes(run, step)
        else:
            tasks = list(run.eval)[run.ranks.rank :: run.ranks.size]
            samples = [s for i, t in enumerate(tasks) for s in imitation(run, t, f"{i:012d}")]
            run.note("eval/", run.learner.evaluate(run.learner.shard(samples)[0]))
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
    state = {"step": step, "position": step * run.config.tasks_per_step, "seed": run.config.seed}
    save_checkpoint(
        out / "checkpoints" / f"step_{step:06d}", {"policy": run.learner}, state, run.ranks, run.config.keep_checkpoints
    )
    export_policy(run.learner.policy, run.chat.tokenizer, out / "hf" / "policy", run.ranks)
    run.log.say(f"saved step {step} to {out / 'checkpoints'} and {out / 'hf' / 'policy'}")
