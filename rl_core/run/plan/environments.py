"""The environments of a run: their files, turns and boxes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType

from rl_core import sandbox
from rl_core.config import Config, EnvConfig
from rl_core.config.rules import check
from rl_core.environments import env_file, run_checks
from rl_core.environments.env_hooks import AGENT_TURNS
from rl_core.run.plan.engine import num_ranks
from rl_core.run.plan.model_configs import num_positions
from rl_core.sampling.env import Env


def load_envs(
    config: Config, modules: Mapping[str, ModuleType] | None = None
) -> tuple[Config, dict[str, Env]]:
    """(the configuration with --max_turns filled in, environments by the names of their files). The
    flags' limits hold, then a file's own. `modules`: instead of files."""
    configure_boxes(config)
    envs, sections = {}, {}
    paths = config.env_paths
    if config.online.on and not paths:
        from rl_core.environments.agents.rollout import unscored_module

        paths, modules = {"online": "--online"}, {"online": unscored_module()}
    for name, path in paths.items():
        module, section = (modules or {}).get(name), config.env(name)
        if module is None and "://" in path:
            from rl_core.environments.service.served_module import load_served

            module = load_served(path)
        env = env_file.load_env(
            path,
            hook_timeout_s=config.rollout.hook_timeout_s,
            max_turns=max_turns_of(config, section),
            fitting_turns=partial(fitting_turns, config, section),
            module=module,
            agents=config.agents,
        )
        envs[name], sections[name] = env, replace(section, max_turns=env.max_turns)
    if envs:
        config = replace(config, max_turns=max(env.max_turns for env in envs.values()))
        if len(envs) > 1:
            config = replace(config, envs=sections)
        with naming_turns(envs):
            check(config)
    run_checks.check_environments(config, envs)
    return config, envs


def max_turns_of(config: Config, section: EnvConfig) -> int | None:
    """The turns that flags allow; None leaves them to the environment's file. A session has as many
    as an agent."""
    max_turns = section.max_turns or config.max_turns
    if config.online.on and not max_turns:
        return min(AGENT_TURNS, fitting_turns(config, section))
    return max_turns


def configure_boxes(config: Config) -> None:
    """Applies --sandbox.* to the boxes of this rank."""
    flags = vars(config.sandbox) | {"rank": int(os.environ.get("RANK", 0))}
    num_sampling = config.rollout_ranks or num_ranks()
    flags["max_boxes"] = config.sandbox.max_boxes // num_sampling
    if config.out:
        flags["run_file"] = str(config.folder.resolve() / "boxes")
    sandbox.configure(**flags)


def fitting_turns(config: Config, section: EnvConfig) -> int:
    """Number of turns of a program's episode that fit a microbatch and the models' positions, at
    least 1."""
    budget = config.learner.microbatch_tokens * config.cp
    for name in config.trained:
        budget = min(budget, num_positions(config.actors[name].model) or budget)
    max_tokens = max(config.max_tokens, section.max_tokens or 0)
    return max(1, (budget - config.max_prompt_tokens) // max_tokens)


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
