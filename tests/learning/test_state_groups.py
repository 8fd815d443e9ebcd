"""GiGPO: turns that began in equal states share a baseline in addition to the episodes'."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import pytest

from rl_core.algorithms import PRESETS, Algorithm
from rl_core.learning import advantages as plain
from rl_core.learning.advantages import samples_of
from rl_core.learning.gigpo import state_metrics, turn_advantages
from rl_core.learning.signal import has_signal
from rl_core.types import Completion, Trajectory, Turn

HALF = dataclasses.replace(PRESETS["grpo"], gigpo_discount=0.5)


def turn(name: str, key: str) -> Turn:
    done = Completion(token_ids=[2], logprobs=[-1.0], finish_reason="stop", policy_version=0)
    return Turn(new_ids=[1], is_fresh=False, completion=done, name=name, state_key=key)


def episode(index: int, keys: str, rewards: list[float], **more) -> Trajectory:
    """One letter of `keys` for each turn; '-' is no key."""
    turns = [turn(f"{index}#{n}", key.strip("-")) for n, key in enumerate(keys)]
    return Trajectory(
        task_id="t",
        group_id="g",
        index=index,
        turns=turns,
        reward=sum(rewards),
        turn_rewards=rewards,
        **more,
    )


def advantages_of(group: list[Trajectory], algorithm: Algorithm = HALF, advantage_fn=None):
    return turn_advantages(group, [0.0] * len(group), algorithm, advantage_fn)


def near(rows: list[list[float]]):
    return [pytest.approx(row, abs=5e-6) for row in rows]


# Three episodes with the rewards 1, 0 and 1; the third is in the state b twice.
THREE = [
    episode(0, "ab", [0.0, 1.0]),
    episode(1, "ac", [0.0, 0.0]),
    episode(2, "abb", [0.0, 0.0, 1.0]),
]


def test_the_papers_formula_on_an_example_by_hand():
    """A = A_E + w A_S (arXiv:2505.10978) with the discount 1/2. A_E = (R - 2/3) / sqrt(2/9) is
    0.70711, -1.41421, 0.70711. Returns from the state a on are 1/2, 0, 1/4: mean 1/4, deviation
    sqrt(1/24), A_S = 1.22474, -1.22474, 0. From b on they are 1; 1/2, 1: mean 5/6, deviation
    sqrt(1/18), A_S = 0.70711; -1.41421, 0.70711. Nobody else was in c."""
    assert advantages_of(THREE) == near(
        [[1.931852, 1.414214], [-2.638958, -1.414214], [0.707107, -0.707107, 1.414214]]
    )
    weighted = dataclasses.replace(HALF, gigpo_coef=0.1)
    assert advantages_of(THREE, weighted) == near(
        [[0.829581, 0.777817], [-1.536688, -1.414214], [0.707107, 0.565685, 0.777817]]
    )


def test_without_the_deviation_and_with_the_other_episodes_alone():
    """A_E = R - 2/3 and A_S = return - mean; leave-one-out: of an episode that is in a state twice,
    both returns are left out."""
    mean = dataclasses.replace(HALF, advantage="group_mean")
    want = [[1 / 3 + 1 / 4, 1 / 3 + 1 / 6], [-2 / 3 - 1 / 4, -2 / 3]]
    want.append([1 / 3, 1 / 3 - 1 / 3, 1 / 3 + 1 / 6])
    assert advantages_of(THREE, mean) == near(want)
    rloo = dataclasses.replace(HALF, advantage="rloo")
    want = [[1 / 2 + 3 / 8, 1 / 2 + 1 / 4], [-1 - 3 / 8, -1.0]]
    want.append([1 / 2 + 0.0, 1 / 2 - 1 / 2, 1 / 2 + 0.0])
    assert advantages_of(THREE, rloo) == near(want)


@pytest.mark.parametrize("kind", ["group_mean", "group_norm", "group_norm_unbiased", "rloo"])
def test_states_that_never_recur_give_the_plain_advantage(kind):
    row = dataclasses.replace(HALF, advantage=kind)
    zero = [0.0] * 3
    off = dataclasses.replace(row, gigpo_coef=0.0)
    assert advantages_of(THREE, off) == plain.turn_advantages(THREE, zero, row, None)
    apart = [episode(0, "ab", [0, 1]), episode(1, "c", [0]), episode(2, "---", [0, 0, 1])]
    assert advantages_of(apart, row) == plain.turn_advantages(apart, zero, row, None)
    assert state_metrics(apart)["shared_state_frac"].value == 0.0


def test_the_order_of_episodes_does_not_matter():
    wanted = dict(zip("012", advantages_of(THREE), strict=True))
    for order in itertools.permutations(range(3)):
        rows = advantages_of([THREE[n] for n in order])
        for n, row in zip(order, rows, strict=True):
            assert row == pytest.approx(wanted[str(n)])


def test_a_turn_discount_takes_the_episodes_advantages_place():
    row = dataclasses.replace(HALF, advantage="group_mean", turn_discount=1.0)
    returns = [1, 1, 0, 0, 1, 1, 1]
    mean = statistics.mean(returns)
    of_states = [1 / 4, 1 / 6, -1 / 4, 0.0, 0.0, -1 / 3, 1 / 6]
    flat = [value for row_of in advantages_of(THREE, row) for value in row_of]
    assert flat == pytest.approx([r - mean + s for r, s in zip(returns, of_states, strict=True)])


def test_conversations_that_branch_share_a_turn_which_counts_once():
    """Episode 0 branches after its first turn. That turn has the mean return of the branches, and
    all branches have its advantage."""
    root = turn("0#0", "a")
    tree = [episode(0, "ab", [0.0, reward]) for reward in (1.0, 0.0)]
    for number, t in enumerate(tree):
        t.turns = [root, turn(f"0#1.{number}", "b")]
    other = episode(1, "a", [1.0])
    row = dataclasses.replace(HALF, advantage="group_mean", gigpo_coef=2.0)
    base = plain.turn_advantages([*tree, other], [0.0] * 3, row, None)
    rows = advantages_of([*tree, other], row)
    of_states = [
        [(value - b) / 2 for value, b in zip(row_of, of, strict=True)]
        for row_of, of in zip(rows, base, strict=True)
    ]
    # From a on: (1/2 + 0) / 2 and 1, an episode each. From b on: 1 and 0, of one episode.
    mean = (1 / 4 + 1) / 2
    assert of_states == near([[1 / 4 - mean, 1 / 2], [1 / 4 - mean, -1 / 2], [1 - mean]])
    alone = advantages_of(tree, row)
    base = plain.turn_advantages(tree, [0.0] * 2, row, None)
    assert [row_of[0] for row_of in alone] == [row_of[0] for row_of in base], (
        "one turn alone has no signal"
    )
    samples = samples_of([[*tree, other]], row, 10, advantages_of=turn_advantages)
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == 4  # the root once


def test_an_episode_weighs_the_same_however_many_conversations_it_returns():
    def group(copies: int) -> list[Trajectory]:
        first = [episode(0, "a", [1.0]) for _ in range(copies)]
        for number, t in enumerate(first):
            t.turns = [turn(f"0.{number}#0", "a")]
        return [*first, episode(1, "a", [0.0]), episode(2, "a", [0.25])]

    for kind in ("group_mean", "group_norm", "group_norm_unbiased", "rloo"):
        row = dataclasses.replace(HALF, advantage=kind)
        once, thrice = advantages_of(group(1), row), advantages_of(group(3), row)
        assert [thrice[0], *thrice[3:]] == near(once), kind
    two = [episode(n // 2, "ab"[n % 2], [float(n)]) for n in range(4)]
    row = dataclasses.replace(HALF, advantage="group_norm_unbiased")
    assert all(math.isfinite(value) for row_of in advantages_of(two, row) for value in row_of)


def test_penalties_are_in_the_returns():
    group = [episode(0, "a", [1.0]), episode(1, "a", [1.0])]
    row = dataclasses.replace(HALF, advantage="group_mean")
    assert turn_advantages(group, [0.0, -0.5], row, None) == near([[0.5], [-0.5]])


def test_advantage_fn_gets_the_returns_of_each_state():
    seen = []

    def advantage_fn(values: list[float]) -> list[float]:
        seen.append(values)
        return [10.0 * value for value in values]

    row = dataclasses.replace(HALF, advantage="custom")
    rows = advantages_of(THREE, row, advantage_fn)
    assert seen == [[1.0, 0.0, 1.0], [0.5, 0.0, 0.25], [1.0, 0.5, 1.0]]
    assert rows == near([[15.0, 20.0], [0.0, 0.0], [12.5, 15.0, 20.0]])


@pytest.mark.parametrize("kind", ["gae", "none", "zero"])
def test_an_advantage_that_compares_no_episodes_compares_no_states(kind):
    row = dataclasses.replace(HALF, advantage=kind)
    assert advantages_of(THREE, row) == plain.turn_advantages(THREE, [0.0] * 3, row, None)


def test_a_group_of_equal_rewards_has_signal_where_states_differ():
    row = dataclasses.replace(HALF, dynamic_sampling_rounds=1)
    soon, late = episode(0, "a", [1.0]), episode(1, "ab", [0.0, 1.0])
    assert has_signal([soon, late], row)
    assert not has_signal([soon, late], dataclasses.replace(row, gigpo_coef=0.0))
    assert not has_signal([soon, late], dataclasses.replace(row, gigpo_discount=1.0))
    assert not has_signal([soon, late], dataclasses.replace(row, advantage="custom", gigpo_coef=0))
    row = dataclasses.replace(row, advantage="custom")
    assert has_signal([soon, late], row)
    assert not has_signal([soon, dataclasses.replace(soon, index=2)], row)


def test_the_metric_counts_turns_whose_state_came_again():
    # Six of the seven turns: all but the one in c.
    assert state_metrics(THREE)["shared_state_frac"].value == 6 / 7
    players = [dataclasses.replace(t, player=str(t.index)) for t in THREE]
    assert state_metrics(players)["shared_state_frac"].value == 2 / 7  # b of the third
    assert state_metrics([episode(0, "--", [0.0, 1.0])]) == {}
