"""Which rewards share a baseline, and what each turn earned: trajectories -> TrainingSamples with
advantages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rl_core.data.episodes import by_episode, episode_rewards, has_spread
from rl_core.data.samples import samples_from_turns
from rl_core.distributed import Ranks, all_gather_json
from rl_core.learning.algorithms import Algorithm, group_advantages, mean_and_std, overlong_penalty
from rl_core.types import TrainingSample, Trajectory


def group_results(
    trajectories: list[Trajectory], trained: Iterable[str], pass_reward: float, ranks: Ranks
) -> list[tuple[str, str, float, float]]:
    """(environment, task id, share of episodes that passed, mean reward) of each group that was
    rolled out on any rank, in the order of the groups and alike on all: over the episodes of actors
    that learn, but for those that failed."""
    groups: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        if t.status != "failed" and t.actor in trained:
            groups.setdefault(t.group_id, []).append(t)
    results = []
    for group_id, group in groups.items():
        rewards = episode_rewards(group)
        passed = sum(reward >= pass_reward for reward in rewards)
        means = passed / len(rewards), sum(rewards) / len(rewards)
        results.append((group_id, group[0].env, group[0].task_id, *means))
    return [
        tuple(result[1:])
        for result in sorted(r for part in all_gather_json(results, ranks) for r in part)
    ]


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
    advantage_fns: dict[str, Callable[[list[float]], list[float]] | None] | None = None,
) -> list[TrainingSample]:
    """Each trajectory's samples with its advantage over its group, or those of its turns. Overlong
    ones may be penalised before, or left out after: they count in the baseline, but neither in the
    loss nor in its denominator. `advantage_fns`: by environment."""
    kept: list[tuple[Trajectory, list[float]]] = []
    for group in groups:
        penalties = [0.0] * len(group)
        if algorithm.overlong == "soft":
            longest = [
                max((len(turn.completion.token_ids) for turn in t.turns), default=0) for t in group
            ]
            penalties = [
                overlong_penalty(n, max_tokens, algorithm.overlong_buffer) for n in longest
            ]
        advantage_fn = (advantage_fns or {}).get(group[0].env)
        pairs = zip(group, turn_advantages(group, penalties, algorithm, advantage_fn), strict=True)
        kept += [
            (t, values)
            for t, values in pairs
            if algorithm.overlong != "mask" or t.status != "truncated"
        ]
    scales = env_scales(kept, ranks) if algorithm.normalize == "env" else {}
    return [
        sample
        for t, values in kept
        for sample in samples_from_turns(
            t.turns, [a / scales.get(t.env, 1.0) for a in values], t.group_id
        )
    ]


def turn_advantages(
    group: list[Trajectory],
    penalties: list[float],
    algorithm: Algorithm,
    advantage_fn: Callable[[list[float]], list[float]] | None,
) -> list[list[float]]:
    """Of each trajectory's turns: all have that of the trajectory's reward, or with a turn_discount
    each that of its own return, over the returns of all turns of the group."""
    returns = [
        turn_returns(t, p, algorithm.turn_discount) for t, p in zip(group, penalties, strict=True)
    ]
    numbers, shares = episode_shares(group)
    kind = algorithm.advantage
    if algorithm.turn_discount is None:
        rewards = [values[0] for values in returns]
        advantages = group_advantages(rewards, kind, advantage_fn, numbers, shares)
        return [[a] * len(t.turns) for t, a in zip(group, advantages, strict=True)]
    flat, numbers_of_turns, shares_of_turns = [], [], []
    for values, number, share in zip(returns, numbers, shares, strict=True):
        flat += values
        numbers_of_turns += [number] * len(values)
        shares_of_turns += [share] * len(values)
    if kind == "custom":
        advantages = iter(advantage_fn(flat))
    else:
        advantages = iter(group_advantages(flat, kind, None, numbers_of_turns, shares_of_turns))
    return [[next(advantages) for _ in values] for values in returns]


def episode_shares(group: list[Trajectory]) -> tuple[list[int], list[float]]:
    """[G] the number of each conversation's episode in the group, and what it weighs: all of an
    episode weigh 1 together."""
    episodes = by_episode(group)
    of_trajectory = {id(t): number for number, episode in enumerate(episodes) for t in episode}
    numbers = [of_trajectory[id(t)] for t in group]
    return numbers, [1 / len(episodes[number]) for number in numbers]


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
    local: dict[str, list[float]] = {}
    for t, values in kept:
        sums = local.setdefault(t.env, [0.0, 0.0, 0.0])
        for turn, a in zip(t.turns, values, strict=True):
            n = len(turn.completion.token_ids)
            sums[:] = [x + y for x, y in zip(sums, (n * a, n * a**2, n), strict=True)]
    parts = all_gather_json(local, ranks)
    total = {
        env: [sum(c) for c in zip(*(p[env] for p in parts if env in p), strict=True)]
        for p in parts
        for env in p
    }
    return {env: mean_and_std(*sums)[1] or 1.0 for env, sums in total.items() if sums[2]}
