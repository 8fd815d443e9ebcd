"""GiGPO: turns of a group that began in equal states share a baseline, in addition to the episodes'
(Feng et al. 2025, arXiv:2505.10978)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from rl_core.algorithms import Algorithm
from rl_core.config.algorithm import compares_states
from rl_core.data.episodes import baseline_groups
from rl_core.learning import advantages
from rl_core.learning.advantages import AdvantageFn, group_advantages, turn_returns
from rl_core.metrics import Mean, Metric
from rl_core.types import Trajectory


@dataclass(kw_only=True, slots=True)
class StateVisit:
    """A turn that began in a state."""

    episode: tuple[str, int]
    # Return by conversation: conversations that branched off later share the turn.
    returns: dict[int, float] = field(default_factory=dict)
    advantage: float = 0.0

    @property
    def mean_return(self) -> float:
        return sum(self.returns.values()) / len(self.returns)


def turn_advantages(
    group: list[Trajectory],
    penalties: list[float],
    algorithm: Algorithm,
    advantage_fn: AdvantageFn | None,
) -> list[list[float]]:
    """Advantages of each trajectory's turns: those of advantages.py plus gigpo_coef times the
    turn's advantage among the turns from its state."""
    of_episodes = advantages.turn_advantages(group, penalties, algorithm, advantage_fn)
    if not compares_states(algorithm):
        return of_episodes
    of_states = state_advantages(group, penalties, algorithm, advantage_fn)
    sums = []
    for first, second in zip(of_episodes, of_states, strict=True):
        sums.append((np.array(first) + algorithm.gigpo_coef * np.array(second)).tolist())
    return sums


def state_advantages(
    group: list[Trajectory],
    penalties: list[float],
    algorithm: Algorithm,
    advantage_fn: AdvantageFn | None,
) -> list[list[float]]:
    """Advantages of each trajectory's turns: the turn's return compared with those of all turns of
    the group with its state key. 0 without a key, or if no other turn has it. The return is r_k + g
    r_{k+1} + ... with g = gigpo_discount."""
    states: dict[str, dict[str, StateVisit]] = defaultdict(dict)
    visits_of: list[list[StateVisit]] = []
    for number, (t, penalty) in enumerate(zip(group, penalties, strict=True)):
        returns = turn_returns(t, penalty, algorithm.gigpo_discount)
        visits = []
        # A conversation without turns has a return too.
        for index, (turn, value) in enumerate(zip(t.turns, returns, strict=False)):
            visit = StateVisit(episode=(t.task_id, t.index))
            if turn.state_key:
                name = turn.name or f"{number}/{index}"
                visit = states[turn.state_key].setdefault(name, visit)
            visit.returns[number] = value
            visits.append(visit)
        visits_of.append(visits)
    for by_turn in states.values():
        if len(by_turn) > 1:
            compare(list(by_turn.values()), algorithm.advantage, advantage_fn)
    return [[visit.advantage for visit in visits] for visits in visits_of]


def compare(visits: list[StateVisit], kind: str, advantage_fn: AdvantageFn | None) -> None:
    """Fills in the advantages of visits to one state. Each visit of a conversation has weight 1, as
    in the paper; an episode's conversations together weigh as one."""
    conversations: dict[tuple[str, int], set[int]] = defaultdict(set)
    for visit in visits:
        conversations[visit.episode].update(visit.returns)
    names = list(conversations)
    episodes, weights = [], []
    for visit in visits:
        episodes.append(names.index(visit.episode))
        weights.append(len(visit.returns) / len(conversations[visit.episode]))
    if kind == "custom":
        episodes = weights = None  # advantage_fn gets the return of each visit.
    returns = [visit.mean_return for visit in visits]
    values = group_advantages(returns, kind, advantage_fn, episodes, weights)
    for visit, advantage in zip(visits, values, strict=True):
        visit.advantage = advantage


def state_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Fraction of the turns with a state key whose state is shared with another turn of the
    group."""
    num_turns = num_shared = 0
    for group in baseline_groups(t for t in trajectories if t.has_state_keys):
        keys = {}
        for number, t in enumerate(group):
            for index, turn in enumerate(t.turns):
                if turn.state_key:
                    keys[turn.name or (number, index)] = turn.state_key
        visits = Counter(keys.values())
        num_turns += len(keys)
        num_shared += sum(n for n in visits.values() if n > 1)
    return {"shared_state_frac": Mean(num_shared, num_turns)} if num_turns else {}
