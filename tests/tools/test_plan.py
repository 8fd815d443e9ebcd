"""rl-core plan: its figures against the memory of a run."""

from __future__ import annotations

import importlib.metadata
import json
import re
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import bench_images
import kit
import memory_table
import numpy as np
import pytest
import torch
import torch.distributed as dist
from bench_learner import QWEN3, model_config
from models_table import load_plain, make_family
from test_equivalence import draw_model
from test_learner import ragged_samples
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from rl_core.config import ActorConfig, parse_config
from rl_core.data.images import read_image
from rl_core.distributed import Mesh, Ranks, on_mesh
from rl_core.engines import remote, weights
from rl_core.engines.buckets import in_flat_buckets
from rl_core.engines.remote import in_buckets
from rl_core.engines.weights import checkpoint_weights, load_weights
from rl_core.learning.activation_memory import block_bytes
from rl_core.models import weight_gathering
from rl_core.models.policy import blocks_of
from rl_core.models.weight_gathering import exhaust
from rl_core.run.plan.plan import make_plan
from rl_core.run.process.joining import init_ranks
from rl_core.tools.cli import main
from rl_core.tools.memory_estimate import (
    engine_bytes,
    facts,
    learner_bytes,
    model_size,
    sync_bytes,
)
from rl_core.tools.plan import describe
from rl_core.trainer import Trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def flags(tiny_model, tmp_path) -> list[str]:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "31524", "answer": "12345"}\n' * 4)
    flags = [
        "--env_path",
        str(ROOT / "envs/sort_digits.py"),
        "--data.train",
        str(tmp_path / "rows.jsonl"),
    ]
    flags += [
        "--tasks_per_step",
        "4",
        "--group_size",
        "8",
        "--max_tokens",
        "8",
        "--max_prompt_tokens",
        "16",
    ]
    return ["--model", str(tiny_model), "--out", str(tmp_path / "run"), *flags]


@pytest.mark.parametrize("adapters", [(), ("--actors.policy.lora.rank", "4")])
def test_parameters_gradients_and_optimizer_are_those_of_a_learner(flags, adapters):
    plan = make_plan(parse_config([*flags, *adapters]))
    actor = plan.config.actors["policy"]
    size, learner = model_size(actor), Trainer(plan, init_ranks(60)).learners["policy"]
    trained = [p for p in learner.policy.parameters() if p.requires_grad]
    held = sum(p.nbytes for p in learner.policy.parameters())
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    moments = sum(
        v.nbytes for s in learner.optimizer.state.values() for k, v in s.items() if k != "step"
    )
    table = learner_bytes(plan, actor, size, Mesh())
    assert size.total == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(actor.model).parameters()
    )
    assert size.adapters == (sum(p.numel() for p in trained) if adapters else 0)
    assert table["weights"] == (held, held) and table["optimizer"] == (moments, moments)
    assert table["gradients"] == (0, sum(p.grad.nbytes for p in trained))
    # Ranks of tp have a half of each adapter whole.
    share = moments * (3 / 8 if adapters else 1 / 4)
    over = learner_bytes(plan, actor, size, Mesh(dp_shard=2, tp=2))
    assert over["optimizer"] == (share, share)


def test_a_reference_is_as_large_as_the_one_that_a_learner_has(flags):
    plan = make_plan(parse_config([*flags, "--algo.kl_coef", "0.1"]))
    actor = plan.config.actors["policy"]
    size, learner = model_size(actor), Trainer(plan, init_ranks(60)).learners["policy"]
    held = sum(p.nbytes for p in kit.part_of(learner, "Reference").policy.parameters())
    assert (
        learner_bytes(plan, actor, size, Mesh())["reference"] == (0, held)
        and held == 4 * size.total
    )
    assert learner_bytes(plan, actor, size, Mesh(dp_shard=2, tp=2))["reference"] == (0, held / 4)


def test_an_actors_own_settings_are_planned_as_the_global_ones_are(flags):
    ours = ["algo.kl_coef=0.1", "learner.microbatch_tokens=4096", "optim.name=sgd", "algorithm=ppo"]
    result = []
    for prefix in ("--", "--actors.policy."):
        plan = make_plan(parse_config([*flags, *(prefix + flag for flag in ours)]))
        result.append(facts(plan)["actors"])
    assert (
        result[0] == result[1]
        and "critic, its optimizer" in result[0]["policy"]["bytes_on_one_rank"]
    )


def test_a_teacher_is_as_large_as_the_one_that_a_learner_has(flags, make_model):
    teacher = make_model(layers=3)
    asked = ["--algo.teacher", str(teacher), "--actors.policy.lora.rank", "4"]
    plan = make_plan(parse_config([*flags, *asked]))
    learner = Trainer(plan, init_ranks(60)).learners["policy"]
    held = sum(p.nbytes for p in kit.part_of(learner, "SampledTeacher").models[0].parameters())
    table = facts(plan)["actors"]["policy"]["bytes_on_one_rank"]
    assert table["teacher"] == {"sample": 0, "learn": held}


MESHES = (Mesh(dp_shard=4), Mesh(dp_shard=2, tp=2))
OF_EXPERTS = (Mesh(dp_shard=4), *(Mesh(dp_shard=4, ep=ep) for ep in (2, 4)), MESHES[1])


def test_gathered_weights_are_about_those_of_an_update_over_four_ranks(make_model, flags, tmp_path):
    model, experts = make_model(layers=6), tmp_path / "experts"
    make_family(experts, "qwen3_moe")
    found = kit.of_ranks(4, __file__, "gathered_bytes", model, experts)
    for path, meshes in ((experts, OF_EXPERTS), (model, MESHES)):
        plan = make_plan(parse_config([*flags, "--model", str(path)]))
        actor = plan.config.actors["policy"]
        size = model_size(actor)
        for of_rank in found:
            for mesh, (before, most) in zip(meshes, of_rank[str(path)], strict=True):
                planned = learner_bytes(plan, actor, size, mesh)["gathered weights"]
                assert before == 0 and planned == (0, pytest.approx(most, rel=0.1))
    assert learner_bytes(plan, actor, size, Mesh())["gathered weights"] == (0, 0)


@pytest.mark.parametrize("family", ["", "qwen3_moe"])
def test_activations_are_about_those_that_autograd_keeps(flags, family, tmp_path):
    if family:
        make_family(tmp_path / "model", family)
        flags = [*flags, "--model", str(tmp_path / "model")]
    actor = make_plan(parse_config(flags)).config.actors["policy"]
    size, model, kept = model_size(actor), AutoModelForCausalLM.from_pretrained(actor.model), {}
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(1, 100, size.hidden, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(100)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.model.layers[0](hidden, position_embeddings=positions)
    assert out.requires_grad and sum(kept.values()) == pytest.approx(
        100 * block_bytes(size, 4, 1), rel=0.4
    )


@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl"])
def test_images_are_about_the_pixels_and_what_autograd_keeps_of_the_tower(
    arch, make_model, flags, tmp_path
):
    image = read_image(np.zeros((64, 48, 3), np.uint8))
    row = {"prompt": "1", "answer": "1", "image": image.url}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    model = make_model(arch)
    flags += ["--model", str(model), "--max_prompt_tokens", "64"]
    plan = make_plan(parse_config(flags))
    actor, family = plan.config.actors["policy"], plan.chats["policy"].vision
    size, tensors, kept = model_size(actor), family.tensors(image), {}
    planned = learner_bytes(plan, actor, size, Mesh())["images"][1]
    hf = AutoModelForImageTextToText.from_pretrained(model)
    weights = {p.untyped_storage().data_ptr() for p in hf.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = hf.model.visual(tensors["pixel_values"], grid_thw=tensors["image_grid_thw"])
    assert out.last_hidden_state.requires_grad
    # A microbatch of 8192 tokens has samples of 64 + 8 tokens, 48 of which are the image's.
    assert planned == pytest.approx(sum(kept.values()) * 8192 / 72, rel=0.4)
    assert "images " in describe(facts(plan))


def test_the_script_counts_pixels_of_a_step(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_images.py", "--images", "2", "--edge", "280"])
    bench_images.main()
    # 20 x 20 patches of 2 x 3 x 14 x 14 numbers in fp32: 1.8 MiB an image.
    assert "counted: pixels 4, cache 4, tower" in capsys.readouterr().out


def test_the_engines_cache_holds_every_episode_in_flight(flags):
    plan = make_plan(parse_config(flags))
    size = model_size(plan.config.actors["policy"])
    table = engine_bytes(plan, "policy", size, Mesh())
    assert table["KV cache"] == (4 * 8 * (16 + 8) * 2 * size.layers * size.keys * 4, 0)
    assert table["engine weights"] == (0, 0), "it reads the learner's"
    assert (
        engine_bytes(plan, "policy", size, Mesh(dp_shard=2))["engine weights"][0] == 4 * size.total
    )


def test_the_command_prints_sizes_and_starts_nothing(flags, tmp_path, capsys):
    assert main(["plan", *flags, "--learner.offload", "phase"]) == 0
    shown = capsys.readouterr().out
    assert "4 rows to train on" in shown and "100 of 4 rows: 100 epochs" in shown
    assert "\ncolumns          train: prompt from prompt; label from answer\n" in shown
    assert "at most 768: 32 episodes of at most 24 tokens" in shown and " M parameters" in shown
    assert "embedded engine, float32, microbatches of 8192 tokens" in shown
    row = next(line for line in shown.splitlines() if line.startswith("optimizer"))
    assert row.split()[1] == "-", "offloaded while engines sample"
    assert not (tmp_path / "run").exists()
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "1", "chosen": "a", "rejected": "b"}) + "\n")
    at = [
        "--algorithm",
        "dpo",
        "--model",
        flags[1],
        "--data.train",
        str(pairs),
        "--out",
        str(tmp_path / "run"),
    ]
    assert "reference" in describe(facts(make_plan(parse_config([*at, "--tasks_per_step", "1"]))))


def test_a_model_without_attention_is_planned_too(flags, tmp_path):
    make_family(tmp_path / "mamba", "mamba")
    plan = make_plan(parse_config([*flags, "--model", str(tmp_path / "mamba")]))
    table = facts(plan)["actors"]["policy"]["bytes_on_one_rank"]
    assert table["KV cache"]["sample"] == 0 < table["weights"]["sample"]


def test_json_holds_what_the_text_says(flags, capsys):
    assert main(["plan", *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    plan = make_plan(parse_config(flags))
    size = model_size(plan.config.actors["policy"])
    assert (result["train_rows"], result["epochs"], result["ranks"]["all"]) == (4, 100, 1)
    assert result["samples_per_step"] * result["max_tokens_of_a_sample"] == 768
    assert result["actors"]["policy"]["parameters"] == size.total
    held = result["actors"]["policy"]["bytes_on_one_rank"]
    assert (
        held["gradients"] == {"sample": 0, "learn": 4 * size.total}
        and held["sum"]["learn"] > 16 * size.total
    )
    assert describe(result) == describe(facts(plan))


def test_a_run_with_sglang_is_planned_where_it_is_not_installed(flags, monkeypatch, capsys):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    arguments = [*flags, "--engine", "sglang", "--engine_args", "--quantization fp8"]
    with pytest.raises(
        ValueError, match=r"needs sglang, which is not installed: pip install 'rl_core\[sglang\]'"
    ):
        make_plan(parse_config(arguments))
    assert main(["plan", *arguments]) == 0 and "sglang engine, float32" in capsys.readouterr().out
    assert (
        main(["plan", *arguments[:-1], "--tp-size 2"]) == 1
        and "give --engine_tp" in capsys.readouterr().err
    )


# Bytes of the published files in bf16; the files of 0.6B hold the tied head twice.
PUBLISHED = {
    "0.6B": 2 * (751_632_384 - 151_936 * 1024),
    "4B": 8_044_936_192,
    "8B": 16_381_470_720,
    "14B": 29_536_614_400,
    "32B": 65_524_246_528,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_files(name, tmp_path):
    model_config(name).save_pretrained(tmp_path)
    assert 2 * model_size(ActorConfig(model=str(tmp_path))).total == PUBLISHED[name]


@pytest.mark.parametrize(
    "names", [["8B"], pytest.param([*QWEN3], marks=pytest.mark.slow)], ids=["8B", "all"]
)
def test_the_table_of_flags_in_the_docs_is_what_the_script_prints(names):
    table = memory_table.lines(names)
    written = (ROOT / "docs/parallelism.md").read_text()
    assert len(table) == 2 + 3 * len(names) and all(f"{line}\n" in written for line in table)
    # 8B on 8 GPUs of 80 GB by hand.
    gib, total, ids, width, mlp, layers = 2**30, 16_381_470_720 / 2, 151_936, 4096, 12288, 36
    block = width * (4096 + 2 * 1024 + 4096 + 3 * mlp)  # Weights of the matrices.
    kept = 2 * (4 + 2 * 2) * width + 2 * 2 * (4096 + 1024) + 4 * 2 * mlp  # Bytes of a token.
    context, graphs = 0.5 * gib, (2 * 16 + 8 * 58) * 2**20  # 16 episodes on each GPU.
    learning = 16 * total / 8 + 2 * (2 * ids * width + 2 * block)  # 16 with Adam; gathered weights.
    learning += 8192 * (layers * 2 * (width + 4096) + kept + 2 * (4 + 2) * width)  # Activations.
    learning += 2 * 256 * 2**20 + gib  # Logits of two tiles, and kept ones.
    learning += 4 * 8192 * width + 2 * ids * width  # Gradients of hidden states and head.
    pool = 0.6 * (80 * gib - context - 12 * total / 8)
    sampling = 12 * total / 8 + pool + 8192 * kept + 4 * ids * width  # The head's fp32 copy.
    sampling, learning = (each + 2 * context + graphs for each in (sampling, learning))
    row = next(line for line in table if line.startswith("| 8B, 8 "))
    assert row.split(" | ")[2] == f"R {sampling / gib:.0f}/{learning / gib:.0f}"


ALWAYS = "--learner.offload always --learner.activations recompute"


@pytest.fixture
def plan_8b(flags, tmp_path, capsys, monkeypatch):
    """plan_8b("--flag value", num_ranks) -> the output of rl-core plan for Qwen3-8B, with --ep for
    one whose first layer has experts."""
    sizes = model_config("8B").to_diff_dict()
    del sizes["model_type"], sizes["layer_types"]
    of_experts = {"mlp_only_layers": [*range(1, 36)], "num_experts": 4}
    model_config("8B").save_pretrained(tmp_path / "8B")
    AutoConfig.for_model("qwen3_moe", **sizes | of_experts).save_pretrained(tmp_path / "experts")
    for name in ("8B", "experts"):
        AutoTokenizer.from_pretrained(flags[1]).save_pretrained(tmp_path / name)

    def planned(more, num_ranks=1):
        monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
        size = f"--max_prompt_tokens 1024 --max_tokens 3072 {more}"
        model = tmp_path / ("experts" if "--ep" in more else "8B")
        assert main(["plan", *flags, "--model", str(model), *size.split()]) == 0
        return capsys.readouterr().out

    return planned


@pytest.mark.parametrize(
    "more, num_ranks, problem, num_fixes",
    [
        ("--gpu_gib 80", 1, "of the 0.0 GiB that learners leave it, and its weights", 2),
        ("--gpu_gib 80", 8, "GiB, more than 0.9 of 80", 2),
        (f"--gpu_gib 24 {ALWAYS}", 8, "of the 23.5 GiB that learners leave it", 2),
        (f"--gpu_gib 48 {ALWAYS} --engine_memory_frac 0.38", 1, "holds 4 episodes of 4,096", 2),
        ("--gpu_gib 24 --engine embedded --learner.offload phase", 1, "learning takes", 0),
        ("--gpu_gib 8", 1, "does not fit", 0),
        ("--gpu_gib 21 --ep 2", 2, "does not fit", 1),
    ],
)
def test_a_plan_for_a_gpu_names_flags_with_which_it_fits(
    more, num_ranks, problem, num_fixes, plan_8b
):
    shown = plan_8b(more, num_ranks)
    *_, verdict = shown.split("\n\n")
    assert problem in verdict and "\nfits a GPU" not in shown
    fixes = re.findall(r"^fits with (.*)", verdict, re.M)
    assert len(fixes) == num_fixes and fixes[:1] != [""]
    for fix in fixes:
        assert "fits a GPU of" in plan_8b(f"{more} {fix}", num_ranks)
    assert fixes or "take more GPUs, or larger ones" in verdict


def test_a_plan_for_a_gpu_is_for_sglang_in_bf16_and_shared_ranks(plan_8b, flags, capsys):
    shown = plan_8b("--gpu_gib 141 --learner.offload always --json")
    result = json.loads(shown)
    gpu = result["gpu"]
    assert (result["engine"], result["dtype"], gpu["problems"]) == ("sglang", "bfloat16", [])
    rows = [use for row, use in gpu["bytes_on_one_rank"].items() if "server" in row]
    # 32 rows of decode graphs; the copy of the head, 2.3 GiB, is released.
    assert sum(use["learn"] for use in rows) == 2**29 + (2 * 32 + 8 * 58) * 2**20
    cache = gpu["bytes_on_one_rank"]["KV cache"]["sample"]
    assert gpu["episodes_in_cache"] == cache // (
        4096 * 2 * 36 * 1024 * 2
    )  # Keys and values in bf16.
    assert gpu["episodes_at_once"] == 32
    plan_8b("", num_ranks=2)
    assert main(["plan", *flags, "--rollout_ranks", "1", "--gpu_gib", "80"]) == 1
    assert "--gpu_gib counts one actor that learns, on the ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "hidden, of_expert, stack", [(2048, 768, 0.75), (4096, 1536, 3)], ids=["30B-A3B", "235B-A22B"]
)
def test_a_sync_takes_a_stack_of_experts(flags, tmp_path, monkeypatch, hidden, of_expert, stack):
    sizes = {"hidden_size": hidden, "moe_intermediate_size": of_expert, "num_experts": 128}
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=1, vocab_size=104, **sizes)
    config.save_pretrained(tmp_path / "model")
    size = model_size(ActorConfig(model=str(tmp_path / "model")))
    in_bf16 = [*flags, "--learner.dtype", "bfloat16", "--dp_replicate", "1"]
    monkeypatch.setenv("WORLD_SIZE", "16")
    plan = make_plan(parse_config(in_bf16))
    held = stack * 17 / 16  # In bf16, and a rank's shard of it.
    # Two pieces of 64 MiB that travel.
    assert sync_bytes(plan, "policy", size) == (held + 1 / 8) * 2**30
    plan = replace(plan, config=replace(plan.config, engine="sglang"))
    # Two buckets of 512 MiB, and 256 MiB of single experts.
    assert sync_bytes(plan, "policy", size) == (held + 1 / 4 + 1) * 2**30


class Held(TorchDispatchMode):
    """Bytes of the tensors that operations made and that something still refers to."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self.num_tensors: Counter[tuple[int, int]] = Counter()  # Of (address, bytes).

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:  # It calls operations with plain tensors.
            return NotImplemented
        seen = {memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            key = memory(tensor) if isinstance(tensor, torch.Tensor) else (0, 0)
            is_view = key in seen and key not in self.num_tensors  # Of older memory.
            if key[0] and not is_view:  # Tensors on "meta" have address 0.
                self.num_tensors[key] += 1
                weakref.finalize(tensor, self.drop, key)
        self.most = max(self.most, sum(size for _, size in self.num_tensors))
        return out

    def drop(self, key: tuple[int, int]) -> None:
        self.num_tensors[key] -= 1
        if not self.num_tensors[key]:
            del self.num_tensors[key]


CPU = torch.device("cpu")


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
@pytest.mark.parametrize("mesh", [Mesh(dp_shard=4), Mesh(dp_shard=4, ep=2)], ids=["ep1", "ep2"])
def test_a_sync_holds_what_is_planned(flags, tmp_path, monkeypatch, mesh, engine):
    """On rank 0 of a process group that moves nothing."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16}
    draw_model(tmp_path / "model", "qwen3_moe", **sizes)
    monkeypatch.setattr(weight_gathering, "GROUP_BYTES", 1 << 15)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1 << 17)
    monkeypatch.setattr(remote, "BUCKET_BYTES", more := 1 << 15)
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags += ["--model", str(tmp_path / "model"), "--learner.dtype", "bfloat16"]
    flags += ["--dp_replicate", "1", "--ep", str(mesh.ep), "--engine_bucket_mib", "1"]
    plan = make_plan(parse_config(flags))
    assert plan.mesh == mesh
    size = model_size(plan.config.actors["policy"])
    plan = replace(plan, config=replace(plan.config, engine=engine))
    planned = sync_bytes(plan, "policy", size)
    # Less than the experts of a layer; for a server two buckets more.
    assert planned < 2 * size.largest_layer + 2 * 2**20 * (engine == "sglang")
    target, bf16 = kit.make_skeleton(str(tmp_path / "model")), torch.bfloat16
    ways = [exhaust, lambda named: exhaust(in_buckets(named, bf16))]
    ways.append(partial(load_weights, load_plain(tmp_path / "model")))
    if engine == "sglang":
        ways = [
            lambda named: exhaust(
                in_flat_buckets(checkpoint_weights(target, named), bf16, CPU, 1 << 20)
            )
        ]
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        ranks = on_mesh(Ranks(rank=0, size=4, device=CPU), mesh)
        learner = kit.make_learner(tmp_path / "model", "--learner.dtype bfloat16", ranks=ranks)
        for send in ways:
            with Held() as held:
                send(learner.engine_weights(False))
            assert 0.8 * planned < held.most <= planned + more
    finally:
        dist.destroy_process_group()


def gathered_bytes(ranks, model, experts) -> dict[str, list[list[int]]]:
    """For each model [before, most] bytes of unsharded weights on this rank, before an update and
    within it, of each mesh."""
    meshes_of = {model: MESHES, experts: OF_EXPERTS}
    return {
        path: [gathered_on(on_mesh(ranks, mesh), path) for mesh in meshes]
        for path, meshes in meshes_of.items()
    }


def gathered_on(ranks, model) -> list[int]:
    learner, values = kit.make_learner(model, ranks=ranks), []
    groups = [
        m._get_fsdp_state()._fsdp_param_group
        for m in learner.policy.modules()
        if isinstance(m, FSDPModule)
    ]

    def note(*_: object) -> None:
        held = [
            tensor for group in groups for p in group.fsdp_params for tensor in p.all_gather_outputs
        ]
        # The next block's, on their way.
        results = [group._all_gather_result for group in groups]
        held += [result.all_gather_output for result in results if result is not None]
        values.append(sum(tensor.untyped_storage().nbytes() for tensor in held))

    note()
    for block in blocks_of(learner.policy.hf):
        block.register_forward_hook(note)
        block.self_attn.register_full_backward_hook(note)
        if hasattr(block.mlp, "experts"):
            block.mlp.experts.act_fn.register_full_backward_hook(note)
    kit.learn(learner, ragged_samples())
    return [values[0], max(values)]


if __name__ == "__main__":
    kit.answer({"gathered_bytes": gathered_bytes})
