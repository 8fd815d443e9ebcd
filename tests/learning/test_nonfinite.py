"""A loss or gradient that is NaN or infinite: the update is skipped, and the run stopped after
several."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
from kit import make_learner, metrics, run, run_ranks, words
from safetensors.torch import load_file
from test_learner import ragged_samples

from rl_core.train import main
from rl_core.types import RunError


def step_with(learner, advantage, step):
    """One step on samples of which one has this advantage in one token."""
    samples = ragged_samples(seed=step)
    if advantage is not None:
        samples[2].advantages[samples[2].loss_mask.argmax()] = advantage
    return learner.step(learner.shard(samples)[0], step)


def state_of(learner):
    weights = [p.detach().clone() for p in learner.policy.parameters()]
    return weights, copy.deepcopy(learner.optimizer.state_dict()["state"])


def assert_equal_state(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    assert a[1].keys() == b[1].keys() and len(a[1]) > 0
    assert all(
        torch.equal(value, b[1][i][kind])
        for i, kinds in a[1].items()
        for kind, value in kinds.items()
    )


@pytest.mark.parametrize("fault", ["advantage inf", "advantage nan", "weights"])
def test_an_update_that_is_not_finite_changes_nothing(fault, tiny_model, capsys):
    learner = make_learner(tiny_model, "--optim.lr 1e-3 --learner.microbatch_tokens 150")
    assert step_with(learner, None, 0)["updates"].value == 1
    if fault == "weights":
        with torch.no_grad():  # Finite weights whose products overflow.
            next(learner.policy.parameters()).mul_(1e30)
    before = state_of(learner)
    row = step_with(learner, None if fault == "weights" else float(fault.split()[1]), 6)
    assert {name: m.value for name, m in row.items()} == {"nonfinite_updates": 1}
    assert_equal_state(before, state_of(learner))
    assert all(p.grad is None for p in learner.policy.parameters())

    printed = capsys.readouterr().out
    assert "step 7, update 0 of policy is not finite: gradient norm nan, loss" in printed
    # With such weights the loss is finite and the gradient is not.
    assert (", loss nan" in printed or "inf" in printed) == (fault != "weights")
    assert fault == "weights" or step_with(learner, None, 7)["updates"].value == 1


def test_the_fourth_in_a_row_stops_the_run(tiny_model):
    learner, inf, nan = make_learner(tiny_model, "--optim.lr 1e-3"), math.inf, math.nan
    for step, advantage in enumerate([inf, None, nan, -inf, inf, None, nan, inf, nan]):
        assert ("updates" in step_with(learner, advantage, step)) == (advantage is None)
    before = state_of(learner)
    with pytest.raises(RunError, match=r"step 10, update 0.*loss nan.*number 4 in a row"):
        step_with(learner, nan, 9)
    assert_equal_state(before, state_of(learner))


def rm_flags(model, folder, margins):
    """A reward model, one pair a rank. A pair's margin of 1e300 is infinite in fp32: so is its
    loss, but not its gradient."""
    rows = [
        {"prompt": "52341", "chosen": "12345", "rejected": f"5{i}", "margin": m}
        for i, m in enumerate(margins)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = words(
        f"--algorithm rm --model {model} --data.train {folder / 'pairs.jsonl'}",
        "--data.shuffle false",
    )
    flags += words(
        "--max_prompt_tokens 20 --max_tokens 8 --optim.lr 1e-3 --tasks_per_step 2 --num_steps"
    )
    return words(flags, len(margins) // 2, "--save_every 1 --keep_checkpoints 0")


@pytest.mark.parametrize("num_ranks, more", [(1, ""), (2, ""), (2, "--dp_replicate 2")])
def test_an_infinite_loss_on_one_rank_skips_the_update_on_all(
    num_ranks, more, tiny_model, tmp_path
):
    """Its gradient alone would be finite. Also where each rank has all weights, and a norm of its
    own."""
    flags = rm_flags(tiny_model, tmp_path, [0, 0.5, 0, 1e300, 0, 0])
    rows = metrics(run(tmp_path / "run", flags, more, ranks=num_ranks))
    assert [row.get("learn/policy/nonfinite_updates") for row in rows] == [
        None,
        pytest.approx(1),
        None,
    ]
    assert [row.get("learn/policy/updates") for row in rows] == [
        pytest.approx(1),
        None,
        pytest.approx(1),
    ]
    assert "learn/policy/loss" not in rows[1] and math.isfinite(rows[2]["learn/policy/grad_norm"])

    # Weights and the optimizer's state of all ranks; those of a copy are saved once.
    saved = [{}, {}, {}]
    for step, rank in itertools.product(range(3), range(num_ranks)):
        folder = tmp_path / f"run/checkpoints/step_{step + 1:06d}/policy"
        shard = load_file(folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors")
        saved[step] |= {(rank, name): value for name, value in shard.items()}
    one, two, three = saved
    assert one.keys() == two.keys() == three.keys() and any(
        "exp_avg_sq/" in name for _, name in one
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(two[name], three[name]) for name in one)


def test_two_ranks_stop_together_with_one_message(tiny_model, tmp_path):
    flags = words(rm_flags(tiny_model, tmp_path, [0, 1e300] * 6), "--out", tmp_path / "run")
    done = run_ranks(2, "-m", "rl_core.train", *flags, check=False)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "step 4" in line and "inf" in line and "number 4 in a row" in line
    assert [row["learn/policy/nonfinite_updates"] for row in metrics(tmp_path / "run")] == [
        pytest.approx(1)
    ] * 3


@pytest.mark.parametrize(
    "flags, learners", [("--algo.advantage group_mean", [""]), ("--algorithm ppo", ["critic_", ""])]
)
def test_rewards_beyond_the_range_of_fp32_stop_a_run(flags, learners, tiny_model, tmp_path, capsys):
    """Its critic counts on its own."""
    (tmp_path / "env.py").write_text(
        """def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]
def reward_fn(completion): return 1e300 * len(completion)"""
    )
    sizes = "--max_tokens 8 --tasks_per_step 2 --num_steps 6 --out"
    flags = words(
        flags, "--model", tiny_model, "--env_path", tmp_path / "env.py", sizes, tmp_path / "run"
    )
    assert main(flags) == 1
    error, who = capsys.readouterr().err, "policy_critic" if "ppo" in flags else "policy"
    assert (
        f"error: step 4, update 0 of {who} is not finite" in error and "number 4 in a row" in error
    )
    rows, counts = (
        metrics(tmp_path / "run"),
        [f"learn/policy/{name}nonfinite_updates" for name in learners],
    )
    assert [[row[name] for name in counts] for row in rows] == [[1] * len(learners)] * 3
