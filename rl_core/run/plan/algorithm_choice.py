"""The algorithm of an actor: a preset, flags, and what environments ask for."""

from __future__ import annotations

from dataclasses import replace

from rl_core.algorithms import ADVANTAGES, Algorithm, make_algorithm
from rl_core.config import Config, CriticConfig, SamplingConfig
from rl_core.config.rules import check_algorithm
from rl_core.sampling.env import Env


def choose_algorithm(config: Config, envs: dict[str, Env]) -> Algorithm:
    """The preset with the parts that were set, and those that advantage_fn and older weights ask
    for."""
    algorithm = make_algorithm(config.algorithm, config.algo)
    has_advantage_fn = bool(envs) and all(env.advantage_fn for env in envs.values())
    is_open = config.algo.advantage is None and config.is_rl and algorithm.advantage != "zero"
    if has_advantage_fn and is_open and not algorithm.has_critic:
        algorithm = replace(algorithm, advantage="custom")
    needs_group = ADVANTAGES[algorithm.advantage].needs_group
    if algorithm.baseline == "running" and config.algo.advantage is None and needs_group:
        algorithm = replace(algorithm, advantage="none")
    is_default = algorithm == Algorithm() and config.critic == CriticConfig()
    is_default &= config.sampling == SamplingConfig()
    if not is_default or config.group_size < 2:
        check_algorithm(config, algorithm, has_advantage_fn)
    if (
        config.max_staleness or config.rollout.stale_policy_frac
    ) and config.algo.importance_correction is None:
        # Weights each token by how likely the newer policy makes it.
        algorithm = replace(algorithm, importance_correction="tis")
    return algorithm
