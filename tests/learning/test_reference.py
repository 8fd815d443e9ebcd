"""The reference of KL penalties and DPO: its place in reward and loss, and how it is renewed."""

import json
import shutil

import pytest
import torch
from kit import learn, make_learner, part_of, run, sample, steps, weights, words
from oracle import logprobs
from transformers import AutoModelForCausalLM

SAMPLES = [
    sample([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 1, 1], 0.7, "a"),
    sample([5, 6, 20, 21], [0, 0, 1, 1], -0.7, "a"),
]
SGD = "--optim.name sgd --optim.lr 0.5 --optim.betas 0,0"
ASK = """
def load_tasks(split):
    return [{"messages": [{"role": "user", "content": text}]} for text in ("ab?", "cd?", "ef?")]


async def reward_fn(completion):
    return sum(map(ord, completion)) / 1000
"""
SIZES = "--max_tokens 6 --tasks_per_step 3 --group_size 3 --optim.lr 1e-2"


def kept(learner) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in part_of(learner, "RenewedReference").copy.tensors]


def trained_weights(learner) -> list[torch.Tensor]:
    return [weight.detach().clone() for _, weight in learner.trained_parameters()]


@pytest.mark.parametrize("lora", ["", "--actors.policy.lora.rank 4"])
def test_a_reference_is_the_policy_of_every_nth_step_to_the_bit(tiny_model, lora):
    learner = make_learner(tiny_model, SGD, lora, "--algo.kl_coef 0.1 --algo.reference_every 2")
    begin = trained_weights(learner)
    expected = [begin]
    for step in range(5):
        learn(learner, SAMPLES, first=step)
        expected.append(trained_weights(learner))
        last = expected[(step + 1) // 2 * 2]
        assert all(map(torch.equal, kept(learner), last)), step
    assert not all(map(torch.equal, expected[0], expected[2]))


def test_a_reference_that_decays_is_the_recurrence_in_fp64(tiny_model):
    learner = make_learner(tiny_model, SGD, "--algo.log_kl true --algo.reference_decay 0.9")
    mean = [weight.double() for weight in trained_weights(learner)]
    for step in range(6):
        learn(learner, SAMPLES, first=step)
        mean = [
            0.9 * m + 0.1 * w.double() for m, w in zip(mean, trained_weights(learner), strict=True)
        ]
    for copy, expected in zip(kept(learner), mean, strict=True):
        torch.testing.assert_close(copy.double(), expected, atol=1e-6, rtol=0)
    assert (
        max(
            (a - b).abs().max()
            for a, b in zip(kept(learner), trained_weights(learner), strict=True)
        )
        > 1e-3
    )


def test_every_and_decay_together_are_trls_sync_of_a_reference(tiny_model):
    """TRL: every ref_model_sync_steps, alpha * policy + (1 - alpha) * reference."""
    flags = "--algo.kl_coef 0.1 --algo.reference_every 3 --algo.reference_decay 0.4"
    learner = make_learner(tiny_model, SGD, flags)
    begin, alpha = trained_weights(learner), 0.6
    for step in range(3):
        assert all(map(torch.equal, kept(learner), begin))
        learn(learner, SAMPLES, first=step)
    for copy, first, now in zip(kept(learner), begin, trained_weights(learner), strict=True):
        torch.testing.assert_close(copy, alpha * now + (1 - alpha) * first)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_renewed_reference_reads_by_its_own_weights(tiny_model, temperature):
    flags = f"--algo.kl_coef 0.1 --algo.reference_every 100 --sampling.temperature {temperature}"
    learner = make_learner(tiny_model, SGD, flags)
    learn(learner, SAMPLES, SAMPLES)
    before = trained_weights(learner)
    (minibatch,), _ = learner.shard(SAMPLES)
    learner.annotate([minibatch])
    assert all(map(torch.equal, trained_weights(learner), before))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    [batch] = minibatch.batches
    with torch.no_grad():
        in_order = sorted(SAMPLES, key=lambda s: s.token_ids.tobytes())
        expected = [logprobs(model, s, temperature) for s in in_order]
    torch.testing.assert_close(batch.ref_logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        now = learner.forward(batch)[0]
    assert (now - batch.ref_logprobs).abs().max() > 1e-3


def test_a_slow_actor_renews_at_the_first_step_after_each_nth(tiny_model):
    flags = "--algo.kl_coef 0.1 --algo.reference_every 3 --actors.policy.update_every 2"
    learner = make_learner(tiny_model, SGD, flags)
    renewed = []
    for step in (1, 3, 5, 7, 9, 11):
        before = kept(learner)
        learn(learner, SAMPLES, first=step)
        renewed.append(not all(map(torch.equal, kept(learner), before)))
    # After 2, 4, 6, 8, 10, 12 steps: 3, 6, 9 and 12 are passed.
    assert renewed == [False, True, True, False, True, True]


def test_a_kl_that_is_only_logged_changes_no_weight(tmp_path, tiny_model):
    (tmp_path / "ask.py").write_text(ASK)
    flags = words("--model", tiny_model, "--env_path", tmp_path / "ask.py", SIZES, "--num_steps 3")
    plain = run(tmp_path / "plain", flags)
    logged = run(tmp_path / "logged", flags, "--algo.log_kl true")
    for name, weight in weights(plain).items():
        assert torch.equal(weights(logged)[name], weight)
    kl = [row["learn/policy/ref_kl_nats"] for row in steps(logged)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-4
    assert "learn/policy/ref_kl_nats" not in steps(plain)[0]


MEAN = "--algo.kl_coef 0.1 --algo.reference_decay 0.5"


def test_a_checkpoint_without_a_reference_begins_with_that_of_a_new_run(
    tmp_path, tiny_model, capsys
):
    (tmp_path / "ask.py").write_text(ASK)
    flags = words("--model", tiny_model, "--env_path", tmp_path / "ask.py", SIZES)
    out = run(tmp_path / "run", flags, "--num_steps 2")
    state = out / "checkpoints/step_000002/state.json"
    assert json.loads(state.read_text())["copies"] == []
    shutil.copytree(out, tmp_path / "fixed")
    run(out, flags, MEAN, "--num_steps 3 --resume")
    assert "has no policy_reference: it begins as in a new run" in capsys.readouterr().out
    run(tmp_path / "fixed", flags, "--algo.kl_coef 0.1 --num_steps 3 --resume")
    kl = [steps(folder)[-1]["learn/policy/ref_kl_nats"] for folder in (out, tmp_path / "fixed")]
    assert kl[0] == pytest.approx(kl[1], rel=1e-5) and kl[0] > 1e-5


def test_dpo_with_a_reference_of_the_last_step_is_dpo_around_the_policy(tmp_path, tiny_model):
    rows = [{"prompt": "a", "chosen": "b" * (n + 1), "rejected": "c"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = words("--model", tiny_model, "--algorithm dpo --data.train", tmp_path / "rows.jsonl")
    flags += words("--tasks_per_step 4 --num_steps 3 --optim.lr 1e-2 --max_tokens 20")
    rows = steps(run(tmp_path / "run", flags, "--algo.reference_every 1"))
    # Around itself every margin is 0, and the loss log 2.
    assert [row["learn/policy/loss"] for row in rows] == pytest.approx([0.6931472] * 3)
    assert min(row["learn/policy/grad_norm"] for row in rows) > 0.1
