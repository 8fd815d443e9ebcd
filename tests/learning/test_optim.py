"""Optimizers and schedules: what a step does, over sharded weights too, and what resuming
restores."""

from __future__ import annotations

import math

import pytest
import torch
from kit import metrics, weights
from test_learner import make_learner, ragged_samples

from rl_core.config import OptimConfig
from rl_core.learning.learner import learning_rate
from rl_core.plugins.checkpoint import save_checkpoint
from rl_core.plugins.resume import load_checkpoint
from rl_core.train import main


def learner_after(model, steps: int, *flags):
    learner = make_learner(model, "--optim.lr", "1e-2", *flags, algorithm="sft")
    return stepped(learner, steps)


def stepped(learner, steps: int):
    for step in range(steps):
        learner.step(learner.shard(ragged_samples(seed=step))[0], step)
    return learner


def test_8_bits_hold_the_state_of_large_weights_and_learn_almost_the_same(tiny_model):
    flags = ["--optim.betas", "0.5,0.6", "--optim.eps", "1e-3", "--optim.name"]
    exact, small = (learner_after(tiny_model, 3, *flags, n) for n in ("adamw", "adamw8bit"))
    dtypes = {s["state1"].dtype for p, s in small.optimizer.state.items() if p.numel() >= 4096}
    assert dtypes == {torch.uint8}
    start = make_learner(tiny_model).policy
    for a, b, c in zip(
        exact.policy.parameters(), small.policy.parameters(), start.parameters(), strict=True
    ):
        assert (a - b).norm() < 0.2 * (a - c).norm(), a.shape


def test_state_of_another_optimizer_is_refused(tiny_model, tmp_path):
    saved = learner_after(tiny_model, 1)
    save_checkpoint(tmp_path / "step_000001", {"policy": saved}, {"step": 1}, saved.ranks, keep=0)
    with pytest.raises(
        ValueError,
        match=r"holds the state of AdamW, which SGD cannot use; resume with the --optim.name",
    ):
        load_checkpoint(
            tmp_path / "step_000001",
            {"policy": learner_after(tiny_model, 0, "--optim.name", "sgd")},
        )


def test_8_bits_over_two_ranks_resume_with_two_and_refuse_one(
    tiny_model, sort_data, torchrun, tmp_path, capsys
):
    args = [
        "--algorithm",
        "sft",
        "--model",
        tiny_model,
        "--data.train",
        sort_data / "few.jsonl",
        "--tasks_per_step",
        7,
    ]
    args += [
        "--max_tokens",
        8,
        "--max_prompt_tokens",
        16,
        "--optim.lr",
        "3e-3",
        "--optim.name",
        "adamw8bit",
    ]
    # The checkpoint follows an evaluation, after which FSDP's root is still whole.
    args += ["--data.eval", sort_data / "few.jsonl", "--eval.num_tasks", 6, "--eval_every", 2]
    whole, parts = [*args, "--out", tmp_path / "whole"], [*args, "--out", tmp_path / "parts"]
    torchrun(2, "-m", "rl_core.train", *whole, "--num_steps", 4)
    torchrun(2, "-m", "rl_core.train", *parts, "--num_steps", 2)
    assert main([*map(str, parts), "--num_steps", "4", "--resume"]) == 1
    error = capsys.readouterr().err
    assert (
        "8-bit optimizer state of 2 ranks, which cannot be cut for 1; resume with as many ranks"
        in error
    )
    torchrun(2, "-m", "rl_core.train", *parts, "--num_steps", 4, "--resume")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(a[n], b[n]) for n in a)
    # Blocks of 256 lie otherwise over two ranks than over one, so the two runs are close, not
    # equal.
    assert main([*map(str, args), "--out", str(tmp_path / "one"), "--num_steps", "4"]) == 0
    losses, one = (
        [row["learn/policy/loss"] for row in metrics(tmp_path / n) if "learn/policy/loss" in row]
        for n in ("whole", "one")
    )
    assert losses[-1] < losses[0] - 0.2
    assert one == pytest.approx(losses, abs=0.02) and one[0] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize(
    "schedule, rates",  # of steps 0, 1, 2 (warm-up), 3, 12, 16, 19 and of the end, 20
    [
        ("constant", [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]),
        (
            "linear",
            [0.5, 1.0, 1.5, 2.0, 0.2 + 1.8 * 8 / 17, 0.2 + 1.8 * 4 / 17, 0.2 + 1.8 / 17, 0.2],
        ),
        (
            "cosine",
            [
                0.5,
                1.0,
                1.5,
                2.0,
                *(0.2 + 0.9 * (1 + math.cos(math.pi * n / 17)) for n in (9, 13, 16)),
                0.2,
            ],
        ),
        ("wsd", [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 0.2 + 1.8 / 4, 0.2]),
    ],
)
def test_the_rate_warms_up_and_ends_at_its_floor(schedule, rates):
    config = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=3, min_lr_frac=0.1)
    assert [
        learning_rate(config, step, 20) for step in (0, 1, 2, 3, 12, 16, 19, 20)
    ] == pytest.approx(rates)
