"""Rewards: a number or a dict of named parts, checked and added to an episode."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress

from rl_core.data.messages import shorten
from rl_core.sampling.hooks import NO_RETURN, Hook
from rl_core.types import AnyJSON

MAX_PARTS = 100  # Names in a dict of rewards; each becomes a metric of every step.
# Metrics of a trajectory that the trainer records itself.
NOT_APPLIED = "reward_none/"  # Prefix of a reward part that was None in an episode.
RECORDED = re.compile(
    rf"tool_parse_failed|agent_(requests|retries|branches|overridden.*)|{NOT_APPLIED}.*"
)


def plain(value: AnyJSON) -> AnyJSON:
    """A scalar of numpy or torch as a Python number, for JSON; any other value unchanged."""
    return value.item() if hasattr(value, "item") else value


def finite(value: object, label: str) -> float:
    """The value, a number or a scalar of numpy or torch, as a finite float. Raises ValueError,
    which begins with `label`, for any other value."""
    # Errors of an array of several numbers, or of an int that is too large.
    with suppress(ValueError, RuntimeError, OverflowError):
        number = plain(value)
        if isinstance(number, numbers.Real) and math.isfinite(number):
            return float(number)
    raise ValueError(
        f"{label} is {shorten(value)}; a reward must be a finite number, or a dict of them"
    )


def finite_parts(value: object, name: str, label: str) -> dict[str, float]:
    """The parts of a reward: a dict's entries, or one number under `name`."""
    if not isinstance(value, dict):
        return {name: finite(value, label)}
    if not value or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{label} is {shorten(value)}; a dict must name each part, as 'format': 0.5"
        )
    if len(value) > MAX_PARTS:
        raise ValueError(f"{label} has {len(value)} names; give at most {MAX_PARTS}")
    return {key: finite(number, f"{label}: part {key!r}") for key, number in value.items()}


def reward_values(value: object, name: str, source: str) -> dict[str, float | None]:
    """The parts of a reward, see finite_parts(). A part that is None does not apply to the
    episode."""
    if value is None:
        return {name: None}
    if not isinstance(value, dict):
        return dict(finite_parts(value, name, source))
    numbers = {name: number for name, number in value.items() if number is not None}
    known = finite_parts(numbers, name, source) if numbers or not value else {}
    return {name: known.get(name) for name in value}


class UnscoredError(ValueError):
    """Raised if every reward of an actor is None."""


def refuse_unscored(
    path: str, actor: str, parts: Mapping[str, float], metrics: Mapping[str, float]
) -> None:
    """Raises UnscoredError if every reward of an actor is None."""
    none = [name.removeprefix(NOT_APPLIED) for name in metrics if name.startswith(NOT_APPLIED)]
    if none and not parts:
        raise UnscoredError(
            f"{path}: {', '.join(none)} {NO_RETURN} One reward of {actor} must be a number"
        )


def is_recorded(name: str) -> bool:
    """True if the trainer itself records a trajectory's metric of this name."""
    return RECORDED.fullmatch(name) is not None


def env_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """An environment's metrics; `env_` is prepended to names that the trainer records itself."""
    return {f"env_{k}" if is_recorded(k) else k: value for k, value in metrics.items()}


def add_parts(
    rewards: MutableMapping,
    metrics: MutableMapping,
    hook: Hook,
    parts: Mapping[str, float | None],
    actors: Collection[str] = (),
) -> None:
    """Adds the parts of a reward to `rewards`, or to `metrics` if the weight is 0. A part that is
    None adds a metric only. Raises ValueError for an actor's name or a repeated name."""
    for name, value in parts.items():
        if len(actors) > 1 and name in actors:
            raise ValueError(
                f"{hook.path}: {hook.name}() returned a part named {name!r}, which is an actor; "
                "parts are summed. For a reward of each actor name `actor` among its arguments"
            )
        if value is None:
            metrics[NOT_APPLIED + name] = 1.0
        elif not hook.weight:
            metrics.update(env_metrics({name: value}))
        elif name in rewards:
            raise ValueError(
                f"{hook.path}: two hooks give the reward part {name!r}; rename it in one of them"
            )
        else:
            rewards[name] = hook.weight * value
