"""Exact forms of a teacher: divergences and their gradients are those of autograd over all logits
in float64, by the papers' formulas, within bounded memory, on every mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit import (
    answer,
    gradient,
    learn,
    make_learner,
    of_ranks,
    part_of,
    run,
    sample,
    weights,
)
from test_experts import family  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rl_core.distributed import Mesh, init_ranks, on_mesh
from rl_core.learning.padded_forward import FullLogitsForward, choose_forward
from rl_core.learning.teachers import divergence
from rl_core.learning.teachers.distill import ModelTeacher, TeacherOutput
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
    """[M] the papers' formulas of log p, the student's, and log q."""
    p, q = logp.exp(), logq.exp()
    if form == "reverse_kl":
        return (p * (logp - logq)).sum(-1)
    if form == "forward_kl":
        return (q * (logq - logp)).sum(-1)
    m = BETA * q + (1 - BETA) * p
    to_teacher, to_student = q * (logq - m.log()), p * (logp - m.log())
    return (BETA * to_teacher + (1 - BETA) * to_student).sum(-1)


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


def test_the_sampled_form_has_the_gradient_of_the_reverse_kl_in_expectation():
    """Over all tokens that the student can sample: E[(log p - log q) grad log p] = grad KL."""
    student = make_factors(3, 40, 8, 1)
    teacher = make_factors(3, 40, 8, 5)
    logp, logq = log_softmax(student), log_softmax(teacher).detach()
    gain = (logp - logq).detach()
    sampled = (logp.exp().detach() * gain * logp).sum(-1)  # each weighed by how often it is sampled
    exact = fused_divergence(student, WholeVocabulary(teacher, make_form("reverse_kl", 0.5)), 40)
    for got, wanted in zip(
        gradients_of(sampled, student), gradients_of(exact, student), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-9)


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


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_is_the_mean_over_trained_tokens_by_transformers(tiny_model, teacher, form):
    flags = f"--algo.teacher_loss {form} --sampling.temperature 0.8 --algo.teacher_coef 0.5"
    beta = f"--algo.teacher_beta {BETA}" if form == "jsd" else ""
    _, grads = gradient(tiny_model, SAMPLES, PLAIN, flags, beta, "--algo.teacher", teacher)
    student = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    other = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    terms = []
    for s in SAMPLES:
        ids, mask = torch.tensor(s.token_ids)[None], torch.tensor(s.loss_mask[1:])
        logp = (student(ids).logits[0, :-1][mask] / 0.8).log_softmax(-1)
        with torch.no_grad():
            logq = (other(ids).logits[0, :-1][mask] / 0.8).log_softmax(-1)
        terms.append(written_out(form, logp, logq))
    (0.5 * torch.cat(terms).mean()).backward()
    for name, weight in student.named_parameters():
        if name in grads:
            torch.testing.assert_close(grads[name].double(), weight.grad, atol=2e-6, rtol=1e-4)
    assert len(grads) > 20 and max(g.abs().max() for g in grads.values()) > 1e-3


MESHES = {"dp 2": Mesh(dp_shard=2), "cp 2": Mesh(cp=2), "tp 2": Mesh(tp=2)}
EXACT = f"--algo.teacher_loss jsd --algo.teacher_beta {BETA}"


def compare(ranks, model: str, teacher: str, out: str) -> None:
    """Writes the gradient on each mesh."""
    for name, mesh in MESHES.items():
        mine = [s for n, s in enumerate(SAMPLES) if n % 2 == ranks.rank]
        cut = f"--cp {mesh.cp} --tp {mesh.tp}"
        flags = PLAIN, EXACT, cut, "--learner.microbatch_tokens 100 --algo.teacher", teacher
        _, grads = gradient(model, mine, *flags, ranks=on_mesh(ranks, mesh))
        torch.save(grads, f"{out}.{name}.{ranks.rank}")


def test_two_ranks_take_the_gradient_of_one(tiny_model, teacher, tmp_path):
    of_ranks(2, __file__, "compare", tiny_model, teacher, tmp_path / "taken")
    _, wanted = gradient(tiny_model, SAMPLES, PLAIN, EXACT, "--algo.teacher", teacher)
    for name in MESHES:
        for rank in range(2):
            grads = torch.load(f"{tmp_path / 'taken'}.{name}.{rank}")
            assert grads.keys() == wanted.keys()
            for weight, value in wanted.items():
                torch.testing.assert_close(grads[weight], value, atol=2e-6, rtol=1e-4)


def likeliest_gradient(ranks, model: str, teacher: str, out: str) -> None:
    """Writes the gradient where of each of the teacher's distributions 7 tokens are known."""
    cut = f"--tp {ranks.mesh.tp} --learner.microbatch_tokens 100 --algo.teacher {teacher}"
    sgd = "--optim.name sgd --optim.lr 1 --optim.betas 0,0 --optim.eps 0 --optim.max_grad_norm 0"
    learner = make_learner(model, PLAIN, EXACT, cut, sgd, ranks=ranks)
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    (minibatch,), _ = learner.shard(SAMPLES if ranks.rank == 0 else [])
    learner.annotate([minibatch])
    for batch in minibatch.batches:
        [output] = batch.teacher.outputs
        top = log_softmax(output.factors).topk(7)
        batch.teacher.outputs = [
            TeacherOutput(logprobs=output.logprobs, top=(top.indices, top.values))
        ]
    learner.step([minibatch], 0)
    grads = {name: before[name] - weight for name, weight in learner.named_weights()}
    torch.save(grads, f"{out}.{ranks.rank}")


def likeliest_on_split_head(ranks, *args: str) -> None:
    likeliest_gradient(on_mesh(ranks, Mesh(tp=2)), *args)


def test_the_likeliest_tokens_of_a_head_that_is_split(tiny_model, teacher, tmp_path):
    """Each rank has some of them."""
    likeliest_gradient(init_ranks(60), tiny_model, teacher, tmp_path / "whole")
    of_ranks(2, __file__, "likeliest_on_split_head", tiny_model, teacher, tmp_path / "split")
    wanted = torch.load(f"{tmp_path / 'whole'}.0")
    for rank in range(2):
        grads = torch.load(f"{tmp_path / 'split'}.{rank}")
        assert grads.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(grads[name], value, atol=2e-6, rtol=1e-4)
    assert max(value.abs().max() for value in wanted.values()) > 1e-3


def whole_logits(hf, ids: list[int], mask) -> torch.Tensor:
    """[M, V] log p of the tokens that are trained, by the model's own forward."""
    logits = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return logits[torch.tensor(mask[1:])].log_softmax(-1)


def wanted_gradients(learner, hf, teacher: str) -> dict[str, torch.Tensor]:
    """Gradients of the mean KL(teacher || student) over tokens, by autograd over all logits."""
    other, terms = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32), []
    for s in SAMPLES:
        ids = s.token_ids.tolist()
        with torch.no_grad():
            logq = whole_logits(other, ids, s.loss_mask)
        terms.append(written_out("forward_kl", whole_logits(hf, ids, s.loss_mask), logq))
    learner.policy.zero_grad()
    torch.cat(terms).mean().backward()
    return grads_of(learner)


def grads_of(learner) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in learner.trained_parameters() if p.grad is not None}


FORWARD = f"{PLAIN} --algo.teacher_loss forward_kl --algo.teacher"


def found_gradients(learner, samples=SAMPLES) -> dict[str, torch.Tensor]:
    (minibatch,), _ = learner.shard(samples)
    learner.annotate([minibatch])
    for extension in learner.extensions:
        extension.before_update(learner, minibatch, 0)
    learner.backward(minibatch)
    return grads_of(learner)


def test_adapters_have_the_gradient_of_the_whole_logits(tiny_model, teacher):
    learner = make_learner(tiny_model, "--actors.policy.lora.rank 4", FORWARD, teacher)
    grads = found_gradients(learner)
    learner.policy.hf.set_attn_implementation("sdpa")
    wanted = wanted_gradients(learner, learner.policy.hf, teacher)
    assert grads.keys() == wanted.keys() and all(".lora_" in name for name in grads)
    for name, value in wanted.items():
        torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)
    assert max(value.abs().max() for value in wanted.values()) > 1e-3


def test_with_top_k_the_divergence_is_over_the_whole_vocabulary(tiny_model, teacher):
    learner = make_learner(tiny_model, FORWARD, teacher, "--sampling.top_k 3")
    samples = []
    for s in SAMPLES:
        lines = [f"{token} 90 91" for token in s.token_ids[s.loss_mask]]
        samples.append(replace(s, kept_ids=lines))
    grads = found_gradients(learner, samples)
    learner.policy.hf.set_attn_implementation("sdpa")
    for name, value in wanted_gradients(learner, learner.policy.hf, teacher).items():
        torch.testing.assert_close(grads[name], value, atol=1e-6, rtol=1e-4)


def test_a_model_on_padded_rows_learns_from_one_that_is_packed(family, teacher):  # noqa: F811
    learner = make_learner(family("lfm2"), FORWARD, teacher)
    for model in learner.models():
        choose_forward(model, learner.ranks)
    assert type(learner.policy.forward_pass).__name__ == "PaddedForward"
    grads = found_gradients(learner)
    wanted = wanted_gradients(learner, learner.policy.hf, teacher)
    for name, value in wanted.items():
        torch.testing.assert_close(grads[name], value, atol=2e-6, rtol=1e-3)
    assert len(wanted) > 10


def test_each_minibatch_has_the_mean_over_its_own_tokens(tiny_model, teacher):
    learner = make_learner(tiny_model, FORWARD, teacher, "--learner.updates_per_epoch 2")
    minibatches, _ = learner.shard(SAMPLES)
    learner.annotate(minibatches)
    assert sorted(minibatch.num_tokens for minibatch in minibatches) == [5, 6]
    for minibatch in minibatches:
        samples = SAMPLES[:2] if minibatch.num_tokens == 6 else SAMPLES[2:]
        alone = found_gradients(make_learner(tiny_model, FORWARD, teacher), samples)
        learner.policy.zero_grad()
        for extension in learner.extensions:
            extension.before_update(learner, minibatch, 0)
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


def test_the_mean_of_means_weighs_each_sequence_alike(tiny_model, teacher):
    flags = FORWARD, teacher, "--algo.aggregation sequence"
    _, grads = gradient(tiny_model, SAMPLES, *flags)
    total: dict[str, torch.Tensor] = {}
    for s in SAMPLES:
        _, of_sample = gradient(tiny_model, [s], FORWARD, teacher)
        for name, value in of_sample.items():
            total[name] = total.get(name, 0) + value / len(SAMPLES)
    for name, value in total.items():
        torch.testing.assert_close(grads[name], value, atol=2e-6, rtol=1e-3)


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


ASK = """
def load_tasks(split):
    return [{"messages": [{"role": "user", "content": text}]} for text in ("ab?", "cd?", "ef?")]


def reward_fn():
    return 0.0
"""


def test_a_resumed_run_is_as_one_that_was_not_stopped(tmp_path, tiny_model, teacher):
    (tmp_path / "ask.py").write_text(ASK)
    flags = (
        f"--algorithm opd --env_path {tmp_path / 'ask.py'} --max_tokens 6 --tasks_per_step 2 "
        f"--group_size 2 --optim.lr 1e-3 --model {tiny_model} --algo.teacher_loss jsd --algo.teacher"
    )
    uninterrupted = weights(run(tmp_path / "whole", flags, teacher, "--num_steps 4"))
    run(tmp_path / "parts", flags, teacher, "--num_steps 2")
    parts = weights(run(tmp_path / "parts", flags, teacher, "--num_steps 4 --resume"))
    begun = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    moved = [
        (uninterrupted[n].float() - w).abs().max()
        for n, w in begun.named_parameters()
        if n in uninterrupted
    ]
    assert max(moved) > 1e-3
    assert all(torch.equal(value, parts[name]) for name, value in uninterrupted.items())


if __name__ == "__main__":
    answer(globals())
