"""fp16: scaled losses against torch's GradScaler and against fp32."""

from __future__ import annotations

import json

import pytest
import torch
from kit import make_learner, metrics, part_of, resume_after, run, words
from test_learner import ragged_samples

from rl_core.distributed import close_ranks, local
from rl_core.learning import fp16
from rl_core.run.process.joining import init_ranks
from rl_core.run.saving.checkpoint import save_checkpoint
from rl_core.run.saving.resume import load_checkpoint

SFT = "--algorithm sft --optim.lr 1e-2"


@pytest.fixture
def in_fp16(tiny_model):
    """in_fp16(flags) -> a learner, whose weights are shards on this one rank."""
    ranks = init_ranks(60, is_sharded=True)
    flags = "--learner.dtype", "float16"
    yield lambda *more: make_learner(tiny_model, *words(SFT), *flags, *more, ranks=ranks)
    close_ranks(ranks)


def gradients(learner, samples) -> dict[str, torch.Tensor]:
    minibatches, _ = learner.shard(samples)
    learner.backward(minibatches[0])
    learner.clip_gradients()
    grads = {}
    for name, parameter in learner.trained_parameters():
        grads[name] = local(parameter.grad).float().clone()
    return grads


def faint(samples, by: float):
    for sample in samples:
        sample.advantages = sample.advantages * by
    return samples


def test_gradients_that_fp16_could_not_hold_are_those_of_fp32(tiny_model, in_fp16):
    flags = words("--optim.max_grad_norm 0")
    exact = gradients(make_learner(tiny_model, *words(SFT), *flags), faint(ragged_samples(), 1e-5))
    learner = in_fp16(*flags)
    scaled = gradients(learner, faint(ragged_samples(), 1e-5))
    learner.policy.zero_grad()
    part_of(learner, "LossScale").loss_scale = 1.0
    lost = gradients(learner, faint(ragged_samples(), 1e-5))

    def error(of: dict) -> float:
        parts = [(of[name] - exact[name]).norm() / exact[name].norm() for name in exact]
        return max(parts).item()

    assert error(scaled) < 0.03 < 0.2 < error(lost)


def test_the_scale_is_that_of_torchs_grad_scaler(in_fp16, monkeypatch):
    monkeypatch.setattr(fp16, "GROWTH_UPDATES", 2)
    learner = in_fp16()
    part_of(learner, "LossScale").loss_scale = 2.0**33
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**33, growth_interval=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([weight], lr=0.1)
    scales, theirs, updates = [], [], []
    for step in range(24):
        before = learner.num_updates
        weights = [local(p).clone() for _, p in learner.trained_parameters()]
        row = learner.step(learner.shard(ragged_samples(seed=step))[0], step)
        is_updated = learner.num_updates > before
        same = [
            torch.equal(local(p), w)
            for (_, p), w in zip(learner.trained_parameters(), weights, strict=True)
        ]
        assert all(same) != is_updated
        assert ("overflowed_updates" in row) != is_updated
        # The same gradients, finite or not, for torch's own.
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.full((1,), 1.0 if is_updated else float("inf"))
        scaler.step(plain)
        scaler.update()
        scales.append(part_of(learner, "LossScale").loss_scale)
        theirs.append(scaler.get_scale())
        updates.append(is_updated)
    assert scales == theirs
    assert not updates[0] and sum(updates) > 4, "it overflowed at first and learned later"


def test_a_loss_that_is_not_finite_is_no_overflow(in_fp16):
    learner = in_fp16()
    row = learner.step(learner.shard(faint(ragged_samples(), float("nan")))[0], 0)
    assert "nonfinite_updates" in row and "overflowed_updates" not in row
    assert part_of(learner, "LossScale").loss_scale == fp16.FIRST_SCALE


def test_a_checkpoint_has_the_scale_that_overflows_have_left(in_fp16, tmp_path):
    learner = in_fp16()
    part_of(learner, "LossScale").loss_scale = 2.0**33
    for step in range(24):
        learner.step(learner.shard(ragged_samples(seed=step))[0], step)
    assert (
        learner.num_updates > 0
        and fp16.FIRST_SCALE < part_of(learner, "LossScale").loss_scale < 2.0**33
    )
    folder = tmp_path / "step_000024"
    save_checkpoint(folder, {"policy": learner}, {"step": 24}, learner.ranks, keep=0)
    resumed = in_fp16()
    load_checkpoint(folder, {"policy": resumed})
    assert resumed.state() == learner.state()
    assert part_of(resumed, "LossScale").loss_scale == part_of(learner, "LossScale").loss_scale


def test_two_ranks_learn_in_fp16_and_resume_with_the_scale(tiny_model, sort_data, tmp_path):
    flags = words(
        SFT, "--learner.dtype float16 --tasks_per_step 4 --max_tokens 40 --max_prompt_tokens 24"
    )
    flags += words("--model", tiny_model, "--data.train", sort_data / "few.jsonl")
    flags += words("--num_steps 4 --save_every 2 --keep_checkpoints 0")
    out = run(tmp_path / "run", flags, ranks=2)
    full = resume_after(out, 2, flags, ranks=2)
    losses = [[row["learn/policy/loss"] for row in metrics(one)] for one in (full, out)]
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    assert metrics(out)[-1]["learn/policy/loss_scale"] == fp16.FIRST_SCALE
    saved = json.loads((out / "checkpoints/step_000004/state.json").read_text())
    assert saved["optimizers"]["policy"]["state"] == {"scale": 2.0**16, "finite_in_a_row": 4}


def test_engine_and_learner_agree_in_fp16(tiny_model, tmp_path):
    env = tmp_path / "env.py"
    env.write_text(
        "def load_tasks(split):\n    return [{'prompt': str(i)} for i in range(8)]\n\n"
        "def reward_fn(completion):\n    return float(len(completion) % 5)\n"
    )
    flags = words("--learner.dtype float16 --tasks_per_step 4 --group_size 4 --max_tokens 10")
    flags += words("--max_prompt_tokens 24 --optim.lr 1e-3 --num_steps 2 --env_path", env)
    run(tmp_path / "out", flags, "--model", tiny_model)
    for row in metrics(tmp_path / "out"):
        assert 0 < row["learn/policy/mismatch_kl_nats_max"] < 1e-3
