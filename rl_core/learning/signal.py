"""Learning signal of a group: a group whose rewards are all equal has zero advantages."""

from __future__ import annotations

from dataclasses import replace

from rl_core.algorithms import Algorithm
from rl_core.config.algorithm import compares_states
from rl_core.data.episodes import has_spread
from rl_core.learning.advantages import turn_returns
from rl_core.learning.gigpo import state_advantages
from rl_core.types import Trajectory


def has_signal(group: list[Trajectory], algorithm: Algorithm) -> bool:
    """True if the rewards of the group's episodes differ. Turns with separate advantages count by
    their returns, or by the returns of turns that began in equal states."""
    if compares_states(algorithm):
        centred = replace(algorithm, advantage="group_mean")
        of_states = state_advantages(group, [0.0] * len(group), centred, None)
        if any(map(any, of_states)):
            return True
    returns = [turn_returns(t, 0.0, algorithm.turn_discount) for t in group]
    if len({len(values) for values in returns}) > 1:
        return True
    return any(has_spread(values) for values in zip(*returns, strict=True))
