"""A short form of docs/models.md, and the names and unchanged weights of exports."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from kit import embedded, families, longrope, make_learner, make_skeleton, sample, steps, words
from models_table import (
    EXPERTS,
    FAMILIES,
    LATENT,
    LIMITS,
    ROWS,
    SIZES,
    VISION,
    family_config,
    load_plain,
    make_family,
    plain_logprobs,
    summary,
    try_family,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rl_core.config import LoraConfig
from rl_core.data.image_families import FAMILIES as SEEING
from rl_core.data.packing import pack_samples
from rl_core.distributed import close_ranks
from rl_core.engines.hf_sampling import choose_sampler
from rl_core.engines.options import make_sampler
from rl_core.engines.weights import checkpoint_weights
from rl_core.learning.padded_forward import choose_forward
from rl_core.learning.policies import make_policy
from rl_core.models.kernels.fused_norms import FusedRMSNorm, fuse_norms
from rl_core.models.loading import max_positions, on_meta
from rl_core.run.process.joining import init_ranks
from rl_core.run.saving.checkpoint import export_policy
from rl_core.types import SamplingParams

FORWARDS = {
    "seed_oss": "packed",  # dropout without a module
    "opt": "packed",  # layers that are dropped
    "phi": "packed",  # a bias of the head
    "mixtral": "packed",  # jitter; fused experts, which are one tensor each in a checkpoint
    "glm4_moe": "packed",  # e_score_correction_bias, a buffer of checkpoints
    "gemma3": "packed",  # multimodal
    "qwen2_5_vl": "packed",  # multimodal, and no causal language model for transformers
    "qwen3_vl": "packed",  # multimodal, with vision features in several layers
    "mistral3": "packed",  # multimodal
    # Multimodal, and a causal language model for transformers that leaves the vision tower out.
    "llama4": "padded",
    "gemma2": "packed",  # attention scores and logits are bounded
    "gpt_oss": "packed",  # attention sinks
    "lfm2": "padded",  # convolutions
    "mamba": "padded",  # no attention
    "falcon": "padded",  # attention that cannot be replaced
}
RUNS = ("sft", "grpo", "lora")
FROZEN = ("correction_bias", "vision", "visual", "multi_modal_projector")


@pytest.mark.parametrize("name", families(FAMILIES))
def test_configurations_of_the_table_hold_only_what_their_family_has(name):
    config = family_config(name)
    for section in (config, config.get_text_config(), getattr(config, "vision_config", config)):
        assert section.to_dict().keys() <= type(section)().to_dict().keys()


def test_the_page_names_the_families_that_see():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    line = "- **see images**: " + ", ".join(SEEING)
    assert line in page.splitlines(), line
    assert line in summary({})


@pytest.mark.parametrize("name", families(FORWARDS))
def test_a_family_equals_transformers_and_is_exported_as_it_came(name, tmp_path):
    if (name, transformers.__version__) == ("llama4", "5.24.0"):
        pytest.skip("Llama 4 with its vision tower fails in transformers 5.24.0")
    row, reasons = try_family(tmp_path, name)
    assert not reasons and row["forward"] == FORWARDS[name] and "**no**" not in row.values(), (
        row,
        reasons,
    )
    sampler = type(choose_sampler(load_plain(tmp_path / "model"))).__name__
    assert sampler == {"packed": "SlotModel", "padded": "RowModel"}[row["forward"]]
    before, *after = (
        load_file(tmp_path / x / "model.safetensors")
        for x in ("model", *(f"{run}/hf/policy" for run in RUNS))
    )
    policy = make_policy(str(tmp_path / "model"), torch.float32, init_ranks(60))
    # To SGLang.
    streamed = dict(
        checkpoint_weights(make_skeleton(str(tmp_path / "model")), policy.named_weights())
    )
    assert streamed.keys() == before.keys() and all(
        torch.equal(v, before[n]) for n, v in streamed.items()
    )
    frozen = [n for n in before if any(fragment in n for fragment in FROZEN)]
    assert all(
        weights.keys() == before.keys() and torch.equal(before[n], weights[n])
        for weights in after
        for n in frozen
    )
    assert any("vis" in n for n in frozen) == hasattr(policy.hf.config, "vision_config")
    assert bool(frozen) == (
        name in ("glm4_moe", "gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "llama4")
    )


@pytest.mark.parametrize("name", [*FAMILIES, "kimi_k25"])
def test_names_sent_to_servers_are_those_of_exports(monkeypatch, name):
    if name == "kimi_k25" and name not in CONFIG_MAPPING_NAMES:
        pytest.skip("transformers is too old for kimi_k25")
    text = SIZES | EXPERTS | LATENT | {"model_type": "deepseek_v3"}
    kimi = {"text_config": text, "vision_config": VISION}  # Its renamings need a whole layer.
    monkeypatch.setitem(FAMILIES, "kimi_k25", kimi)
    model = on_meta(family_config(name))
    weights = dict(model.named_parameters())
    exported = revert_weight_conversion(model, weights)
    calls = []
    find = conversion_mapping.get_model_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_model_conversion_mapping",
        lambda *args, **kwargs: calls.append(args) or find(*args, **kwargs),
    )
    assert dict(checkpoint_weights(model, weights.items())).keys() == exported.keys()
    assert not calls  # It walks all modules, and is not called for each layer.


# These families keep routers, or norms, in fp32.
@pytest.mark.parametrize(
    "name, dtype",
    [(name, torch.bfloat16) for name in ("glm4_moe", "ernie4_5_moe", "deepseek_v3")]
    + [("gpt_oss", torch.float16)],
)
def test_an_export_keeps_in_fp32_what_transformers_does(name, dtype, tmp_path):
    tokenizer = make_family(tmp_path / "model", name)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    saved.save_pretrained(tmp_path / "saved")
    # Weights stay in fp32, of a model in this dtype.
    shutil.copy(tmp_path / "saved/config.json", tmp_path / "model")
    adapters, sharding = {"default": (LoraConfig(rank=2), 1)}, init_ranks(60, is_sharded=True)
    policies = {
        "hf": make_policy(str(tmp_path / "model"), torch.float32, init_ranks(60)),
        # Shards of frozen weights in this dtype, with an adapter that adds 0.
        "lora": make_policy(str(tmp_path / "saved"), dtype, sharding, adapters=adapters),
    }
    expected = load_file(tmp_path / "saved/model.safetensors")
    assert {weight.dtype for weight in expected.values()} == {dtype, torch.float32}
    for folder, policy in policies.items():
        adapter = "default" if folder == "lora" else ""
        export_policy(policy, tokenizer, tmp_path / folder, init_ranks(60), adapter)
        exported = load_file(tmp_path / folder / "model.safetensors")
        assert exported.keys() == expected.keys()
        for weight_name, weight in expected.items():
            assert exported[weight_name].dtype == weight.dtype, (folder, weight_name)
            assert exported[weight_name].equal(weight), (folder, weight_name)
    close_ranks(sharding)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_a_head_that_computes_something_else_is_found_in_every_family(name, tmp_path, capsys):
    make_family(tmp_path, name)
    learner = make_learner(tmp_path)
    hf, ids = learner.policy.hf, [5, 9, 14, 20]
    choose_forward(learner.policy, learner.ranks)
    assert type(learner.policy.forward_pass).__name__ == "PackedForward"
    assert type(make_sampler(hf)).__name__ in ("SlotModel", "LlamaSlots")
    assert not capsys.readouterr().out

    def doubled(module, inputs, out):
        out.logits = 2 * out.logits
        return out

    hf.register_forward_hook(doubled)
    choose_forward(learner.policy, learner.ranks)
    assert "is trained on padded rows, which is slower than packed: its" in capsys.readouterr().out
    batch = pack_samples([sample(ids, [0, 1, 1, 1], 1.0)])
    expected = plain_logprobs(hf, ids[:1], ids[1:])
    assert torch.allclose(learner.forward(batch)[0], expected, atol=1e-5)
    assert type(make_sampler(hf)).__name__ == "OwnHeadModel"


def test_padded_rows_are_the_same_over_two_ranks_and_are_not_cut(tmp_path, torchrun):
    make_family(tmp_path / "model", "lfm2")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    flags = words(
        "-m rl_core.train --algorithm sft --model", tmp_path / "model", "--num_steps 2", LIMITS
    )
    flags += ["--data.train", tmp_path / "rows.jsonl", "--optim.name", "sgd"]
    for num in (1, 2):
        printed = torchrun(num, *map(str, [*flags, "--out", tmp_path / f"{num}"])).stdout
        assert (
            printed.count("padded rows, which is slower than packed: it has layers of kind conv")
            == 1
        )
    one, two = (steps(tmp_path / f"{num}") for num in (1, 2))
    for key in ("learn/policy/loss", "learn/policy/grad_norm"):
        assert [row[key] for row in one] == pytest.approx([row[key] for row in two], rel=1e-5)
    cut = torchrun(2, *map(str, [*flags, "--out", tmp_path / "cut", "--cp", 2]), check=False)
    assert "--cp=2 splits packed sequences" in cut.stderr and cut.returncode


@pytest.mark.parametrize(
    "kinds, limit",
    [
        ({}, (256, "max_position_embeddings")),
        ({"sliding_attention": 40}, (40, "original_max_position_embeddings of longrope")),
        ({"full_attention": 30, "sliding_attention": 40}, (30, "original_max_position_embeddings")),
        ({"full_attention": 40, "sliding_attention": 30}, (30, "original_max_position_embeddings")),
        ({"full_attention": 900}, (256, "max_position_embeddings")),
    ],
)
def test_layers_of_any_kind_bound_the_positions(kinds, limit):
    config = family_config("gemma3_text")
    for kind, num_short in kinds.items():
        config.rope_parameters[kind] = longrope(config, num_short)
    positions, key = max_positions(config)
    assert positions == limit[0] and key.startswith(limit[1])


@pytest.mark.parametrize("name", ["phi3", "llama", "qwen3"])
def test_sequences_that_longrope_allows_do_not_change_each_other(name, tmp_path):
    make_family(tmp_path, name)
    file, num_short = tmp_path / "config.json", 24
    config = json.loads(file.read_text())
    config["rope_parameters"] = longrope(family_config(name), num_short)
    if "original_max_position_embeddings" in config:  # Phi-3's, which comes first
        config["original_max_position_embeddings"] = num_short
    file.write_text(json.dumps(config))
    plain = load_plain(tmp_path)
    assert max_positions(plain.config)[0] == num_short
    ids = [8 + 7 * n % 90 for n in range(num_short + 1)]
    sequences = ids[:num_short], ids[6:0:-1]
    alone = [plain_logprobs(plain, row[:1], row[1:]).detach() for row in sequences]
    # One token more changes all of them.
    assert (plain_logprobs(plain, ids[:1], ids[1:])[:-1] - alone[0]).abs().max() > 0.1
    batch = pack_samples([sample(row, [0] + [1] * (len(row) - 1), 1.0) for row in sequences])
    logprobs = make_learner(tmp_path).forward(batch)[0].detach()
    for number, expected in enumerate(alone):
        assert torch.allclose(logprobs[batch.sequences == number], expected, atol=1e-5)

    engine = embedded(plain, max_context_tokens=200)
    params = SamplingParams(max_tokens=100)
    prompts = [ids[:-5], ids[:3]]

    async def speak():
        asked = [engine.generate(prompt, params, seed=n) for n, prompt in enumerate(prompts)]
        return await asyncio.gather(*asked)

    for prompt, completion in zip(prompts, asyncio.run(speak()), strict=True):
        assert len(prompt) + len(completion.token_ids) == num_short
        logprobs = plain_logprobs(plain, prompt, completion.token_ids)
        assert torch.allclose(torch.tensor(completion.logprobs), logprobs, atol=1e-5)


# LayerNorms, a weight that counts from 1, a gate.
OTHER_NORMS = set("gemma gemma2 gemma3_text nemotron bloom phi starcoder2 stablelm cohere".split())
OTHER_NORMS |= set("cohere2 gpt2 gpt_neox gptj opt falcon mpt qwen3_next".split())
TEXT = [n for n, sizes in FAMILIES.items() if n != "gemma" and "text_config" not in sizes]


@pytest.mark.parametrize("name", ["gemma", *families(TEXT)])
def test_fused_norms_compute_what_the_norms_of_a_family_do(name):
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(family_config(name)).eval(), torch.arange(9)[None]
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    expected, names = model(input_ids=ids).logits, list(model.state_dict())
    fuse_norms(model)
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
    assert list(model.state_dict()) == names
    fused = [module for module in model.modules() if isinstance(module, FusedRMSNorm)]
    assert bool(fused) == (name not in OTHER_NORMS)
