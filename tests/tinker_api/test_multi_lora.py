"""Requests of adapters: losses and gradients against autograd on transformers' model with peft's adapter,
steps against SFT, tenants against each other, states after a restart."""

from __future__ import annotations

import random

import kit
import numpy as np
import pytest
import torch
from bodies import datum, forward_backward, row
from peft import PeftModel
from safetensors import torch as safetensors
from transformers import AutoModelForCausalLM

from rl_core.tinker.multi_lora import MultiLora
from rl_core.tinker.wire import Lora, as_bytes, entry, fields_of
from rl_core.tools.tinker import make_lora, read_flags
from rl_core.types import TrainingSample, counter_seed

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
LORA = {"rank": 4, "train_mlp": True, "train_attn": True, "train_unembed": True}


def new_lora(model, *flags) -> MultiLora:
    flags = flags or ("--max_rank", "6", "--max_models", "2")
    return make_lora(*read_flags(["--model", str(model), "--max_context_tokens", "256", *flags]))


@pytest.fixture(scope="module")
def lora(tiny_model) -> MultiLora:
    return new_lora(tiny_model)


def rows(num: int, seed: int = 0) -> list[list[int]]:
    """Rows of tokens; neighbours begin alike."""
    draw = random.Random(seed)
    start = [draw.randrange(8, 104) for _ in range(12)]
    return [start + [draw.randrange(8, 104) for _ in range(draw.randint(1, 9))] for _ in range(num)]


def learn(lora: MultiLora, name: str, num: int = 2, seed: int = 0) -> None:
    """Steps after which neither factor of an adapter is 0."""
    for step in range(num):
        lora.forward_backward(name, forward_backward(map(row, rows(3, seed + step))))
        lora.optim_step(name, ADAM)


def gradients(lora: MultiLora, name: str) -> dict[str, torch.Tensor]:
    result = {}
    for key, parameter in lora.learners[name].trained_parameters():
        assert parameter.grad is not None
        result[key] = parameter.grad.clone()
    lora.drop_gradients(name)
    return result


def with_adapter(model, folder) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float64)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True).double().eval()


def read_output(body: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Logprobs of each datum, and metrics."""
    metrics, logprobs = {}, []
    for number, value in fields_of(body):
        if number == 2:
            [fields] = [v for n, v in fields_of(as_bytes(value)) if n == 2]
            batched = dict(fields_of(entry(fields)[1]))
            ends = np.frombuffer(as_bytes(batched[2]), "<i8") // 4
            logprobs = np.split(np.frombuffer(as_bytes(batched[1]), "<f4"), ends[1:-1])
        elif number == 3:
            parts = dict(fields_of(as_bytes(value)))
            metrics[bytes(as_bytes(parts[1])).decode()] = np.frombuffer(parts[2], "<f8")[0]
    return logprobs, metrics


def inputs_of(number: int, length: int) -> dict[str, list[float]]:
    draw = random.Random(number)
    return {
        "weights": [draw.choice((-0.7, 0.0, 1.5)) for _ in range(length)],
        "logprobs": [-4.6 + draw.uniform(-0.5, 0.5) for _ in range(length)],
        "advantages": [draw.choice((-1.0, 0.0, 2.0)) for _ in range(length)],
        "clip_low_threshold": [0.9 - 0.1 * number] * length,
        "clip_high_threshold": [1.1 + 0.2 * number] * length,
        "sequence_ratio_mask": [float(draw.random() < 0.7) for _ in range(length)],
    }


def clipped(x, ratio):
    bounded = ratio.clamp(x["clip_low_threshold"], x["clip_high_threshold"])
    return -torch.minimum(ratio * x["advantages"], bounded * x["advantages"]), bounded


def ratio_of(x, logprobs):
    return (logprobs - x["logprobs"]).exp()


def gspo(x, logprobs):
    mask = x["sequence_ratio_mask"]
    log_ratio = (mask * (logprobs - x["logprobs"])).sum() / mask.sum()
    return clipped(x, log_ratio.exp().expand_as(logprobs))[0]


def cispo(x, logprobs):
    bounded = clipped(x, ratio_of(x, logprobs).detach())[1]
    return -bounded * x["advantages"] * logprobs


# Loss -> (losses of tokens from a datum's inputs and its logprobs, the inputs that it reads, settings)
RATIO = ["logprobs", "advantages"]
BOUNDED = [*RATIO, "clip_low_threshold", "clip_high_threshold"]
LOSSES = {
    "cross_entropy": (lambda x, lp: -x["weights"] * lp, ["weights"], {}),
    "importance_sampling": (lambda x, lp: -ratio_of(x, lp) * x["advantages"], RATIO, {}),
    "ppo": (lambda x, lp: clipped(x, ratio_of(x, lp))[0], BOUNDED, {}),
    "cispo": (cispo, BOUNDED, {}),
    "gspo": (gspo, [*BOUNDED, "sequence_ratio_mask"], {}),
    "dro": (
        lambda x, lp: 0.15 * (lp - x["logprobs"]) ** 2 - x["advantages"] * lp,
        RATIO,
        {"beta": 0.3},
    ),
}


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_and_gradients_are_those_of_autograd(lora, tiny_model, tmp_path, loss_fn):
    lora.create("model0", LORA, 3)
    learn(lora, "model0")
    lora.save("model0", str(tmp_path / "s"), {}, has_state=False)
    oracle = with_adapter(tiny_model, tmp_path / "s/adapter")
    losses_of, names, settings = LOSSES[loss_fn]
    data, total, want_logprobs = [], 0.0, []
    for number, ids in enumerate(rows(5)):
        targets = [*ids[1:-1], 9]  # The last is not the token that follows.
        inputs = {name: inputs_of(number, len(targets))[name] for name in names}
        data.append(datum(ids[:-1], target_tokens=targets, **inputs))
        logits = oracle(torch.tensor([ids[:-1]])).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
        x = {name: torch.tensor(v).float().double() for name, v in inputs.items()}
        total = total + losses_of(x, logprobs).sum()
        want_logprobs.append(logprobs.detach().numpy())
    total.backward()
    body = lora.forward_backward("model0", forward_backward(data[:2], loss_fn, **settings))
    lora.forward_backward("model0", forward_backward(data, loss_fn, forward_only=True, **settings))
    rest = lora.forward_backward("model0", forward_backward(data[2:], loss_fn, **settings))
    outputs = [read_output(body), read_output(rest)]
    logprobs = [*outputs[0][0], *outputs[1][0]]
    for got, want in zip(logprobs, want_logprobs, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    loss = sum(metrics["loss:sum"] for _, metrics in outputs)
    assert loss == pytest.approx(float(total.detach()), abs=1e-4, rel=1e-5)
    grads = gradients(lora, "model0")
    for name, parameter in oracle.named_parameters():
        if parameter.requires_grad:
            want = parameter.grad.float()
            got = grads[name.replace("base_model.model.", "hf.")]
            rank = want.shape[0 if ".lora_A." in name else 1]
            block = got[:rank] if ".lora_A." in name else got[:, :rank]
            scale = float(want.abs().max()) or 1.0
            torch.testing.assert_close(block, want, atol=2e-5 * scale, rtol=1e-4)


def test_fifty_steps_on_a_row_are_those_of_sft(tiny_model):
    flags = ["--actors.policy.lora.rank", "4", "--optim.lr", "1e-2", "--optim.max_grad_norm", "0"]
    ours = kit.make_learner(tiny_model, "--algorithm", "sft", *flags)
    theirs = new_lora(tiny_model, "--max_rank", "4", "--max_models", "1")
    theirs.create("model0", LORA | {"train_unembed": False}, counter_seed(0, "policy"))
    [ids] = rows(1)
    sample = TrainingSample(
        token_ids=ids,
        loss_mask=[False] * 5 + [True] * (len(ids) - 5),
        rollout_logprobs=[0] * len(ids),
        policy_versions=[0] * len(ids),
        advantages=[0] * 5 + [1] * (len(ids) - 5),
    )
    weights = [0.0] * 4 + [1 / (len(ids) - 5)] * (len(ids) - 5)  # A run divides by the tokens.
    body = forward_backward([row(ids, weights)])
    for step in range(50):
        ours_loss = ours.step(ours.shard([sample])[0], 0)["loss"].value
        loss = read_output(theirs.forward_backward("model0", body))[1]["loss:sum"]
        theirs.optim_step("model0", ADAM)
        assert loss == pytest.approx(ours_loss, abs=1e-5), step
    assert loss < 2


def test_the_gradient_at_ratio_1_is_that_of_weighted_cross_entropy(lora):
    lora.create("model0", LORA, 3)
    learn(lora, "model0")
    data = rows(3)
    body = forward_backward(map(row, data), forward_only=True)
    logprobs, _ = read_output(lora.forward_backward("model0", body))
    grads = []
    for loss_fn in ("importance_sampling", "cross_entropy"):
        parts = []
        for ids, old in zip(data, logprobs, strict=True):
            advantages = inputs_of(0, len(old))["advantages"]
            more = {"logprobs": old, "advantages": advantages}
            more = more if loss_fn == "importance_sampling" else {"weights": advantages}
            parts.append(datum(ids[:-1], target_tokens=ids[1:], **more))
        lora.forward_backward("model0", forward_backward(parts, loss_fn))
        grads.append(gradients(lora, "model0"))
    for name, want in grads[1].items():
        torch.testing.assert_close(grads[0][name], want, atol=1e-4, rtol=1e-4)


def test_what_a_client_did_not_ask_for_stays_0_and_its_seed_decides(lora):
    asked = LORA | {"rank": 2, "train_attn": False, "train_unembed": False}
    for name in ("model0", "model1"):
        lora.create(name, asked, 7)
        learn(lora, name)
    first, second = lora.weights("model0"), lora.weights("model1")
    assert {key.split(".")[-3] for key in first} == {"gate_proj", "up_proj", "down_proj"}
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(2 in value.shape and value.all() for value in first.values())
    for name, value in lora.learners["model0"].trained_parameters():
        is_asked = "mlp" in name
        if not is_asked:
            assert not value.any(), name
        elif ".lora_A." in name:
            assert not value[2:].any(), name


def test_interleaved_tenants_change_no_bit_of_each_other(tiny_model, lora):
    lora.create("model0", LORA, 1)
    learn(lora, "model0", 1, 5)
    lora.create("model1", LORA | {"rank": 3}, 2)
    for step in range(3):
        for seed, name in enumerate(("model0", "model1")):
            lora.forward_backward(name, forward_backward(map(row, rows(3, 10 * seed + step))))
        for name in ("model1", "model0"):
            lora.optim_step(name, ADAM)
    together = {name: lora.weights(name) for name in ("model0", "model1")}
    for seed, name in enumerate(together):
        lora.create(name, LORA | {"rank": 4 - seed}, seed + 1)
        learn(lora, name, 1 - seed, 5)
        learn(lora, name, 3, 10 * seed)
        alone = lora.weights(name)
        assert all(torch.equal(alone[key], value) for key, value in together[name].items())


def test_logprobs_are_those_of_transformers_for_a_snapshot_and_the_base(lora, tiny_model, tmp_path):
    lora.create("model0", LORA, 5)
    learn(lora, "model0")
    lora.save("model0", str(tmp_path / "s"), {}, has_state=False)
    body = safetensors.save(lora.weights("model0"))
    learn(lora, "model0")  # The snapshot stays.
    [ids] = rows(1)
    adapted = with_adapter(tiny_model, tmp_path / "s/adapter")
    facts = Lora(**LORA).model_dump()
    for snapshot in ("", "one", "", "one"):
        if snapshot:
            logits = adapted(torch.tensor([ids])).logits
        else:
            with adapted.disable_adapter():
                logits = adapted(torch.tensor([ids])).logits
        want = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        got = lora.logprobs(ids, snapshot, body, **facts)
        np.testing.assert_allclose(got, want.detach().numpy(), atol=1e-5)


def test_after_a_restart_the_next_step_is_bit_equal(lora, tiny_model, tmp_path):
    lora.create("model0", LORA, 5)
    learn(lora, "model0", 3)
    lora.save("model0", str(tmp_path / "s"), {"base_model": "m"}, has_state=True)
    restarted = new_lora(tiny_model)
    for has_optimizer in (True, False):
        restarted.load("model1", str(tmp_path / "s"), has_optimizer)
        before = restarted.weights("model1")
        assert all(torch.equal(before[key], v) for key, v in lora.weights("model0").items())
        learn(restarted, "model1", 1, 20)
        if has_optimizer:
            learn(lora, "model0", 1, 20)
            after, want = restarted.weights("model1"), lora.weights("model0")
            assert all(torch.equal(after[key], value) for key, value in want.items())
            restarted.load("model0", str(tmp_path / "s"), True)
            lora.load("model0", str(tmp_path / "s"), True)
    for file in (tmp_path / "s").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        with pytest.raises(ValueError, match="damaged"):
            restarted.load("model0", str(tmp_path / "s"), True)
        data[-3] ^= 1
        file.write_bytes(data)


GOOD = row([8, 9, 10])
REFUSED = {
    "no data": ({}, [], "has no data"),
    "stable_reinforce": ({"loss_fn": "stable_reinforce"}, [GOOD], "not public; give loss_fn"),
    "unknown loss": ({"loss_fn": "pppo"}, [GOOD], "ppo"),
    "setting": ({"beta": 1.0}, [GOOD], "no setting beta"),
    "length": ({}, [GOOD, row([8, 9, 10], [1.0])], "datum 1: weights has 1 values for 2"),
    "not finite": ({}, [row([8, 9], [float("inf")])], "weights has a value that is not finite"),
    "vocabulary": ({}, [row([8, 104])], "outside of the vocabulary of 104"),
    "negative": ({}, [row([-1, 9])], "outside of the vocabulary"),
    "float": ({}, [datum([8], target_tokens=[9.0])], "target_tokens are float32; give int64"),
    "empty": ({}, [row([8])], "0 tokens"),
    "long": ({}, [row([8] * 300)], "299 tokens; the server reads 1 to 256"),
    "input": ({}, [row([8, 9], advantages=[1.0])], "does not read advantages"),
    "missing": ({"loss_fn": "ppo"}, [datum([8], target_tokens=[9])], "ppo needs advantages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_rows_are_refused_without_an_effect(lora, case):
    lora.create("model0", LORA, 1)
    settings, data, match = REFUSED[case]
    with pytest.raises(ValueError, match=match):
        lora.forward_backward("model0", forward_backward(data, **settings))
    parameters = lora.learners["model0"].trained_parameters()
    assert all(parameter.grad is None for _, parameter in parameters)


def test_an_overflowing_loss_and_a_step_without_gradients_are_refused(lora):
    lora.create("model0", LORA, 1)
    extreme = datum([8], target_tokens=[9], logprobs=[-1e4], advantages=[-1.0])
    with pytest.raises(ValueError, match="loss is not finite"):
        lora.forward_backward("model0", forward_backward([extreme], "importance_sampling"))
    lora.drop_gradients("model0")  # The queue does, after a request that failed.
    with pytest.raises(ValueError, match="no gradients"):
        lora.optim_step("model0", ADAM)
    lora.forward_backward("model0", forward_backward([row([8, 9])]))
    lora.create("model0", LORA, 1)  # Another client's, who has the learner next.
    with pytest.raises(ValueError, match="no gradients"):
        lora.optim_step("model0", ADAM)


def test_the_gradient_is_clipped_to_the_requests_norm(lora):
    lora.create("model0", LORA, 1)
    lora.forward_backward("model0", forward_backward([row([8, 9, 10])]))
    learner = lora.learners["model0"]
    betas = {"beta1": 0.8, "beta2": 0.6}
    params = ADAM | betas | {"grad_clip_norm": 1e-3, "learning_rate": 0.0}
    norm = lora.optim_step("model0", params)
    states = learner.optimizer.state.values()
    moments = torch.cat([state["exp_avg"].flatten() for state in states])
    assert float(moments.norm() / (1 - 0.8)) == pytest.approx(1e-3, rel=1e-3)
    squares = sum(float(state["exp_avg_sq"].sum()) for state in states)
    assert squares / (1 - 0.6) == pytest.approx(1e-6, rel=1e-3)
    assert norm["metrics"]["grad_norm:mean"] > 1
    # B is 0, and with it the gradient of A: AdamW multiplies A by 1 - learning_rate weight_decay.
    before = lora.weights("model0")
    lora.forward_backward("model0", forward_backward([row([8, 9, 10])]))
    lora.optim_step("model0", ADAM | {"weight_decay": 10.0})
    for key, value in lora.weights("model0").items():
        if ".lora_A." in key:
            torch.testing.assert_close(value, 0.9 * before[key])
    before = lora.weights("model0")
    lora.forward_backward("model0", forward_backward([row([8, 9, 10])]))
    lora.optim_step("model0", ADAM | {"eps": 1e9})
    for key, value in lora.weights("model0").items():
        torch.testing.assert_close(value, before[key])


def test_settings_without_a_value_are_the_defaults_of_the_page(lora):
    lora.create("model0", LORA, 1)
    body = forward_backward([row([8, 9])], forward_only=True)
    [[logprob]], _ = read_output(lora.forward_backward("model0", body))
    logprob = float(logprob)
    for loss_fn, ratio, advantage, loss, num_clipped in (
        ("ppo", 1.25, 1.0, -1.2, 1),
        ("ppo", 0.75, -1.0, 0.8, 1),
        ("ppo", 1.19, 1.0, -1.19, 0),
        ("cispo", 1.25, 1.0, -1.2 * logprob, 1),
        ("cispo", 0.75, 1.0, -0.8 * logprob, 1),
        ("gspo", 1.001, 1.0, -1.0004, 1),
        ("gspo", 0.999, -1.0, 0.9997, 1),
        ("dro", np.e, 0.0, 0.025, None),
    ):
        old = {"logprobs": [logprob - float(np.log(ratio))], "advantages": [advantage]}
        body = forward_backward([datum([8], target_tokens=[9], **old)], loss_fn, forward_only=True)
        _, metrics = read_output(lora.forward_backward("model0", body))
        assert metrics["loss:sum"] == pytest.approx(loss, abs=2e-5), (loss_fn, ratio)
        assert metrics.get("clipped_tokens:sum") == num_clipped, (loss_fn, ratio)


@pytest.mark.parametrize(
    "asked, match",
    [
        ({"rank": 7}, "above the server's --max_rank 6"),
        (
            {"train_mlp": False, "train_attn": False, "train_unembed": False},
            "all False",
        ),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(lora, asked, match):
    with pytest.raises(ValueError, match=match):
        lora.create("model0", LORA | asked, 1)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--model ./none", "model none: no such folder"),
        ("--ep 2", "--ep 2: the server splits no models"),
        ("--tp 2", "--tp 2: the server splits no models"),
        ("--max_rank 0", "--max_rank 0 must be above 0"),
        ("--port 65536", "--port from 0 to 65535"),
        ("--max_context_tokens 1", "--max_context_tokens must be 2 or more"),
    ],
)
def test_flags_that_the_server_cannot_use_are_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        read_flags(["--model", "m", *flags.split()])


def test_a_base_that_servers_cannot_adapt_is_refused(make_model):
    with pytest.raises(ValueError, match="--engine vllm has no adapters of some layers of"):
        read_flags(["--model", str(make_model("qwen3_vl", heads=2)), "--engine", "vllm"])
