"""Minibatches, bins of equal work and the clip. Losses and gradients: test_equivalence.py."""

from __future__ import annotations

import dataclasses
import random
from contextlib import nullcontext

import kit
import pytest
import torch
from kit import words

from rl_core.algorithms import Algorithm, clipped_loss, token_losses
from rl_core.config import parse_config
from rl_core.data.packing import balanced_bins, pack_samples
from rl_core.learning.learner import Learner
from rl_core.run.plan.model_checks import checked_chat
from rl_core.run.process.joining import init_ranks
from rl_core.run.saving.checkpoint import save_checkpoint
from rl_core.run.saving.resume import load_checkpoint
from rl_core.types import TrainingSample

FLAGS = ["--env_path", "x.py", "--out", "x", "--max_prompt_tokens", "40", "--max_tokens", "60"]


def make_learner(model, *flags, algorithm="grpo") -> Learner:
    return kit.make_learner(model, "--algorithm", algorithm, *flags)


def ragged_samples(num=12, seed=0, shared_prompt=0) -> list[TrainingSample]:
    """Two turns each: prompt, reply, environment's message, reply. Some advantages are zero,
    some tokens at the end untrained. With shared_prompt, four samples each begin with the same
    tokens and some replies are a single token."""
    draw = random.Random(seed)
    samples = []
    for i in range(num):
        group = i // 4 if shared_prompt else i // 2
        spans = [
            (0, draw.randint(1, 9)),
            (1, draw.randint(1, 30)),
            (0, draw.randint(1, 5)),
            (1, draw.randint(1, 9)),
            (0, 2),
        ]
        if shared_prompt:
            spans = (
                [(0, shared_prompt + group), *spans[1:]]
                if i % 3
                else [(0, shared_prompt + group), (1, 1)]
            )
        mask = [m for m, n in spans for _ in range(n)]
        advantage = 0.0 if i % 5 == 4 else draw.gauss(0, 1)
        token_ids = [draw.randrange(8, 104) for _ in mask]
        if shared_prompt:
            prompts = random.Random(f"{seed} {group}")
            token_ids[: spans[0][1]] = [prompts.randrange(8, 104) for _ in range(spans[0][1])]
        samples.append(
            TrainingSample(
                token_ids=token_ids,
                loss_mask=mask,
                group_id=f"{group:04d}",
                rollout_logprobs=[-draw.random() * m for m in mask],
                policy_versions=[m - 1 for m in mask],
                advantages=[advantage * m for m in mask],
            )
        )
    return samples


def gradients(learner: Learner, samples, old_shift=0.0) -> tuple[dict[str, torch.Tensor], float]:
    """The gradient that update() would use, and the loss."""
    minibatches, _ = learner.shard(samples)
    assert len(minibatches) == 1
    total = 0.0
    for batch in minibatches[0].batches:
        logprobs, entropy = learner.policy(batch, learner.temperature)
        if old_shift:
            batch.old_logprobs = logprobs.detach() - old_shift * torch.sin(batch.labels.float())
        losses, _ = token_losses(learner.algorithm, batch, logprobs, entropy)
        loss = losses.sum() / minibatches[0].denominator
        loss.backward()
        total += loss.item()
    grads = {n: p.grad.clone() for n, p in learner.policy.hf.named_parameters()}
    learner.policy.zero_grad()
    return grads, total


def test_samples_without_advantage_need_no_forward(tiny_model):
    learner, samples = make_learner(tiny_model), ragged_samples()
    minibatch = learner.shard(samples)[0][0]
    assert minibatch.denominator == sum(sum(s.loss_mask) for s in samples)
    assert (
        sum(len(b.parents) for b in minibatch.batches)
        == sum(any(s.advantages) for s in samples)
        < len(samples)
    )
    learner.annotate([minibatch])
    # The ratio of a first update is 1.
    assert all(b.old_logprobs is None for b in minibatch.batches)


def test_a_batch_without_signal_leaves_the_weights_alone(tiny_model):
    learner = make_learner(tiny_model, "--optim.lr", "0.1")
    samples = [
        dataclasses.replace(s, advantages=[0.0] * len(s.token_ids)) for s in ragged_samples()
    ]
    before = [p.clone() for p in learner.policy.parameters()]
    metrics = learner.step(learner.shard(samples)[0], 0)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert metrics["skipped_updates"].value == 1


def test_minibatches_keep_groups_and_old_logprobs(
    tiny_model,
):
    learner = make_learner(
        tiny_model, "--learner.updates_per_epoch 2 --learner.epochs 2 --optim.lr 0.01"
    )
    samples = ragged_samples(12)[1:]  # a group of one, then groups of two
    minibatches, _ = learner.shard(samples)
    assert [m.num_tokens for m in minibatches] == [
        sum(s.loss_mask.sum() for s in x) for x in (samples[:5], samples[5:])
    ]
    learner.annotate(minibatches)
    with torch.no_grad():
        before = [learner.policy(b, 1.0)[0] for m in minibatches for b in m.batches]
    metrics = learner.step(minibatches, 0)
    after = [b.old_logprobs for m in minibatches for b in m.batches]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert metrics["updates"].value == 4
    assert metrics["clip_frac"].value > 0  # a large step leaves the clip range


def test_the_clip_ignores_a_ratio_only_where_it_would_gain_from_it():
    ratio, advantages = (
        torch.tensor([0.5, 0.5, 1.5, 1.5, 1.1]),
        torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
    )
    losses, is_clipped = clipped_loss(
        Algorithm(clip_high=0.28), ratio.log(), ratio.log(), advantages
    )
    torch.testing.assert_close(losses, torch.tensor([-0.5, 0.8, -1.28, 1.5, -1.1]))
    assert is_clipped.tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("pair_work", [0.0, 1 / 7680])
def test_bins_are_deterministic_within_their_limit_and_of_equal_work(pair_work):
    draw = random.Random(0)
    lengths = [min(4096, int(draw.lognormvariate(6, 1)) + 1) for _ in range(4096)]
    work = [n + n * n * pair_work for n in lengths]
    costs = list(zip(lengths, work, strict=True))
    for max_tokens in (16_384, 32_768):
        bins = balanced_bins(costs, max_tokens, 8)
        assert bins == balanced_bins(costs, max_tokens, 8) and len(bins) % 8 == 0
        assert sorted(i for b in bins for i in b) == list(range(4096))
        assert max(sum(lengths[i] for i in b) for b in bins) <= max_tokens
        assert sum(work) / (len(bins) * max(sum(work[i] for i in b) for b in bins)) >= 0.98


def test_a_bin_without_space_for_one_sample_takes_a_shorter_one_later():
    costs = [(2, 10.0), (5, 8.0), (7, 1.5), (5, 1.0)]
    assert balanced_bins(costs, 10, 1) == [[0, 2], [1, 3]]


def test_fewer_samples_than_ranks_leave_bins_empty():
    assert sorted(map(len, balanced_bins([(5, 5), (3, 3)], 100, 4))) == [0, 0, 1, 1]
    batch = pack_samples([])
    assert batch.input_ids.numel() == 1 and batch.labels.numel() == 0


@pytest.mark.parametrize(
    "arch, flags, why",
    [
        ("qwen2_5_vl", "tower", "--learner.train=tower: name some of vision,projector,language"),
        ("qwen3", "vision", "reads text alone; leave it out"),
        (
            "qwen3_vl",
            "vision --actors.policy.lora.rank 2 --actors.policy.lora.targets q_proj",
            "'q_proj' is not a linear layer of a block of this model; take some of all-linear, "
            "linear_fc1, linear_fc2, proj, qkv",
        ),
        (
            "qwen3_vl_moe",
            "vision --actors.policy.lora.rank 2 --actors.policy.lora.targets experts",
            "'experts' is not a linear layer of a block of this model; take some of all-linear, "
            "linear_fc1, linear_fc2, proj, qkv",
        ),
        (
            "qwen3_vl",
            "vision,language --actors.policy.lora.rank 2 --actors.other.lora_base policy "
            "--actors.other.lora.rank 2",
            "share a model are in its language model; take --learner.train language",
        ),
    ],
)
def test_parts_that_cannot_be_trained_are_refused(arch, flags, why, make_model):
    sizes = "--env_path x.py --out x --max_prompt_tokens 16 --max_tokens 16 --learner.train"
    config = parse_config(words("--model", make_model(arch), sizes, flags))
    with pytest.raises(ValueError, match=why):
        checked_chat(config, "policy")


LORA = "--actors.policy.lora.rank 4 --actors.policy.lora.targets"
SHAPE, FROZEN = "is missing or has another shape", "was trained, and is frozen here"


@pytest.mark.parametrize(
    "arch, before, after, why",
    [
        ("qwen2_5_vl", "", "", None),
        ("qwen2_5_vl", "", "--learner.train language", FROZEN),
        ("qwen3", f"{LORA} q_proj", f"{LORA} q_proj", None),
        ("qwen3", f"{LORA} q_proj", f"{LORA} q_proj --actors.policy.lora.rank 8", SHAPE),
        ("qwen3", f"{LORA} q_proj", f"{LORA} q_proj,v_proj", SHAPE),
        ("qwen3", f"{LORA} q_proj,v_proj", f"{LORA} q_proj", FROZEN),
        ("qwen3", f"{LORA} q_proj", "", FROZEN),
        ("qwen3", "", f"{LORA} q_proj", FROZEN),
    ],
)
def test_a_checkpoint_of_other_trained_weights_is_refused(
    arch, before, after, why, make_model, tmp_path
):
    path, ranks = make_model(arch), init_ranks(60)
    save_checkpoint(tmp_path / "step_000001", {"policy": make_learner(path, before)}, {}, ranks, 0)
    learners = {"policy": make_learner(path, after)}
    with pytest.raises(ValueError, match=why) if why else nullcontext():
        load_checkpoint(tmp_path / "step_000001", learners)
