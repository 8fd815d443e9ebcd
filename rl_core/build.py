"""Flags -> a checked plan -> a run with its models. All that can be refused is refused before a model loads."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import TOKENIZERS
from rl_core.data.tasks import TaskSource
from rl_core.distributed import Ranks, barrier, explain_timeouts, make_mesh
from rl_core.learning.algorithms import Algorithm, make_algorithm
from rl_core.learning.checkpoint import checkpoints_in, load_checkpoint
from rl_core.learning.learner import Learner
from rl_core.learning.model import end_token_ids
from rl_core.metrics import Mean, Metric, add_metrics
from rl_core.models import (
    LocalEngines,
    adapters_of,
    check_model,
    choose_engine,
    compute_dtype,
    make_api_actor,
    make_learners,
    readers_of,
    takes_turns,
)
from rl_core.rules import check_algorithm
from rl_core.run_folder import RunLog, keep_config
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import DeviceLease, Engine
from rl_core.sampling.env import Env
from rl_core.sampling.group import run_group
from rl_core.sampling.rollout import RolloutWorker, groups_at_once
from rl_core.sources import ImitatedRows, check_lengths, eval_sources, load_envs, train_source
from rl_core.types import option

CURRICULUM = "rl_core.options.curriculum:make_curriculum"
CANARY = "rl_core.options.canary:Canary"
OLDER_POLICY = "rl_core.options.older_policy:OlderPolicy"
REMOTE_ENGINES, ENGINE_SERVER = "rl_core.engines.remote:connect", "rl_core.engines.remote:EngineServer"


@dataclass(kw_only=True)
class Plan:
    """What is known and checked before any model loads."""

    config: Config
    algorithm: Algorithm
    envs: dict[str, Env]  # by the name of its file
    train: TaskSource
    eval: dict[str, TaskSource]  # by the name of its environment
    chats: dict[str, Chat]  # of the actors that have a model here
    endpoints: dict[str, Any]  # actors behind a URL, with no engine here
    imitated: ImitatedRows | None  # None: episodes are rolled out
    curriculum: Any  # an options.curriculum.Curriculum, where an environment has task_weight()


@dataclass(kw_only=True)
class Run(Plan):
    """A run with its models. Learners learn, engines sample, both by the name of their actor. Where rows are
    imitated there are no engines."""

    ranks: Ranks
    learners: dict[str, Learner]
    engines: dict[str, Engine | None] = field(default_factory=dict)  # None: another rank has this actor's engine
    actors: dict[str, Any] = field(default_factory=dict)
    lease: DeviceLease | None = None  # where engines share a device
    worker: RolloutWorker | None = None
    canary: Any = None  # an options.canary.Canary
    older: Any = None  # an options.older_policy.OlderPolicy, where a part of the turns is by older weights
    server: Any = None  # an engines.remote.EngineServer, on a rank that only samples
    log: RunLog | None = None  # None on ranks that only sample
    start: int = 0
    position: int = 0  # of the next training task in the order of the data
    pending: list[int] = field(default_factory=list)  # positions before it of which no step has learned yet
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the step under way
    failed_rows: dict[tuple[str, str], float] = field(default_factory=dict)  # see refuse_failures
    writing: asyncio.Future | None = None  # the file of rollouts under way

    @property
    def all_engines(self) -> list[Engine]:
        """Each engine of this rank once."""
        older = self.older.engines.values() if self.older else ()
        return list(dict.fromkeys(e for e in (*self.engines.values(), *older) if e is not None))

    @contextmanager
    def timed(self, phase: str):
        began = time.monotonic()
        waiting = explain_timeouts(phase, self.ranks, self.config.timeout_s)
        with waiting, torch.profiler.record_function(phase):
            yield
        name = f"time/{phase}_s"
        # What several actors take in one step adds up.
        add_metrics(self.metrics, {name: Mean(time.monotonic() - began, 0.0 if name in self.metrics else 1.0)})

    def note(self, prefix: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=prefix)


def make_plan(config: Config) -> Plan:
    """Everything that can be refused before a model loads. Raises ValueError."""
    out = Path(config.out) if config.out else None
    if out and out.exists() and not config.resume and not config.dry_run and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists already; go on with it by --resume, or name another folder")
    config, envs = load_envs(config)
    algorithm = choose_algorithm(config, envs)
    train = train_source(config, envs, algorithm)
    evals = eval_sources(config, envs, algorithm) if config.eval_every else {}
    size = int(os.environ.get("WORLD_SIZE", 1))
    make_mesh(size, config.dp_replicate, config.cp, config.tp, config.engine_ranks)
    config = choose_engine(config, config.engine_ranks or size)
    chats = {name: check_model(config, name) for name, actor in config.actors.items() if not actor.api}
    imitated = None if algorithm.is_rl else ImitatedRows(config, chats[config.trained[0]])
    for source in (*train.sources, *evals.values()):
        check_lengths(config, envs, chats, imitated, source)
    is_weighted = algorithm.is_rl and any("task_weight" in env.hooks for env in envs.values())
    curriculum = option(CURRICULUM)(train, envs) if is_weighted else None
    return Plan(
        config=config,
        algorithm=algorithm,
        envs=envs,
        train=train,
        eval=evals,
        chats=chats,
        endpoints={name: make_api_actor(config, name) for name, actor in config.actors.items() if actor.api},
        imitated=imitated,
        curriculum=curriculum,
    )


def choose_algorithm(config: Config, envs: dict[str, Env]) -> Algorithm:
    """The preset with the parts that were set, and those that advantage_fn and older weights ask for."""
    algorithm = make_algorithm(config.algorithm, config.algo)
    has_advantage_fn = bool(envs) and all(env.advantage_fn for env in envs.values())
    if has_advantage_fn and config.algo.advantage is None and algorithm.is_rl and not algorithm.has_critic:
        algorithm = replace(algorithm, advantage="custom")
    check_algorithm(algorithm, config, has_advantage_fn)
    if (config.max_staleness or config.rollout.lagged[0]) and config.algo.correction is None:
        algorithm = replace(algorithm, correction="tis")  # weights each token by how likely the newer policy makes it
    return algorithm


def build(plan: Plan, ranks: Ranks) -> Run:
    """Loads the models and makes all that lives as long as the run."""
    config, out = plan.config, Path(plan.config.out)
    if ranks.rank == 0 and not ranks.is_engine:
        prepare_folder(plan, out)
    found = checkpoints_in(out / "checkpoints") if config.resume else []
    learners = {} if ranks.is_engine else make_learners(config, plan.algorithm, ranks)
    state = load_checkpoint(found[-1], learners) if found else {"step": 0, "position": 0}
    if config.resume and ranks.rank == 0 and not ranks.is_engine:
        text = f"goes on from step {state['step']}" if found else f"no checkpoint in {out}: begins at step 0"
        print(f"--resume: {text}", flush=True)
    if plan.curriculum:
        plan.curriculum.load(state.get("curriculum", {}))
    barrier(ranks)  # the folders are there
    run = {"start": state["step"], "position": state["position"], "pending": state.get("pending", [])}
    run |= {"ranks": ranks, "learners": learners}
    if not ranks.is_engine:
        run["log"] = RunLog(out, ranks, config.num_steps, state["step"])
    if plan.algorithm.is_rl:
        run |= make_samplers(plan, learners, ranks)
    elif config.learner.kernels == "liger":
        option("rl_core.options.liger:apply_liger")(
            [model.hf for learner in learners.values() for model in learner.models()]
        )
    return Run(**vars(plan), **run)


def prepare_folder(plan: Plan, out: Path) -> None:
    for folder in ("rollouts", "checkpoints", "hf"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for line in keep_config(out, plan.config):
        print(f"differs from {out / 'config.yaml'}: {line}", flush=True)
    if plan.algorithm.is_rl:
        fingerprints = {name: chat.fingerprint for name, chat in plan.chats.items()}
        (out / "rollouts" / TOKENIZERS).write_text(json.dumps(fingerprints))


def make_samplers(plan: Plan, learners: dict[str, Learner], ranks: Ranks) -> dict[str, Any]:
    """What a run needs to sample: engines, actors, the environment and the worker. A rank that only samples has engines and
    their server; where there are such ranks, the others have engines that ask them."""
    config, more = plan.config, {}
    lease = DeviceLease() if takes_turns(config) else None
    if ranks.engine_ranks and not ranks.is_engine:
        engines, lease = option(REMOTE_ENGINES)(list(plan.chats), ranks, compute_dtype(config), config.timeout_s), None
    else:
        tokenizers = {name: chat.tokenizer for name, chat in plan.chats.items()}
        local = LocalEngines(config=config, tokenizers=tokenizers, learners=learners, ranks=ranks)
        engines = local.make(list(plan.chats))
        if config.rollout.lagged[0]:
            more["older"] = option(OLDER_POLICY)(
                engines=local.make(config.trained, "_older"), learners=learners, every=config.rollout.lagged[1],
                dtype=compute_dtype(config), folder=Path(config.out) / "older" if ranks.rank == 0 else None,
            )  # fmt: skip
        if config.learner.kernels == "liger":
            # Last, since what is loaded after it is of Liger's classes, which lack options of some models.
            held = [*local.modules, *(model.hf for learner in learners.values() for model in learner.models())]
            option("rl_core.options.liger:apply_liger")(list({id(model): model for model in held}.values()))
    if ranks.is_engine:
        return {"engines": engines, "server": option(ENGINE_SERVER)(engines, lease, ranks, config.timeout_s)}
    actors = make_actors(plan, engines, more.get("older"), lease)
    ahead = config.tasks_per_step * (1 + config.max_staleness)
    width = groups_at_once(actors, config.rollout, ahead, config.group_size, ranks)
    play = partial(run_group, plan.envs, actors, config.rollout)
    more["worker"] = RolloutWorker(play, ranks, width, "train", config.timeout_s)
    if config.canary_tolerance != 0:
        more["canary"] = option(CANARY)(
            learners=learners, actors=actors, readers=readers_of(config, learners, ranks), ranks=ranks,
            dtype=compute_dtype(config), tolerance=config.canary_tolerance,
        )  # fmt: skip
    return more | {"engines": engines, "actors": actors, "lease": lease}


def make_actors(plan: Plan, engines: dict[str, Engine | None], older: Any, lease: DeviceLease | None) -> dict[str, Any]:
    config, actors = plan.config, dict(plan.endpoints)
    for name, chat in plan.chats.items():
        own = config.actors[name]
        owner = own.share or name
        ends = [*chat.stop_token_ids, *end_token_ids(own.model)]
        actors[name] = Actor(
            name=name,
            engine=engines[name],
            chat=chat,
            stop_token_ids=tuple(dict.fromkeys(ends)),
            max_turns=config.turn_limit,
            max_context_tokens=config.max_context_tokens,
            max_tokens=own.max_tokens,
            is_trainable=own.is_trained,
            adapter=name if name in adapters_of(config, owner) else "",
            lease=None if config.actors[owner].engine_urls else lease,
            older=older.engines.get(name) if older else None,
            older_frac=config.rollout.lagged[0],
        )
    return {name: actors[name] for name in config.actors}
