"""The slots' forward of Llama's layout equals that of the model's own modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from kit import run_afresh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.engines.fused_graphs import FusedGraphs
from rl_core.engines.kv_slots import SlotModel
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.models.kernels import llama_cpu, triton_decode
from rl_core.models.kernels.fused_norms import fuse_norms
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


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install triton"
)


@pytest.fixture(params=OTHERS)
def model(request):
    return make_model(request.param)


def make_model(family):
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **OTHERS[family])
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


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would start. Views and empty tensors start none."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_free = func.is_view or "empty" in func._schema.name or "_unsafe_view" in str(func)
        self.num += not is_free
        return func(*args, **(kwargs or {}))

    def run_triton(self, *_, **__):
        self.num += 1


@needs_triton
@torch.no_grad()
def test_a_fused_decode_step_starts_12_kernels_a_layer(monkeypatch):
    """Seven products, two norms, rotary positions, attention and the activation."""
    counts = []
    for num_layers in (2, 3):
        config = AutoConfig.for_model("qwen3", **SIZES | {"num_hidden_layers": num_layers})
        with torch.device("meta"):
            slots = FusedGraphs(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        rows, cache = slice(0, 3), slots.make_cache(3, 30)
        tokens = torch.zeros(3, 2, dtype=torch.long, device="meta")
        with slots.borrowed():
            LlamaSlots.forward(slots, cache, rows, tokens, None, 2)
            with Launches() as launches:
                monkeypatch.setattr(triton_decode, "run", launches.run_triton)
                LlamaSlots.forward(slots, cache, rows, tokens[:, :1], tokens[:, 0], 30)
        counts.append(launches.num)
    assert counts[1] - counts[0] == 12


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


def flash_attention(query, keys, values, firsts, offsets, num_queries, longest, *_, **options):
    """torch's operator in fp32, for one query of each row and the first seqused_k keys."""
    left, num_shared = options["window_size_left"], query.shape[1] // keys.shape[1]
    assert num_queries == 1 and firsts.tolist() == list(range(len(query) + 1))
    out = torch.empty_like(query)
    for row, size in enumerate(options["seqused_k"].tolist()):
        assert size <= longest
        first = 0 if left < 0 else max(0, size - 1 - left)
        seen = slice(offsets[row] + first, offsets[row] + size)
        k, v = (x[seen].float().repeat_interleave(num_shared, 1) for x in (keys, values))
        scores = torch.einsum("hd,lhd->hl", query[row].float(), k) * options["scale"]
        out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out, *[query.new_empty(0)] * 4


def compare_fused():
    """In fp16: Triton's interpreter truncates to bf16."""
    operators = torch.library.Library("aten", "IMPL")
    operators.impl("_flash_attention_forward", flash_attention, "CPU")
    for family in ("qwen2", "qwen3"):  # Windows, biases, SiLU; norms of heads, GELU.
        model = make_model(family).half()
        fuse_norms(model)
        fused, expected = hidden_states(FusedGraphs(model)), hidden_states(LlamaSlots(model))
        torch.testing.assert_close(fused, expected, atol=0.01, rtol=0)


def compile_fused():
    """For A100, H100 and B200, none of which is needed."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_core.models.kernels import triton_decode as kernels

    types = {"epsilon": "fp32", "length": "i32", "size": "i32", "columns_ptr": "*i64"}
    heads = {"H": 16, "K": 8, "D": 128}
    for kernel, constants in [
        (kernels.add_norm_kernel, {"E": 2560, "WIDTH": 4096, "HAS_DELTA": True}),
        (kernels.store_heads_kernel, heads | {"HAS_NORM": True}),
        (kernels.store_heads_kernel, heads | {"HAS_NORM": False}),
        (kernels.swiglu_kernel, {"WIDTH": 1024}),
    ]:
        signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        for capability in (80, 90, 100):
            target = GPUTarget("cuda", capability, 32)
            assert compile(ASTSource(kernel, signature, constants), target=target).asm["cubin"]


def run_apart(function, **variables):
    code = f"import test_llama_slots as test; test.{function}()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_fused_kernels_equal_the_models_modules():
    run_afresh("import test_llama_slots; test_llama_slots.compare_fused()", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_fused_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    run_apart("compile_fused", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
