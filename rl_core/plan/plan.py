"""Flags -> a checked plan: environments, tasks, algorithm, mesh. All that can be refused is refused
here, before a model loads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core import registry
from rl_core.algorithms import Algorithm, make_algorithm
from rl_core.config import MAX_TOP_K, Config, CriticConfig, EnvConfig, SamplingConfig
from rl_core.data.chat import Chat
from rl_core.data.rows import load_rows
from rl_core.data.tasks import TaskSource
from rl_core.distributed import MESH_FLAGS, Mesh, make_mesh
from rl_core.errors import check
from rl_core.sampling.env import Env

# Name of an environment -> its held-out tasks by the name of their set.
HeldOut = Callable[[str], dict[str, TaskSource]]


@dataclass(kw_only=True)
class Plan:
    """A run that was checked before any model loads."""

    config: Config
    algorithms: dict[str, Algorithm]  # By the name of each trained actor.
    mesh: Mesh
    envs: dict[str, Env]  # By the name of the file.
    local: list[str]  # actors whose models are on this rank
    # Ranks and their actors, those that play episodes first; none if no actor has its own.
    places: list[Any] = field(default_factory=list)
    train: TaskSource | None = None
    # By the name of its environment, or of the held-out set.
    eval: dict[str, TaskSource] = field(default_factory=dict)
    chats: dict[str, Chat] = field(default_factory=dict)  # By the name of each actor with a model.
    endpoints: dict[str, Any] = field(default_factory=dict)  # actors behind a URL
    sft_dataset: Any = None  # a tasks.sft_dataset.SFTDataset; None: episodes are rolled out
    own_parts: Any = None  # a tools.python_parts.OwnParts of a script

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first trained actor."""
        return next(iter(self.algorithms.values()))

    @property
    def local_algorithms(self) -> dict[str, Algorithm]:
        """The algorithms of the actors that are trained on this rank."""
        return {name: self.algorithms[name] for name in self.local if name in self.algorithms}


def make_plan(
    config: Config,
    modules: Mapping[str, ModuleType] | None = None,
    is_planned: bool = False,
    own_parts: Any = None,
) -> Plan:
    """`modules`: instead of files of --env_path, by the names of environments. `is_planned`: the
    run is for another machine. Raises ValueError."""
    registry.quiet()
    config = choose_engine(config, config.engine_ranks or num_ranks(), is_planned, own_parts)
    check_folder(Path(config.out), config.resume)
    if config.trackers:
        registry.check_trackers(config.trackers)
    config, envs = load_envs(config, modules)
    if not is_planned:
        registry.env_file().check_boxes(envs)
    plan = plan_learning(config, envs)
    plan.own_parts = own_parts
    held_out = cache(partial(held_out_tasks, config, envs))
    with registry.naming_recipes(config):
        plan.train = train_tasks(config, envs, held_out)
    if config.eval_every:
        plan.eval = eval_tasks(config, envs, held_out)
    with naming_turns(envs):
        plan.chats, plan.endpoints = make_chats(config)
    if config.is_rl:
        registry.env_file().check_tools(config, envs, plan.chats)
    else:
        plan.sft_dataset = registry.sft_dataset(config, plan.chats[config.trained[0]])
    with registry.naming_recipes(config):
        for source in (*plan.train.sources, *plan.eval.values()):
            registry.check_lengths(config, envs, plan.chats, plan.sft_dataset, source)
    if registry.has_curriculum(plan):
        registry.draw_by_weight(envs, plan.train)
    if config.num_epochs:
        num_steps = math.ceil(config.num_epochs * len(plan.train) / config.tasks_per_step)
        plan.config = replace(config, num_steps=num_steps, num_epochs=None)
    if config.resume:
        registry.check_resumed(plan.config)
    return plan


def plan_learning(config: Config, envs: dict[str, Env]) -> Plan:
    """The plan without rows and engines. Reads only advantage_fn of the environments."""
    algorithms, local = {}, list(config.actors)
    places = registry.places(config, num_ranks())
    if places:
        rank = int(os.environ.get("RANK", 0))
        own = next(place for place in places if rank in place.ranks)
        mesh, local = own.mesh, own.actors
    else:
        sizes = {name: getattr(config, name) for name in MESH_FLAGS}
        num_learners = num_ranks() - config.engine_ranks
        sizes["dp_replicate"] = registry.num_copies(config, num_learners, config.trained)
        mesh = make_mesh(num_ranks(), **sizes)
    for name in config.trained:
        algorithms[name] = choose_algorithm(config.of(name), envs)
    return Plan(
        config=config, algorithms=algorithms, mesh=mesh, envs=envs, local=local, places=places
    )


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def check_folder(out: Path, is_resumed: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; name a folder that does not exist yet")
    if out.exists() and not is_resumed and any(out.iterdir()):
        raise ValueError(
            f"--out {out} exists already; go on with it by --resume, or name another folder"
        )


def load_envs(
    config: Config, modules: Mapping[str, ModuleType] | None = None
) -> tuple[Config, dict[str, Env]]:
    """(the configuration with --max_turns filled in, environments by the names of their files). The
    flags' limits hold, then a file's own. `modules`: instead of files."""
    envs, sections = {}, {}
    for name, path in config.env_paths.items():
        own, section = (modules or {}).get(name), config.env(name)
        if own is None and "://" in path:
            own = registry.served_environment(path)
        env = registry.env_file().load_env(
            path,
            hook_timeout_s=config.rollout.hook_timeout_s,
            max_turns=section.max_turns or config.max_turns,
            fitting_turns=partial(fitting_turns, config, section),
            module=own,
            agents=config.agents,
        )
        envs[name], sections[name] = env, replace(section, max_turns=env.max_turns)
    if envs:
        config = replace(config, max_turns=max(env.max_turns for env in envs.values()))
        if len(envs) > 1:
            config = replace(config, envs=sections)
        with naming_turns(envs):
            check(config)
    registry.env_file().check_environments(config, envs)
    return config, envs


def fitting_turns(config: Config, section: EnvConfig) -> int:
    """Number of turns of a program's episode that fit a microbatch and the models' positions, at
    least 1."""
    room = config.learner.microbatch_tokens * config.cp
    for name in config.trained:
        room = min(room, registry.num_positions(config.actors[name].model) or room)
    max_tokens = max(config.max_tokens, section.max_tokens or 0)
    return max(1, (room - config.max_prompt_tokens) // max_tokens)


@contextmanager
def naming_turns(envs: dict[str, Env]) -> Iterator[None]:
    """Adds the source of --max_turns to errors that name this flag."""
    try:
        yield
    except ValueError as error:
        if "--max_turns=" not in str(error) or not envs:
            raise
        longest = max(envs.values(), key=lambda env: env.max_turns)
        raise ValueError(
            f"{error}; --max_turns={longest.max_turns} is {longest.turns_from}"
        ) from None


def choose_algorithm(config: Config, envs: dict[str, Env]) -> Algorithm:
    """The preset with the parts that were set, and those that advantage_fn and older weights ask
    for."""
    algorithm = make_algorithm(config.algorithm, config.algo)
    has_advantage_fn = bool(envs) and all(env.advantage_fn for env in envs.values())
    is_open = config.algo.advantage is None and config.is_rl and algorithm.advantage != "zero"
    if has_advantage_fn and is_open and not algorithm.has_critic:
        algorithm = replace(algorithm, advantage="custom")
    is_default = algorithm == Algorithm() and config.critic == CriticConfig()
    is_default &= config.sampling == SamplingConfig()
    if not is_default or config.group_size < 2:
        registry.check_algorithm(config, algorithm, has_advantage_fn)
    if (config.max_staleness or config.rollout.lagged[0]) and config.algo.correction is None:
        # Weights each token by how likely the newer policy makes it.
        algorithm = replace(algorithm, correction="tis")
    return algorithm


def choose_engine(
    config: Config, num_ranks: int, is_planned: bool = False, own_parts: Any = None
) -> Config:
    """The configuration with the engine that --engine auto stands for, and with a top_k for
    training samples that need one. Raises ValueError if the engine cannot run here or, for a plan,
    on any machine."""
    if config.engine == "auto" and not (own_parts and own_parts.engine):
        config = replace(config, engine=registry.auto_engine(config))
    registry.check_options(config)
    if config.is_rl:
        config = with_top_k(config)
        places = registry.places(config, num_ranks)
        registry.engine_maker(config, None, own_parts).check(num_ranks, is_planned, places)
    return config


def with_top_k(config: Config) -> Config:
    """The configuration with the largest top_k for trained actors that set only top_p or min_p, or
    that reply in a JSON schema, because each sampled token is stored with the ids that it was drawn
    from."""
    actors = {}
    for name in config.trained:
        actor, sampling = config.actors[name], config.of(name).sampling
        if config.limits_ids(name) and not sampling.top_k:
            actors[name] = replace(actor, sampling=actor.sampling | {"top_k": MAX_TOP_K})
    is_enforced = config.agents.response_format == "enforce"
    limits = "top_p, min_p and JSON schemas" if is_enforced else "top_p and min_p"
    if actors and not int(os.environ.get("RANK", 0)):
        print(
            f"{', '.join(actors)}: {limits} choose among the {MAX_TOP_K:,} likeliest ids, "
            "because each token is stored with the ids that it was drawn from (--sampling.top_k)",
            flush=True,
        )
    return replace(config, actors=config.actors | actors)


def make_chats(config: Config) -> tuple[dict[str, Chat], dict[str, Any]]:
    """(the chat of each actor that has a model here, the endpoint of each other actor)."""
    chats, endpoints = {}, {}
    for name, actor in config.actors.items():
        if actor.api:
            endpoints[name] = registry.api_actor(config, name)
        else:
            chats[name] = registry.checked_chat(config, name)
    return chats, endpoints


def train_tasks(
    config: Config, envs: dict[str, Env], held_out: HeldOut | None = None
) -> TaskSource:
    """Training tasks of all environments. One that has held-out rows alone is left out."""
    held_out = held_out or partial(held_out_tasks, config, envs)
    sources, weights = [], []
    names = list(envs or ["data"])
    for name in names:
        section = config.env(name)
        if not section.weight:
            continue
        path = section.train or config.data.train
        source = load_source(config, envs.get(name), name, "train", path)
        if source is None:
            if len(names) > 1 and held_out(name):
                continue
            flag = "--data.train" if len(names) == 1 else f"--envs.{name}.train"
            raise ValueError(
                f"{flag} is missing: a file or `datasets` name{without_rows(envs.get(name))}"
            )
        sources.append(source)
        weights.append(section.weight)
    if not sources:
        raise ValueError(
            f"--env_path {config.env_path}: no environment has training rows; add rows to one "
            "with --envs.NAME.train, or with load_tasks('train') in its file"
        )
    return sources[0] if len(sources) == 1 else registry.task_mix(sources, weights)


def without_rows(env: Env | None) -> str:
    """The end of an error message: the reason why an environment has no training rows."""
    if env is None:
        return ""
    if env.load_tasks is None:
        return f"; {env.path} has no load_tasks"
    return f"; load_tasks('train') of {env.path} returns no rows"


def eval_tasks(
    config: Config, envs: dict[str, Env], held_out: HeldOut | None = None
) -> dict[str, TaskSource]:
    """Held-out tasks by the name of their environment or set. Raises ValueError if there are
    none."""
    held_out = held_out or partial(held_out_tasks, config, envs)
    sources: dict[str, TaskSource] = {}
    for name in envs or ["data"]:
        sources |= held_out(name)
    if not sources:
        raise ValueError(
            "an evaluation has no held-out rows: --data.eval is missing, and no load_tasks(split) "
            "of an environment returns rows for 'eval'; name rows by --data.eval rows.jsonl"
        )
    return sources


def held_out_tasks(config: Config, envs: dict[str, Env], name: str) -> dict[str, TaskSource]:
    """Held-out tasks of one environment, by the names of its sets."""
    sources = {}
    for set_name, env, split, path in registry.held_out(config, envs or ["data"]):
        if env == name:
            source = load_source(config, envs.get(env), env, split, path)
            if source is not None:
                sources[set_name] = source
    return sources


def load_source(
    config: Config, env: Env | None, name: str, part: str, path: str | None
) -> TaskSource | None:
    is_train = part == "train"
    is_pairs = make_algorithm(config.algorithm, config.algo).is_pairs
    if is_train and config.data.streaming:
        return registry.streamed_tasks(config, env, name, path, is_pairs)
    if path:
        min_reward = config.data.min_reward if is_train else None
        load_other = partial(
            registry.load_other,
            min_reward=min_reward,
            actor=config.trained[0],
            build=config.agents.build_network,
            verify=config.agents.verify_network,
        )
        rows, files = load_rows(path, "train" if is_train else "test", load_other)
        if is_pairs:
            rows, files = registry.pair_rows(rows, files)
        if config.data.columns:
            rows = registry.renamed_columns(config, rows, path, is_train)
    elif env and env.load_tasks:
        rows, files = env.load_tasks(part), ()
        if not len(rows):
            return None  # An environment may be for training, or for evaluation, alone.
    else:
        return None
    if env and env.row_to_prompt:
        rows = registry.made_prompts(rows, env.row_to_prompt, env.path)
    if config.is_rl:
        registry.env_file().check_columns(env, rows, files, part)
    elif path:
        registry.check_rows(config, rows, path, is_train)
    return TaskSource(
        rows,
        env=name,
        split=part,
        files=files,
        seed=config.seed,
        shuffle=config.data.shuffle and is_train,
        is_pairs=is_pairs,
    )
