"""Refuses flags that a run's engines do not support."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.sampling.engine import Engine

if TYPE_CHECKING:
    from rl_core.engines.rank_groups import RankGroup


def check_engines(
    config: Config,
    classes: Mapping[str, type[Engine]],
    num_ranks: int,
    is_planned: bool,
    rank_groups: Iterable[RankGroup] = (),
) -> None:
    """Raises ValueError if engines do not support the flags: on this machine or, if is_planned, on
    any. `classes`: by actor."""
    sizes: dict[str, int] = {}
    for group in rank_groups:
        sizes |= dict.fromkeys(group.actors, len(group.ranks))
    for name, cls in classes.items():
        settings, size = config.of(name), sizes.get(name, num_ranks)
        if settings.agents.response_format == "enforce" and not cls.has_grammars:
            raise ValueError(
                f"--agents.response_format=enforce: {cls.__name__} of actor {name} takes no "
                "JSON schemas; take --engine embedded"
            )
        cls.check(settings, name, is_planned)
        check_divides(f"--actors.{name}.engine_urls", len(config.actors[name].servers), size)
        check_divides("--engine_tp", settings.engine_tp, size)


def check_divides(flag: str, number: int, size: int) -> None:
    if number and size % number:
        fits = max(d for d in range(1, number) if size % d == 0)
        raise ValueError(f"{flag} ({number}) must divide the {size} ranks that sample; try {fits}")
