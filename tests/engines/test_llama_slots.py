"""The slots' forward of Llama's layout equals that of the model's own modules."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.engines.kv_slots import SlotModel
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.models.kernels import llama_cpu
from rl_core.models.options import LLAMA_LAYOUT

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
OTHERS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "sliding_window": 5},  # Ignored by Llama.
    "mistral": {"sliding_window": 5},
    "qwen2": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 4,
    },
    "qwen3": {"attention_bias": True, "hidden_act": "gelu"},
}


@pytest.fixture(params=OTHERS)
def model(request):
    torch.manual_seed(3)
    config = AutoConfig.for_model(request.param, **SIZES, **OTHERS[request.param])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():  # Norms differ from 1, and biases from 0.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def hidden_states(sampler):
    """Hidden states of a padded prefill of three rows, and of five decode steps."""
    cache, states = sampler.make_cache(3, 30), []
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([9, 4, 7])
    with sampler.borrowed():
        tokens = torch.randint(61, (3, 9), generator=draw)
        first = sampler.forward(cache, slice(0, 3), tokens, None, 9, sizes)
        states += [row[:size] for row, size in zip(first, sizes, strict=True)]
        for step in range(5):
            tokens = torch.randint(61, (3, 1), generator=draw)
            states += sampler.forward(cache, slice(0, 3), tokens, sizes + step, 10 + step)
    return torch.cat(states)


@pytest.mark.parametrize("large_from", [1, 2**40])
def test_hidden_states_are_the_models(model, large_from, monkeypatch):
    """All products by oneDNN, where there is AVX512, and none."""
    monkeypatch.setattr(llama_cpu, "LARGE_PRODUCT", large_from)
    torch.testing.assert_close(
        hidden_states(LlamaSlots(model)), hidden_states(SlotModel(model)), atol=2e-5, rtol=2e-5
    )


@torch.inference_mode()
def test_rows_of_one_length_need_no_mask(model):
    slots, tokens = LlamaSlots(model), torch.randint(61, (3, 9))
    cache, ends = slots.make_cache(3, 30), torch.full((3,), 9)
    with slots.borrowed():
        slots.forward(cache, slice(0, 3), tokens, None, 9)
        masked, plain = (
            slots.forward(cache, slice(0, 3), tokens[:, :1], ends, 10, is_even=is_even)
            for is_even in (False, True)
        )
    torch.testing.assert_close(plain, masked, atol=1e-5, rtol=1e-5)


def test_bf16_is_rounded_as_by_the_models_own_modules(model):
    model.to(torch.bfloat16)
    assert torch.equal(hidden_states(LlamaSlots(model)), hidden_states(SlotModel(model)))


def test_every_family_that_is_sampled_so_is_tested_here():
    assert set(OTHERS) == set(LLAMA_LAYOUT)
