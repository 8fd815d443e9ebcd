"""Adapters: trained weights, weights of the engine and the export, over ranks and after resuming;
the model in 4 bits."""

from __future__ import annotations

import json

import pytest
import torch
from kit import metrics, weights, words
from safetensors import safe_open
from test_equivalence import pictures
from test_learner import FLAGS, gradients, make_learner, ragged_samples
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_core.config import parse_config, to_yaml
from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.lora import adapter_parameters
from rl_core.learning.optimizers import adamw
from rl_core.learning.policies import make_policy
from rl_core.models.loading import load_hf_model
from rl_core.run.saving.checkpoint import export_policy

LORA = ["--actors.policy.lora.rank", "4", "--actors.policy.lora.alpha", "8"]
NF4 = [*LORA, "--actors.policy.lora.quantize", "nf4"]


def make_lora_learner(model, *flags, algorithm="sft") -> Learner:
    return make_learner(model, *(flags or LORA), algorithm=algorithm)


def with_random_adapters(learner: Learner) -> Learner:
    for i, (_, parameter) in enumerate(adapter_parameters(learner.policy.hf)):
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    return learner


@torch.no_grad()
def logprobs(learner: Learner, adapter: str | None = None) -> torch.Tensor:
    batch = learner.shard(ragged_samples())[0][0].batches[0]
    return learner.policy(batch, 1.0, learner.adapter if adapter is None else adapter)[0]


def test_new_adapters_change_nothing_and_disabled_ones_neither(any_model):
    learner = make_lora_learner(any_model)
    plain = make_policy(str(any_model), torch.float32, learner.ranks)
    adapted, learner.policy = learner.policy, plain
    want, learner.policy = logprobs(learner, ""), adapted
    assert torch.equal(logprobs(learner), want)
    with_random_adapters(learner)
    assert (logprobs(learner) - want).abs().max() > 0.01
    assert torch.equal(logprobs(learner, ""), want)
    assert (logprobs(learner) - want).abs().max() > 0.01


def test_adapters_are_drawn_from_the_seed(tiny_model):
    def drawn(*flags):
        return dict(adapter_parameters(make_lora_learner(tiny_model, *LORA, *flags).policy.hf))

    one, same, other = drawn(), drawn(), drawn("--seed", "1")
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert all(torch.equal(one[n], other[n]) == (".lora_B." in n) for n in one)
    firsts = [float(value.flatten()[0]) for n, value in one.items() if ".lora_A." in n]
    assert len(set(firsts)) == len(firsts) > 1, "layers are drawn apart"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_adapters_have_a_gradient_and_an_optimizer(tiny_model, checkpointing):
    learner = with_random_adapters(make_lora_learner(tiny_model))
    if checkpointing:
        learner.policy.hf.gradient_checkpointing_enable()
    minibatch = learner.shard(ragged_samples())[0][0]
    learner.forward(minibatch.batches[0])[0].sum().backward()
    adapters = {id(p) for _, p in adapter_parameters(learner.policy.hf)}
    assert len(adapters) == 2 * 2 * 7
    for name, parameter in learner.policy.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in adapters), name
    assert {id(p) for g in learner.optimizer.param_groups for p in g["params"]} == adapters


def test_targets_choose_the_layers(tiny_model):
    learner = make_lora_learner(tiny_model, *LORA, "--actors.policy.lora.targets", "q_proj,v_proj")
    names = {n.split(".")[-4] for n, _ in adapter_parameters(learner.policy.hf)}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    "arch, parts, num",
    [
        ("qwen3", "", 2 * 7),
        ("qwen2_5_vl", "language", 2 * 7),
        ("qwen2_5_vl", "vision,projector,language", 2 * 7 + 2 * 5 + 2),
        ("qwen3_vl", "vision", 2 * 4),
    ],
)
def test_a_gradient_is_that_of_w_plus_the_product(arch, parts, num, make_model):
    """dL/dA = scale B^T dL/dW and dL/dB = scale dL/dW A^T, with dL/dW of the plain model that has
    the merged weights."""
    model, samples = make_model(arch, hidden=48), pictures() if parts else ragged_samples()
    flags = ["--learner.train", parts] if parts else []
    learner = with_random_adapters(make_lora_learner(model, *LORA, *flags))
    plain = make_policy(str(model), torch.float32, learner.ranks)
    plain.hf.load_state_dict(dict(learner.named_weights()), strict=False)
    context = LearnerContext(
        config=learner.config,
        algorithm=learner.algorithm,
        name="policy",
        policy=plain,
        ranks=learner.ranks,
        load=make_policy,
        make_optimizer=adamw,
    )
    merged = Learner(context)
    full, _ = gradients(merged, samples)
    [batch] = learner.shard(samples)[0][0].batches
    adapters = list(adapter_parameters(learner.policy.hf))
    assert len(adapters) == 2 * num
    (-(batch.advantages * learner.forward(batch)[0]).sum() / batch.labels.numel()).backward()
    for name in full:
        layer = learner.policy.hf.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "lora_A") and name.endswith("weight"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            torch.testing.assert_close(a.grad, 2 * b.T @ full[name], atol=2e-6, rtol=1e-4)
            torch.testing.assert_close(b.grad, 2 * full[name] @ a.T, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("flags", [LORA, NF4])
def test_merged_weights_and_both_exports_give_the_adapted_models_logits(
    flags, tiny_model, tmp_path
):
    peft = pytest.importorskip("peft")
    learner = with_random_adapters(make_lora_learner(tiny_model, *flags))
    policy = learner.policy
    ids = torch.arange(8, 60)[None]
    policy.hf.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = policy.hf(ids).logits
        engine_copy = load_hf_model(str(tiny_model), torch.float32, torch.device("cpu"))
        engine_copy.load_state_dict(dict(learner.named_weights()), strict=False)
        engine_copy.set_attn_implementation("sdpa")
        torch.testing.assert_close(engine_copy(ids).logits, want, atol=1e-5, rtol=1e-5)
        export_policy(
            policy,
            AutoTokenizer.from_pretrained(tiny_model),
            tmp_path / "policy",
            learner.ranks,
            learner.adapter,
        )
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
        torch.testing.assert_close(merged(ids).logits, want, atol=1e-5, rtol=1e-5)
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "policy_adapter")(ids).logits
    assert (want - before).abs().max() > 0.1
    # An adapter trained on a 4-bit model fits the model before quantization, up
    # to the rounding of 4 bits.
    tolerance = 1e-5 if flags is LORA else 0.5 * (want - before).abs().max().item()
    torch.testing.assert_close(adapted, want, atol=tolerance, rtol=1e-5)
    config = json.loads((tmp_path / "policy_adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model) and config["r"] == 4


def test_sharded_fp32_adapters_learn_beside_a_bf16_model(places, torchrun, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(places["model"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(places["model"]).save_pretrained(tmp_path / "model")
    sizes = (
        "--max_tokens 8 --tasks_per_step 4 --num_steps 3 --optim.lr 1e-2 --algo.kl_coef 0.01 "
        "--learner.dtype bfloat16 --env_path"
    )
    letters = places["dir"] + "/letters.py"
    flags = words("--model", tmp_path / "model", LORA, sizes, letters, "--out", tmp_path / "run")
    torchrun(2, "-m", "rl_core.train", *flags)
    steps = metrics(tmp_path / "run")
    # The first thing that FSDP sees of the adapters is the reference's forward without them; they
    # must learn all the same.
    kl = [row["learn/policy/ref_kl_nats"] for row in steps]
    assert kl[0] == 0 < kl[1] < kl[2] and all(row["learn/policy/grad_norm"] > 0 for row in steps)
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in steps) < 1e-2
    with safe_open(tmp_path / "run/hf/policy_adapter/adapter_model.safetensors", "pt") as saved:
        assert {saved.get_tensor(name).dtype for name in saved.keys()} == {torch.float32}  # noqa: SIM118
    assert {v.dtype for v in weights(tmp_path / "run").values()} == {torch.bfloat16}


def test_a_config_file_holds_adapters(tiny_model, tmp_path):
    config = parse_config(["--model", str(tiny_model), *FLAGS, *LORA])
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    again = parse_config(["--config", str(tmp_path / "c.yaml")])
    assert again.actors["policy"].lora == config.actors["policy"].lora
