"""Rank groups (--actors.NAME.ranks): the actors of each rank, and the flags that a rank group
cannot be combined with."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from rl_core.config import Config
from rl_core.distributed import Mesh, make_mesh
from rl_core.errors import refuse, split
from rl_core.parallel.replicas import num_replicas

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
        lambda c, a: a.share,
        ".ranks={a.ranks}: the actor shares the model of {a.share} and its ranks; give ranks to "
        "{a.share}",
    ),
    (
        lambda c, a: a.api or a.engine_urls,
        ".ranks={a.ranks} cannot be combined with api or engine_urls: the engine is on these "
        "ranks; leave one out",
    ),
    (
        lambda c, a: c.engine_ranks or c.max_staleness or c.rollout.lagged[0],
        ".ranks={a.ranks} cannot be combined with --engine_ranks, --max_staleness or "
        "--rollout.lagged; leave one out",
    ),
    (
        lambda c, a: a.router_replay,
        ".ranks={a.ranks} cannot be combined with router_replay: experts are not sent over HTTP; "
        "leave one out",
    ),
]


@dataclass(kw_only=True)
class RankGroup:
    """Ranks that form a separate process group, and the actors that sample and learn there."""

    ranks: tuple[int, ...]
    actors: list[str]
    mesh: Mesh

    def __str__(self) -> str:
        """ranks 2-3 (bob, judge)"""
        return f"{self.where} ({', '.join(self.actors)})"

    @property
    def where(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"rank {first}"
        if last - first + 1 == len(self.ranks):
            return f"ranks {first}-{last}"
        return f"ranks {','.join(map(str, self.ranks))}"


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
    from rl_core.config.algorithm import envs_by_teacher

    for teacher in envs_by_teacher(config.of(name)):
        if teacher in config.trained and ranks_of(config, teacher) != ranks_of(config, name):
            raise ValueError(
                f"--algo.teacher={teacher} learns on other ranks than {name}, which reads its "
                "weights; give both the same ranks"
            )


def ranks_of(config: Config, name: str) -> tuple[int, ...]:
    """Ranks of an actor; () for the ranks that are left."""
    actor = config.actors[name]
    owner = config.actors[actor.share] if actor.share else actor
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


def rank_groups_of(config: Config, num_ranks: int) -> list[RankGroup]:
    """All ranks with their actors; none if no actor has separate ranks. Ranks that play episodes
    are first: they have the actors without separate ranks. Raises ValueError for ranks that do not
    exist, that overlap in part, or that the mesh does not divide."""
    if not any(actor.ranks for actor in config.actors.values()):
        return []
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    left: list[str] = []
    for name in config.actors:
        ranks = ranks_of(config, name)
        if ranks:
            by_ranks.setdefault(ranks, []).append(name)
        else:
            left.append(name)
    owner: dict[int, str] = {}
    for ranks, names in by_ranks.items():
        flag = f"--actors.{names[0]}.ranks={config.actors[names[0]].ranks}"
        if ranks[-1] >= num_ranks:
            raise ValueError(
                f"{flag}: there are ranks 0 to {num_ranks - 1}; start more by torchrun "
                f"--nproc_per_node, or give lower ones"
            )
        for rank in ranks:
            if rank in owner:
                other = config.actors[owner[rank]].ranks
                raise ValueError(
                    f"{flag} and --actors.{owner[rank]}.ranks={other} overlap partly; give both "
                    "actors the same ranks, or different ones"
                )
            owner[rank] = names[0]
    main = tuple(rank for rank in range(num_ranks) if rank not in owner)
    groups = []
    for ranks, names in ({main: left} | by_ranks).items():
        groups.append(RankGroup(ranks=ranks, actors=names, mesh=mesh_of(config, ranks, names)))
    return groups


def mesh_of(config: Config, ranks: tuple[int, ...], names: list[str]) -> Mesh:
    """The mesh of a rank group: the mesh flags apply to each group in which an actor learns."""
    if not any(name in config.trained for name in names):
        return Mesh(dp_shard=len(ranks))
    trained = [name for name in names if name in config.trained]
    try:
        copies = num_replicas(config, len(ranks), trained)
        return make_mesh(len(ranks), dp_replicate=copies, cp=config.cp, tp=config.tp)
    except ValueError as error:
        group: Any = RankGroup(ranks=ranks, actors=names, mesh=Mesh())
        raise ValueError(f"{group}: {error}") from None
