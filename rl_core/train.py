"""torchrun --nproc_per_node N -m rl_core.train: build, then a loop that fits on one screen.

Whatever loads slowly is imported inside functions: --help and an error in a flag answer at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.config import Config, check_config, parse_config, to_yaml

if TYPE_CHECKING:
    from rl_core.data.chat import Chat
    from rl_core.data.tasks import TaskSource
    from rl_core.distributed import Ranks
    from rl_core.learning.algorithms import Algorithm
    from rl_core.learning.learner import Learner
    from rl_core.metrics import Metric, RunLog
    from rl_core.sampling.actor import Actor
    from rl_core.sampling.engine import Engine
    from rl_core.sampling.env import Env
    from rl_core.types import Task, TrainingSample, Trajectory

CHECKED_ROWS = 20_000  # of which the length is checked at start-up; rows beyond are checked when they are drawn


@dataclass(kw_only=True)
class Plan:
    """What is known and checked before any model loads."""

    config: Config
    algorithm: Algorithm
    env: Env | None
    train: TaskSource
    eval: TaskSource | None
    chat: Chat


@dataclass(kw_only=True)
class Run(Plan):
    """A run with its models; `learner` learns, `engine` samples."""

    ranks: Ranks
    learner: Learner
    engine: Engine | None
    actors: dict[str, Actor]
    log: RunLog
    start: int = 0
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the step under way

    @contextmanager
    def timed(self, phase: str):
        from rl_core.metrics import Mean, add_metrics

        began = time.monotonic()
        yield
        add_metrics(self.metrics, {f"time/{phase}_s": Mean(time.monotonic() - began)})

    def note(self, room: str, metrics: dict[str, Metric]) -> None:
        from rl_core.metrics import add_metrics

        add_metrics(self.metrics, metrics, prefix=room)


async def train(run: Run) -> None:
    """The loop."""
    config, learner = run.config, run.learner
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
        run.metrics |= packing
        run.log.progress(step, run.log.write(step, run.metrics))
        is_last = step + 1 == config.num_steps
        if config.eval_every and ((step + 1) % config.eval_every == 0 or is_last):
            await evaluate(run, step + 1)
        if is_last or (config.save_every and (step + 1) % config.save_every == 0):
            save(run, step + 1)


async def gather_samples(run: Run, step: int) -> list[TrainingSample]:
    """This rank's part of the step's samples: of episodes that it rolled out, or of rows that are to be imitated."""
    config, n = run.config, run.config.tasks_per_step
    if not run.algorithm.is_rl:
        positions = range(step * n + run.ranks.rank, (step + 1) * n, run.ranks.size)
        return [s for p in positions for s in imitation(run, run.train.tasks(p, 1)[0], f"{p:012d}")]

    from rl_core.sampling.rollout import RolloutPlan, rollout, rollout_metrics
    from rl_core.types import SamplingParams

    params = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.sampling.temperature,
        stop=tuple(config.sampling.stop),
        stop_token_ids=run.chat.stop_token_ids,
    )
    plan = RolloutPlan(
        name=f"train/{step:06d}",
        tasks=run.train.tasks(step * n, n),
        group_size=config.group_size,
        params=params,
        seed=config.seed,
    )
    trajectories = await rollout(run.env, run.actors, plan, config.rollout, run.ranks)
    run.note("rollout/policy/", rollout_metrics(trajectories))
    if config.rollout.save:
        write_trajectories(Path(config.out) / "rollouts", f"step_{step:06d}", trajectories, run.ranks)
    return samples_of(trajectories, run.algorithm)


def samples_of(trajectories: list[Trajectory], algorithm: Algorithm) -> list[TrainingSample]:
    """Each scored trajectory's samples with its advantage over those that share its (env, group, actor, seat)."""
    from rl_core.data.samples import samples_from_turns
    from rl_core.learning.algorithms import group_advantages

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


def imitation(run: Plan, task: Task, group_id: str = "") -> list[TrainingSample]:
    """The samples of one row that is to be imitated. Raises ValueError if it is too long, unless such rows are skipped."""
    from rl_core.data.samples import imitation_samples

    try:
        samples = imitation_samples(run.chat, task.row)
    except ValueError as error:
        raise ValueError(f"{task.id}: {error}") from None
    longest, limit = max((len(s.token_ids) for s in samples), default=0), run.config.max_context_tokens
    if longest > limit:
        if run.config.data.skip_long:
            return []
        raise ValueError(
            f"{task.id}: a row of {longest} tokens is longer than {limit} (max_prompt_tokens + max_tokens); "
            "raise --max_prompt_tokens or --max_tokens, or leave such rows out with --data.skip_long"
        )
    for sample in samples:
        sample.group_id = group_id
    return samples


async def sync_engine(run: Run, version: int) -> None:
    """The engine's weights become the learner's; one that reads them in place only forgets what it computed with the old."""
    from rl_core.learning.model import is_sharded

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
    run.log.say(
        f"eval at step {step}  "
        + "  ".join(f"{k.removeprefix('eval/')} {v:.4g}" for k, v in values.items() if k.startswith("eval/"))
    )


async def evaluate_episodes(run: Run, step: int) -> None:
    from rl_core.metrics import Mean
    from rl_core.sampling.rollout import RolloutPlan, rollout
    from rl_core.types import SamplingParams

    config, tasks = run.config, list(run.eval)
    tasks = tasks[: config.eval.num_tasks or len(tasks)]
    k = config.eval.samples
    for label, count in (("greedy", 1), ("sampled", k)) if k else (("greedy", 1),):
        truncation = (
            {}
            if label == "greedy"
            else {n: getattr(config.eval, n) for n in ("temperature", "top_p", "top_k", "min_p")}
        )
        params = SamplingParams(
            **{
                "max_tokens": config.max_tokens,
                "temperature": 0.0,
                "stop": tuple(config.sampling.stop),
                "stop_token_ids": run.chat.stop_token_ids,
            }
            | truncation
        )
        plan = RolloutPlan(
            name=f"eval/{step:06d}/{label}", tasks=tasks, group_size=count, params=params, seed=config.seed
        )
        trajectories = await rollout(run.env, run.actors, plan, config.rollout, run.ranks)
        if config.rollout.save:
            write_trajectories(Path(config.out) / "rollouts", f"eval_{step:06d}_{label}", trajectories, run.ranks)
        groups: dict[str, list[float]] = {}
        for t in trajectories:
            groups.setdefault(t.group_id, []).append(0.0 if t.reward is None else t.reward)
        scores = [sum(g) / len(g) for g in groups.values()]
        passes = [max(g) >= config.eval.pass_reward for g in groups.values()]
        names = (f"avg@{k}", f"pass@{k}") if label == "sampled" else ("greedy_score", "greedy_pass")
        run.note(
            f"eval/{run.env.name}/",
            {names[0]: Mean(sum(scores), len(scores)), names[1]: Mean(sum(passes), len(passes))},
        )


def write_trajectories(folder: Path, name: str, trajectories: list[Trajectory], ranks: Ranks) -> None:
    """rollouts/NAME.jsonl.zst; with several ranks each writes its own file, so that nothing is sent to be written."""
    import dataclasses
    import json

    import zstandard

    suffix = f".rank_{ranks.rank:05d}" if ranks.size > 1 else ""
    lines = "".join(json.dumps(dataclasses.asdict(t), default=str) + "\n" for t in trajectories)
    beside = folder / f".{name}{suffix}.tmp"
    beside.write_bytes(zstandard.ZstdCompressor(level=3).compress(lines.encode()))
    os.replace(beside, folder / f"{name}{suffix}.jsonl.zst")


def save(run: Run, step: int) -> None:
    """A checkpoint, and the model as a Hugging Face folder."""
    from rl_core.learning.checkpoint import save_checkpoint
    from rl_core.learning.model import export_policy

    out = Path(run.config.out)
    state = {"step": step, "position": step * run.config.tasks_per_step, "seed": run.config.seed}
    save_checkpoint(
        out / "checkpoints" / f"step_{step:06d}", {"policy": run.learner}, state, run.ranks, run.config.keep_checkpoints
    )
    export_policy(run.learner.policy, run.chat.tokenizer, out / "hf" / "policy", run.ranks)
    run.log.say(f"saved step {step} to {out / 'checkpoints'} and {out / 'hf' / 'policy'}")


def make_plan(config: Config) -> Plan:
    """Everything that can be refused before a model loads. Raises ValueError."""
    from rl_core.data.chat import load_chat
    from rl_core.learning.algorithms import make_algorithm
    from rl_core.learning.model import load_model_config

    out = Path(config.out) if config.out else None
    if out and out.exists() and not config.resume and not config.dry_run and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists already; go on with it by --resume, or name another folder")
    algorithm = make_algorithm(config.algorithm, config.algo)
    env = None
    if config.env_path:
        from rl_core.sampling.env import load_env

        env = load_env(config.env_path, hook_timeout_s=config.rollout.hook_timeout_s)
        config.max_turns = config.max_turns or env.max_turns or (8 if env.is_multi_turn else 1)
        check_config(config)
    sources = {split: load_source(config, env, split, algorithm) for split in ("train", "eval")}
    if sources["train"] is None:
        raise ValueError(
            "--data.train is missing: a file or `datasets` name"
            + (f"; {config.env_path} has no load_tasks" if env else "")
        )
    if config.eval_every and sources["eval"] is None:
        raise ValueError(
            "--eval_every asks for evaluation, but there is no --data.eval and no load_tasks in the environment"
        )
    actor = config.actors["policy"]
    load_model_config(actor.model)
    plan = Plan(
        config=config,
        algorithm=algorithm,
        env=env,
        chat=load_chat(actor.model, actor.chat_template),
        train=sources["train"],
        eval=sources["eval"] if config.eval_every else None,
    )
    for source in (plan.train, plan.eval):
        if source is not None:
            check_lengths(plan, source)
    return plan


def load_source(config: Config, env: Env | None, split: str, algorithm: Algorithm) -> TaskSource | None:
    from rl_core.data.tasks import TaskSource, load_rows

    path = getattr(config.data, split)
    if path:
        rows = load_rows(path, split="train" if split == "train" else "test")
    elif env and env.load_tasks:
        rows = env.load_tasks(split)
    else:
        return None
    if env and algorithm.is_rl:
        env.check_columns(rows, path or f"load_tasks({split!r})")
    return TaskSource(
        rows,
        env=env.name if env else "data",
        split=split,
        seed=config.seed,
        shuffle=config.data.shuffle and split == "train",
    )


def check_lengths(plan: Plan, source: TaskSource) -> None:
    """Every row renders and fits, or is left out if --data.skip_long says so."""
    config, kept = plan.config, []
    for number, (index, task) in enumerate(zip(source.kept, source, strict=True)):
        if number >= CHECKED_ROWS:
            kept.append(index)
        elif not plan.algorithm.is_rl:
            kept += [index] if imitation(plan, task) else []
        else:
            length = len(plan.chat.prompt_ids(task.messages, plan.env.tools))
            if length <= config.max_prompt_tokens:
                kept.append(index)
            elif not config.data.skip_long:
                raise ValueError(
                    f"{task.id}: a prompt of {length} tokens is longer than --max_prompt_tokens={config.max_prompt_tokens}; "
                    "raise it, or leave such rows out with --data.skip_long"
                )
    if len(kept) < len(source):
        source.keep(kept)


def describe(plan: Plan, num_ranks: int) -> str:
    """What --dry_run prints: sizes, tokens and an estimate of memory in each phase, in GiB on one rank."""
    import torch
    from transformers import AutoModelForCausalLM

    from rl_core.learning.model import load_model_config

    config, gib = plan.config, 2**30
    hf = load_model_config(config.actors["policy"].model)
    with torch.device("meta"):
        num_params = sum(p.numel() for p in AutoModelForCausalLM.from_config(hf).parameters())
    width = 2 if torch.cuda.is_available() or config.learner.dtype == "bfloat16" else 4
    episodes = config.tasks_per_step * (config.group_size if plan.algorithm.is_rl else 1)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    kv = (
        2
        * hf.num_hidden_layers
        * (getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads)
        * head_dim
        * width
    )
    # About 16 numbers of the hidden size and 3 of the MLP's size are kept per token and layer, two with recomputation.
    per_layer = (
        2 * hf.hidden_size
        if config.learner.activation_checkpointing
        else 16 * hf.hidden_size + 3 * hf.intermediate_size
    )
    activations = config.learner.microbatch_tokens * hf.num_hidden_layers * per_layer * width
    in_place = num_ranks == 1 and width == 4
    slots = min(config.rollout.max_concurrent, episodes)
    rows = {
        "algorithm": f"{config.algorithm} {plan.algorithm}",
        "model": f"{config.actors['policy'].model}, {num_params / 1e6:.2f} M parameters",
        "data": f"{len(plan.train)} rows to train on" + (f", {len(plan.eval)} held out" if plan.eval else ""),
        "ranks": f"{num_ranks}, mesh dp={num_ranks}",
        "episodes per step": f"{episodes}, of at most {config.max_turns or 1} turns and {config.max_context_tokens} tokens",
        "tokens per step": f"at most {episodes * config.max_context_tokens}, in microbatches of {config.learner.microbatch_tokens}",
        "updates": f"{config.num_steps} steps of {config.learner.minibatches} minibatches and {config.learner.epochs} epochs",
        "memory to learn": f"{16 * num_params / num_ranks / gib:.3f} GiB weights, gradients, AdamW + {activations / gib:.3f} GiB activations",
        "memory to generate": f"{(0 if in_place else width * num_params) / gib:.3f} GiB weights"
        f"{' (the learner is read in place)' if in_place else ''} + {slots * config.max_context_tokens * kv / gib:.3f} GiB KV cache",
    }
    return "\n".join(f"{name:<20} {text}" for name, text in rows.items())


def build(plan: Plan, ranks: Ranks) -> Run:
    """Loads the model and makes all that lives as long as the run."""
    import torch

    from rl_core.distributed import all_gather_json
    from rl_core.learning.checkpoint import checkpoints_in, load_checkpoint
    from rl_core.learning.learner import Learner
    from rl_core.learning.model import is_sharded, load_hf_model, make_policy
    from rl_core.metrics import RunLog
    from rl_core.sampling.actor import Actor
    from rl_core.sampling.engine import make_engine

    config, out = plan.config, Path(plan.config.out)
    all_gather_json(None, ranks)  # every rank has seen that the folder is free
    if ranks.rank == 0:
        for folder in ("rollouts", "checkpoints", "hf"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(to_yaml(config))
    path = config.actors["policy"].model
    dtype = {"auto": torch.bfloat16 if ranks.device.type == "cuda" else torch.float32}.get(
        config.learner.dtype
    ) or getattr(torch, config.learner.dtype)
    policy = make_policy(path, dtype, ranks, config.learner.activation_checkpointing)
    learner = Learner(config, plan.algorithm, policy, ranks)
    found = checkpoints_in(out / "checkpoints")
    start = load_checkpoint(found[-1], {"policy": learner})["step"] if config.resume and found else 0
    engine, actors = None, {}
    if plan.algorithm.is_rl:
        model = load_hf_model(path, dtype, ranks.device) if is_sharded(policy) else policy.hf
        engine = make_engine(config, model, plan.chat.tokenizer)
        actors = {
            "policy": Actor(
                name="policy",
                engine=engine,
                chat=plan.chat,
                max_turns=config.turn_limit,
                max_context_tokens=config.max_context_tokens,
            )
        }
    all_gather_json(None, ranks)  # the folders are there
    log = RunLog(out, ranks, config.num_steps, start)
    return Run(**vars(plan), ranks=ranks, learner=learner, engine=engine, actors=actors, log=log, start=start)


async def run_all(run: Run) -> None:
    if run.start:
        run.log.say(f"going on from step {run.start}")
    await sync_engine(run, run.start)
    try:
        await train(run)
    finally:
        if run.engine is not None:
            await run.engine.close()


def main(argv: list[str] | None = None) -> int:
    """The exit status. A user's mistake is one line; --debug shows where it was found."""
    ranks: Any = None
    argv = sys.argv[1:] if argv is None else argv
    try:
        plan = make_plan(parse_config(argv))
        if plan.config.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(describe(plan, int(os.environ.get("WORLD_SIZE", 1))))
            return 0
        from rl_core.distributed import close_ranks, init_ranks

        ranks = init_ranks(plan.config.timeout_s)
        run = build(plan, ranks)
        asyncio.run(run_all(run))
        close_ranks(ranks)
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        if "--debug" in argv:
            raise
        if is_first_to_fail(ranks):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def is_first_to_fail(ranks: Ranks | None) -> bool:
    """True on one rank: the first that failed knows the cause, the others lost it. Before ranks meet, all see the same."""
    if ranks is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return ranks.store is None or ranks.store.add("failures", 1) == 1
    except (RuntimeError, OSError):
        return False  # the store went with the rank that told the cause


if __name__ == "__main__":
    # A hook that still hangs in its thread must not keep the process.
    status = main()
    sys.stdout.flush()
    os._exit(status)
