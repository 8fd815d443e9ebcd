"""Flags -> a checked plan -> a run with its models. All that can be refused is refused before a model loads."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_core.config import Config
from rl_core.data.chat import Chat, load_chat
from rl_core.data.curriculum import Curriculum, Progress, WeightedOrder
from rl_core.data.rows import ROLLOUTS, TOKENIZERS, is_trajectory, load_rows
from rl_core.data.tasks import TaskMix, TaskSource
from rl_core.distributed import Ranks, barrier, explain_timeouts, make_mesh
from rl_core.learning.algorithms import CRITIC, Algorithm, make_algorithm
from rl_core.learning.attention import find_kernel
from rl_core.learning.checkpoint import checkpoints_in, load_checkpoint
from rl_core.learning.learner import Learner
from rl_core.learning.liger import apply_liger, check_liger
from rl_core.learning.loading import second_model
from rl_core.learning.lora import DEFAULT, check_lora, merged_weights, peft_config
from rl_core.learning.model import (
    Policy,
    PolicyModel,
    SharedPolicy,
    compile_blocks,
    end_token_ids,
    is_in_4_bits,
    load_hf_model,
    load_model_config,
    make_policy,
    make_reference,
    reads_in_place,
)
from rl_core.learning.offload import Offload, activations_on_host
from rl_core.learning.tensor_parallel import check_tensor_parallel
from rl_core.metrics import Mean, Metric, RunLog, add_metrics
from rl_core.rules import check, check_algorithm
from rl_core.run_folder import keep_config
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import DeviceLease, Engine, EngineSpec
from rl_core.sampling.env import Env, load_env
from rl_core.sampling.stream import Intake
from rl_core.sampling.weights import load_weights
from rl_core.types import Task, TrainingSample, counter_seed

ENGINES = {
    "embedded": "rl_core.engines.embedded:make_engine",
    "sglang": "rl_core.engines.sglang:make_engine",
}
# What makes samples of a row, by the algorithm.
ROWS = {
    "sft": "rl_core.options.imitation:imitation_samples",
    "dpo": "rl_core.options.pairs:reply_pair",
    "rm": "rl_core.options.pairs:scored_pair",
}
API_ACTOR = "rl_core.engines.api:ApiActor"
CHECKED_ROWS = 20_000  # of which the length is checked at start-up; rows beyond are checked when they are drawn


@dataclass(kw_only=True)
class Plan:
    """What is known and checked before any model loads."""

    config: Config
    algorithm: Algorithm
    envs: dict[str, Env]  # by the name of its file
    train: TaskSource | TaskMix
    eval: dict[str, TaskSource]  # by the name of its environment
    chats: dict[str, Chat]  # of the actors that have a model here
    remote: dict[str, Any]  # actors that speak by an endpoint
    curriculum: Curriculum | None = None  # of the training tasks, where an environment has task_weight()
    takes_turns: bool = False  # one engine is awake at a time
    memory_fracs: dict[str, float] = field(default_factory=dict)  # of a GPU, for each SGLang engine

    @property
    def chat(self) -> Chat:
        """Of the actor that learns, where there is one alone."""
        return self.chats[self.config.trained[0]]


@dataclass(kw_only=True)
class Run(Plan):
    """A run with its models; learners learn, engines sample, both by the name of their actor."""

    ranks: Ranks
    learners: dict[str, Learner]
    engines: dict[str, Engine | None]  # none where rows are imitated; None: another rank has this actor's engine
    older: dict[str, Engine | None]  # of actors that speak by older weights too
    actors: dict[str, Any]
    lease: DeviceLease | None  # where engines share a device
    log: RunLog | None  # None on ranks that only sample
    start: int = 0
    position: int = 0  # of the next training task in the order of the data
    pending: list[int] = field(default_factory=list)  # positions before it of which no step has learned yet
    intake: Intake | None = None  # of the groups that steps learn from
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the step under way
    canaries: dict[str, list[list]] = field(default_factory=dict)  # what engines said that learners still check

    @property
    def all_engines(self) -> list[Engine]:
        """Each engine of this rank once."""
        return list(dict.fromkeys(e for e in (*self.engines.values(), *self.older.values()) if e is not None))

    @contextmanager
    def timed(self, phase: str):
        began = time.monotonic()
        waiting = explain_timeouts(phase, self.ranks, self.config.timeout_s)
        with waiting, torch.profiler.record_function(phase):
            yield
        name = f"time/{phase}_s"
        # What several actors take in one step adds up.
        add_metrics(self.metrics, {name: Mean(time.monotonic() - began, 0.0 if name in self.metrics else 1.0)})

    def note(self, room: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=room)


def make_plan(config: Config) -> Plan:
    """Everything that can be refused before a model loads. Raises ValueError."""
    out = Path(config.out) if config.out else None
    if out and out.exists() and not config.resume and not config.dry_run and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists already; go on with it by --resume, or name another folder")
    algorithm = make_algorithm(config.algorithm, config.algo)
    config, envs = load_envs(config)
    has_advantage_fn = bool(envs) and all(env.advantage_fn for env in envs.values())
    if has_advantage_fn and config.algo.advantage is None and algorithm.is_rl:
        if algorithm.has_critic:
            raise ValueError(
                f"{config.env_path} defines advantage_fn, which --algorithm {config.algorithm} would not call: it asks a "
                "critic; set --algo.advantage gae to ask it all the same, or take --algorithm grpo"
            )
        algorithm.advantage = "custom"
    if algorithm.advantage == "custom" and not has_advantage_fn:
        raise ValueError(f"--algo.advantage=custom needs def advantage_fn(rewards) in {config.env_path}; define it")
    check_algorithm(algorithm, config)
    if (config.max_staleness or config.rollout.lagged_frac) and config.algo.correction is None:
        algorithm.correction = "tis"  # what older weights sampled is weighted by how likely the newer make it
    train = train_source(config, envs, algorithm)
    held_out = {}
    if config.eval_every:
        found = {name: load_source(config, envs.get(name), name, "eval", algorithm) for name in envs or ["data"]}
        held_out = {name: source for name, source in found.items() if source is not None}
        if not held_out:
            raise ValueError(
                "--eval_every asks for evaluation, but there is no --data.eval and no load_tasks in the environment"
            )
    size = int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= config.engine_ranks < size:
        raise ValueError(
            f"--engine_ranks={config.engine_ranks} must leave at least one of {size} rank{'s' * (size > 1)} to learn; raise "
            "--nproc_per_node, or lower it"
        )
    make_mesh(size - config.engine_ranks, config.dp_replicate, config.cp, config.tp)
    config = choose_engine(config, config.engine_ranks or size)
    chats = {name: check_model(config, name) for name, actor in config.actors.items() if not actor.api}
    remote = {name: make_api_actor(config, name) for name, actor in config.actors.items() if actor.api}
    plan = Plan(config=config, algorithm=algorithm, envs=envs, chats=chats, remote=remote, train=train, eval=held_out)
    share_device(plan)
    for source in (*(train.sources if isinstance(train, TaskMix) else [train]), *held_out.values()):
        check_lengths(plan, source)
    plan.curriculum = make_curriculum(plan)
    return plan


def share_device(plan: Plan) -> None:
    """Several engines of one device take turns, or are awake together and divide --engine_memory_frac."""
    config = plan.config
    local = {config.actors[name].share or name for name in plan.chats if not config.actors[name].servers}
    awake = config.rollout.engines_awake
    is_one = awake == "one" or (awake == "auto" and config.engine == "sglang")
    plan.takes_turns = plan.algorithm.is_rl and len(local) > 1 and is_one
    num_awake = 1 if plan.takes_turns else max(1, len(local))
    for name in local:
        num_engines = 1 + (config.rollout.lagged_frac > 0 and config.actors[name].is_trained)
        plan.memory_fracs[name] = config.engine_memory_frac / num_awake / num_engines


def choose_engine(config: Config, num_ranks: int) -> Config:
    """--engine auto becomes what it stands for here. Raises ValueError if that cannot be done."""
    if config.engine == "auto":
        has_sglang = torch.cuda.is_available() and importlib.util.find_spec("sglang") is not None
        in_4_bits = any(config.actors[owner].lora.quantize != "none" for owner in config.sharers)
        config = replace(config, engine="sglang" if has_sglang and not in_4_bits else "embedded")
        check(config)
    if config.engine == "sglang":
        imported("rl_core.engines.sglang_server:check_sglang")()
    if num_ranks % config.engine_tp:
        fits = max(d for d in range(1, config.engine_tp) if num_ranks % d == 0)
        raise ValueError(f"--engine_tp={config.engine_tp} must divide the number of ranks, {num_ranks}; try {fits}")
    for name, actor in config.actors.items():
        if (n := len(actor.servers)) and num_ranks % n:
            raise ValueError(
                f"--actors.{name}.engine_urls names {n} servers for {num_ranks} ranks that sample, which is not a whole number "
                f"for each; name {max(d for d in range(1, n) if num_ranks % d == 0)}"
            )
    return config


def check_model(config: Config, name: str) -> Chat:
    """The chat template of an actor whose model is here. Raises ValueError if it cannot do what is asked of it."""
    actor = config.actors[name]
    model_config = load_model_config(actor.model)
    if actor.is_trained:
        check_lora(actor.lora, model_config)
        check_tensor_parallel(config.tp, model_config, actor.lora)
        if path := config.critic.model:
            critic_config = load_model_config(path)
            check_tensor_parallel(config.tp, critic_config)
            if critic_config.vocab_size != model_config.vocab_size:
                raise ValueError(
                    f"--critic.model={path} has a vocabulary of {critic_config.vocab_size} tokens, that of {name} has "
                    f"{model_config.vocab_size}: a critic reads the actor's tokens; take a model of the same family"
                )
    if config.learner.kernels == "liger":
        for path in filter(None, (actor.model, config.critic.model)):
            check_liger(load_model_config(path))
    return load_chat(actor.model, actor.chat_template)


def load_envs(config: Config) -> tuple[Config, dict[str, Env]]:
    """(the configuration with --max_turns filled in, environments by the names of their files). The flags' limits hold, then a
    file's own."""
    envs = {}
    for name, path in config.env_paths.items():
        env = envs[name] = load_env(path, hook_timeout_s=config.rollout.hook_timeout_s)
        env.check_actors(list(config.actors))
        own = config.env(name)
        env.max_turns = own.max_turns or config.max_turns or env.max_turns or (8 if env.is_multi_turn else 1)
        env.max_tokens = own.max_tokens or config.max_tokens
    if envs:
        own = {name: replace(config.env(name), max_turns=env.max_turns) for name, env in envs.items()}
        limit = max(env.max_turns for env in envs.values())
        config = replace(config, max_turns=limit, envs=own if len(envs) > 1 else config.envs)
        check(config)
    if config.is_rl:
        check_speakers(config, envs)
    if len({env.advantage_fn is None for env in envs.values()}) > 1:
        raise ValueError(f"of {config.env_path} some define advantage_fn and some do not; let all do, or none")
    return config, envs


def check_speakers(config: Config, envs: dict[str, Env]) -> None:
    """Raises ValueError if an actor that should learn can speak in no environment that is trained in."""
    trained_in = {n: env for n, env in envs.items() if config.env(n).weight}
    spoken = [env.speakers(list(config.actors)) for env in trained_in.values()]
    for name in config.trained:
        if all(names is not None and name not in names for names in spoken):
            paths = ", ".join(env.path for env in trained_in.values())
            raise ValueError(
                f"--actors.{name} would never speak, so that it cannot learn: `turns` of {paths} does not name it; name it "
                f"there, or give --actors.{name}.train false"
            )


def train_source(config: Config, envs: dict[str, Env], algorithm: Algorithm) -> TaskSource | TaskMix:
    weights = {name: config.env(name).weight for name in envs} or {"data": 1.0}
    sources = {}
    for name in (name for name, weight in weights.items() if weight):
        source = sources[name] = load_source(config, envs.get(name), name, "train", algorithm)
        if source is None:
            flag = "--data.train" if len(weights) == 1 else f"--envs.{name}.train"
            hint = f"; {envs[name].path} has no load_tasks" if envs else ""
            raise ValueError(f"{flag} is missing: a file or `datasets` name{hint}")
    if len(sources) == 1:
        return next(iter(sources.values()))
    return TaskMix(list(sources.values()), [weights[name] for name in sources])


def load_source(config: Config, env: Env | None, name: str, split: str, algorithm: Algorithm) -> TaskSource | None:
    path = getattr(config.envs.get(name), split, None) or getattr(config.data, split)
    if path:
        is_train = split == "train"
        may_choose = not algorithm.is_rl and (is_train or path.endswith(ROLLOUTS))
        min_reward, actor = config.data.min_reward if is_train else None, config.data.actor
        rows = load_rows(path, "train" if is_train else "test", *((min_reward, actor) if may_choose else ()))
        if (algorithm.is_rl or algorithm.is_pairs) and is_trajectory(rows[0]):
            raise ValueError(f"--data.{split} {path} holds a run's episodes, which are for --algorithm sft; name rows")
    elif env and env.load_tasks:
        rows = env.load_tasks(split)
    else:
        return None
    if env and algorithm.is_rl:
        env.check_columns(rows, path or f"load_tasks({split!r})")
    shuffle = config.data.shuffle and split == "train"
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
            env = plan.envs[task.env]
            prompts = ((chat, env.opening(task, name)) for name, chat in plan.chats.items())
            length = max(len(chat.prompt_ids(messages, env.tools)) for chat, messages in prompts)
            if length <= config.max_prompt_tokens:
                kept.append(index)
            elif not config.data.skip_long:
                raise ValueError(
                    f"{task.id}: a prompt of {length} tokens is longer than --max_prompt_tokens={config.max_prompt_tokens}; "
                    "raise it, or leave such rows out with --data.skip_long"
                )
    if len(kept) < len(source):
        source.keep(kept)


def make_curriculum(plan: Plan) -> Curriculum | None:
    """Of the environments with task_weight(), whose tasks are drawn by it from here on. None if there is none."""
    train, orders = plan.train, {}
    for source in (train.sources if isinstance(train, TaskMix) else [train]) if plan.algorithm.is_rl else ():
        if hook := plan.envs[source.env].hooks.get("task_weight"):
            columns, rows = (hook.required | hook.optional) - hook.ours, source.rows
            if columns and not hook.takes_all and (names := getattr(rows, "column_names", None)) is not None:
                rows = rows.select_columns(sorted(columns & set(names)))  # reading a row of a table is slow

            def weigh(row: int, known: Progress, env=plan.envs[source.env], rows=rows, source=source) -> float:
                values = {"tries": known.tries, "success_rate": known.success_rate, "mean_reward": known.mean_reward}
                return env.task_weight(f"{source.split}/{row}", rows[row], values)

            orders[source.env] = WeightedOrder(source, weigh, is_by_row=bool(columns) or hook.takes_all)
            source.order = orders[source.env]
    return Curriculum(train=train, orders=orders) if orders else None


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
    learns = ranks.link is None or not ranks.link.is_engine
    samples = plan.algorithm.is_rl and (ranks.link is None or not learns)
    if ranks.rank == 0 and learns:
        for folder in ("rollouts", "checkpoints", "hf"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        for line in keep_config(out, config):
            print(f"differs from {out / 'config.yaml'}: {line}", flush=True)
        if plan.algorithm.is_rl:
            fingerprints = {name: chat.fingerprint for name, chat in plan.chats.items()}
            (out / "rollouts" / TOKENIZERS).write_text(json.dumps(fingerprints))
    found = checkpoints_in(out / "checkpoints") if config.resume else []
    shared = shared_policies(config, ranks) if learns else {}
    learners = {name: make_learner(plan, name, ranks, shared.get(name)) for name in config.trained if learns}
    state = load_checkpoint(found[-1], learners) if found else {"step": 0, "position": 0}
    if config.resume and ranks.rank == 0 and learns:
        text = (
            f"goes on from step {state['step']}"
            if found
            else f"no checkpoint in {out / 'checkpoints'}: begins at step 0"
        )
        print(f"--resume: {text}", flush=True)
    if plan.curriculum:
        plan.curriculum.load(state.get("curriculum", {}))
    lease = DeviceLease() if plan.takes_turns else None
    speakers = list(config.actors) if samples else []
    local = [name for name in speakers if name not in plan.remote]
    engines, older, ends, models = make_engines(plan, local, learners, ranks)
    limits = {"max_turns": config.turn_limit, "max_context_tokens": config.max_context_tokens}
    actors = {}
    for name in speakers:
        actors[name] = plan.remote.get(name) or Actor(
            name=name,
            engine=engines[name],
            chat=plan.chats[name],
            stop_token_ids=tuple(dict.fromkeys([*plan.chats[name].stop_token_ids, *ends[name]])),
            max_tokens=config.actors[name].max_tokens,
            is_trainable=config.actors[name].is_trained,
            adapter=name if name in adapters_of(config, config.actors[name].share or name) else "",
            lease=None if config.actors[config.actors[name].share or name].engine_urls else lease,
            older=older.get(name),
            older_frac=config.rollout.lagged_frac,
            **limits,
        )
    if config.learner.kernels == "liger":
        # Last, since what is loaded after it is of Liger's classes, which lack options of some models.
        held = [*models, *(m.hf for x in learners.values() for m in x.models())]
        apply_liger(list({id(model): model for model in held}.values()))
    barrier(ranks)  # the folders are there
    log = RunLog(out, ranks, config.num_steps, state["step"]) if learns else None
    parts = {"ranks": ranks, "learners": learners, "engines": engines, "actors": actors, "log": log}
    parts |= {"older": older, "lease": lease}
    place = {"start": state["step"], "position": state["position"], "pending": state.get("pending", [])}
    return Run(**vars(plan), **parts, **place)


def make_engines(
    plan: Plan, names: list[str], learners: dict[str, Learner], ranks: Ranks
) -> tuple[dict[str, Engine | None], dict[str, Engine | None], dict[str, list[int]], list[nn.Module]]:
    """Each actor's engine, the engines with older weights, the tokens that end an actor's turn by its model, and what engines
    of this process sample with. Actors that share a model have one engine."""
    config, engines, older, ends, models = plan.config, {}, {}, {}, []
    made: dict[str, tuple[Engine | None, nn.Module, list[int]]] = {}  # by the name of the actor whose model it is
    for name in names:
        if (owner := config.actors[name].share or name) not in made:
            made[owner] = sampling_engine(plan, owner, learners.get(owner), ranks)
            own = [made[owner][1]]
            if config.rollout.lagged_frac and owner in learners:
                older[owner], second, _ = sampling_engine(plan, owner, None, ranks, "_older")
                own.append(second)
            models += own if config.engine_of(owner) == "embedded" else []
        engines[name], _, ends[name] = made[owner]
    return engines, older, ends, models


def adapters_of(config: Config, owner: str) -> list[str]:
    """Actors that train adapters beside the model of `owner`, which others share."""
    users = [owner, *config.sharers[owner]] if owner in config.sharers else []
    return [name for name in users if config.actors[name].is_trained]


def make_api_actor(config: Config, name: str) -> Any:
    actor = config.actors[name]
    return imported(API_ACTOR)(
        name=name,
        url=actor.api,
        model=actor.model,
        api_key_env=actor.api_key_env,
        max_turns=config.turn_limit,  # of several environments each sets its own
        max_tokens=actor.max_tokens,
        max_concurrent=actor.api_concurrency,
    )


def sampling_engine(
    plan: Plan, name: str, learner: Learner | None, ranks: Ranks, role: str = ""
) -> tuple[Engine | None, nn.Module, list[int]]:
    """An engine for a model, what it samples with (of SGLang's the shapes alone), and the tokens that end a turn by its
    generation_config.json. None: another rank's engine has this one's device."""
    config, is_own = plan.config, False
    if config.engine_of(name) == "sglang":
        module = imported("rl_core.engines.sglang:make_skeleton")(config.actors[name].model)
        ends = end_token_ids(module)
    else:
        module, ends = speaking_model(plan, name, learner, ranks)
        is_own = learner is None or not reads_in_place(learner.policy)
    spec = engine_spec(plan, name, module, ranks, role, is_own and plan.takes_turns)
    if spec is None:
        return None, module, ends
    return imported(ENGINES[config.engine_of(name)])(spec), module, ends


def engine_spec(
    plan: Plan, name: str, module: nn.Module, ranks: Ranks, role: str, owns_weights: bool
) -> EngineSpec | None:
    """Of an actor's engine on this rank. None: of each --engine_tp neighbours, or of those that share a server that runs
    already, the first has the engine. role: which of several engines of the actor."""
    config, actor = plan.config, plan.config.actors[name]
    stride = ranks.size // len(actor.servers) if actor.servers else config.engine_tp
    if ranks.rank % stride:
        return None
    # A rank has at most its share at once, of all that may be under way.
    groups = -(-config.tasks_per_step * (1 + config.max_staleness) * stride // ranks.size)
    adapters = {n: config.actors[n] for n in adapters_of(config, name)}
    return EngineSpec(
        name=name + role,
        model=actor.model,
        module=module,
        tokenizer=plan.chats[name].tokenizer,
        num_slots=min(config.rollout.max_concurrent, groups * config.group_size),
        max_context_tokens=config.max_context_tokens,
        dtype=compute_dtype(config),
        device=ranks.device,
        seed=counter_seed(config.seed, name + role, ranks.rank) % 2**31,
        adapters={n: peft_config(a.lora, module, a.model).to_dict() for n, a in adapters.items()},
        owns_weights=owns_weights,
        log=Path(config.out) / f"engine_{name}{role}_{ranks.rank:05d}.log",
        start_timeout_s=config.timeout_s,
        tp=config.engine_tp,
        memory_frac=round(plan.memory_fracs.get(name, config.engine_memory_frac), 3),
        url=actor.servers[ranks.rank // stride] if actor.servers else "",
        folder=actor.engine_folder,
    )


def speaking_model(plan: Plan, name: str, learner: Learner | None, ranks: Ranks) -> tuple[nn.Module, list[int]]:
    """What an engine samples with, and the tokens that end a turn by its generation_config.json: the learner's own model
    where it is whole, or its weights where several share them, else a copy in the dtype of compute."""
    policy = learner and learner.policy
    if policy is not None and reads_in_place(policy):
        model = second_model(policy.hf) if isinstance(policy, SharedPolicy) else policy.hf
        return model, end_token_ids(policy.hf)
    model = load_hf_model(plan.config.actors[name].model, compute_dtype(plan.config), ranks.device)
    if isinstance(policy, SharedPolicy) and is_in_4_bits(policy):
        load_weights(model, merged_weights(policy.hf, adapter=None))  # what its adapters learn beside
    return model, end_token_ids(model)


def shared_policies(config: Config, ranks: Ranks) -> dict[str, SharedPolicy]:
    """Of the actors that train adapters of one model, each model loaded once."""
    found = {}
    for owner, others in config.sharers.items():
        names = {owner: DEFAULT} | {name: f"of_{name}" for name in others if config.actors[name].is_trained}
        loras = {names[name]: (config.actors[name].lora, counter_seed(config.seed, name)) for name in names}
        lora, seed = loras.pop(DEFAULT)
        model = make_trained(config, config.actors[owner].model, ranks, lora, seed, more_adapters=loras)
        offload = Offload([], [], ranks.device)
        found |= {name: SharedPolicy(model, adapter, offload) for name, adapter in names.items()}
        if config.learner.offload == "phase" and not reads_in_place(found[owner]):
            offload.models.append(model)
    return found


def make_learner(plan: Plan, name: str, ranks: Ranks, policy: Policy | None = None) -> Learner:
    """The learner of an actor, with an optimizer that has not stepped yet, and with the reference and the critic that the
    algorithm asks for. Both start as the model at the start of the run. `policy`: what is shared."""
    config, actor = plan.config, plan.config.actors[name]
    if actor.lr is not None:
        config = replace(config, optim=replace(config.optim, lr=actor.lr))
    if policy is None:
        is_scoring = plan.algorithm.objective == "rm"
        policy = make_trained(config, actor.model, ranks, actor.lora, counter_seed(config.seed, name), is_scoring)
    reference = None
    if has_reference(plan):
        reference = policy if policy.adapter else make_reference(actor.model, compute_dtype(config), ranks)
        reference.attention = config.attention
    critic = make_critic(config, actor.model, ranks, name) if plan.algorithm.has_critic else None
    return Learner(config, plan.algorithm, policy, ranks, reference, critic, name=name)


def is_sharded(config: Config) -> bool:
    """Whether one rank alone holds its weights as shards."""
    return compute_dtype(config) != torch.float32 or config.learner.offload == "always"


def make_trained(config: Config, path: str, ranks: Ranks, *how, **more) -> PolicyModel:
    """A model that is trained, with what --learner.* says of its memory."""
    learner = config.learner
    on_host = learner.offload == "always"
    checkpointing = learner.activations == "recompute"
    find_kernel(config.attention, ranks.device)  # before the weights are read
    model = make_policy(path, compute_dtype(config), ranks, checkpointing, *how, on_host=on_host, **more)
    model.attention = config.attention
    if learner.activations == "offload":
        model.keeps_activations = activations_on_host
    if learner.kernels == "compile":
        compile_blocks(model)
    return model


def make_critic(config: Config, path: str, ranks: Ranks, name: str = "policy") -> Learner:
    """A whole model, --critic.model or the one at `path` with a value of 0 everywhere, sharded as the policy is;
    --optim with --critic.lr trains it."""
    model = make_trained(config, config.critic.model or path, ranks, is_scoring=True)
    return Learner(replace(config, optim=replace(config.optim, lr=config.critic.lr)), CRITIC, model, ranks, name=name)


def imported(name: str) -> Any:
    """What "module:attribute" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def imitation(run: Plan, task: Task, group_id: str = "") -> list[TrainingSample]:
    """The samples of one row that is to be imitated, or of one pair. Raises ValueError if it is too long, unless such rows
    are skipped."""
    weights = (run.config.sft.action_weight, run.config.sft.observation_weight) if run.config.algorithm == "sft" else ()
    try:
        samples = imported(ROWS[run.config.algorithm])(run.chat, task.row, *weights)
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
