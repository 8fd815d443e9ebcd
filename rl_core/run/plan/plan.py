"""Flags -> a checked plan: environments, tasks, algorithm, mesh. All that can be refused is refused
here, before a model loads."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rl_core.algorithms import Algorithm
from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.data.task_rows import Tasks, TaskSource
from rl_core.data.tasks.row_lengths import check_run
from rl_core.data.tasks.sources import eval_tasks, held_out_tasks, naming_recipes, train_tasks
from rl_core.distributed import Mesh
from rl_core.environments import run_checks
from rl_core.models.parallel.replicas import mesh_of_flags
from rl_core.run.display.terminal import quiet
from rl_core.run.plan.algorithm_choice import choose_algorithm
from rl_core.run.plan.custom_components import CustomComponents
from rl_core.run.plan.engine import choose_engine, num_ranks, rank_groups_of
from rl_core.run.plan.environments import load_envs, naming_turns
from rl_core.run.plan.model_checks import make_chats
from rl_core.run.plan.path_checks import check_folder
from rl_core.sampling.env import Env

if TYPE_CHECKING:
    from rl_core.data.tasks.sft_dataset import SFTDataset
    from rl_core.engines.api import ApiActor
    from rl_core.engines.factory import EngineFactory
    from rl_core.engines.rank_groups import RankGroup


@dataclass(kw_only=True)
class Plan:
    """A checked run, before any model loads."""

    config: Config
    algorithms: dict[str, Algorithm]  # By the name of each trained actor.
    mesh: Mesh
    envs: dict[str, Env]  # By the name of the file.
    local: list[str]  # Actors whose models are on this rank.
    # Groups of ranks with their actors, rollout ranks first; empty without separate ranks.
    rank_groups: list[RankGroup] = field(default_factory=list)
    train: Tasks = None  # pyright: ignore[reportAssignmentType]  make_plan() sets it.
    num_tasks: int | None = None  # Length of --num_epochs.
    # By the name of its environment, or of the held-out set.
    eval: dict[str, TaskSource] = field(default_factory=dict)
    chats: dict[str, Chat] = field(default_factory=dict)  # By the name of each actor with a model.
    endpoints: dict[str, ApiActor] = field(default_factory=dict)  # Actors behind a URL.
    sft_dataset: SFTDataset | None = None  # None: episodes are rolled out.
    custom: CustomComponents = field(default_factory=CustomComponents)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first trained actor."""
        return next(iter(self.algorithms.values()))

    @property
    def has_task_weight(self) -> bool:
        """True if an environment of an RL run defines task_weight()."""
        return self.config.is_rl and any("task_weight" in env.hooks for env in self.envs.values())

    @property
    def may_end_early(self) -> bool:
        """True if dynamic sampling may draw the rows of --num_epochs in fewer steps."""
        is_dynamic = any(a.dynamic_sampling_rounds for a in self.algorithms.values())
        return is_dynamic and self.num_tasks is not None

    @cached_property
    def engines(self) -> EngineFactory:
        """Makes the engines of this rank."""
        from rl_core.engines.factory import EngineFactory

        return EngineFactory(self.config, self.local, self.custom.engine)

    @property
    def served(self) -> list[str]:
        """Actors of this rank whose adapters engines apply to the model's weights."""
        return (
            list(filter(self.engines.weights.adapter_of, self.local)) if self.config.is_rl else []
        )

    @property
    def local_algorithms(self) -> dict[str, Algorithm]:
        """The algorithms of the actors that are trained on this rank."""
        return {name: self.algorithms[name] for name in self.local if name in self.algorithms}


def make_plan(
    config: Config,
    modules: Mapping[str, ModuleType] | None = None,
    is_planned: bool = False,
    custom: CustomComponents | None = None,
) -> Plan:
    """`modules`: instead of files of --env_path, by the names of environments. `is_planned`: the
    run is for another machine. Raises ValueError."""
    quiet()
    custom = custom or CustomComponents()
    num_sampling = config.rollout_ranks or num_ranks()
    config = choose_engine(config, num_sampling, is_planned, custom.engine)
    assert config.out
    check_folder(Path(config.out), config.resume)
    if config.trackers:
        from rl_core.run.display.trackers import check_trackers

        check_trackers(config.trackers)
    config, envs = load_envs(config, modules)
    if not is_planned:
        run_checks.check_boxes(envs)
    plan = plan_learning(config, envs)
    plan.custom = custom
    held_out = cache(partial(held_out_tasks, config, envs))
    with naming_recipes(config.data.train or ""):
        plan.train = train_tasks(config, envs, held_out)
    if config.eval_every:
        plan.eval = eval_tasks(config, envs, held_out)
    with naming_turns(envs):
        plan.chats, plan.endpoints = make_chats(config, custom)
    if config.is_rl and any(env.tools for env in envs.values()):
        run_checks.check_tools(config, envs, plan.chats)
    if not config.is_rl:
        from rl_core.data.tasks.sft_dataset import SFTDataset

        plan.sft_dataset = SFTDataset(config, plan.chats[config.trained[0]])
    with naming_recipes(config.data.train or ""):
        for source in (*plan.train.sources, *plan.eval.values()):
            check_run(config, envs, plan.chats, plan.sft_dataset, source)
    if plan.has_task_weight:
        from rl_core.run.curriculum import draw_by_weight

        draw_by_weight(envs, plan.train)
    if config.num_epochs:
        plan.num_tasks = max(1, round(config.num_epochs * len(plan.train)))
        num_steps = math.ceil(plan.num_tasks / config.tasks_per_step)
        plan.config = replace(config, num_steps=num_steps)
    if config.resume:
        from rl_core.run.saving.resumed_config import check_resumed

        check_resumed(plan.config)
    return plan


def plan_learning(config: Config, envs: dict[str, Env]) -> Plan:
    """The plan without rows and engines. Reads only advantage_fn of the environments."""
    algorithms, local = {}, list(config.actors)
    rank, first = int(os.environ.get("RANK", 0)), 0
    rank_groups = rank_groups_of(config, num_ranks())
    if rank_groups:
        group = next(group for group in rank_groups if rank in group.ranks)
        mesh, local, first = group.mesh, group.actors, group.ranks[0]
    else:
        mesh = mesh_of_flags(config, num_ranks(), config.trained, config.rollout_ranks)
    learning = [name for name in config.trained if name in local]
    if config.ep == "auto" and mesh.ep == 1 and learning and rank == first:
        from rl_core.models.parallel.expert_parallel import why_unsplit

        print(f"--ep auto: 1, because {why_unsplit(config, learning)}", file=sys.stderr)
    for name in config.trained:
        algorithms[name] = choose_algorithm(config.of(name), envs)
    return Plan(
        config=config,
        algorithms=algorithms,
        mesh=mesh,
        envs=envs,
        local=local,
        rank_groups=rank_groups,
    )
