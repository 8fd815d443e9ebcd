"""Experts that a checkpoint has one by one and transformers as one tensor: each rank makes its own
part of them.

As a program it is one rank of a comparison.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import answer, make_skeleton, of_ranks
from make_tiny_model import make_tiny_model
from models_table import make_family
from safetensors.torch import load_file, save_file
from test_experts import family  # noqa: F401
from test_memory import differences, peak_mib, save_model
from transformers import AutoTokenizer

from rl_core.config import LearnerConfig, LoraConfig
from rl_core.distributed import Mesh, on_mesh
from rl_core.engines import weights as sent
from rl_core.engines.weights import checkpoint_weights
from rl_core.learning.policies import make_policy
from rl_core.models import loading
from rl_core.models.parallel.fsdp import fused_later
from rl_core.run.process.joining import init_ranks
from rl_core.run.saving.checkpoint import export_policy

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3")
KINDS = ("dp 2", "hsdp 2", "lora", "scores", "offload")


def compare_loading(ranks, *models) -> dict:
    """Every rank: the weights that differ from those of transformers, by model and kind."""
    differing = {}
    for path in models:
        for kind in KINDS:
            if kind not in ("dp 2", "lora") and not path.endswith("qwen3_moe"):
                continue
            of_kind = on_mesh(ranks, Mesh(dp_replicate=2)) if kind == "hsdp 2" else ranks
            adapters = {"default": (LoraConfig(rank=2), 0)} if kind == "lora" else None
            options = LearnerConfig(offload="always") if kind == "offload" else None
            policy = make_policy(
                path, torch.float32, of_kind, options, adapters, is_scoring=kind == "scores"
            )
            plain = loading.load_hf_model(path, torch.float32, ranks.device, kind == "scores")
            differing[f"{Path(path).name} {kind}"] = differences(policy, plain)
    return differing


def test_each_of_two_ranks_holds_its_part_of_what_transformers_loads(family):  # noqa: F811
    for differing in of_ranks(
        2, __file__, "compare_loading", *(family(name) for name in FAMILIES), timeout_s=300
    ):
        assert len(differing) == 2 * len(FAMILIES) + 3 and not any(differing.values()), differing


def export(ranks, model, out) -> list[str]:
    """Every rank: names that are streamed to SGLang."""
    policy, tokenizer = (
        make_policy(model, torch.float32, ranks),
        AutoTokenizer.from_pretrained(model),
    )
    export_policy(policy, tokenizer, Path(out), ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sent, "PIECE_BYTES", 1 << 14)  # One expert or two.
        streamed = dict(checkpoint_weights(make_skeleton(model), policy.named_weights()))
    torch.save(streamed, f"{out}.{ranks.rank}")
    return sorted(streamed)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_export_and_stream_the_checkpoints_own_names_and_buffers(family, name, tmp_path):  # noqa: F811
    before = load_file(family(name) / "model.safetensors")
    assert any("correction_bias" in n for n in before) == (name in ("glm4_moe", "deepseek_v3"))
    for rank, names in enumerate(
        of_ranks(2, __file__, "export", family(name), tmp_path / "export")
    ):
        streamed, after = (
            torch.load(f"{tmp_path}/export.{rank}"),
            load_file(tmp_path / "export/model.safetensors"),
        )
        assert names == sorted(before)
        for weights in (streamed, after):
            assert weights.keys() == before.keys()
            assert all(torch.equal(value, before[n]) for n, value in weights.items())


def test_transposed_experts_are_exported_and_streamed_so(tmp_path):
    """Published files of Qwen3-VL's MoE have [experts, hidden, 2 x intermediate]."""
    make_tiny_model(tmp_path / "model", arch="qwen3_vl_moe", hidden=32)
    before = load_file(tmp_path / "model/model.safetensors")
    experts = "model.language_model.layers.0.mlp.experts."
    assert before[f"{experts}gate_up_proj"].shape == (4, 32, 48)
    assert before[f"{experts}down_proj"].shape == (4, 24, 32)
    export(init_ranks(60), str(tmp_path / "model"), tmp_path / "export")
    for weights in (
        torch.load(f"{tmp_path}/export.0"),
        load_file(tmp_path / "export/model.safetensors"),
    ):
        assert weights.keys() == before.keys()
        assert all(torch.equal(value, before[n]) for n, value in weights.items())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_of_a_checkpoints_experts_only_those_of_an_index_are_read(family, name):  # noqa: F811
    plain = dict(
        loading.load_hf_model(family(name), torch.float32, torch.device("cpu")).named_parameters()
    )
    with fused_later() as fused:
        loading.load_hf_model(family(name), "auto", None)
    assert fused.keys() == {n for n in plain if plain[n].ndim == 3}
    for n, weight in fused.items():
        weight.parts = {
            p: [t if e in (1, 2) else None for e, t in enumerate(ts)]
            for p, ts in weight.parts.items()
        }
        index = slice(1, 3), slice(3, 20), slice(0, 9)
        assert torch.equal(weight[index], plain[n].detach()[index])
        assert weight[(slice(4, 4), *index[1:])].shape == (0, 17, 9)


def measure_peak(ranks, model, small) -> dict:
    """Every rank: MiB by which its peak grew while the model was loaded and split."""
    make_policy(small, torch.float32, ranks)  # imports, threads
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak to the memory in use.
    before = peak_mib()
    policy = make_policy(model, torch.float32, ranks)
    return {
        "grew": peak_mib() - before,
        "model": sum(p.numel() for p in policy.parameters()) * 4 / 2**20,
    }


def test_a_rank_reads_and_holds_little_more_than_its_own_experts(family, tmp_path):  # noqa: F811
    """45 M parameters, 172 MiB in fp32, nearly all of them of experts, from files in bf16 of half
    that size."""
    sizes = {
        "hidden_size": 512,
        "moe_intermediate_size": 448,
        "num_experts": 8,
        "num_hidden_layers": 8,
    }
    model = save_model(tmp_path / "model", family("qwen3_moe"), **sizes, vocab_size=200)
    for mib in of_ranks(2, __file__, "measure_peak", model, family("qwen3_moe")):
        print(f"{mib}, MiB")
        assert mib["model"] > 140 and mib["grew"] < 0.65 * mib["model"]


@pytest.mark.parametrize(
    "missing", ["mlp.experts.3.up_proj.weight", "mlp.experts.3.", "mlp.experts."]
)
def test_a_checkpoint_without_an_expert_is_refused(family, tmp_path, missing):  # noqa: F811
    make_family(tmp_path / "model", "qwen3_moe")
    file = tmp_path / "model/model.safetensors"
    weights = {n: w for n, w in load_file(file).items() if f"layers.1.{missing}" not in n}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"model '.*/model'.* (cannot be loaded|its files lack model.layers.1.mlp|is \[)",
    ):
        make_policy(
            str(tmp_path / "model"), torch.float32, init_ranks(60), LearnerConfig(offload="always")
        )


if __name__ == "__main__":
    answer(globals())
