"""Liger's kernels: refused where they cannot run, put into a model's modules, and on a GPU the same
numbers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit import ROOT, ForkedProcess, words
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.config import parse_config
from rl_core.models.kernels.liger import apply_liger, check_liger
from rl_core.run.plan.plan import make_plan

needs_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None,
    reason="liger-kernel is not installed: pip install 'rl_core[liger]'",
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_without_a_gpu_it_is_refused_before_a_model_loads(monkeypatch, tiny_model, tmp_path):
    real, rows = importlib.util.find_spec, tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "liger_kernel" or real(name)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows.write_text('{"messages": [{"role": "user", "content": "21"}], "answer": "12"}\n')
    flags = words(
        f"--model {tiny_model} --env_path {ROOT / 'envs/sort_digits.py'} --data.train",
        f"{rows} --out x",
    )
    with pytest.raises(ValueError, match=r"--learner.kernels=liger needs a GPU"):
        make_plan(parse_config([*flags, "--learner.kernels", "liger"]))


def make_model(kind: str, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **HEADS))


def check_patches() -> None:
    """Modules that are patched, and the refusal of an architecture without kernels."""
    for kind, norms in {"qwen2": 5, "qwen3": 9, "llama": 5}.items():
        model, other = make_model(kind), make_model(kind, seed=1)
        weights = dict(model.named_parameters())
        apply_liger([model])
        apply_liger([model])
        patched = [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert sum("norm" in name for name in patched) == norms, patched
        assert sum(name.endswith("mlp") for name in patched) == 2, patched
        assert "forward" not in vars(model)  # Liger's loss would be there
        assert not any("forward" in vars(module) for module in other.modules())
        assert dict(model.named_parameters()).keys() == weights.keys()
        assert all(p is weights[name] for name, p in model.named_parameters())
        transformers_module = sys.modules[type(model).__module__]
        assert "liger" in transformers_module.apply_rotary_pos_emb.__module__
    torch.cuda.is_available = lambda: True
    check_liger(AutoConfig.for_model("qwen3"))
    with pytest.raises(ValueError, match=r"no kernels for 'gpt2'; .* qwen3"):
        check_liger(AutoConfig.for_model("gpt2"))


def compare_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    """Logits and gradients of a model before and after, errors counted in the largest number of
    each. Packed positions that begin anew, as in training."""
    tokens = torch.randint(100, (1, 300), generator=torch.Generator().manual_seed(0)).cuda()
    positions = torch.cat([torch.arange(180), torch.arange(120)])[None].cuda()
    for kind in ("qwen2", "qwen3", "llama"):
        model = make_model(kind).to("cuda", dtype)
        results = []
        for _ in range(2):
            model.zero_grad()
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
            logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None]).mean().backward()
            results.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
            apply_liger([model])
        for plain, liger in zip(*results, strict=True):
            error = (plain - liger).abs().max() / plain.abs().max()
            assert error < tolerance, (kind, tuple(plain.shape), error.item())


# Runs in a separate process: Liger sets rotary positions for every model of the process.
def run_here(code: str) -> None:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [
                str(ROOT),
                str(ROOT / "tests"),
                str(Path(__file__).parent),
                os.environ.get("PYTHONPATH", ""),
            ]
        )
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_liger
def test_norms_mlps_and_rotary_positions_become_ligers():
    process = ForkedProcess("-c", "import test_liger; test_liger.check_patches()")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-3000:]


@needs_liger
@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 0.05)])
def test_logits_and_gradients_are_those_of_the_plain_model_on_a_gpu(dtype, tolerance):
    run_here(f"import torch, test_liger; test_liger.compare_on_a_gpu(torch.{dtype}, {tolerance})")
