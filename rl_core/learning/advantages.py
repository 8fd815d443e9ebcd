"""Rewards -> advantages: which rewards share a baseline, and what each turn earned. Trajectories ->
TrainingSamples. G conversations of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from rl_core.algorithms import ADVANTAGES, Algorithm
from rl_core.data.episodes import has_spread
from rl_core.data.samples import samples_from_turns
from rl_core.types import TrainingSample, Trajectory

AdvantageFn = Callable[[list[float]], list[float]]
# Trajectories with the advantages of their turns.
Judged = list[tuple[Trajectory, list[float]]]
# A trajectory, advantages of its turns, names of turns that are trained already -> its samples.
MakeSamples = Callable[[Trajectory, list[float], set[str]], list[TrainingSample]]


def samples_of(
    groups: list[list[Trajectory]],
    algorithm: Algorithm,
    max_tokens: int,
    advantage_fns: dict[str, AdvantageFn | None] | None = None,
    normalised: Callable[[Judged], Judged] | None = None,
    advantages_of: Callable[..., list[list[float]]] | None = None,
    make_samples: MakeSamples | None = None,
) -> list[TrainingSample]:
    """Training samples of all groups with their advantages. Truncated trajectories are penalised
    (truncation_penalty "soft") or masked: they count in the baseline, but neither in the loss nor
    in its denominator. A turn that branches share is trained once, with the mean of their
    advantages.
    `advantage_fns`: by environment. `normalised`: whitens all advantages.
    `advantages_of` replaces turn_advantages(), `make_samples` trajectory_samples()."""
    advantages_of = advantages_of or turn_advantages
    make_samples = make_samples or trajectory_samples
    judged: Judged = []
    for group in groups:
        penalties = [0.0] * len(group)
        if algorithm.truncation_penalty == "soft":
            penalties = [overlong_penalty(t, max_tokens, algorithm.overlong_buffer) for t in group]
        advantage_fn = (advantage_fns or {}).get(group[0].env)
        advantages = advantages_of(group, penalties, algorithm, advantage_fn)
        judged += zip(group, advantages, strict=True)
    if algorithm.truncation_penalty == "mask":
        judged = [(t, values) for t, values in judged if t.status != "truncated"]
    judged = with_shared_turns(judged)
    if normalised:
        judged = normalised(judged)
    samples = []
    trained: set[str] = set()
    for t, values in judged:
        for sample in make_samples(t, values, trained):
            sample.env = t.env
            samples.append(sample)
    return samples


def with_shared_turns(judged: Judged) -> Judged:
    """The trajectories with new advantages: a turn that several branches share gets the mean of the
    branches' advantages."""
    of_turn: dict[str, list[float]] = defaultdict(list)
    for t, values in judged:
        for turn, value in zip(t.turns, values, strict=True):
            of_turn[turn.name].append(value)
    of_turn.pop("", None)
    mean = {name: sum(values) / len(values) for name, values in of_turn.items()}
    return [
        (t, [mean.get(turn.name, value) for turn, value in zip(t.turns, values, strict=True)])
        for t, values in judged
    ]


def trajectory_samples(
    t: Trajectory, advantages: list[float], trained: set[str]
) -> list[TrainingSample]:
    return samples_from_turns(t.turns, advantages, t.group_id, trained)


def overlong_penalty(t: Trajectory, max_tokens: int, buffer: int) -> float:
    """Reward in -1..0 of the turn that comes nearest to its limit. The reward falls linearly over
    the last `buffer` tokens (DAPO, arXiv:2503.14476, eq. 13); buffer 0 is a fifth of the limit, as
    in the paper. `max_tokens`: limit of turns that do not know theirs."""
    penalty = 0.0
    for turn in t.turns:
        limit = turn.max_tokens or max_tokens
        last = min(buffer or max(1, limit // 5), limit)
        excess = len(turn.completion.token_ids) - (limit - last)
        penalty = min(penalty, -excess / last)
    return penalty


def turn_advantages(
    group: list[Trajectory],
    penalties: list[float],
    algorithm: Algorithm,
    advantage_fn: AdvantageFn | None,
) -> list[list[float]]:
    """Per-turn advantages of each trajectory. Without a turn_discount every turn gets the episode's
    advantage; with one, each turn's discounted return is compared with those of all turns in the
    group."""
    discount = algorithm.turn_discount
    returns, episodes, weights = [], [], []
    keys = [(t.task_id, t.index) for t in group]  # rl-core check has several tasks in one group
    names = list(dict.fromkeys(keys))
    for t, key, penalty in zip(group, keys, penalties, strict=True):
        of_turns = turn_returns(t, penalty, discount)
        returns.append(of_turns)
        episodes += [names.index(key)] * len(of_turns)
        weights += [1 / keys.count(key)] * len(of_turns)
        if algorithm.baseline == "running":
            returns[-1] = [value - t.baseline for value in of_turns]
    flat = np.concatenate(returns)
    if algorithm.advantage == "custom" and discount is not None:
        episodes = weights = None  # advantage_fn gets the return of each turn
    values = group_advantages(flat, algorithm.advantage, advantage_fn, episodes, weights)
    if discount is None:
        return [[value] * len(t.turns) for t, value in zip(group, values, strict=True)]
    advantages = iter(values)
    return [[next(advantages) for _ in of_turns] for of_turns in returns]


def group_advantages(
    rewards: Sequence[float] | np.ndarray,
    kind: str,
    advantage_fn: AdvantageFn | None = None,
    episodes: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """[G] rewards -> [G] advantages by a row of ADVANTAGES. Advantages that compare episodes are
    exactly 0 if the rewards differ by rounding alone. `episodes`: [G] index of each reward's
    episode. `weights`: [G] share of each reward in its episode. By default, and in a group of one
    episode, each reward counts as an episode."""
    values = np.asarray(rewards, float)
    numbers, shares = np.arange(len(values)), np.ones(len(values))
    if episodes is not None and len(set(episodes)) > 1:
        numbers, shares = np.asarray(episodes), np.asarray(weights)
    advantage = ADVANTAGES[kind]
    if advantage.of is None:
        assert advantage_fn is not None
        of_episodes = advantage_fn(np.bincount(numbers, shares * values).tolist())
        return [of_episodes[number] for number in numbers]
    if advantage.needs_group and not has_spread(values.tolist()):
        return [0.0] * len(values)
    return advantage.of(values, shares, numbers).tolist()


def turn_returns(t: Trajectory, penalty: float, discount: float | None) -> list[float]:
    """[turns] returns r_k + g r_{k+1} + ... with the discount g; without per-turn rewards the
    episode's reward counts for the last turn. Without a discount: [1], the episode's reward. The
    penalty is added to the last reward."""
    assert t.reward is not None
    if discount is None:
        return [t.reward + penalty]
    rewards = list(t.turn_rewards) or [0.0] * (len(t.turns) - 1) + [t.reward]
    rewards[-1] += penalty
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + discount * returns[-1])
    return returns[:0:-1]
