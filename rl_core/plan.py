"""Flags -> a checked plan: environments, tasks, algorithm, mesh. All that can be refused is refused
here, before a model loads."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core import models, registry
from rl_core.algorithms import Algorithm, make_algorithm
from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.rows import is_trajectory, load_rows
from rl_core.data.tasks import TaskSource
from rl_core.distributed import MESH_FLAGS, Mesh, make_mesh
from rl_core.rules import check, check_algorithm, split
from rl_core.sampling.env import Env, load_env

OnStep = Callable[[Any, dict[str, float]], None]


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
    sft_dataset: Any  # a plugins.sft_dataset.SFTDataset; None: episodes are rolled out
    # Called after each step with the trainer and the step's metrics.
    on_step: OnStep | None = None


def make_plan(
    config: Config,
    module: ModuleType | None = None,
    is_planned: bool = False,
    on_step: OnStep | None = None,
) -> Plan:
    """`module`: instead of --env_path's file. `is_planned`: the run is for another machine. Raises
    ValueError."""
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
    sft_dataset = (
        None if algorithm.is_rl else registry.sft_dataset()(config, chats[config.trained[0]])
    )
    for source in (*train.sources, *evals.values()):
        registry.check_lengths()(config, envs, chats, sft_dataset, source)
    if config.num_epochs:
        num_steps = math.ceil(config.num_epochs * len(train) / config.tasks_per_step)
        config = replace(config, num_steps=num_steps, num_epochs=None)
    for source in train.sources if algorithm.is_rl else ():
        if hook := envs[source.env].hooks.get("task_weight"):
            source.draw_by(registry.weighted_order()(source, hook))
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
        sft_dataset=sft_dataset,
        on_step=on_step,
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


def load_envs(config: Config, module: ModuleType | None = None) -> tuple[Config, dict[str, Env]]:
    """(the configuration with --max_turns filled in, environments by the names of their files). The
    flags' limits hold, then a file's own. `module`: instead of a file. Raises ValueError if an
    actor that should learn can speak in none that is trained in."""
    envs = {}
    for name, path in config.env_paths.items():
        given, timeout_s = (
            config.env(name).max_turns or config.max_turns,
            config.rollout.hook_timeout_s,
        )
        own = module
        if module is None and "://" in path:
            own = registry.served_environment()(path)
        envs[name] = load_env(path, hook_timeout_s=timeout_s, max_turns=given, module=own)
        others = [other for other in config.actors if other not in config.trained]
        registry.check_actors()(envs[name], [*config.trained, *others])
    if envs:
        sections = {
            name: replace(config.env(name), max_turns=env.max_turns) for name, env in envs.items()
        }
        limit = max(env.max_turns for env in envs.values())
        config = replace(config, max_turns=limit, envs=sections if len(envs) > 1 else config.envs)
        check(config)
    trained_in = [env for name, env in envs.items() if config.env(name).weight]
    spoken = [env.speakers(list(config.actors)) for env in trained_in]
    for name in config.trained if config.is_rl else []:
        if all(names is not None and name not in names for names in spoken):
            raise ValueError(
                f"--actors.{name} would never speak, so that it cannot learn: `turns` of "
                f"{', '.join(env.path for env in trained_in)} does not name it; name it there, or "
                "give "
                f"--actors.{name}.train false"
            )
    if len({env.advantage_fn is None for env in envs.values()}) > 1:
        raise ValueError(
            f"of {config.env_path} some define advantage_fn and some do not; let all do, or none"
        )
    return config, envs


def train_tasks(config: Config, envs: dict[str, Env], algorithm: Algorithm) -> TaskSource:
    weights = {name: config.env(name).weight for name in envs or ["data"]}
    paths = {
        name: config.env(name).train or config.data.train
        for name, weight in weights.items()
        if weight
    }
    sources = {
        name: load_source(config, envs.get(name), name, "train", path, algorithm)
        for name, path in paths.items()
    }
    for name in (name for name, source in sources.items() if source is None):
        flag = "--data.train" if len(weights) == 1 else f"--envs.{name}.train"
        hint = f"; {envs[name].path} has no load_tasks" if envs else ""
        raise ValueError(f"{flag} is missing: a file or `datasets` name{hint}")
    found = list(sources.values())
    return (
        found[0]
        if len(found) == 1
        else registry.task_mix()(found, [weights[name] for name in sources])
    )


def eval_sources(
    config: Config, envs: dict[str, Env], algorithm: Algorithm
) -> dict[str, TaskSource]:
    """Held-out tasks by the name of their environment, or of their own set."""
    found = {}
    for name in envs or ["data"]:
        for own, path in named_sets(config.env(name).eval or config.data.eval).items():
            source = load_source(
                config, envs.get(name), name, f"eval/{own}" if own else "eval", path, algorithm
            )
            if source is not None:
                found[f"{name}/{own}" if own and len(envs) > 1 else own or name] = source
    if not found:
        raise ValueError(
            "--eval_every asks for evaluation, but there is no --data.eval and no load_tasks in "
            "the environment"
        )
    return found


def named_sets(value: str | None) -> dict[str, str | None]:
    """Name -> sources of each held-out set in "gsm8k=a.jsonl,aime=b.jsonl,c.jsonl"; sources before
    the first name have ""."""
    name, found = "", {}
    for part in split(value):
        if given := re.fullmatch(r"([A-Za-z][\w-]*)=(.+)", part):
            name, part = given.groups()
        found[name] = f"{found[name]},{part}" if name in found else part
    return found or {"": None}


def load_source(
    config: Config, env: Env | None, name: str, part: str, path: str | None, algorithm: Algorithm
) -> TaskSource | None:
    is_train = part == "train"
    if path:
        min_reward = config.data.min_reward if is_train else None
        load_other = partial(registry.load_other, min_reward=min_reward, actor=config.trained[0])
        rows = load_rows(path, "train" if is_train else "test", load_other)
        if is_trajectory(rows[0]) and config.algorithm != "sft":
            raise ValueError(
                f"{path} holds a run's episodes, which are for --algorithm sft; name rows"
            )
        if min_reward is not None and not is_trajectory(rows[0]):
            raise ValueError(
                f"--data.min_reward={min_reward} is for a run's rollouts, and {path} holds none; "
                "drop it"
            )
    elif env and env.load_tasks:
        rows = env.load_tasks(part)
    else:
        return None
    if path and config.data.columns:
        rows = registry.renamed_columns()(
            rows, config.data.columns, path, is_strict=len(config.env_paths) < 2
        )
    if env and algorithm.is_rl:
        registry.check_columns()(env, rows, path or "", part)
    how = {
        "seed": config.seed,
        "shuffle": config.data.shuffle and is_train,
        "is_pairs": algorithm.is_pairs,
    }
    return TaskSource(rows, env=name, split=part, origin=path or "", **how)
