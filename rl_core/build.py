"""Flags -> a checked plan -> a run with its models. All that can be refused is refused before a model loads."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rl_core.config import Config, check_config, to_yaml
from rl_core.data.chat import Chat, load_chat
from rl_core.data.samples import imitation_samples, reply_pair, scored_pair
from rl_core.data.tasks import TaskSource, load_rows
from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.algorithms import Algorithm, check_algorithm, make_algorithm
from rl_core.learning.checkpoint import checkpoints_in, load_checkpoint
from rl_core.learning.learner import Learner
from rl_core.learning.lora import adapter_size, check_lora, linear_layers
from rl_core.learning.model import (
    end_token_ids,
    load_hf_model,
    load_model_config,
    make_policy,
    make_reference,
    reads_in_place,
)
from rl_core.metrics import Mean, Metric, RunLog, add_metrics
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import Engine, make_engine
from rl_core.sampling.env import Env, load_env
from rl_core.types import Task, TrainingSample

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
    position: int = 0  # of the next training task in the order of the data
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the step under way

    @contextmanager
    def timed(self, phase: str):
        began = time.monotonic()
        yield
        add_metrics(self.metrics, {f"time/{phase}_s": Mean(time.monotonic() - began)})

    def note(self, room: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=room)


def make_plan(config: Config) -> Plan:
    """Everything that can be refused before a model loads. Raises ValueError."""
    out = Path(config.out) if config.out else None
    if out and out.exists() and not config.resume and not config.dry_run and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists already; go on with it by --resume, or name another folder")
    algorithm = make_algorithm(config.algorithm, config.algo)
    env = None
    if config.env_path:
        env = load_env(config.env_path, hook_timeout_s=config.rollout.hook_timeout_s)
        config.max_turns = config.max_turns or env.max_turns or (8 if env.is_multi_turn else 1)
        check_config(config)
        if env.advantage_fn and config.algo.advantage is None and algorithm.is_rl:
            algorithm.advantage = "custom"
    check_algorithm(algorithm, config, env is not None and env.advantage_fn is not None)
    train = load_source(config, env, "train", algorithm)
    held_out = load_source(config, env, "eval", algorithm) if config.eval_every else None
    if train is None:
        hint = f"; {config.env_path} has no load_tasks" if env else ""
        raise ValueError(f"--data.train is missing: a file or `datasets` name{hint}")
    if config.eval_every and held_out is None:
        raise ValueError(
            "--eval_every asks for evaluation, but there is no --data.eval and no load_tasks in the environment"
        )
    actor = config.actors["policy"]
    check_lora(actor.lora, load_model_config(actor.model))
    chat = load_chat(actor.model, actor.chat_template)
    plan = Plan(config=config, algorithm=algorithm, env=env, chat=chat, train=train, eval=held_out)
    for source in (plan.train, plan.eval):
        if source is not None:
            check_lengths(plan, source)
    return plan


def load_source(config: Config, env: Env | None, split: str, algorithm: Algorithm) -> TaskSource | None:
    path = getattr(config.data, split)
    if path:
        rows = load_rows(path, split="train" if split == "train" else "test")
    elif env and env.load_tasks:
        rows = env.load_tasks(split)
    else:
        return None
    if env and algorithm.is_rl:
        env.check_columns(rows, path or f"load_tasks({split!r})")
    name, shuffle = env.name if env else "data", config.data.shuffle and split == "train"
    return TaskSource(rows, env=name, split=split, seed=config.seed, shuffle=shuffle, is_pairs=algorithm.is_pairs)


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
    config, gib = plan.config, 2**30
    hf = load_model_config(config.actors["policy"].model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    num_params = num_trained = sum(p.numel() for p in model.parameters())
    width, lora, frozen = compute_dtype(config).itemsize, config.actors["policy"].lora, ""
    if lora.rank:
        num_trained = adapter_size(lora, linear_layers(model))
        frozen_bytes = (0.5 if lora.quantize == "nf4" else width) * num_params / num_ranks
        frozen = f" of adapters + {frozen_bytes / gib:.3f} GiB frozen weights"
    moments = {"sgd": 4, "adamw8bit": 2, "paged_adamw8bit": 2}.get(config.optim.name, 8)
    kind, of_task = "replies" if plan.algorithm.is_pairs else "rows", 2 if plan.algorithm.is_pairs else 1
    if plan.algorithm.is_rl:
        kind, of_task = "episodes", config.group_size
    episodes = config.tasks_per_step * of_task
    # About 16 numbers of the hidden size and 3 of the MLP's size are kept per token and layer, two with recomputation.
    kept = (
        2 * hf.hidden_size
        if config.learner.activation_checkpointing
        else 16 * hf.hidden_size + 3 * hf.intermediate_size
    )
    activations = config.learner.microbatch_tokens * hf.num_hidden_layers * kept * width
    rows = {
        "algorithm": f"{config.algorithm} {plan.algorithm}",
        "model": f"{config.actors['policy'].model}, {num_params / 1e6:.2f} M parameters",
        "data": f"{len(plan.train)} rows to train on" + (f", {len(plan.eval)} held out" if plan.eval else ""),
        "ranks": f"{num_ranks}, mesh dp={num_ranks}",
        "tokens per step": f"at most {episodes * config.max_context_tokens}: {episodes} {kind} of at most "
        f"{config.max_context_tokens} tokens and {config.turn_limit} turns, in microbatches of "
        f"{config.learner.microbatch_tokens}",
        "updates": f"{config.num_steps} steps, {config.learner.minibatches} minibatches, {config.learner.epochs} epochs",
        "memory to learn": f"{(8 + moments) * num_trained / num_ranks / gib:.3f} GiB weights, gradients and optimizer{frozen}"
        f" + {activations / gib:.3f} GiB activations",
    }
    if has_reference(plan) and not lora.rank:
        rows["memory to learn"] += f" + {4 * num_params / num_ranks / gib:.3f} GiB reference"
    if plan.algorithm.is_rl:
        heads = getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        slots = min(config.rollout.max_concurrent, episodes)
        cache = slots * config.max_context_tokens * 2 * hf.num_hidden_layers * heads * head_dim * width
        own = 0 if num_ranks == 1 and width == 4 and not lora.rank else width * num_params
        rows["memory to generate"] = f"{own / gib:.3f} GiB weights{'' if own else ' (reads the learner in place)'}"
        rows["memory to generate"] += f" + {cache / gib:.3f} GiB KV cache of {slots} slots"
    return "\n".join(f"{name:<20} {text}" for name, text in rows.items())


def has_reference(plan: Plan) -> bool:
    is_dpo = plan.algorithm.objective == "dpo"
    return plan.algorithm.kl_coef > 0 or (is_dpo and not plan.config.preference.reference_free)


def compute_dtype(config: Config) -> torch.dtype:
    if config.learner.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, config.learner.dtype)


def build(plan: Plan, ranks: Ranks) -> Run:
    """Loads the model and makes all that lives as long as the run."""
    config, out = plan.config, Path(plan.config.out)
    all_gather_json(None, ranks)  # every rank has seen that the folder is free
    if ranks.rank == 0:
        for folder in ("rollouts", "checkpoints", "hf"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(to_yaml(config))
    path = config.actors["policy"].model
    dtype = compute_dtype(config)
    lora = config.actors["policy"].lora
    is_scoring = plan.algorithm.objective == "rm"
    policy = make_policy(path, dtype, ranks, config.learner.activation_checkpointing, lora, config.seed, is_scoring)
    reference = None
    if has_reference(plan):
        reference = policy if policy.adapter else make_reference(path, dtype, ranks)
    learner = Learner(config, plan.algorithm, policy, ranks, reference)
    found = checkpoints_in(out / "checkpoints")
    state = load_checkpoint(found[-1], {"policy": learner}) if config.resume and found else {"step": 0, "position": 0}
    engine, actors = None, {}
    if plan.algorithm.is_rl:
        model = policy.hf if reads_in_place(policy) else load_hf_model(path, dtype, ranks.device)
        engine = make_engine(config, model, plan.chat.tokenizer)
        stop = tuple(dict.fromkeys([*plan.chat.stop_token_ids, *end_token_ids(policy)]))
        limits = {"max_turns": config.turn_limit, "max_context_tokens": config.max_context_tokens}
        actors["policy"] = Actor(name="policy", engine=engine, chat=plan.chat, stop_token_ids=stop, **limits)
    all_gather_json(None, ranks)  # the folders are there
    log = RunLog(out, ranks, config.num_steps, state["step"])
    parts = {"ranks": ranks, "learner": learner, "engine": engine, "actors": actors, "log": log}
    return Run(**vars(plan), **parts, start=state["step"], position=state["position"])


def imitation(run: Plan, task: Task, group_id: str = "") -> list[TrainingSample]:
    """The samples of one row that is to be imitated, or of one pair. Raises ValueError if it is too long, unless such rows
    are skipped."""
    samples_of_row = {"dpo": reply_pair, "rm": scored_pair}.get(run.algorithm.objective, imitation_samples)
    try:
        samples = samples_of_row(run.chat, task.row)
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
