"""Rules of rank groups (--actors.NAME.ranks), and the ranks of each actor."""

from __future__ import annotations

import re
from dataclasses import replace

from rl_core.config.config import Config
from rl_core.errors import refuse, split

RANKS = r"\d+(-\d+)?(,\d+(-\d+)?)*"
# (condition that breaks the rule, message). c: the configuration; a: an actor with ranks.
OF_RANKS = [
    (
        lambda c, a: not re.fullmatch(RANKS, a.ranks) or not numbers(a.ranks),
        ".ranks={a.ranks} must be numbers of ranks, such as 4-7 or 4,5",
    ),
    (
        lambda c, a: 0 in numbers(a.ranks),
        ".ranks={a.ranks}: rank 0 plays the episodes and writes files; give higher ranks",
    ),
    (
        lambda c, a: a.lora_base,
        ".ranks={a.ranks}: the actor shares the model of {a.lora_base} and its ranks; give ranks "
        "to "
        "{a.lora_base}",
    ),
    (
        lambda c, a: a.api or a.engine_urls,
        ".ranks={a.ranks} cannot be combined with api or engine_urls: the engine is on these "
        "ranks; leave one out",
    ),
    (
        lambda c, a: c.rollout_ranks or c.max_staleness or c.rollout.stale_policy_frac,
        ".ranks={a.ranks} cannot be combined with --rollout_ranks, --max_staleness or "
        "--rollout.stale_policy_frac; leave one out",
    ),
    (
        lambda c, a: a.router_replay,
        ".ranks={a.ranks} cannot be combined with router_replay: experts are not sent over HTTP; "
        "leave one out",
    ),
]


def check_ranks(config: Config) -> None:
    """Raises ValueError with the value, the rule and the fix."""
    for name, actor in config.actors.items():
        if actor.ranks:
            refuse(OF_RANKS, f"--actors.{name}", c=config, a=actor)
    for name in config.trained:
        settings = config.of(name)
        if settings.algo.teacher or any(env.teacher for env in config.envs.values()):
            check_teachers_are_near(config, name)


def check_teachers_are_near(config: Config, name: str) -> None:
    """Raises ValueError for a teacher that learns on other ranks than its student."""
    for teacher in config.of(name).envs_by_teacher:
        if teacher in config.trained and ranks_of(config, teacher) != ranks_of(config, name):
            raise ValueError(
                f"--algo.teacher={teacher} learns on other ranks than {name}, which reads its "
                "weights; give both the same ranks"
            )


def ranks_of(config: Config, name: str) -> tuple[int, ...]:
    """Ranks of an actor; () for the ranks that are left."""
    actor = config.actors[name]
    owner = config.actors[actor.lora_base] if actor.lora_base else actor
    return numbers(owner.ranks or "")


def without_ranks(config: Config) -> Config:
    """The configuration with all actors on all ranks."""
    actors = {name: replace(actor, ranks=None) for name, actor in config.actors.items()}
    return replace(config, actors=actors)


def numbers(text: str) -> tuple[int, ...]:
    """4-6,8 -> 4, 5, 6, 8. A range that runs backwards has no numbers."""
    ranks: set[int] = set()
    for item in split(text):
        first, _, last = item.partition("-")
        ranks.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ranks))
