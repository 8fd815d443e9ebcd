"""Presets, advantages and penalties against the papers' formulas. Losses: test_equivalence.py."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
import torch
from kit import metrics, trajectories, words
from test_learner import make_learner, ragged_samples

from rl_core.algorithms import PRESETS
from rl_core.data.episodes import baseline_groups
from rl_core.learning.advantages import (
    group_advantages,
    overlong_penalty,
    samples_of,
    turn_advantages,
    turn_returns,
)
from rl_core.learning.signal import has_signal
from rl_core.train import main
from rl_core.types import Completion, Trajectory, Turn

DEFAULTS = {
    "advantage": "group_norm",
    "baseline": "group",
    "normalize": "none",
    "objective": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 0.0,
    "aggregation": "token",
    "kl": "k3",
    "kl_in": "loss",
    "kl_coef": 0.0,
    "kl_reward": None,
    "kl_loss": None,
    "log_kl": False,
    "entropy_coef": 0.0,
    "importance_correction": "none",
    "correction_range": (0.5, 2.0),
    "truncation_penalty": "none",
    "overlong_buffer": 0,
    "dynamic_sampling_rounds": 0,
    "target_kl": 0.0,
    "turn_discount": None,
    "gigpo_coef": 1.0,
    "gigpo_discount": 0.95,
    "reference": None,
    "reference_every": 0,
    "reference_decay": 0.0,
    "teacher": None,
    "teacher_coef": 1.0,
    "teacher_loss": "sampled",
    "teacher_beta": 0.5,
    "teacher_top_k": 0,
    "teacher_update": "start",
    "teacher_decay": 0.99,
}
TABLE = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    "dapo": {"clip_high": 0.28, "truncation_penalty": "soft", "dynamic_sampling_rounds": 10},
    "gspo": {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"advantage": "rloo", "aggregation": "constant", "kl": "k1", "kl_in": "reward"},
    "reinforce_pp": {"advantage": "none", "normalize": "batch", "kl": "k1", "kl_in": "reward"},
    "ppo": {"advantage": "gae", "normalize": "batch", "kl": "k1", "kl_in": "reward"},
    "opd": {"advantage": "zero", "normalize": "batch"},
    "sft": {"objective": "nll"},
    "dpo": {"objective": "dpo"},
    "simpo": {"objective": "simpo"},
    "orpo": {"objective": "orpo"},
    "kto": {"objective": "kto"},
    "rm": {"objective": "rm"},
}


def test_presets_are_the_papers_settings():
    assert {name: dataclasses.asdict(row) for name, row in PRESETS.items()} == {
        name: DEFAULTS | parts for name, parts in TABLE.items()
    }


def test_advantages_are_the_papers_formulas():
    draw = random.Random(0)
    for rewards in ([1.0, 0.0, 0.5, 0.25], [draw.gauss(0, 2) for _ in range(7)], [3.0, -1.0]):
        n, mean = len(rewards), sum(rewards) / len(rewards)
        squares = sum((r - mean) ** 2 for r in rewards)
        others = [sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i in range(n)]
        want = {
            "group_mean": [r - mean for r in rewards],
            "group_norm": [(r - mean) / math.sqrt(squares / n) for r in rewards],
            "group_norm_unbiased": [(r - mean) / math.sqrt(squares / (n - 1)) for r in rewards],
            "rloo": [r - o for r, o in zip(rewards, others, strict=True)],
            "none": rewards,
            "gae": rewards,
        }
        for kind, expected in want.items():
            assert group_advantages(rewards, kind) == pytest.approx(expected), kind
    for kind in ("group_mean", "group_norm", "group_norm_unbiased", "rloo"):
        assert group_advantages([0.1] * 3, kind) == [0.0] * 3
        assert group_advantages([0.7], kind) == [0.0]


def test_equal_rewards_are_normalised_over_the_batch_to_nothing(tiny_model):
    learner = make_learner(tiny_model, algorithm="reinforce_pp")
    samples = [
        dataclasses.replace(s, advantages=[0.1 * m for m in s.loss_mask]) for s in ragged_samples()
    ]
    minibatches, _ = learner.shard(samples)
    learner.annotate(minibatches)
    assert not any(b.advantages.any() for m in minibatches for b in m.batches)


def test_the_overlong_penalty_is_dapos():
    longest, buffer = 20, 5
    for length in range(1, 21):
        want = 0.0 if length <= 15 else (15 - length) / 5
        assert overlong_penalty(episode(0.0, length), longest, buffer) == want
    fifth = [overlong_penalty(episode(0.0, n), 20, 0) for n in (16, 18, 20)]
    assert fifth == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    "limits, lengths, buffer, penalty",
    [
        ([10], [8], 0, 0.0),  # a fifth of the environment's 10, not of the run's 100
        ([10], [10], 0, -1.0),
        ([10, 40], [9, 36], 0, -0.5),
        ([10, 40], [8, 39], 0, -7 / 8),
        ([4], [3], 8, -3 / 4),  # a buffer above the limit
        ([0], [98], 4, -0.5),  # An older rollout has no limit.
    ],
)
def test_the_overlong_penalty_uses_the_limit_of_each_turn(limits, lengths, buffer, penalty):
    t = episode(0.0, 1)
    t.turns = []
    for limit, length in zip(limits, lengths, strict=True):
        t.turns += [dataclasses.replace(episode(0.0, length).turns[0], max_tokens=limit)]
    assert overlong_penalty(t, 100, buffer) == penalty


def episode(
    reward: float | None, length: int, status: str = "ok", env: str = "e", group: str = "g"
) -> Trajectory:
    done = Completion(
        token_ids=[9] * length,
        logprobs=[-1.0] * length,
        text="",
        finish_reason="",
        policy_version=0,
    )
    turns = [Turn(new_ids=[8, 8], is_fresh=True, completion=done)]
    return Trajectory(
        task_id="t", env=env, group_id=group, turns=turns, reward=reward, status=status
    )


def test_the_overlong_penalty_is_of_an_episodes_longest_turn():
    def advantages(*lengths: int) -> list[float]:
        long = episode(1.0, lengths[0])
        long.turns = [
            dataclasses.replace(episode(1.0, n).turns[0], is_fresh=not i)
            for i, n in enumerate(lengths)
        ]
        row = dataclasses.replace(PRESETS["dr_grpo"], truncation_penalty="soft", overlong_buffer=4)
        return [max(s.advantages, key=abs) for s in samples_of([[long, episode(0.0, 1)]], row, 10)]

    assert advantages(6, 6) == advantages(5) == pytest.approx([0.5, -0.5])
    assert advantages(2, 9) == pytest.approx([0.125, -0.125])


def test_failed_episodes_are_in_no_baseline():
    group = [episode(1.0, 4), episode(None, 4, "failed"), episode(0.5, 4)]
    assert baseline_groups(group) == [[group[0], group[2]]]


def test_overlong_episodes_count_in_the_baseline():
    group = [episode(1.0, 4), episode(0.0, 6), episode(0.5, 10, "truncated")]

    def advantages(overlong):
        row = dataclasses.replace(PRESETS["dr_grpo"], truncation_penalty=overlong)
        return [max(s.advantages, key=abs) for s in samples_of([group], row, 10)]

    assert advantages("none") == pytest.approx([0.5, -0.5, 0.0])
    assert advantages("mask") == pytest.approx([0.5, -0.5])
    assert advantages("soft") == pytest.approx([5 / 6, -1 / 6, -4 / 6])


def test_updates_stop_above_the_target_kl(tiny_model):
    def run(*more):
        learner = make_learner(tiny_model, "--learner.epochs", "2", "--optim.lr", "0.01", *more)
        minibatches, _ = learner.shard(ragged_samples())
        learner.annotate(minibatches)
        return learner.step(minibatches, 0), [p.clone() for p in learner.policy.parameters()]

    unbounded, after_two = run()
    assert unbounded["updates"].value == 2
    kl = 2 * unbounded["step_kl_nats"].value  # Only the second update has a KL.
    assert kl > 1e-4
    below, after_one = run("--algo.target_kl", str(0.7 * kl))
    assert (below["updates"].value, below["kl_stopped_updates"].value) == (1, 1)
    assert not all(map(torch.equal, after_one, after_two))
    above, after = run("--algo.target_kl", str(1.4 * kl))
    assert above["updates"].value == 2 and all(map(torch.equal, after, after_two))


CUSTOM = """
def load_tasks(split): return [{{'prompt': str(n)}} for n in range(4)]
def reward_fn(completion): return float(len(completion))
def advantage_fn(rewards): return {0}
"""


def run_custom(returned: str, tiny_model, folder, *flags) -> int:
    (folder / "env.py").write_text(CUSTOM.format(returned))
    flags = words("--max_tokens 6 --tasks_per_step 4 --num_steps 1 --group_size 4", flags)
    return main(
        words("--model", tiny_model, "--env_path", folder / "env.py", flags, "--out", folder / "o")
    )


def test_an_environments_own_advantages_are_used(tiny_model, tmp_path, capsys):
    assert run_custom("[0.0 for r in rewards]", tiny_model, tmp_path) == 0
    assert "none of 1 steps made an update" in capsys.readouterr().err
    assert metrics(tmp_path / "o")[0]["learn/policy/skipped_updates"] == 1


def test_a_preset_part_given_by_flag_overrides_the_environments_advantages(tiny_model, tmp_path):
    assert run_custom("1 / 0", tiny_model, tmp_path, "--algo.advantage", "group_mean") == 0


@pytest.mark.parametrize(
    "returned, message",
    [
        ("1 / 0", "ZeroDivisionError"),
        ("rewards[1:]", "gave 3 values"),
        ("[float('nan')] * 4", "finite"),
    ],
)
def test_wrong_advantages_of_an_environment_stop_the_run_with_its_name(
    returned, message, tiny_model, tmp_path, capsys
):
    assert run_custom(returned, tiny_model, tmp_path) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (
        len(error) == 1
        and message in error[0]
        and "env.py" in error[0]
        and "advantage_fn" in error[0]
    )


SOME_SIGNAL = """
def load_tasks(split): return [{'prompt': str(n), 'n': n} for n in range(40)]
def reward_fn(completion, n): return float(len(completion)) + hash(completion) % 97 if n % 3 == 0 else 1.0
"""


def test_groups_without_signal_are_refilled(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(
        SOME_SIGNAL.replace("hash(completion)", "sum(map(ord, completion))")
    )
    flags = words("--model", tiny_model, "--env_path", tmp_path / "env.py", "--max_tokens 12")
    flags += words("--tasks_per_step 3 --group_size 4 --data.shuffle false --optim.lr 1e-3")
    flags += ["--algo.dynamic_sampling_rounds", "9"]
    flags += ["--sampling.stop", '["a","b","c","d","e","f","g"]']  # replies of many lengths
    out = tmp_path / "whole"
    assert main([*flags, "--num_steps", "1", "--out", str(out)]) == 0

    # Tasks 0, 3 and 6 have a signal: the first three, then replacements for two, until there are
    # three.
    rows = trajectories(out / "rollouts/step_000001.jsonl.zst")
    drawn = [t["task_id"] for t in rows if t["index"] == 0]
    assert sorted(drawn, key=lambda name: int(name.split("/")[1])) == [
        f"train/{n}" for n in range(len(drawn))
    ]
    assert sum(int(name.split("/")[1]) % 3 == 0 for name in drawn) == 3
    state = json.loads((out / "checkpoints/step_000001/state.json").read_text())
    assert state["position"] == len(drawn) > 3
    row = metrics(out)[0]
    assert row["rollout/dynamic_sampling_rounds"] > 0 and row["rollout/groups_missing"] == 0

    # The loss is the mean over the tokens of groups with a signal alone.
    groups: dict[str, list[tuple[float, int]]] = {}
    for t in rows:
        num_tokens = sum(len(turn["completion"]["token_ids"]) for turn in t["turns"])
        groups.setdefault(t["group_id"], []).append((t["reward"], num_tokens))
    groups = {name: g for name, g in groups.items() if len({reward for reward, _ in g}) > 1}
    advantages = [
        a
        for g in groups.values()
        for a in group_advantages([reward for reward, _ in g], "group_norm")
    ]
    lengths = [n for g in groups.values() for _, n in g]
    loss = -sum(a * n for a, n in zip(advantages, lengths, strict=True)) / sum(lengths)
    assert row["learn/policy/loss"] == pytest.approx(loss, rel=1e-4) and abs(loss) > 1e-3


def test_refilling_ends_at_its_cap(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(SOME_SIGNAL.replace("n % 3 == 0", "n == 1"))
    flags = words("--model", tiny_model, "--env_path", tmp_path / "env.py", "--max_tokens 8")
    flags += words("--tasks_per_step 3 --group_size 4 --data.shuffle false --num_steps 1")
    assert (
        main([*flags, "--algo.dynamic_sampling_rounds", "2", "--out", str(tmp_path / "run")]) == 0
    )
    row = metrics(tmp_path / "run")[0]
    assert row["rollout/dynamic_sampling_rounds"] == 2 and row["rollout/groups_missing"] == 2
    assert len(trajectories(tmp_path / "run/rollouts/step_000001.jsonl.zst")) == 4 * (3 + 2 + 2)


def test_the_reference_is_the_model_at_the_start(places, tmp_path):
    letters = "--env_path {dir}/letters.py --max_tokens 8 --tasks_per_step 4".format(**places)
    flags = words("--model", places["model"], letters, "--optim.lr 1e-3 --num_steps 3")
    kls = {}
    for coef in ("0.001", "10"):
        out = tmp_path / coef
        assert main([*flags, "--algo.kl_coef", coef, "--out", str(out)]) == 0
        kls[coef] = [row["learn/policy/ref_kl_nats"] for row in metrics(out)]
        assert abs(kls[coef][0]) < 1e-7 < kls[coef][1]
    assert kls["10"][2] < kls["0.001"][2]


def episode_of(rewards: list[float]) -> Trajectory:
    turn = Turn(
        new_ids=[1],
        is_fresh=True,
        completion=Completion(
            token_ids=[2, 3], logprobs=[-1.0, -1.0], text="", finish_reason="stop", policy_version=0
        ),
    )
    return Trajectory(
        task_id="t",
        env="e",
        group_id="g",
        turns=[turn] * len(rewards),
        reward=sum(rewards),
        turn_rewards=rewards,
    )


def test_turns_have_the_discounted_return_over_the_group():
    group, discount = [episode_of([1.0, 0.0, 2.0]), episode_of([0.0, 3.0])], 0.5
    expected = [[1 + 0.5 * 0 + 0.25 * 2, 0 + 0.5 * 2, 2.0], [0 + 0.5 * 3, 3.0]]
    assert [turn_returns(t, 0.0, discount) for t in group] == expected
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    centred = iter((flat - flat.mean()).tolist())
    row = dataclasses.replace(PRESETS["dr_grpo"], turn_discount=discount)
    got = turn_advantages(group, [0.0, 0.0], row, None)
    for advantages, returns in zip(got, expected, strict=True):
        assert advantages == pytest.approx([next(centred) for _ in returns])
    of_episodes = turn_advantages(group, [0.0, 0.0], PRESETS["dr_grpo"], None)
    assert of_episodes == [[0.0] * 3, [0.0] * 2]  # Both episodes earned 3.


def test_turns_with_own_advantages_give_a_group_its_signal():
    episodes, turns = PRESETS["dapo"], dataclasses.replace(PRESETS["dapo"], turn_discount=0.9)
    groups = {
        "equal": [episode_of([1.0, 0.0]), episode_of([1.0, 0.0])],
        "only in turns": [episode_of([1.0, 0.0]), episode_of([0.0, 1.0])],
        "in all": [episode_of([1.0, 0.0]), episode_of([0.0, 0.0])],
    }
    signals = {
        name: (has_signal(group, episodes), has_signal(group, turns))
        for name, group in groups.items()
    }
    assert signals == {
        "equal": (False, False),
        "only in turns": (False, True),
        "in all": (True, True),
    }
    late, soon = groups["only in turns"]
    late.turn_rewards = soon.turn_rewards = []
    assert not has_signal([late, soon], turns)
