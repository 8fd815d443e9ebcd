"""Optimizers and schedules: steps, over sharded weights too, and the state that resuming
restores."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import families, metrics, rewind, run, weights, words
from models_table import FAMILIES, family_config
from safetensors.torch import load_file
from test_learner import make_learner, ragged_samples
from torch import nn
from transformers import AutoModelForCausalLM, Trainer

from rl_core.config import OptimConfig
from rl_core.distributed import Mesh
from rl_core.learning.muon import is_block_matrix, muon, newton_schulz
from rl_core.learning.optimizers import parameter_groups
from rl_core.models.loading import on_meta
from rl_core.run.saving.checkpoint import save_checkpoint
from rl_core.run.saving.resume import check_optimizer, load_checkpoint
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


def test_muon_is_torchs_for_the_matrices_of_layers_and_adamw_for_the_rest(tiny_model):
    flags = "--optim.name muon --optim.weight_decay 0.1 --optim.betas 0.8,0.9 --optim.eps 1e-3"
    learner = make_learner(tiny_model, *words(flags), algorithm="sft")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    named, draw = dict(model.named_parameters()), torch.Generator().manual_seed(0)
    groups = {True: [], False: []}
    for name, weight in named.items():
        groups[name.startswith("model.layers.") and weight.ndim == 2].append(weight)
    assert len(groups[True]) == 14 and len(groups[False]) > 2
    decays = [{"params": [w for w in groups[False] if w.ndim == n], "weight_decay": d}
              for n, d in ((1, 0.0), (2, 0.1))]  # fmt: skip
    theirs = [
        torch.optim.Muon(groups[True], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decays, betas=(0.8, 0.9), eps=1e-3, fused=True),
    ]
    for rate in (0.01, 0.02, 0.005):
        for name, parameter in learner.trained_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            named[name.removeprefix("hf.")].grad = parameter.grad.clone()
        for optimizer in (learner.optimizer, *theirs):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    for name, weight in learner.named_weights():
        torch.testing.assert_close(weight, named[name], atol=0, rtol=0)


def test_each_matrix_of_a_stack_is_made_orthogonal_alone():
    """Muon's coefficients leave singular values between 0.6 and 1.3, and a gradient of 0 as it is,
    such as that of an expert without tokens."""
    assert newton_schulz(torch.zeros(2, 4, 3)).eq(0).all()
    for stack in (torch.randn(3, 40, 24), torch.randn(3, 24, 40)):
        made = newton_schulz(stack.bfloat16()).float()
        values = torch.linalg.svdvals(made)
        assert values.min() > 0.6 and values.max() < 1.3
        for one, alone in zip(made, stack, strict=True):
            u, _, v = torch.linalg.svd(alone, full_matrices=False)
            assert torch.cosine_similarity(one.flatten(), (u @ v).flatten(), dim=0) > 0.95
        joined = nn.Parameter(stack.clone())
        weights_alone = [nn.Parameter(matrix.clone()) for matrix in stack]
        joined.grad = made
        for weight, gradient in zip(weights_alone, made, strict=True):
            weight.grad = gradient
        muon([("layers.0.experts.up", joined)], OptimConfig(lr=0.01, weight_decay=0.1)).step()
        torch.optim.Muon(
            weights_alone, lr=0.01, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
        ).step()
        torch.testing.assert_close(joined, torch.stack(weights_alone), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", families(FAMILIES))
def test_no_family_gives_embeddings_heads_or_biases_to_muon(name):
    model = on_meta(family_config(name))
    named = dict(model.named_parameters())
    others = {n for n, weight in named.items() if not is_block_matrix(n, weight)}
    tables = {
        f"{n}.weight" for n, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    assert {n for n in tables if n in named} <= others
    assert {n for n, w in named.items() if w.ndim < 2 or "lm_head" in n or "bias" in n} <= others
    matrices = [n for n, w in named.items() if w.ndim == 2 and ".layers." in n and "bias" not in n]
    assert not others.intersection(matrices) - tables


@pytest.mark.parametrize("name", families(FAMILIES))
def test_no_family_decays_a_bias_or_what_transformers_trainer_does_not(name):
    model = on_meta(family_config(name))
    groups = parameter_groups(model.named_parameters(), 0.1)
    decaying = {n for group in groups if group["weight_decay"] for n, _ in group["params"]}
    assert not {n for n in decaying if "bias" in n}
    named = dict(model.named_parameters())
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    matrices = {n for n in theirs if n in named and named[n].ndim > 1}
    assert decaying == matrices
    assert len(named) == sum(len(group["params"]) for group in groups)


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


def test_a_new_run_starts_from_the_optimizer_of_another(tiny_model, sort_data, tmp_path):
    flags = "--algorithm sft --tasks_per_step 4 --max_tokens 40 --max_prompt_tokens 24"
    flags = words(flags, "--data.train", sort_data / "few.jsonl", "--model", tiny_model)
    first, rate = tmp_path / "first", words("--optim.lr 1e-2 --optim.max_grad_norm 0")
    run(first, flags, rate, "--num_steps 2")
    run(tmp_path / "second", flags, rate, "--num_steps 1 --optim.init_from", first)
    loaded = saved_state(tmp_path / "second", 1)
    run(tmp_path / "plain", flags, rate, "--num_steps 1")
    before, plain = saved_state(first, 2), saved_state(tmp_path / "plain", 1)
    start = {name: value.float() for name, value in load_model(tiny_model).items()}
    for name in [n.removeprefix("exp_avg/") for n in plain if n.startswith("exp_avg/")]:
        # A new AdamW's first mean is 0.1 of the gradient, the second 0.05 of its square.
        gradient = plain[f"exp_avg/{name}"] / 0.1
        mean = 0.9 * before[f"exp_avg/{name}"] + 0.1 * gradient
        square = 0.95 * before[f"exp_avg_sq/{name}"] + 0.05 * gradient**2
        torch.testing.assert_close(loaded[f"exp_avg/{name}"], mean, atol=1e-6, rtol=1e-4)
        change = 1e-2 * (mean / (1 - 0.9**3)) / ((square / (1 - 0.95**3)).sqrt() + 1e-8)
        expected = start[name.removeprefix("hf.")] - change
        torch.testing.assert_close(loaded[f"param/{name}"], expected, atol=1e-5, rtol=1e-4)


def test_a_critic_starts_from_the_optimizer_of_the_other_critic(places, tmp_path):
    flags = (
        "--model {model} --env_path {dir}/letters.py --algorithm ppo --critic.lr 1e-3 "
        "--tasks_per_step 2 --group_size 2 --max_tokens 6 --optim.max_grad_norm 0"
    )
    flags, first = flags.format(**places), tmp_path / "first"
    run(first, flags, "--num_steps 2")
    run(tmp_path / "next", flags, "--num_steps 1 --seed 5 --optim.init_from", first)
    [critic] = [folder.name for folder in first.glob("checkpoints/step_000002/*critic*")]
    before, after = saved_state(first, 2, critic), saved_state(tmp_path / "next", 1, critic)
    names = [name for name in before if name.startswith("exp_avg_sq/")]
    assert names and max(before[name].max() for name in names) > 0
    for name in names:
        # The mean of squares cannot fall by more than its decay.
        assert (after[name] >= 0.95 * before[name] * (1 - 1e-5)).all(), name


def saved_state(out, step: int, learner: str = "policy") -> dict:
    tensors = {}
    for file in (out / f"checkpoints/step_{step:06d}/{learner}").glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def load_model(folder) -> dict:
    tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize(
    "path, message",
    [
        ("nothing", "has no checkpoint; name a run's folder"),
        ("light", "has no optimizer state of policy; name a run that made an update"),
    ],
)
def test_an_optimizer_that_is_not_there_is_refused(
    path, message, tiny_model, sort_data, tmp_path, capsys
):
    flags = "--algorithm sft --tasks_per_step 4 --max_tokens 40 --max_prompt_tokens 24"
    flags = words(flags, "--data.train", sort_data / "few.jsonl", "--model", tiny_model)
    run(tmp_path / "light", flags, "--num_steps 1 --save_optimizer false")
    run(tmp_path / "next", flags, "--num_steps 1 --optim.init_from", tmp_path / path, status=1)
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_optimizer_is_small_and_goes_on(
    tiny_model, sort_data, tmp_path, capsys
):
    flags = "--algorithm sft --tasks_per_step 4 --max_tokens 40 --max_prompt_tokens 24"
    flags = words(flags, "--data.train", sort_data / "few.jsonl", "--model", tiny_model)
    out = tmp_path / "light"
    run(out, flags, "--num_steps 2 --optim.lr 1e-2 --save_optimizer false")
    saved = saved_state(out, 2)
    assert saved and all(name.startswith("param/") for name in saved)
    capsys.readouterr()
    run(out, flags, "--num_steps 3 --optim.lr 1e-2 --save_optimizer false --resume")
    assert "policy's optimizer begins anew" in capsys.readouterr().out
    # AdamW's first step moves each weight by the learning rate, wherever its gradient is not tiny.
    moved = [(saved_state(out, 3)[n] - saved[n]).abs().max().item() for n in saved]
    assert max(moved) == pytest.approx(1e-2, rel=1e-3)
    assert state_of(out, 3) == {"steps": 3, "is_saved": False}


def state_of(out, step: int) -> dict:
    text = (out / f"checkpoints/step_{step:06d}/state.json").read_text()
    facts = json.loads(text)["optimizers"]["policy"]
    return {name: facts[name] for name in ("steps", "is_saved")}


def test_8_bits_over_two_ranks_resume_with_two_and_refuse_one(
    tiny_model, sort_data, torchrun, tmp_path, capsys
):
    args = words(
        f"--algorithm sft --model {tiny_model} --data.train {sort_data / 'few.jsonl'}",
        "--tasks_per_step 7",
    )
    args += words("--max_tokens 8 --max_prompt_tokens 16 --optim.lr 3e-3 --optim.name adamw8bit")
    # The checkpoint follows an evaluation, after which FSDP's root is still whole.
    args += ["--data.eval", sort_data / "few.jsonl", "--eval.num_tasks", 6, "--eval_every", 2]
    args += words("--num_steps 4 --save_every 2 --keep_checkpoints 0")
    two = [*args, "--out", tmp_path / "two"]
    torchrun(2, "-m", "rl_core.train", *two)
    expected = weights(tmp_path / "two")
    rewind(tmp_path / "two", 2)
    assert main([*map(str, two), "--resume"]) == 1
    error = capsys.readouterr().err
    assert (
        "8-bit optimizer state of 2 ranks, --dp_replicate 2, which cannot be resharded for 1 rank"
        in error
    )
    torchrun(2, "-m", "rl_core.train", *two, "--resume")
    resumed = weights(tmp_path / "two")
    assert all(torch.equal(resumed[n], expected[n]) for n in expected)
    # Blocks of 256 lie otherwise over two ranks than over one, so the two runs are close, not
    # equal.
    assert main([*map(str, args), "--out", str(tmp_path / "one")]) == 0
    losses, one = (
        [row["learn/policy/loss"] for row in metrics(tmp_path / n) if "learn/policy/loss" in row]
        for n in ("two", "one")
    )
    assert losses[-1] < losses[0] - 0.2
    assert one == pytest.approx(losses, abs=0.02) and one[0] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize(
    "saved", [Mesh(dp_shard=4), Mesh(dp_shard=4, ep=4), Mesh(dp_shard=2, tp=2)]
)
def test_8_bit_state_of_as_many_ranks_with_other_shards_is_refused(tiny_model, saved):
    learner = make_learner(tiny_model, "--optim.name", "adamw8bit")
    layouts = []
    for mesh in (saved, Mesh(dp_shard=4, ep=2)):
        ranks = replace(learner.ranks, size=4, mesh=mesh)
        layouts.append(ranks.layout)
    learner.ranks = ranks
    check_optimizer(Path("step_1"), learner, "AdamW8bit", layouts[1])
    with pytest.raises(ValueError, match=f"of {layouts[0]}, which .* for 4 ranks, --ep 2; resume"):
        check_optimizer(Path("step_1"), learner, "AdamW8bit", layouts[0])


@pytest.mark.parametrize(
    "schedule, rates",  # Steps 0, 1, 2 (warm-up), 3, 12, 16, 19 and the end, 20.
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
    assert [config.lr_at(step, 20) for step in (0, 1, 2, 3, 12, 16, 19, 20)] == pytest.approx(rates)


def test_the_warm_up_may_be_a_fraction_of_the_run():
    config = OptimConfig(lr=2.0, warmup_frac=0.15)
    assert [config.lr_at(step, 20) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
