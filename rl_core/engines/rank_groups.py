"""Rank groups (--actors.NAME.ranks): the actors and the mesh of each group of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rl_core.config import Config
from rl_core.config.rank_groups import ranks_of
from rl_core.distributed import Mesh
from rl_core.models.parallel.replicas import mesh_of_flags


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


def make_rank_groups(config: Config, num_ranks: int) -> list[RankGroup]:
    """All ranks with their actors. Ranks that play episodes
    are first: they have the actors without separate ranks. Raises ValueError for ranks that do not
    exist, that overlap in part, or that the mesh does not divide."""
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
        return mesh_of_flags(config, len(ranks), trained)
    except ValueError as error:
        group = RankGroup(ranks=ranks, actors=names, mesh=Mesh())
        raise ValueError(f"{group}: {error}") from None
