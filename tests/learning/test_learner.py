"""The learner's equivalences: however a batch is split, padded or packed, the gradient is the
same."""

from __future__ import annotations

import dataclasses
import random

import kit
import pytest
import torch

from rl_core.algorithms import Algorithm, clipped_loss, token_losses
from rl_core.data.packing import balanced_bins, pack_samples
from rl_core.learning.learner import Learner
from rl_core.types import TrainingSample

FLAGS = ["--env_path", "x.py", "--out", "x", "--max_prompt_tokens", "40", "--max_tokens", "60"]


def make_learner(model, *flags, algorithm="grpo") -> Learner:
    return kit.make_learner(model, "--algorithm", algorithm, list(flags))


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


def padded_gradients(
    learner: Learner, samples, old_shift=0.0
) -> tuple[dict[str, torch.Tensor], float]:
    """The same from the plain padded forward of the Hugging Face model and the formula written out
    token by token."""
    model, a = learner.policy.hf, learner.algorithm
    longest = max(len(s.token_ids) for s in samples)
    ids = torch.tensor([s.token_ids.tolist() + [0] * (longest - len(s.token_ids)) for s in samples])
    is_token = torch.tensor(
        [[1] * len(s.token_ids) + [0] * (longest - len(s.token_ids)) for s in samples]
    )
    model.set_attn_implementation("sdpa")
    logits = (
        model(input_ids=ids, attention_mask=is_token, use_cache=False).logits / learner.temperature
    )
    model.set_attn_implementation("rl_core_packed")
    logprobs = logits.log_softmax(-1)
    loss, count = 0.0, sum(sum(s.loss_mask) for s in samples)
    for row, s in enumerate(samples):
        for i in range(1, len(s.token_ids)):
            if not s.loss_mask[i]:
                continue
            lp = logprobs[row, i - 1, s.token_ids[i]]
            if not a.is_rl:
                loss = loss - s.advantages[i] * lp / count  # SFT stores the token's weight here.
                continue
            old = lp.detach() - old_shift * torch.sin(torch.tensor(float(s.token_ids[i])))
            ratio = torch.exp(lp - old)
            clipped = torch.clamp(ratio, 1 - a.clip_low, 1 + a.clip_high)
            p = logprobs[row, i - 1]
            entropy = -(p.exp() * p).sum()
            loss = (
                loss
                - (
                    torch.min(ratio * s.advantages[i], clipped * s.advantages[i])
                    + a.entropy_coef * entropy
                )
                / count
            )
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    learner.policy.zero_grad()
    return grads, loss.item()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance=2e-6):
    assert a.keys() == b.keys()
    assert max(v.abs().max() for v in a.values()) > 1e-4, "no gradient to compare"
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], atol=tolerance, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "algorithm, flags, old_shift",
    [
        ("sft", (), 0.0),
        ("grpo", (), 0.0),
        ("grpo", ("--algo.clip_low", "0.1", "--algo.clip_high", "0.28"), 0.5),
        ("grpo", ("--algo.entropy_coef", "0.01", "--sampling.temperature", "0.7"), 0.3),
    ],
)
def test_packed_batch_gives_the_same_gradient_as_padded(any_model, algorithm, flags, old_shift):
    learner = make_learner(any_model, *flags, algorithm=algorithm)
    packed, packed_loss = gradients(learner, ragged_samples(), old_shift)
    padded, padded_loss = padded_gradients(learner, ragged_samples(), old_shift)
    assert packed_loss == pytest.approx(padded_loss, rel=2e-6, abs=2e-6)
    assert_same(packed, padded)


@pytest.mark.parametrize("algorithm, old_shift", [("sft", 0.0), ("grpo", 0.4)])
def test_a_prompt_that_samples_share_is_computed_once_and_gives_the_same_gradient(
    any_model, algorithm, old_shift
):
    learner, samples = (
        make_learner(any_model, algorithm=algorithm),
        ragged_samples(16, shared_prompt=30),
    )
    _, metrics = learner.shard(samples)
    assert metrics["pack/computed_tokens"].value < 0.65 * metrics["pack/tokens"].value
    packed, packed_loss = gradients(learner, samples, old_shift)
    padded, padded_loss = padded_gradients(learner, samples, old_shift)
    assert packed_loss == pytest.approx(padded_loss, rel=2e-6, abs=2e-6)
    assert_same(packed, padded)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_four_microbatches_give_the_same_gradient_as_one(tiny_model, algorithm):
    one = make_learner(tiny_model, algorithm=algorithm)
    four = make_learner(tiny_model, "--learner.microbatch_tokens", "100", algorithm=algorithm)
    samples = ragged_samples(20)
    assert len(one.shard(samples)[0][0].batches) == 1
    assert len(four.shard(samples)[0][0].batches) >= 4
    (a, loss_a), (b, loss_b) = gradients(one, samples), gradients(four, samples)
    assert loss_a == pytest.approx(loss_b, rel=2e-6, abs=2e-6)
    assert_same(a, b)


def test_activation_checkpointing_gives_the_same_gradient(tiny_model):
    a, _ = gradients(make_learner(tiny_model), ragged_samples())
    b, _ = gradients(
        make_learner(tiny_model, "--learner.activations", "recompute"), ragged_samples()
    )
    assert_same(a, b)


def test_samples_without_advantage_count_in_the_denominator_but_need_no_forward(tiny_model):
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


def test_minibatches_keep_groups_together_and_use_the_logprobs_from_before_the_first_update(
    tiny_model,
):
    learner = make_learner(
        tiny_model,
        "--learner.updates_per_epoch",
        "2",
        "--learner.epochs",
        "2",
        "--optim.lr",
        "0.01",
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


def clipped_gradients(
    learner: Learner, weights: list[torch.Tensor], minibatch, norm: float
) -> list[torch.Tensor]:
    """By torch's own clipping, of a learner that gets these weights."""
    parameters = list(learner.policy.parameters())
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
            parameter.grad = None
    (batch,) = minibatch.batches
    (
        token_losses(learner.algorithm, batch, *learner.forward(batch))[0].sum()
        / minibatch.denominator
    ).backward()
    assert torch.nn.utils.clip_grad_norm_(parameters, norm) > 2 * norm
    return [p.grad for p in parameters]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_are_torchs_optimizer_with_scheduled_rates_and_a_clipped_gradient(name, tiny_model):
    flags = [
        "--optim.name",
        name,
        "--optim.lr",
        "0.08",
        "--optim.warmup_steps",
        "3",
        "--optim.schedule",
        "linear",
    ]
    flags += ["--optim.betas", "0.8,0.7", "--optim.eps", "1e-5", "--optim.weight_decay", "0.1"]
    flags += [
        "--optim.max_grad_norm",
        "0.01",
        "--learner.updates_per_epoch",
        "2",
        "--algo.entropy_coef",
        "0.01",
    ]
    learner, plain = (make_learner(tiny_model, *flags, "--num_steps", "9") for _ in range(2))
    weights_of_learner = list(learner.policy.parameters())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in weights_of_learner]
    matrices, rest = (
        [p for p in copies if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.7), eps=1e-5, foreach=False)
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.8)
    warmup = [0.08 * x / 4 for x in (1, 1.5, 2, 2.5, 3, 3.5)]
    rates = iter([*warmup, 0.08, 0.08 * (1 - 0.5 / 6)])  # two updates in each of four steps
    seen = []  # Weights before each update, and its gradients.
    learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            (
                [p.detach().clone() for p in weights_of_learner],
                [p.grad.clone() for p in weights_of_learner],
            )
        )
    )
    for step in range(4):
        samples = ragged_samples(seed=step)
        learner.step(learner.shard(samples)[0], step)
        for minibatch, (weights, gradients_) in zip(
            plain.shard(samples)[0], seen[-2:], strict=True
        ):
            rate = next(rates)
            for got, want in zip(
                gradients_, clipped_gradients(plain, weights, minibatch, 0.01), strict=True
            ):
                torch.testing.assert_close(got, want, atol=1e-5 * 0.01, rtol=1e-5)
            # From here on with the learner's gradients: Adam's step is as large for a gradient near
            # zero, whose sign is rounding, as for any other.
            for copy, gradient in zip(copies, gradients_, strict=True):
                copy.grad = gradient
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    # Each of 8 updates moves at most lr, with some ten roundings of 2^-24.
    for (n, a), b in zip(learner.policy.named_parameters(), copies, strict=True):
        torch.testing.assert_close(
            a, b.detach(), atol=8 * 10 * 2**-24 * 0.08, rtol=1e-5, msg=lambda m, n=n: f"{n}: {m}"
        )


def test_all_logprobs_of_the_learner_are_at_the_temperature_of_sampling(tiny_model):
    flags = ["--sampling.temperature", "0.5", "--learner.epochs", "2", "--algo.kl_coef", "0.1"]
    learner, samples = make_learner(tiny_model, *flags), ragged_samples()
    (minibatch,), _ = learner.shard(samples)
    learner.annotate([minibatch])
    (batch,) = minibatch.batches
    hf, want = learner.policy.hf, []
    hf.set_attn_implementation("sdpa")
    for s in samples:
        logprobs = (
            hf(torch.tensor(s.token_ids)[None], use_cache=False).logits[0] / 0.5
        ).log_softmax(-1)
        want += [
            (t, logprobs[i - 1, t].item())
            for i, t in enumerate(s.token_ids.tolist())
            if s.loss_mask[i]
        ]
    hf.set_attn_implementation("rl_core_packed")
    for logprobs_of in (batch.old_logprobs, batch.ref_logprobs, learner.forward(batch)[0]):
        pairs = sorted(zip(batch.labels.tolist(), logprobs_of.tolist(), strict=True))
        assert [x for pair in pairs for x in pair] == pytest.approx(
            [x for pair in sorted(want) for x in pair], abs=1e-5
        )
    _, metrics = learner.losses(batch)
    assert metrics["step_kl_nats"].total.item() == metrics["ref_kl_nats"].total.item() == 0


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
