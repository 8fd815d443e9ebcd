"""However ranks are divided into replicas, shards, parts of sequences and slices of matrices, the
update is the same.

As a program it is one rank of the comparison. What one rank does alone is worked out by the test.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import shutil
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from kit import answer, make_learner, of_ranks, run_ranks, sample, words
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_collectives import MESHES as COUNTED
from test_collectives import ON_GLOO, SIZES, count, on_fake_ranks
from test_equivalence import SIZES as SMALL
from test_equivalence import draw_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl_core.config import LoraConfig, parse_config
from rl_core.distributed import Mesh, Ranks, all_gather_json, barrier, local, on_mesh
from rl_core.learning.gradient_averaging import average_gradients
from rl_core.learning.padded_forward import choose_forward
from rl_core.learning.policies import make_policy
from rl_core.learning.teachers.distill import local_rows
from rl_core.learning.teachers.divergence import TopTokens, fused_divergence, make_form
from rl_core.metrics import reduce_metrics
from rl_core.models import logprobs as fused
from rl_core.models.device import check_device, device_of_rank
from rl_core.models.parallel import replicas
from rl_core.models.parallel.expert_parallel import check_expert_parallel, ep_plan
from rl_core.models.parallel.fsdp import local_slices
from rl_core.models.parallel.replicas import make_mesh, mesh_of_flags, num_replicas
from rl_core.models.parallel.tensor_parallel import check_tensor_parallel, split_logprobs, tp_plan
from rl_core.run.plan.model_options import check_model_options, read_other
from rl_core.run.plan.plan import plan_learning
from rl_core.run.process.meeting import check_gpus_differ
from rl_core.run.saving import checkpoint
from rl_core.run.saving.checkpoint import export_policy, save_checkpoint
from rl_core.run.saving.resume import load_checkpoint
from rl_core.types import RunError, TrainingSample, counter_seed

MESHES = {
    "dp 4": Mesh(dp_shard=4),
    "dp 2 x cp 2": Mesh(dp_shard=2, cp=2),
    "cp 4": Mesh(cp=4),
    "hsdp 2 x 2": Mesh(dp_replicate=2, dp_shard=2),
    "hsdp 2 x cp 2": Mesh(dp_replicate=2, cp=2),
    "tp 2 x dp 2": Mesh(dp_shard=2, tp=2),
    "copies 4": Mesh(dp_replicate=4),
    "hsdp 2 x tp 2": Mesh(dp_replicate=2, tp=2),
    "cp 2 x tp 2": Mesh(cp=2, tp=2),
    "tp 4": Mesh(tp=4),
    "dp 3 x tp 2": Mesh(dp_shard=3, tp=2),
    "ep 4": Mesh(dp_shard=4, ep=4),
    "ep 2 x dp 2": Mesh(dp_shard=4, ep=2),
    "ep 2 x dp 3": Mesh(dp_shard=6, ep=2),
    "ep 2 x cp 2": Mesh(dp_shard=2, cp=2, ep=2),
    "ep 2 x hsdp 2": Mesh(dp_replicate=2, dp_shard=2, ep=2),
}
# Not AdamW, which makes a step of full size out of a gradient that is nothing but rounding.
SGD = "--optim.name sgd --optim.lr 0.05"
# A bound that binds. A large eps, for the same reason.
ADAMW = (
    "--algo.entropy_coef 0.01 --optim.lr 3e-3 --optim.betas 0.9,0.95 --optim.eps 1e-3 "
    "--optim.max_grad_norm 0.1 "
    "--optim.weight_decay 0.1"
)
# Shapes of models. kv: key and value heads, by which tp is bounded. Sizes that tp divides but tp x
# dp does not, and words that tp does not: 109 are 55 + 54, and in thirds 19 + 19 + 17 and 18 + 18 +
# 18, which DTensor's own split would not give.
HALVES, QUARTERS = {"num_key_value_heads": 2}, {"num_key_value_heads": 4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
TEXT = SMALL | {"sliding_window": 6}
TOWER = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
TOWER |= {"num_attention_heads": 1, "image_size": 4, "patch_size": 2}
MODELS = {
    "qwen3": ("qwen3", TIED | HALVES | {"intermediate_size": 70}),
    "experts": ("qwen3_moe", TIED),
    "qwen3 untied": ("qwen3", UNTIED | QUARTERS | {"vocab_size": 107}),
    "qwen2 uneven": ("qwen2", TIED | HALVES | {"vocab_size": 109}),
    "sees": ("gemma3", {"text_config": TEXT, "vision_config": TOWER}),
    "llama biased": ("llama", TIED | HALVES | {"attention_bias": True, "mlp_bias": True}),
}
# Families whose experts are split. By two and by four; a rank's experts by two again, or, of four,
# their rows.
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
EXPERTS |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4)
EXPERTS |= {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "num_key_value_heads": 4}
LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
LINEAR = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
OF_EXPERTS = {
    "qwen3_moe": {},
    "glm4_moe": {},
    "deepseek_v3": LATENT,
    "gpt_oss": {"sliding_window": 6},
    "qwen3_5_moe_text": LINEAR,
}
MODELS |= {
    name: (name, EXPERTS | sizes | {"tie_word_embeddings": False})
    for name, sizes in OF_EXPERTS.items()
}
# A share of B of the experts' adapters, [40, 2, 3], divides over three ranks by experts alone.
SIX = dict.fromkeys(("num_experts", "num_local_experts"), 6)
SIX |= {"hidden_size": 40, "moe_intermediate_size": 20}
MODELS["six experts"] = ("qwen3_moe", EXPERTS | UNTIED | SIX)
FIRST = list(MESHES)[:7]
EP_MESHES = ["ep 2 x cp 2", "ep 2 x dp 2"]
WITH_EP = ["dp 4", "ep 4", *EP_MESHES]
EPOCHS = "--learner.updates_per_epoch 2 --learner.epochs 2"
MUON = "--optim.name muon --optim.lr 1e-3 --optim.eps 1e-3 --optim.weight_decay 0.1"
ALWAYS = "--learner.offload always"  # Needs a process group.
NF4 = "--actors.policy.lora.rank 2 --actors.policy.lora.quantize nf4"
ON_EXPERTS = "--actors.policy.lora.rank 3 --actors.policy.lora.targets all-linear,experts"
RECOMPUTED = f"{ADAMW} --learner.activations recompute"
# Name -> (model, flags, number of samples -> meshes). Two samples are fewer than the ranks that
# train on different ones. test_equivalence.py has every loss on two ranks: here are each way to
# divide samples, sequences and weights, several updates, and the optimizer's state.
CASES = {
    "grpo": (
        "qwen3",
        f"{SGD} {EPOCHS} --algo.kl_coef 0.1",
        {14: FIRST, 2: ["dp 4", "hsdp 2 x cp 2"]},
    ),
    "top_k": ("qwen3", f"{SGD} --sampling.top_k 5 --learner.epochs 2", {14: ["hsdp 2 x cp 2"]}),
    "ppo": ("qwen3", f"{SGD} --algorithm ppo {EPOCHS}", {14: ["hsdp 2 x cp 2", "copies 4"]}),
    "rm": ("qwen3", f"{SGD} --algorithm rm", {2: ["dp 4", "tp 2 x dp 2"]}),
    # Several microbatches, after the last of which replicas add up their gradients.
    "adamw": (
        "qwen3",
        f"{ADAMW} --learner.microbatch_tokens 100",
        {14: ["hsdp 2 x tp 2", "copies 4"]},
    ),
    "muon": (
        "qwen3",
        MUON,
        {14: ["dp 4", "hsdp 2 x tp 2", "copies 4"]},
    ),
    "muon, experts": ("experts", MUON, {14: ["hsdp 2 x 2", "ep 2 x hsdp 2", "tp 2 x dp 2"]}),
    "untied top_k": ("qwen3 untied", f"{ADAMW} --sampling.top_k 5", {14: ["tp 4"]}),
    "untied": ("qwen3 untied", ADAMW, {14: ["tp 2 x dp 2", "cp 2 x tp 2", "dp 3 x tp 2"]}),
    "uneven": ("qwen2 uneven", ADAMW, {14: ["tp 2 x dp 2", "dp 3 x tp 2"]}),
    "biased": ("llama biased", RECOMPUTED, {14: ["tp 2 x dp 2"]}),
    "sees": ("sees", ADAMW, {14: ["tp 2 x dp 2"]}),
    # Experts over ranks, with the options that meet them.
    "qwen3_moe": (
        "qwen3_moe",
        f"{RECOMPUTED} --actors.policy.router_aux_loss_coef 0.5 --learner.microbatch_tokens 100",
        {14: [*WITH_EP, "tp 2 x dp 2", "cp 2 x tp 2"], 2: ["ep 4"]},
    ),
    "glm4_moe": ("glm4_moe", f"{ADAMW} {ALWAYS}", {14: [*WITH_EP, "hsdp 2 x tp 2"]}),
    "deepseek_v3": ("deepseek_v3", f"{SGD} --algorithm ppo {EPOCHS}", {14: WITH_EP}),
    "gpt_oss": (
        "gpt_oss",
        f"{SGD} --algo.kl_coef 0.1 {EPOCHS}",
        {14: [*WITH_EP, "ep 2 x hsdp 2"]},
    ),
    # Without cp, which linear attention does not support.
    "qwen3_5_moe": ("qwen3_5_moe_text", ADAMW, {14: ["dp 4", "ep 4", "ep 2 x dp 2"]}),
    "adapters": (
        "qwen3_moe",
        f"{ADAMW} --actors.policy.lora.rank 2",
        {14: [*EP_MESHES, "tp 2 x dp 2"]},
    ),
    "biased adapters": (
        "llama biased",
        f"{RECOMPUTED} --actors.policy.lora.rank 2 --learner.microbatch_tokens 100",
        {14: ["tp 2 x dp 2", "cp 2 x tp 2"]},
    ),
    "adapters on experts": (
        "qwen3_moe",
        f"{RECOMPUTED} {ON_EXPERTS}",
        {14: [*EP_MESHES, "ep 2 x hsdp 2"]},
    ),
    "adapters on six experts": (
        "six experts",
        f"{ADAMW} {ON_EXPERTS.replace('3', '2')}",
        {14: ["ep 2 x dp 3"]},
    ),
    "gpt_oss, adapters": ("gpt_oss", f"{ADAMW} {ON_EXPERTS} {ALWAYS}", {14: ["ep 2 x dp 2"]}),
}
SAVED = [
    ("adamw", 14, "hsdp 2 x tp 2"),
    ("adamw", 14, "copies 4"),
    ("untied", 14, "tp 2 x dp 2"),
    ("uneven", 14, "dp 3 x tp 2"),
    ("muon", 14, "hsdp 2 x tp 2"),
    ("qwen3_moe", 14, "ep 2 x dp 2"),
    ("gpt_oss", 14, "ep 4"),
    ("qwen3_moe", 14, "tp 2 x dp 2"),
    ("biased adapters", 14, "tp 2 x dp 2"),
    ("adapters on experts", 14, "ep 2 x dp 2"),
    ("adapters on six experts", 14, "ep 2 x dp 3"),
]
ALL = [
    (case, num, mesh)
    for case, (_, _, meshes_of) in CASES.items()
    for num, meshes in meshes_of.items()
    for mesh in meshes
]
# Other families are on the same meshes in the default suite.
SLOW = [(name, 14, "dp 4") for name in ("glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_5_moe")]
SLOW += [("glm4_moe", 14, "ep 4"), ("deepseek_v3", 14, "ep 4"), ("gpt_oss", 14, "ep 2 x dp 2")]
SLOW += [case for case in ALL if MESHES[case[-1]].size == 6]


def marked(cases: list[tuple]) -> list:
    return [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else []) for case in cases]


def mixed_learner(path: Path, flags: str, ranks: Ranks | None = None):
    learner = make_learner(path, flags, ranks=ranks)
    if "qwen3_5" in path.name:  # Linear attention is computed on padded rows.
        choose_forward(learner.policy, learner.ranks)
    return learner


def ragged(num: int, seed: int, is_pairs: bool) -> list[TrainingSample]:
    """Some shorter than 2 x cp tokens. Two turns each; pairs begin alike."""
    draw, samples = random.Random(seed), []
    for i in range(num):
        group = i // 2
        prompt = random.Random(f"{seed} {group}")
        lengths = [
            prompt.randint(1, 9),
            draw.choice([1, 2, 30]),
            draw.randint(1, 5),
            draw.randint(1, 9),
        ]
        mask = [
            turn % 2 for turn, n in enumerate(lengths[: 2 if i % 5 == 3 else 4]) for _ in range(n)
        ]
        token_ids = [prompt.randrange(8, 104) for _ in range(lengths[0])]
        token_ids += [draw.randrange(8, 104) for _ in mask[len(token_ids) :]]
        advantage = (0.3 if i % 2 == 0 else 0.0) if is_pairs else draw.gauss(0, 1)
        one = sample(token_ids, mask, advantage, f"{group:04d}")
        # The ids that each trained token was drawn from, for learners that read them.
        lines, others = [], random.Random(i)
        for token in one.token_ids[one.loss_mask].tolist():
            ids = {token, *others.sample(range(104), others.randint(0, 4))}
            lines.append(" ".join(map(str, sorted(ids))))
        samples.append(dataclasses.replace(one, kept_ids=lines))
    return samples


def train(learner, num_samples: int, first: int = 0, num: int = 0) -> dict[str, float]:
    """The metrics of `num` steps over all ranks; 0: one step of several updates, or two of one."""
    facts, ranks = {}, learner.ranks
    num = num or 1 + (learner.config.learner.epochs == 1)
    for step in range(first, first + num):
        samples = ragged(num_samples, step, learner.algorithm.is_pairs)
        minibatches, _ = learner.shard(
            [s for i, s in enumerate(samples) if (i // 2) % ranks.size == ranks.rank]
        )
        learner.annotate(minibatches)
        row = reduce_metrics(learner.step(minibatches, step), ranks)
        facts |= {f"{step} {name}": value for name, value in row.items()}
    return facts


def take_steps(learner, num_samples: int, first: int = 0, num: int = 2) -> dict[str, float]:
    """`num` optimizer steps by gradients that are drawn from a parameter's name. In place of train()
    for Muon, whose iteration in bf16 makes much of gradients' rounding."""
    for step in range(first, first + num):
        for name, parameter in learner.trained_parameters():
            draw = torch.Generator().manual_seed(counter_seed(step, name))
            gradient = torch.randn(parameter.shape, generator=draw)
            _, slices = local_slices(parameter)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                layout = {"shape": gradient.shape, "stride": gradient.stride()}
                gradient = gradient[slices].contiguous()
                gradient = DTensor.from_local(gradient, mesh, placements, run_check=False, **layout)
            parameter.grad = gradient
        for group in learner.optimizer.param_groups:
            group["lr"] = 0.01
        learner.optimizer.step()
        learner.num_updates += 1
        learner.policy.zero_grad()
    return {}


def full(value: torch.Tensor) -> torch.Tensor:
    return (
        (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().contiguous()
    )


def everything(learner) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's state of each."""
    tensors = {n: full(w) for n, w in learner.named_weights()}
    for group in learner.optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            tensors |= {
                f"{kind} {name}": full(v)
                for kind, v in learner.optimizer.state[p].items()
                if v is not None
            }
    return tensors


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


def compare(ranks: Ranks, folder: str, cases: str) -> dict:
    """Every rank: how far each of these cases is on its meshes from what one rank did."""
    folder = Path(folder)
    alone = Ranks(rank=0, size=1, device=ranks.device, store=None)
    results: dict = {
        "logprobs": logprobs_of_a_split_vocabulary(ranks),
        "bf16": in_bf16(folder / "qwen3", ranks, alone),
    }
    # Each process group of gloo starts threads, so that a mesh is made once.
    on = {name: on_mesh(ranks, mesh) for name, mesh in MESHES.items() if mesh.size == ranks.size}
    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # It returned a view.
    results["calls"] = {
        name: count(on[name], folder / "counted")[0] for name in ON_GLOO if name in on
    }
    for case, num, mesh in [c for c in json.loads(cases) if c[-1] in on]:
        model, flags = CASES[case][:2]
        learner = mixed_learner(folder / model, flags, ranks=on[mesh])
        expected, weights = (
            load_file(folder / f"{case} {num}.safetensors"),
            list(learner.policy.parameters()),
        )
        held = (
            sum(local(p.detach()).numel() for p in weights) * ranks.size / MESHES[mesh].dp_replicate
        )
        learn = take_steps if flags == MUON else train
        result = {"held": held / sum(p.numel() for p in weights), "facts": learn(learner, num)}
        result["trained"] = distance(expected, everything(learner))
        if (case, num, mesh) in SAVED:
            result["travels"] = travels(folder, model, flags, learner, alone)
        results[f"{case}, {num}, {mesh}"] = result
    if "ep 2 x cp 2" in on:
        with pytest.raises(ValueError) as refused:
            mixed_learner(folder / "qwen3_5_moe_text", "--ep 2 --cp 2", ranks=on["ep 2 x cp 2"])
        results["refused"] = str(refused.value)
    return results


def travels(folder: Path, model: str, flags: str, learner, alone: Ranks) -> dict[str, float]:
    """Distances of weights and state after a checkpoint that other meshes read, and
    an export."""
    ranks, before, saved = learner.ranks, everything(learner), folder / "checkpoints/step_000003"
    checkpoint.FILE_BYTES = 1 << (11 if learner.adapter else 14)  # Several files of a rank.
    save_checkpoint(saved, {"policy": learner}, {"step": 3}, ranks, 1)
    files = [*saved.glob("policy/*.safetensors")]
    assert len(files) > ranks.size
    written = sum(f.stat().st_size for f in files)
    distances = {"written": written / sum(v.nbytes for v in before.values())}
    sharded = on_mesh(ranks, Mesh(dp_shard=ranks.size))
    for name, on in (("to one rank", alone), ("to dp", sharded), ("and back", ranks)):
        other = mixed_learner(folder / model, flags, ranks=on)
        load_checkpoint(saved, {"policy": other})
        distances[name] = distance(before, everything(other))
        barrier(ranks)  # all have read it
        if name == "to dp":
            save_checkpoint(saved, {"policy": other}, {"step": 3}, on, 1)
    learn = take_steps if flags == MUON else train
    assert learn(other, 14, 3, 1) == learn(learner, 14, 3, 1)
    distances["and on"] = distance(everything(learner), everything(other))
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    export_policy(learner.policy, tokenizer, folder / "export", ranks, learner.adapter)
    barrier(ranks)
    exported = mixed_learner(folder / "export", flags, ranks=alone)
    weights = {n: full(w) for n, w in learner.named_weights()}
    distances["exported"] = distance({n: full(w) for n, w in exported.named_weights()}, weights)
    if learner.adapter:
        base = AutoModelForCausalLM.from_pretrained(folder / model)
        merged = PeftModel.from_pretrained(base, folder / "export_adapter").merge_and_unload()
        distances["by peft"] = distance(dict(merged.named_parameters()), weights)
    barrier(ranks)
    return distances


def logprobs_of_a_split_vocabulary(ranks: Ranks) -> dict[str, float]:
    """Distances of logprobs, of the divergence from a teacher's top tokens and of gradients from an
    unsplit vocabulary's: one tile and several, by torch and by Triton."""
    mesh, distances = init_device_mesh("cpu", (ranks.size,)), {}
    kernels = {"torch": None}
    if importlib.util.find_spec("triton"):
        for name in [n for n in sys.modules if "triton" in n and "_C" not in n]:
            del sys.modules[name]  # forked ranks have them imported to be compiled, not interpreted
        kernels["Triton"] = importlib.import_module("rl_core.models.kernels.triton_logprobs")
    for kind, num_tokens, num_words in (("torch", 9, 37), ("torch", 600, 4999), ("Triton", 9, 37)):
        if kind not in kernels:
            continue
        draw, both = torch.Generator().manual_seed(0), []
        hidden, weight = (torch.randn(n, 16, generator=draw) for n in (num_tokens, num_words))
        labels = torch.randint(num_words, (num_tokens,), generator=draw)
        share = torch.randn(num_tokens, generator=draw) / num_tokens
        logq, top = torch.randn(num_tokens, num_words, generator=draw).log_softmax(-1).topk(7)
        for split in (False, True):
            h, w = hidden.clone().requires_grad_(), weight.clone()
            w = (distribute_tensor(w, mesh, [Shard(0)]) if split else w).requires_grad_()
            if split:
                logprobs, entropy = split_logprobs(h, w, labels, 0.7, None, kernels[kind])
            else:
                logprobs, entropy = fused.fused_logprobs(h, w, labels, 0.7)
            rows, first, merges = local_rows(w)
            target = TopTokens(top, logq, make_form("jsd", 0.3), first)
            divergence = fused_divergence((h, rows, 0.7, None), target, len(rows), merges)
            ((logprobs + entropy + divergence) * share).sum().backward()
            both.append(
                {
                    str(i): full(value)
                    for i, value in enumerate((logprobs, entropy, divergence, h.grad, w.grad))
                }
            )
        distances[f"{kind} {num_tokens}"] = distance(*both)
    return distances


def in_bf16(path: Path, ranks: Ranks, alone: Ranks) -> dict[str, float]:
    """Distances of logprobs in bf16 from fp32, with matrices split and whole."""
    logprobs = {}
    for name, on, dtype in (
        ("exact", alone, torch.float32),
        ("whole", on_mesh(ranks, Mesh(dp_shard=ranks.size)), torch.bfloat16),
        ("split", on_mesh(ranks, Mesh(dp_shard=ranks.size // 2, tp=2)), torch.bfloat16),
    ):
        batch = make_learner(path, SGD, ranks=alone).shard(ragged(6, 100, False))[0][0].batches[0]
        with torch.no_grad():
            logprobs[name] = make_policy(str(path), dtype, on)(batch, 0.9)[0]
    return {
        name: (logprobs[name] - logprobs["exact"]).abs().max().item() for name in ("whole", "split")
    }


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """results(number of ranks) -> what compare() found, and what one rank did."""
    folder, facts, of_size = tmp_path_factory.mktemp("mesh"), {}, {}
    cases = json.dumps([case for case in ALL if request.config.option.slow or case not in SLOW])
    for name, (arch, sizes) in MODELS.items():
        draw_model(folder / name, arch, **sizes)
    draw_model(folder / "counted", "qwen3", **SIZES)
    for case, (model, flags, nums) in CASES.items():
        for num in nums:
            learner = mixed_learner(folder / model, flags.replace(ALWAYS, ""))
            start = {n: full(w) for n, w in learner.named_weights()}
            learn = take_steps if flags == MUON else train
            facts[f"{case}, {num}"] = learn(learner, num)
            assert distance(start, {n: full(w) for n, w in learner.named_weights()}) > 1e-4
            save_file(everything(learner), folder / f"{case} {num}.safetensors")

    def get(size: int) -> tuple[dict, dict]:
        if size not in of_size:
            interpret = {"TRITON_INTERPRET": "1"}
            of_size[size] = of_ranks(
                size, __file__, "compare", folder, cases, timeout_s=600, env=interpret
            )[0]
        return of_size[size], facts

    return get


@pytest.mark.parametrize("case, num, mesh", marked(ALL))
def test_an_update_is_the_same_on_every_mesh(results, case, num, mesh):
    result, facts = results(MESHES[mesh].size)
    result, expected = result[f"{case}, {num}, {mesh}"], facts[f"{case}, {num}"]
    assert result["facts"].keys() == expected.keys()
    for name, value in expected.items():
        assert result["facts"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert result["trained"] < (1e-6 if CASES[case][0] in OF_EXPERTS else 1e-5)
    if case != "rm":
        # Norms and some biases are whole on every rank.
        assert result["held"] == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("case, num, mesh", marked(SAVED))
def test_a_checkpoint_of_any_mesh_is_read_by_any_other(results, case, num, mesh):
    distances = results(MESHES[mesh].size)[0][f"{case}, {num}, {mesh}"]["travels"]
    assert (
        distances["to one rank"]
        == distances["to dp"]
        == distances["and back"]
        == distances["and on"]
        == distances["exported"]
        == distances.get("by peft", 0)
        == 0
    )
    # Headers are large relative to so few weights, but no shard is written twice.
    assert distances["written"] < 1.3


def test_experts_next_to_linear_attention_are_refused_with_cp(results):
    refused = results(4)[0]["refused"]
    assert refused.startswith("--cp=2 splits packed sequences") and refused.endswith("take --cp 1")


@pytest.mark.parametrize("mesh", ON_GLOO)
def test_gloo_has_the_collectives_of_the_fake_process_group(results, tmp_path, mesh):
    draw_model(tmp_path, "qwen3", **SIZES)
    expected, _ = on_fake_ranks(COUNTED[mesh], tmp_path)
    phases = results(4)[0]["calls"][mesh]
    assert {n: {k: tuple(c) for k, c in p.items()} for n, p in phases.items()} == expected


def test_logprobs_of_a_split_vocabulary_are_those_of_a_whole_one(results):
    distances = results(4)[0]["logprobs"]
    assert max(distances.values()) < 1e-5
    assert distances["torch 9"] > 0  # another order of sums: they were split


def test_bf16_is_as_near_as_without(results):
    errors = results(4)[0]["bf16"]
    assert 0 < errors["split"] < 1.5 * errors["whole"]


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", 4),
        ("--dp_replicate 1", 1),
        ("--dp_replicate 2", 2),
        ("--cp 2", 1),
        ("--tp 2", 1),
        ("--learner.dtype bfloat16", 1),
        ("--learner.offload always", 1),
        ("--algo.reference another", 1),
        ("--algo.teacher another", 1),
    ],
)
def test_each_rank_holds_all_weights_of_a_small_model_on_cpus(tiny_model, flags, expected):
    config = parse_config(words("--env_path x.py --out x --model", tiny_model, flags))
    assert num_replicas(config, 4, ["policy"]) == expected


def test_models_that_learn_together_are_counted_together(tiny_model, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    monkeypatch.setattr(replicas, "MAX_PARAMETERS", 1.5 * model.num_parameters())
    bob = f"--env_path x.py --out x --model {tiny_model} --actors.bob.model {tiny_model}"
    config = parse_config(words(bob, "--actors.bob.train true"))
    assert num_replicas(config, 4, ["policy"]) == 4 and num_replicas(config, 4, config.trained) == 1
    shared = "--actors.policy.lora.rank 2 --actors.bob.lora.rank 2 --actors.bob.lora_base policy"
    config = parse_config(words(bob, shared, "--actors.bob.train true"))
    assert num_replicas(config, 4, config.trained) == 4


def average(ranks: Ranks) -> list:
    """Averages gradients of three parameters, used by all ranks, by rank 0 and by none."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.tensor([1.0, 10.0]) * (1 + ranks.rank)
    if ranks.rank == 0:
        parameters[1].grad = torch.tensor([4.0, 8.0])
    average_gradients(parameters, ranks.size)
    average_gradients(parameters[2:], ranks.size)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_gradients_are_averaged_and_what_no_rank_used_has_none():
    assert of_ranks(2, __file__, "average") == [[[1.5, 15.0], [2.0, 4.0], None]] * 2


def test_a_large_model_is_sharded(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    model = AutoConfig.from_pretrained(tiny_model, vocab_size=3_000_000)
    model.save_pretrained(tmp_path / "model")
    config = parse_config(words("--env_path x.py --out x --model", tmp_path / "model"))
    assert num_replicas(config, 4, ["policy"]) == 1


@pytest.mark.parametrize(
    "local_rank, num_visible, visible, expected",
    [
        (0, 8, None, "cuda:0"),
        (7, 8, None, "cuda:7"),
        (1, 2, "3,5", "cuda:1"),  # Gaps: torch numbers the GPUs that it sees.
        (1, 2, "GPU-8f1a,GPU-2c7e", "cuda:1"),
        # The launcher shows each rank one GPU.
        (3, 1, "5", "cuda:0"),
        (3, 1, "MIG-63fe", "cuda:0"),
        (1, 2, "2,3", "cuda:1"),
        # No GPU, as asked for or as found.
        (0, 0, None, "cpu"),
        (3, 0, "", "cpu"),
        (0, 0, "-1", "cpu"),
        (0, 0, "NoDevFiles", "cpu"),  # Slurm's word for none.
        (4, 4, None, r"LOCAL_RANK=4 needs 5 GPUs and torch sees 4 .*Lower --nproc_per_node to 4"),
        (2, 2, "3,5", r"torch sees 2 \(CUDA_VISIBLE_DEVICES=3,5\)"),
        (0, 0, "3,3", "CUDA_VISIBLE_DEVICES=3,3 names GPUs and torch sees none: .*comes twice"),
        (0, 0, "GPU-8f1a", "CUDA_VISIBLE_DEVICES=GPU-8f1a names GPUs"),
        (0, 0, "MIG-63fe", "CUDA_VISIBLE_DEVICES=MIG-63fe names GPUs"),
        (0, 0, " 9", "CUDA_VISIBLE_DEVICES= 9 names GPUs"),
    ],
)
def test_a_rank_has_the_visible_gpu_of_its_number(local_rank, num_visible, visible, expected):
    if expected.startswith(("cuda:", "cpu")):
        assert str(device_of_rank(local_rank, num_visible, visible)) == expected
        return
    with pytest.raises(ValueError, match=expected):
        device_of_rank(local_rank, num_visible, visible)


@pytest.mark.parametrize(
    "name, num_visible, has_mps, num_ranks, expected",
    [
        ("auto", 0, True, 2, ""),
        ("auto", 2, False, 2, ""),
        ("cpu", 0, True, 2, ""),
        ("cuda", 2, False, 2, ""),
        ("mps", 0, True, 1, ""),
        ("cpu", 2, False, 2, "torch sees 2 GPUs; hide them by CUDA_VISIBLE_DEVICES=''"),
        ("cuda", 0, True, 1, "torch sees no GPU; leave --device out"),
        ("mps", 0, False, 1, "torch sees no Apple GPU, .* leave --device out"),
        ("mps", 0, True, 2, "2 ranks cannot exchange tensors .* start one rank"),
    ],
)
def test_a_device_that_a_run_cannot_have_is_refused(
    name, num_visible, has_mps, num_ranks, expected
):
    with pytest.raises(ValueError, match=expected) if expected else nullcontext():
        check_device(name, num_visible, has_mps, num_ranks)


def test_two_ranks_on_one_gpu_are_refused():
    check_gpus_differ(["", "", ""])
    check_gpus_differ(["8f1a", "2c7e", ""])
    with pytest.raises(RunError, match="ranks 1 and 3 have the same GPU, 2c7e"):
        check_gpus_differ(["8f1a", "2c7e", "", "2c7e"])


def test_sizes_that_do_not_divide_the_ranks_are_refused():
    assert make_mesh(8, dp_replicate=2, cp=2, tp=2) == Mesh(dp_replicate=2, dp_shard=1, cp=2, tp=2)
    with pytest.raises(
        ValueError, match=r"--dp_replicate 1 \* --cp 3 \* --tp 1 must divide the 8 ranks"
    ):
        make_mesh(8, cp=3)
    assert make_mesh(8, dp_replicate=2, cp=2, ep=4).ep == 4
    with pytest.raises(ValueError, match="--ep=8 must divide the 4 ranks of one copy"):
        make_mesh(8, dp_replicate=2, cp=2, ep=8)


@pytest.mark.parametrize(
    "tp, arch, change, message",
    [
        (
            3,
            "qwen3",
            {},
            r"--tp=3 must divide .*num_attention_heads=8, num_key_value_heads=4, .*try --tp 2",
        ),
        (8, "qwen3", {}, r"num_key_value_heads=4.*try --tp 4"),
        (2, "llama", {"intermediate_size": 77}, "gate_proj width=77.*try --tp 1"),
        (2, "gpt2", {}, r"--tp=2: a gpt2 model has no plan in transformers; take --tp 1"),
        (
            2,
            "apertus",
            {},
            r"--tp=2: the plan for a apertus model leaves out layers.0.mlp.act_fn, .*; take --tp 1",
        ),
        (
            2,
            "qwen3_moe",
            {"num_local_experts": 3},
            "--tp=2 must divide the model's experts=3; try --tp 1",
        ),
        (8, "qwen3_moe", {"num_local_experts": 6}, "=4, experts=6; try --tp 2"),
        (
            2,
            "gemma3",
            {"text_config": SMALL | {"intermediate_size": 77}},
            "gate_proj width=77, up_proj width=77, down_proj width=77; try --tp 1",
        ),
        (
            2,
            "qwen3",
            {"base_model_tp_plan": {"layers.*.attn.q": "colwise"}},
            "--tp=2: the plan for a qwen3 model names none of its layers; take --tp 1",
        ),
        (2, "glm4_moe", {"use_qk_norm": True}, "a glm4_moe model leaves out layers.*q_norm"),
        (2, "deepseek_v3", LATENT, "--tp=2: the plan for a deepseek_v3 model splits no attention"),
        (2, "gpt_oss", {}, "--tp=2: a gpt_oss model has no plan in transformers; take --tp 1"),
        (2, "qwen3_5_moe_text", LINEAR, "qwen3_5_moe_text model splits layers as colwise_gather_o"),
    ],
)
def test_models_that_cannot_be_split_are_refused_with_the_nearest_choice(tp, arch, change, message):
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 104,
        "num_hidden_layers": 2,
    }
    config = AutoConfig.for_model(arch, hidden_size=64, **(EXPERTS | sizes | change))
    check_tensor_parallel(1, config)
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(tp, config)


@pytest.mark.parametrize(
    "ep, arch, lora, message",
    [
        (3, "qwen3_moe", {}, r"--ep=3 must divide the model's 4 experts; try --ep 2"),
        (8, "gpt_oss", {}, r"--ep=8 must divide the model's 4 experts; try --ep 4"),
        (2, "qwen3", {}, "--ep=2: a qwen3 model has no plan for experts in transformers; take"),
        (2, "llama4_text", {}, "--ep=2: a llama4_text model has no plan for experts .*--ep 1"),
        (2, "gemma4_text", {}, "--ep=2: a gemma4_text model splits layers as colwise, which"),
        (4, "qwen3_moe", {"rank": 2, "targets": "experts"}, "--ep=4 leaves one .* try --ep 2"),
        (2, "qwen3_moe", {"rank": 2, "quantize": "nf4"}, "no quantized model; take --ep 1"),
    ],
)
def test_experts_that_cannot_be_split_are_refused_by_name(tmp_path, ep, arch, lora, message):
    config = AutoConfig.for_model(arch, **SMALL | EXPERTS)
    check_expert_parallel(1, config, LoraConfig(**lora))
    with pytest.raises(ValueError, match=message):
        check_expert_parallel(ep, config, LoraConfig(**lora))
    if lora or not ep_plan(config):
        return
    # A reference, a teacher or a critic is refused too.
    config.save_pretrained(tmp_path)
    run = parse_config(words("--env_path x.py --out x --model m --ep", ep))
    with pytest.raises(ValueError, match=f"model {tmp_path}: {message}"):
        read_other(run, str(tmp_path))


@pytest.mark.parametrize(
    "flags, num_ranks, experts, expected",
    [
        ("", 4, 4, Mesh(dp_shard=4)),
        ("--ep 2", 4, 4, Mesh(dp_shard=4, ep=2)),
        ("--ep auto", 4, 6, Mesh(dp_shard=4, ep=2)),
        ("--ep auto --cp 2", 4, 4, Mesh(dp_shard=2, cp=2, ep=4)),
        ("--ep auto --dp_replicate 2", 4, 4, Mesh(dp_replicate=2, dp_shard=2, ep=2)),
        ("--ep auto", 48, 48, Mesh(dp_shard=48, ep=8)),
        ("--ep auto", 3, 4, Mesh(dp_shard=3)),
        (f"--ep auto {ON_EXPERTS}", 4, 4, Mesh(dp_shard=4, ep=2)),
        ("--ep auto --algo.kl_coef 1 --algo.reference {six}", 4, 4, Mesh(dp_shard=4, ep=2)),
        ("--ep auto --algorithm ppo --critic.model {six}", 4, 4, Mesh(dp_shard=4, ep=2)),
        ("--ep auto --algo.teacher {dense}", 4, 4, Mesh(dp_shard=4, ep=4)),
    ],
)
def test_auto_splits_experts_over_as_many_ranks_as_divide_them(
    tmp_path, flags, num_ranks, experts, expected
):
    folders = {"six": tmp_path / "6", "dense": tmp_path / "0"}
    for num in {0, 6, experts}:
        sizes = SMALL | EXPERTS | dict.fromkeys(("num_experts", "num_local_experts"), num)
        model_config = AutoConfig.for_model("qwen3_moe" if num else "qwen3", **sizes)
        model_config.save_pretrained(tmp_path / str(num))
    flags = flags.format(**folders)
    options = flags if "dp_replicate" in flags else f"{flags} --dp_replicate 1"
    config = parse_config(
        words("--env_path x.py --out x --model", tmp_path / str(experts), options)
    )
    assert mesh_of_flags(config, num_ranks, ["policy"]) == expected


@pytest.mark.parametrize(
    "flags, arch, num_ranks, why",
    [
        ("", "qwen3_moe", 4, ""),
        ("", "qwen3_moe", 3, "no number from 2 to 8 divides the ranks of a copy and the experts"),
        ("", "qwen3", 4, "a qwen3 model has no plan for experts in transformers"),
        ("--tp 2", "qwen3_moe", 4, "--tp=2 cannot be combined with --ep"),
        ("--learner.kernels liger", "qwen3_moe", 4, "--learner.kernels=liger cannot be combined"),
        (NF4, "qwen3_moe", 4, "the model of actor policy is quantized"),
        ("", "qwen3_vl_moe", 4, "model can see images; --ep N splits it to train on text"),
    ],
)
def test_auto_says_in_one_line_why_experts_are_not_split(
    tmp_path, monkeypatch, capsys, flags, arch, num_ranks, why
):
    config = AutoConfig.for_model(arch, **SMALL | EXPERTS)
    config.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    model = tmp_path / "model"
    flags = words("--env_path x.py --out x --ep auto --model", model, flags)
    plan = plan_learning(parse_config(flags), {})
    stderr = capsys.readouterr().err
    assert (plan.mesh.ep == 1) == bool(why) == stderr.startswith("--ep auto: 1, because ")
    assert why in stderr and stderr.count("\n") == bool(why)
    # The rules and the checks of the model agree.
    check_model_options(plan.config, "policy", config)


def test_an_embedding_in_the_plan_changes_nothing():
    """transformers 5.17 adds it for models with tied embeddings."""
    config = AutoConfig.for_model("qwen3", num_attention_heads=8, num_key_value_heads=4)
    config.intermediate_size, plain = 96, tp_plan(config)
    config.base_model_tp_plan = {**plain, "embed_tokens": "embedding_rowwise"}
    assert tp_plan(config) == plain
    check_tensor_parallel(2, config)


@pytest.mark.parametrize(
    "option, message",
    [
        (
            {"targets": "all-linear,experts"},
            "adapters on experts; .* experts out of .*lora.targets",
        ),
        ({"quantize": "nf4"}, "quantized model; .* leave out --actors.NAME.lora.quantize"),
    ],
)
def test_adapters_that_tp_cannot_split_are_refused(option, message):
    config = AutoConfig.for_model("qwen3_moe", **SMALL | EXPERTS)
    check_tensor_parallel(2, config, LoraConfig(rank=4))
    with pytest.raises(ValueError, match=f"--tp=2 splits no {message}"):
        check_tensor_parallel(2, config, LoraConfig(rank=4, **option))


def gather_without_warnings(ranks: Ranks) -> list:
    warnings.simplefilter("error")
    return all_gather_json({"rank": ranks.rank, "text": "x" * ranks.rank}, ranks)


def test_ranks_tell_each_other_values_and_torch_warns_of_nothing():
    gathered = of_ranks(2, __file__, "gather_without_warnings")
    assert gathered == [[{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]] * 2


def test_a_run_with_a_model_that_cannot_be_split_is_refused(places, tmp_path):
    flags = words(
        "--model", places["model"], "--algorithm sft --tp 3 --out", tmp_path / "x", "--data.train"
    )
    done = run_ranks(3, "-m", "rl_core.train", *flags, places["dir"] + "/rows.jsonl", check=False)
    assert (
        done.returncode != 0
        and "--tp=3 must divide the model's num_attention_heads=4" in done.stderr
    )


if __name__ == "__main__":
    answer(globals())
