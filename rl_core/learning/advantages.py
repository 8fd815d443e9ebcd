"""Rewards -> advantages: which rewards share a baseline, what each turn earned, what is normalised.
Trajectories -> TrainingSamples. G conversations of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from rl_core.algorithms import ADVANTAGES, Algorithm
from rl_core.data.episodes import NO_SPREAD, by_episode, has_spread
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import Ranks, all_gather_json
from rl_core.types import TrainingSample, Trajectory

AdvantageFn = Callable[[list[float]], list[float]]


def has_signal(group: list[Trajectory], algorithm: Algorithm) -> bool:
    """Whether the episodes' rewards differ, or, where each turn has an advantage of its own, the
    returns of their turns."""
    returns = [turn_returns(t, 0.0, algorithm.turn_discount) for t in group]
    if len({len(values) for values in returns}) > 1:
        return True
    return any(has_spread(values) for values in zip(*returns, strict=True))


def samples_of(
    groups: list[list[Trajectory]],
    algorithm: Algorithm,
    max_tokens: int,
    ranks: Ranks,
    advantage_fns: dict[str, AdvantageFn | None] | None = None,
) -> list[TrainingSample]:
    """Each trajectory's samples with its advantage over its group, or those of its turns. Overlong
    ones may be penalised before, or left out after: they count in the baseline, but neither in the
    loss nor in its denominator. `advantage_fns`: by environment."""
    kept: list[tuple[Trajectory, list[float]]] = []
    for group in groups:
        penalties = [0.0] * len(group)
        if algorithm.overlong == "soft":
            buffer = algorithm.overlong_buffer
            penalties = [overlong_penalty(longest_turn(t), max_tokens, buffer) for t in group]
        advantage_fn = (advantage_fns or {}).get(group[0].env)
        advantages = turn_advantages(group, penalties, algorithm, advantage_fn)
        for t, values in zip(group, advantages, strict=True):
            if algorithm.overlong != "mask" or t.status != "truncated":
                kept.append((t, values))
    scales = env_scales(kept, ranks) if algorithm.normalize == "env" else {}
    samples = []
    trained: set[str] = set()
    for t, values in kept:
        scale = scales.get(t.env, 1.0)
        samples += samples_from_turns(t.turns, [a / scale for a in values], t.group_id, trained)
    return samples


def longest_turn(t: Trajectory) -> int:
    return max((len(turn.completion.token_ids) for turn in t.turns), default=0)


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """Added to a reward, in -1..0: it falls linearly over the last `buffer` of max_tokens (DAPO,
    arXiv:2503.14476, eq. 13). buffer 0 is a fifth of max_tokens, as there."""
    buffer = buffer or max(1, max_tokens // 5)
    return min(0.0, (max_tokens - buffer - length) / buffer)


def turn_advantages(
    group: list[Trajectory],
    penalties: list[float],
    algorithm: Algorithm,
    advantage_fn: AdvantageFn | None,
) -> list[list[float]]:
    """Of each trajectory's turns: all have that of the trajectory's reward, or with a turn_discount
    each that of its own return, over the returns of all turns of the group."""
    kind, discount = algorithm.advantage, algorithm.turn_discount
    pairs = zip(group, penalties, strict=True)
    returns = [turn_returns(t, penalty, discount) for t, penalty in pairs]
    sizes = [len(values) for values in returns]
    episodes, weights = episode_weights(group)
    episodes, weights = np.repeat(episodes, sizes), np.repeat(weights, sizes)
    if kind == "custom" and discount is not None:
        episodes = weights = None  # advantage_fn gets the return of each turn
    flat = np.concatenate(returns)
    advantages = iter(group_advantages(flat, kind, advantage_fn, episodes, weights))
    if discount is None:
        return [[next(advantages)] * len(t.turns) for t in group]
    return [[next(advantages) for _ in values] for values in returns]


def group_advantages(
    rewards: Sequence[float],
    kind: str,
    advantage_fn: AdvantageFn | None = None,
    episodes: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """[G] rewards -> [G] advantages of a row of ADVANTAGES. Those that compare episodes are exactly
    0 where rewards differ by rounding alone. `episodes`: [G] from 0, of which episode each reward
    is, and `weights`: [G] its part of that. By default, and in a group of one episode, each reward
    is an episode."""
    rewards = np.asarray(rewards, float)
    if episodes is None or len(set(episodes)) == 1:
        episodes, weights = np.arange(len(rewards)), np.ones(len(rewards))
    episodes, weights = np.asarray(episodes), np.asarray(weights)
    advantage = ADVANTAGES[kind]
    if advantage.of is None:
        of_episodes = advantage_fn(np.bincount(episodes, weights * rewards).tolist())
        return [of_episodes[number] for number in episodes]
    if advantage.needs_group and not has_spread(rewards.tolist()):
        return [0.0] * len(rewards)
    return advantage.of(rewards, weights, episodes).tolist()


def episode_weights(group: list[Trajectory]) -> tuple[list[int], list[float]]:
    """[G] the number of each conversation's episode in the group, and what it weighs: all of an
    episode weigh 1 together."""
    numbers, weights = {}, {}
    for number, episode in enumerate(by_episode(group)):
        for t in episode:
            numbers[id(t)], weights[id(t)] = number, 1 / len(episode)
    return [numbers[id(t)] for t in group], [weights[id(t)] for t in group]


def turn_returns(t: Trajectory, penalty: float, discount: float | None) -> list[float]:
    """[turns] r_k + g r_{k+1} + ..., with the discount g; an episode without rewards of turns earns
    all at its end. Without a discount [1], the episode's reward. The penalty is added to the last
    reward."""
    if discount is None:
        return [t.reward + penalty]
    rewards = list(t.turn_rewards) or [0.0] * (len(t.turns) - 1) + [t.reward]
    rewards[-1] += penalty
    returns = [0.0]
    for reward in reversed(rewards):
        returns.append(reward + discount * returns[-1])
    return returns[:0:-1]


def env_scales(kept: list[tuple[Trajectory, list[float]]], ranks: Ranks) -> dict[str, float]:
    """Environment -> what divides its advantages: their standard deviation over all its sampled
    tokens of the step on all ranks, those of groups without signal included; 1 where all are
    equal."""
    sums: dict[str, list[float]] = {}
    for t, values in kept:
        for turn, a in zip(t.turns, values, strict=True):
            n = len(turn.completion.token_ids)
            add_sums(sums, t.env, [n * a, n * a**2, n])
    total: dict[str, list[float]] = {}
    for part in all_gather_json(sums, ranks):
        for env, of_rank in part.items():
            add_sums(total, env, of_rank)
    return {env: mean_and_std(*sums)[1] or 1.0 for env, sums in total.items() if sums[2]}


def add_sums(into: dict[str, list[float]], name: str, more: list[float]) -> None:
    before = into.get(name, [0.0] * len(more))
    into[name] = [a + b for a, b in zip(before, more, strict=True)]


def mean_and_std(total: float, squares: float, count: float) -> tuple[float, float]:
    """Of a population whose sum, sum of squares and number are given; the deviation is exactly 0 if
    it is rounding."""
    mean = total / count
    deviation = max(squares / count - mean**2, 0.0) ** 0.5
    return mean, deviation if deviation > NO_SPREAD * max(abs(mean), 1.0) else 0.0


def global_sums(sums: Tensor, ranks: Ranks) -> list[float]:
    """Sums over the ranks. They wait for the device."""
    by_rank = all_gather_json(sums.tolist(), ranks)
    return [sum(column) for column in zip(*by_rank, strict=True)]
