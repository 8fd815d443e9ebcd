"""Flags -> a checked plan -> a run with its models. All that can be refused is refused before a
model loads."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rl_core import models, registry
from rl_core.algorithms import Algorithm, make_algorithm
from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import write_tokenizers
from rl_core.data.tasks import TaskSource
from rl_core.distributed import MESH_FLAGS, Mesh, Ranks, barrier, explain_timeouts, make_mesh
from rl_core.learning.checkpoint import load_checkpoint, newest_intact, trained_learners
from rl_core.learning.policy import end_token_ids
from rl_core.metrics import Max, Mean, Metric, add_metrics
from rl_core.rules import check_algorithm
from rl_core.run_folder import RunLog, keep_codes, keep_config
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import DeviceLease, Engine
from rl_core.sampling.env import Env
from rl_core.sampling.kept_groups import read_groups
from rl_core.sampling.rollout import RolloutWorker, groups_at_once, run_group
from rl_core.sources import eval_sources, load_envs, train_tasks


@dataclass(kw_only=True)
class Plan:
    """What is known and checked before any model loads."""

    config: Config
    algorithm: Algorithm
    mesh: Mesh
    envs: dict[str, Env]  # by the name of its file
    train: TaskSource
    eval: dict[str, TaskSource]  # by the name of its environment, or of the held-out set
    chats: dict[str, Chat]  # of the actors that have a model here
    endpoints: dict[str, Any]  # actors behind a URL, with no engine here
    imitated: Any  # an plugins.sft_dataset.ImitatedRows; None: episodes are rolled out
    curriculum: Any  # an plugins.curriculum.Curriculum, where an environment has task_weight()


def make_plan(config: Config, module: ModuleType | None = None, is_planned: bool = False) -> Plan:
    """Everything that can be refused before a model loads. `module`: instead of --env_path's file.
    `is_planned`: the run is for another machine. Raises ValueError."""
    registry.quiet()()
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder that does not exist yet")
    if out.exists() and not config.resume and any(out.iterdir()):
        raise ValueError(
            f"--out {out} exists already; go on with it by --resume, or name another folder"
        )
    if config.trackers:
        registry.check_trackers()(config.trackers)
    config, envs = load_envs(config, module)
    algorithm = choose_algorithm(config, envs)
    train = train_tasks(config, envs, algorithm)
    evals = eval_sources(config, envs, algorithm) if config.eval_every else {}
    size = int(os.environ.get("WORLD_SIZE", 1))
    mesh = make_mesh(size, **{name: getattr(config, name) for name in MESH_FLAGS})
    config = models.choose_engine(config, config.engine_ranks or size, is_planned)
    chats = {
        name: models.check_model(config, name)
        for name, actor in config.actors.items()
        if not actor.api
    }
    if algorithm.is_rl:
        check_tools(config, envs, chats)
    imitated = (
        None if algorithm.is_rl else registry.imitated_rows()(config, chats[config.trained[0]])
    )
    for source in (*train.sources, *evals.values()):
        registry.check_lengths()(config, envs, chats, imitated, source)
    if config.num_epochs:
        num_steps = math.ceil(config.num_epochs * len(train) / config.tasks_per_step)
        config = replace(config, num_steps=num_steps, num_epochs=None)
    is_weighted = algorithm.is_rl and any("task_weight" in env.hooks for env in envs.values())
    return Plan(
        config=config,
        algorithm=algorithm,
        mesh=mesh,
        envs=envs,
        train=train,
        eval=evals,
        chats=chats,
        endpoints={
            name: models.make_api_actor(config, name)
            for name, actor in config.actors.items()
            if actor.api
        },
        imitated=imitated,
        curriculum=registry.make_curriculum()(train, envs) if is_weighted else None,
    )


def check_tools(config: Config, envs: dict[str, Env], chats: dict[str, Chat]) -> None:
    """Raises ValueError if calls of an actor that gets an environment's tools are not read. Others,
    such as a judge that hooks ask, get none."""
    for env in envs.values():
        speakers = env.speakers(list(config.actors))
        if speakers is None:
            speakers = config.trained  # A function of the file decides; these speak somewhere.
        for name in speakers:
            if name in chats and env.tools:
                chats[name].tool_calls.check(env.tools, env.path)


def choose_algorithm(config: Config, envs: dict[str, Env]) -> Algorithm:
    """The preset with the parts that were set, and those that advantage_fn and older weights ask
    for."""
    algorithm = make_algorithm(config.algorithm, config.algo)
    has_advantage_fn = bool(envs) and all(env.advantage_fn for env in envs.values())
    if (
        has_advantage_fn
        and config.algo.advantage is None
        and algorithm.is_rl
        and not algorithm.has_critic
    ):
        algorithm = replace(algorithm, advantage="custom")
    check_algorithm(algorithm, config, has_advantage_fn)
    if (config.max_staleness or config.rollout.lagged[0]) and config.algo.correction is None:
        # Weights each token by how likely the newer policy makes it.
        algorithm = replace(algorithm, correction="tis")
    return algorithm


class Run:
    """A run with its models. Learners learn, engines sample, both by the name of their actor. Where
    rows are imitated there are no engines and no actors; a rank that only samples has no
    learners."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        on_step: Callable[[int, dict[str, float]], Any] | None = None,
    ):
        """Loads the models and makes all that lives as long as the run. `on_step(step, metrics)`
        ends it by returning False."""
        self.on_step = on_step or (lambda step, metrics: None)
        config, out = plan.config, Path(plan.config.out)
        self.plan, self.config, self.out, self.ranks = plan, config, out, ranks
        for endpoint in plan.endpoints.values():
            endpoint.ping()
        if ranks.is_writer:
            prepare_folder(plan, out)
        found = newest_intact(out / "checkpoints", ranks) if config.resume else None
        self.learners = (
            {} if ranks.is_engine else models.make_learners(config, plan.algorithm, ranks)
        )
        state = {"step": 0, "position": 0, "to_evaluate": True}
        if found:
            state = load_checkpoint(found, self.learners, is_verified=True)
        text = (
            f"goes on from step {state['step']}"
            if found
            else f"no checkpoint in {out}: begins at step 0"
        )
        if state["step"] >= config.num_steps > 0:
            text = f"nothing is left to do, --num_steps={config.num_steps} are done; raise it"
        self.beginning = f"--resume: {text}" if config.resume else f"begins at step 0, in {out}"
        if plan.curriculum:
            plan.curriculum.load(state.get("curriculum", {}))
        barrier(ranks)  # the folders are there
        is_evaluated_again = bool(state["to_evaluate"] and config.eval_every)
        self.log = RunLog(out, ranks, state["step"], is_evaluated_again)
        self.trackers = registry.trackers()(config) if config.trackers and ranks.is_writer else None
        self.keeper = registry.keeper()(
            out / "best", config.save_minutes, config.keep_best, ranks.is_writer
        )
        self.start: int = state["step"]
        self.to_evaluate: bool = state["to_evaluate"]  # before the first step
        self.updates_before = {
            name: learner.num_updates for name, learner in trained_learners(self.learners).items()
        }
        self.position: int = state["position"]  # of the next training task in the order of the data
        # Positions before it of which no step has learned yet.
        self.pending: list[int] = state.get("pending", [])
        self.metrics: dict[str, Metric] = {}  # of the step under way
        self.failed_rows: dict[tuple[str, str], float] = {}  # see refuse_failures
        # Episodes of this process, and those that failed.
        self.tallies = {"train": Counter(), "eval": Counter()}
        self.writing: asyncio.Future | None = None  # the file of rollouts under way
        self.make_samplers()
        self.kept_groups = self.go_on(found, state) if found and not ranks.is_engine else {}
        self.terminal = registry.terminal()(self)

    def go_on(self, checkpoint: Path, state: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """By position, what was under way in this rank's groups when the checkpoint was written."""
        num_collected, oldest = state.get("collected", 0), self.start - self.config.max_staleness
        self.worker.go_on(num_collected, len(self.pending))
        numbered = enumerate(self.pending, num_collected)
        own = {position for number, position in numbered if self.worker.is_own(number)}
        return read_groups(checkpoint, own, oldest)

    def make_samplers(self) -> None:
        """Engines, and what samples with them. Where ranks only sample, the others have engines
        that ask them."""
        plan, config, learners, ranks = self.plan, self.config, self.learners, self.ranks
        chats, dtype = plan.chats if plan.algorithm.is_rl else {}, models.compute_dtype(config)
        is_elsewhere, self.older = ranks.engine_ranks > 0 and not ranks.is_engine, None
        # Where engines share a device.
        self.lease = DeviceLease() if models.takes_turns(config) and not is_elsewhere else None
        self.engines = {} if is_elsewhere else models.make_engines(config, chats, learners, ranks)
        if config.rollout.lagged[0]:
            self.older = registry.older_policy()(
                engines={
                    name: models.make_engine(config, name, chats[name], None, ranks, "_older")
                    for name in config.trained
                },
                learners=learners,
                every=config.rollout.lagged[1],
                dtype=dtype,
                folder=self.out / "older" if ranks.is_writer else None,
            )
        if config.learner.kernels == "liger":
            # Last, since what is loaded after it is of Liger's classes, which lack options of some
            # models.
            held = [model.hf for learner in learners.values() for model in learner.models()]
            registry.apply_liger()(
                held + [engine.model for engine in self.all_engines if hasattr(engine, "model")]
            )
        if is_elsewhere:
            self.engines = registry.connect()(list(chats), ranks, dtype, config.timeout_s)
        self.server = (
            registry.engine_server()(self.engines, self.lease, ranks, config.timeout_s)
            if ranks.is_engine
            else None
        )
        self.actors = make_actors(plan, self.engines, self.older, self.lease)
        ahead = config.tasks_per_step * (1 + config.max_staleness)
        width = groups_at_once(self.actors, config.rollout, ahead, config.group_size, ranks)
        play = partial(run_group, plan.envs, self.actors, config.rollout)
        order = None
        if config.rollout.fixed_order:
            width, order = sys.maxsize, registry.fixed_order()()
        self.worker = RolloutWorker(play, ranks, width, "train", config.timeout_s, order)
        self.canary = None
        if plan.algorithm.is_rl and config.canary_tolerance != 0:
            readers = {name for name, learner in learners.items() if models.is_read(learner)}
            self.canary = registry.canary()(
                learners=learners,
                actors=self.actors,
                readers=readers,
                ranks=ranks,
                dtype=dtype,
                tolerance=config.canary_tolerance,
            )

    @property
    def all_engines(self) -> list[Engine]:
        """Each engine of this rank once."""
        older = self.older.engines.values() if self.older else ()
        return list(dict.fromkeys(e for e in (*self.engines.values(), *older) if e is not None))

    @property
    def begun(self) -> list[int]:
        """Positions of tasks that were drawn and of which no step has learned yet."""
        return [*(group.position for group in self.worker.pending.values()), *self.pending]

    @contextmanager
    def timed(self, phase: str):
        began = time.monotonic()
        self.terminal.show(phase)
        waiting = explain_timeouts(phase, self.ranks, self.config.timeout_s)
        with waiting, torch.profiler.record_function(phase):
            yield
        if self.ranks.device.type == "cuda" and phase != "step":  # which holds the others
            self.note("memory/", {f"{phase}_gib": Max(torch.cuda.max_memory_allocated() / 2**30)})
            torch.cuda.reset_peak_memory_stats()
        name = f"time/{phase}_s"
        # What several actors take in one step adds up.
        self.note("", {name: Mean(time.monotonic() - began, 0.0 if name in self.metrics else 1.0)})

    def write_metrics(self, step: int) -> dict[str, float]:
        """What all ranks noted, by which they agree when to save and to end too."""
        self.note("", self.keeper.metrics())
        return self.keeper.agree(self.log.write(step, self.metrics))

    def note(self, prefix: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=prefix)


def prepare_folder(plan: Plan, out: Path) -> None:
    for folder in ("rollouts", "checkpoints", "hf"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    if plan.config.push_to_hub:
        registry.create()(plan.config)
    for line in keep_config(out, plan.config):
        print(f"differs from {out / 'config.yaml'}: {line}", flush=True)
    codes = {env.path.partition("?")[0]: env.code() for env in plan.envs.values()}
    for name in keep_codes(out, codes):
        print(f"differs from {out / 'env_code.yaml'}: {name} has changed since", flush=True)
    for line in registry.data_warnings()(plan.config, plan.algorithm, plan.train, plan.eval):
        print(f"warning: {line}", flush=True)
    if plan.algorithm.is_rl:
        write_tokenizers(out / "rollouts", plan.chats)


def make_actors(
    plan: Plan, engines: dict[str, Engine | None], older: Any, lease: DeviceLease | None
) -> dict[str, Any]:
    config, actors = plan.config, dict(plan.endpoints)
    for name, engine in engines.items():
        own, chat = config.actors[name], plan.chats[name]
        ends = [*chat.stop_token_ids, *end_token_ids(own.model)]
        actors[name] = Actor(
            name=name,
            engine=engine,
            chat=chat,
            stop_token_ids=tuple(dict.fromkeys(ends)),
            max_context_tokens=config.max_context_tokens,
            max_tokens=own.max_tokens,
            is_trainable=own.is_trained,
            adapter=models.adapter_of(config, name),
            lease=None if config.actors[own.share or name].engine_urls else lease,
            older=older.engines.get(name) if older else None,
            older_frac=config.rollout.lagged[0],
        )
    return {name: actors[name] for name in config.actors if name in actors}
