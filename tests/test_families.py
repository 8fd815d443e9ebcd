"""Architectures with something of their own: what is trained is what transformers computes, and exports are checkpoints
like the one that training began with."""

from __future__ import annotations

import json

import pytest
import torch
from kit import steps, words
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_core.distributed import init_ranks
from rl_core.engines.sglang import make_skeleton
from rl_core.learning.model import checkpoint_weights, make_policy, named_weights
from rl_core.train import main

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "vocab_size": 104}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "seed_oss": SIZES | {"residual_dropout": 0.3, "attention_dropout": 0.2},  # dropout without a module
    "opt": SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.3, "layerdrop": 0.2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 104, "resid_pdrop": 0.3},
    "mixtral": SIZES | EXPERTS | {"num_local_experts": 4, "router_jitter_noise": 0.3},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4},  # fused experts: one tensor each in a checkpoint
    "glm4_moe": SIZES | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1},  # e_score_correction_bias
    "gemma3": {"text_config": SIZES, "vision_config": VISION | {"image_size": 28, "patch_size": 14}},  # multimodal
}


def make_family(folder, name: str, tiny_model):
    """A model of random weights with the tiny model's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **FAMILIES.get(name, SIZES)))
    for buffer_name, buffer in model.named_buffers():
        if "correction_bias" in buffer_name:
            buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def plain_loss(folder, tokenizer, rows) -> float:
    """Mean over all trained tokens of transformers' own loss, without dropout."""
    model, total, count = AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0, 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True)["input_ids"]
        ids = tokenizer.apply_chat_template(row["messages"])["input_ids"]
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor(ids)[None]).logits[0].float().log_softmax(-1)
        for i in range(len(prompt), end):
            total, count = total - logprobs[i - 1, ids[i]].item(), count + 1
    return total / count


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_transformers_own_and_the_export_is_named_as_the_checkpoint(name, tiny_model, tmp_path):
    folder, tokenizer = make_family(tmp_path / "model", name, tiny_model)
    talk = [("say", "12 34"), ("again", "5"), ("more", "678 9 0"), ("end", "1")]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in talk]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--algorithm", "sft", "--model", str(folder), "--data.train", str(tmp_path / "rows.jsonl")]
    flags += ["--max_prompt_tokens", "24", "--max_tokens", "12", "--tasks_per_step", "4", "--num_steps", "1"]
    assert main([*flags, "--optim.lr", "1e-2", "--out", str(tmp_path / "run")]) == 0
    [row] = steps(tmp_path / "run")
    assert row["learn/policy/loss"] == pytest.approx(plain_loss(folder, tokenizer, rows), abs=1e-4)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "run/hf/policy"))
    policy = make_policy(str(folder), torch.float32, init_ranks(60))
    streamed = dict(checkpoint_weights(make_skeleton(str(folder)), named_weights(policy)))  # to SGLang
    assert streamed.keys() == before.keys() and all(torch.equal(v, before[n]) for n, v in streamed.items())
    assert {n: v.shape for n, v in before.items()} == {n: v.shape for n, v in after.items()}
    assert all(torch.equal(before[n], after[n]) for n in before if "correction_bias" in n)  # which nothing trains
    assert not all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("name", ["gemma3", "glm4_moe"])
def test_grpo_with_adapters_samples_with_the_learners_weights(name, tiny_model, tmp_path):
    """The engine has a copy, whose weights and buffers are streamed; the canary compares."""
    folder, _ = make_family(tmp_path / "model", name, tiny_model)
    (tmp_path / "env.py").write_text(
        'def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]\n'
        "def reward_fn(completion): return sum(map(ord, completion)) % 7 / 7\n"
    )
    flags = words("--model", folder, "--env_path", tmp_path / "env.py", "--max_prompt_tokens 24 --max_tokens 8")
    flags += words("--group_size 2 --tasks_per_step 4 --num_steps 2 --optim.lr 1e-2 --out", tmp_path / "run")
    assert main([*flags, *words("--actors.policy.lora.rank 4 --actors.policy.lora.targets q_proj")]) == 0
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in steps(tmp_path / "run")) < 1e-6


def test_a_model_whose_layers_keep_arguments_from_attention_is_refused(tiny_model, tmp_path, capsys):
    folder, _ = make_family(tmp_path / "model", "nemotron", tiny_model)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "completion": "2"}\n')
    flags = ["--algorithm", "sft", "--model", folder, "--data.train", tmp_path / "rows.jsonl"]
    assert main([*map(str, flags), "--out", str(tmp_path / "run")]) == 1
    assert "of type nemotron has its own attention, in which packed sequences would mix" in capsys.readouterr().err
