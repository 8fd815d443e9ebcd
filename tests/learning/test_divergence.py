"""Exact forms of a teacher: divergences and their gradients are those of autograd over all logits
in float64, by the papers' formulas, within bounded memory."""

from __future__ import annotations

import oracle
import pytest
import torch
from kit import (
    learn,
    make_learner,
    part_of,
    sample,
)
from test_experts import family  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rl_core.learning.padded_forward import FullLogitsForward
from rl_core.learning.teachers import divergence
from rl_core.learning.teachers.distill import ModelTeacher
from rl_core.learning.teachers.divergence import (
    TopTokens,
    WholeVocabulary,
    fused_divergence,
    make_form,
)
from rl_core.models import logprobs as fused
from rl_core.models.cpu_offload import HostCopies
from rl_core.models.policy import Policy
from rl_core.types import RunError

FORMS = ("reverse_kl", "forward_kl", "jsd")
BETA = 0.3
PLAIN = "--algorithm opd --algo.normalize none"
SAMPLES = [
    sample([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 1, 1], 0.0, "a"),
    sample([5, 6, 20, 21], [0, 0, 1, 1], 0.0, "a"),
    sample([30, 31, 32, 33, 34, 35, 36], [0, 1, 1, 0, 1, 1, 1], 0.0, "b"),
]


def written_out(form: str, logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    return oracle.divergence(form, BETA, logp, logq)


def log_softmax(factors) -> torch.Tensor:
    hidden, weight, temperature, cap = factors
    z = hidden @ weight.T
    z = z if cap is None else cap * (z / cap).tanh()
    return (z / temperature).log_softmax(-1)


def draw(*shape: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make_factors(num_tokens: int, num_ids: int, width: int, seed: int, scaling=(0.7, None), **kind):
    hidden = draw(num_tokens, width, seed=seed, **kind)
    weight = 3 * draw(num_ids, width, seed=seed + 1, **kind) / width**0.5
    return hidden.requires_grad_(), weight.requires_grad_(), *scaling


def gradients_of(values: torch.Tensor, factors) -> list[torch.Tensor]:
    weights = torch.sin(torch.arange(len(values))).to(values.dtype) + 1.5
    return list(torch.autograd.grad((values * weights).sum(), factors[:2]))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that 37 tokens and 101 ids are many."""
    monkeypatch.setattr(divergence, "CPU_TILE_BYTES", 4 * 8 * 16)
    monkeypatch.setattr(fused, "LEAST_IDS", 16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scaling", [(0.7, None), (1.3, 5.0)])
def test_tiles_give_the_formula_and_its_gradient(small_tiles, form, scaling):
    student = make_factors(37, 101, 12, 1, scaling)
    teacher = tuple(x.detach() for x in make_factors(37, 104, 20, 5, scaling)[:2]) + scaling
    # The teacher's embedding has rows that pad it.
    bounded = teacher[0], teacher[1][:101], *scaling
    expected = written_out(form, log_softmax(student), log_softmax(bounded))
    values = fused_divergence(student, WholeVocabulary(teacher, make_form(form, BETA)), 101)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=1e-10)
    for got, wanted in zip(
        gradients_of(values, student), gradients_of(expected, student), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-9)
        assert wanted.abs().max() > 0.01


@pytest.mark.parametrize("form", FORMS)
def test_the_likeliest_tokens_and_one_bucket_for_the_rest(small_tiles, form):
    student = make_factors(37, 101, 12, 1)
    logq = log_softmax([x.detach() for x in make_factors(37, 101, 20, 5)[:2]] + [1.0, None])
    top = logq.topk(7)
    values = fused_divergence(
        student, TopTokens(top.indices, top.values, make_form(form, BETA)), 101
    )

    def buckets(logprobs):
        is_top = torch.zeros_like(logq, dtype=torch.bool).scatter(1, top.indices, True)
        rest = logprobs.masked_fill(is_top, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logprobs.gather(1, top.indices), rest], 1)

    expected = written_out(form, buckets(log_softmax(student)), buckets(logq))
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-8)
    for got, wanted in zip(
        gradients_of(values, student), gradients_of(expected, student), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounding", [0.0, 1e-4])
def test_the_rest_has_a_floor_where_the_likeliest_tokens_are_all(form, rounding):
    """A server rounds logprobs, whose probabilities may then be 1 together, or more."""
    student = make_factors(5, 40, 8, 1)
    ids = torch.arange(3).expand(5, -1)
    probs = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).expand(5, -1)
    logq = probs.log() + rounding
    values = fused_divergence(student, TopTokens(ids, logq, make_form(form, BETA)), 40)
    logp = log_softmax(student)
    buckets = torch.cat([logp[:, :3], logp[:, 3:].logsumexp(-1, keepdim=True)], 1)
    floor = torch.full((5, 1), 1e-6, dtype=torch.float64).log()
    expected = written_out(form, buckets, torch.cat([logq, floor], 1))
    assert values.isfinite().all()
    torch.testing.assert_close(values, expected, atol=1e-10, rtol=1e-8)
    for got, wanted in zip(
        gradients_of(values, student), gradients_of(expected, student), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-7)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return out


def test_no_tensor_has_all_logits():
    num_tokens, num_ids = 3000, 20_000
    student = make_factors(num_tokens, num_ids, 16, 1, dtype=torch.float32)
    teacher = make_factors(num_tokens, num_ids, 24, 5, dtype=torch.float32)
    with LargestTensor() as largest:
        target = WholeVocabulary(
            [x.detach() for x in teacher[:2]] + [1.0, None], make_form("jsd", 0.5)
        )
        fused_divergence(student, target, num_ids).sum().backward()
    all_logits = 4 * num_tokens * num_ids
    assert largest.bytes <= 2 * divergence.CPU_TILE_BYTES < all_logits / 20


@pytest.fixture(scope="module")
def teacher(make_model):
    return make_model(seed=7, hidden=48)


def grads_of(learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in learner.trained_parameters() if p.grad is not None}


FORWARD = f"{PLAIN} --algo.teacher_loss forward_kl --algo.teacher"


def found_gradients(learner, samples=SAMPLES) -> dict[str, torch.Tensor]:
    (minibatch,), _ = learner.shard(samples)
    learner.annotate([minibatch])
    learner.backward(minibatch)
    return grads_of(learner)


def test_adapters_have_the_gradient_of_the_whole_logits(tiny_model, teacher):
    learner = make_learner(tiny_model, "--actors.policy.lora.rank 4", FORWARD, teacher)
    grads = found_gradients(learner)
    learner.policy.hf.set_attn_implementation("sdpa")
    other, terms = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32), []
    for s in SAMPLES:
        logp, logq = (oracle.distributions(hf, s, 1.0) for hf in (learner.policy.hf, other))
        terms.append(written_out("forward_kl", logp, logq.detach()))
    learner.policy.zero_grad()
    torch.cat(terms).mean().backward()
    wanted = grads_of(learner)
    assert grads.keys() == wanted.keys() and all(".lora_" in name for name in grads)
    for name, value in wanted.items():
        torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)
    assert max(value.abs().max() for value in wanted.values()) > 1e-3


def test_each_minibatch_has_the_mean_over_its_own_tokens(tiny_model, teacher):
    learner = make_learner(tiny_model, FORWARD, teacher, "--learner.updates_per_epoch 2")
    minibatches, _ = learner.shard(SAMPLES)
    learner.annotate(minibatches)
    assert sorted(minibatch.num_tokens for minibatch in minibatches) == [5, 6]
    for minibatch in minibatches:
        samples = SAMPLES[:2] if minibatch.num_tokens == 6 else SAMPLES[2:]
        alone = found_gradients(make_learner(tiny_model, FORWARD, teacher), samples)
        learner.policy.zero_grad()
        learner.backward(minibatch)
        for name, value in grads_of(learner).items():
            torch.testing.assert_close(value, alone[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_a_head_that_is_not_a_product_is_refused(tiny_model, teacher, whose):
    learner = make_learner(tiny_model, FORWARD, teacher)
    policy = learner.policy
    if whose == "teacher":
        [policy] = part_of(learner, "ExactTeacher").models
    policy.use_forward(FullLogitsForward())
    policy.hf.set_attn_implementation("sdpa")
    with pytest.raises(RunError, match=r"has a custom head, .* take sampled"):
        learn(learner, SAMPLES)


def test_a_teacher_that_leaves_the_device_teaches_the_same(tiny_model, teacher):
    """Its head is on no device when the student is compared."""
    rows = []
    for leaves in (False, True):
        learner = make_learner(tiny_model, FORWARD, teacher)
        extension = part_of(learner, "ExactTeacher")
        [policy] = extension.models
        if leaves:
            for weight in policy.hf.parameters():
                weight.data = weight.data.clone()  # a file's pages cannot leave
            offloaded = Policy(
                policy.hf,
                torch.float32,
                torch.float32,
                policy.forward_pass,
                host_copies=HostCopies(torch.device("cpu"), is_constant=True),
            )
            with offloaded.on_device():
                pass
            assert not offloaded.is_on_device
            extension.teachers[:] = [ModelTeacher(offloaded, 1.0)]
        rows += learn(learner, SAMPLES)
    one, other = (row["teacher_loss_nats"] for row in rows)
    assert one == pytest.approx(other, rel=1e-6)
    assert one > 0
    # Memory elsewhere may be read by other kernels: a norm of fp32 sums of 11 tokens' terms.
    assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-5)
    assert rows[0]["grad_norm"] > 0


def test_rewards_and_several_updates_stand_beside_a_teacher(tiny_model, teacher):
    """Each update compares the student as it is then."""
    flags = "--algorithm grpo --learner.epochs 3 --optim.lr 1e-3 --algo.teacher_loss forward_kl"
    learner = make_learner(tiny_model, flags, "--algo.teacher", teacher)
    paid = [sample([5, 6, 7, 8], [0, 0, 1, 1], reward, "a") for reward in (1.0, -1.0)]
    rows = learn(learner, *[paid] * 4)
    losses = [row["teacher_loss_nats"] for row in rows]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
