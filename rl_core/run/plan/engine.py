"""The engine of a run, and which ranks sample."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_core.config import MAX_TOP_K, Config
from rl_core.engines.checks import check_engines
from rl_core.engines.options import auto_engine, engine_classes
from rl_core.models.device import this_device
from rl_core.run.plan.option_rules import check_options

if TYPE_CHECKING:
    from rl_core.engines.rank_groups import RankGroup
    from rl_core.sampling.engine import Engine


def rank_groups_of(config: Config, num_ranks: int) -> list[RankGroup]:
    """All ranks with their actors; none if no actor has separate ranks (--actors.NAME.ranks)."""
    if not any(actor.ranks for actor in config.actors.values()):
        return []
    from rl_core.engines.rank_groups import make_rank_groups

    return make_rank_groups(config, num_ranks)


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def choose_engine(
    config: Config, num_ranks: int, is_planned: bool = False, engine: type[Engine] | None = None
) -> Config:
    """The configuration with the engine that --engine auto stands for, and with a top_k for
    training samples that need one. Raises ValueError if the engine cannot run here or, for a plan,
    on any machine."""
    if config.engine == "auto" and engine is None:
        name, reason = auto_engine(config)
        if reason and config.is_rl and not int(os.environ.get("RANK", 0)):
            print(f"--engine auto: {name}, because {reason}", file=sys.stderr)
        config = replace(config, engine=name)
    if not is_planned and config.device != "auto":
        this_device(config.device)
    check_options(config)
    if config.is_rl:
        if any(map(config.limits_ids, config.trained)):
            config = with_top_k(config)
        rank_groups = rank_groups_of(config, num_ranks)
        check_engines(config, engine_classes(config, engine), num_ranks, is_planned, rank_groups)
    return config


def with_top_k(config: Config) -> Config:
    """The configuration with the largest top_k for trained actors that set only top_p or min_p, or
    that reply in a JSON schema, because each sampled token is stored with the ids that it was drawn
    from."""
    actors = {}
    for name in filter(config.limits_ids, config.trained):
        actor = config.actors[name]
        if not config.of(name).sampling.top_k:
            actors[name] = replace(actor, sampling=actor.sampling | {"top_k": MAX_TOP_K})
    if not actors:
        return config
    is_enforced = config.agents.response_format == "enforce"
    limits = "top_p, min_p and JSON schemas" if is_enforced else "top_p and min_p"
    if not int(os.environ.get("RANK", 0)):
        print(
            f"{', '.join(actors)}: {limits} choose among the {MAX_TOP_K:,} likeliest ids, "
            "because each token is stored with the ids that it was drawn from (--sampling.top_k)",
            flush=True,
        )
    return replace(config, actors=config.actors | actors)
