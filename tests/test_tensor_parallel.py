"""However matrices are split over ranks, logprobs, gradients, updates and files are those of one rank.

Run as a file under torchrun it is one rank of the comparison: torchrun --nproc_per_node 4 test_tensor_parallel.py MODELS OUT
"""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoTokenizer

from rl_core.config import LoraConfig, parse_config
from rl_core.data.packing import pack_samples
from rl_core.distributed import Mesh, Ranks, barrier, close_ranks, init_ranks, on_mesh
from rl_core.learning import logprobs as fused
from rl_core.learning.algorithms import make_algorithm
from rl_core.learning.checkpoint import load_checkpoint, save_checkpoint
from rl_core.learning.learner import Learner
from rl_core.learning.model import PolicyModel, export_policy, make_policy, named_weights
from rl_core.metrics import reduce_metrics
from rl_core.options.tensor_parallel import check_tensor_parallel, sum_partial_gradients
from rl_core.train import main
from rl_core.types import TrainingSample

FLAGS = [
    "--env_path",
    "x.py",
    "--out",
    "x",
    "--max_prompt_tokens",
    "40",
    "--max_tokens",
    "60",
    "--algo.entropy_coef=0.01",
]
# A large eps: AdamW makes a step of full size out of a gradient that is nothing but rounding. A bound that binds.
OPTIM = ["--optim.lr", "3e-3", "--optim.eps", "1e-3", "--optim.max_grad_norm", "0.1", "--optim.weight_decay", "0.1"]
# kv: key and value heads, by which tp is bounded. Sizes that tp divides but tp x dp does not, and words that tp does not:
# 109 are 55 + 54, and in thirds 19 + 19 + 17 and 18 + 18 + 18, which DTensor's own split in thirds would not give.
MODELS = {
    "qwen3 tied": {"arch": "qwen3", "tied": True, "vocab_size": 104, "kv": 2, "intermediate_size": 70},
    "qwen3 untied uneven": {"arch": "qwen3", "tied": False, "vocab_size": 107, "kv": 4, "intermediate_size": 72},
    "qwen2 tied uneven": {"arch": "qwen2", "tied": True, "vocab_size": 109, "kv": 2, "intermediate_size": 72},
    "llama untied": {"arch": "llama", "tied": False, "vocab_size": 104, "kv": 4, "intermediate_size": 76},
    "llama biased": {"arch": "llama", "tied": True, "vocab_size": 104, "kv": 2, "intermediate_size": 72, "bias": True},
    "qwen3 scoring": {"arch": "qwen3", "tied": True, "vocab_size": 105, "kv": 2, "intermediate_size": 72},
}
MESHES = {
    "tp 2": Mesh(tp=2),
    "dp 2 x tp 2": Mesh(dp_shard=2, tp=2),
    "hsdp 2 x tp 2": Mesh(dp_replicate=2, tp=2),
    "cp 2 x tp 2": Mesh(cp=2, tp=2),
    "tp 4": Mesh(tp=4),
    "dp 3 x tp 2": Mesh(dp_shard=3, tp=2),
}
CASES = [
    ("tp 2", "qwen3 tied"),
    ("tp 2", "llama biased"),
    *[("dp 2 x tp 2", model) for model in MODELS],
    ("hsdp 2 x tp 2", "qwen3 tied"),
    ("cp 2 x tp 2", "qwen3 untied uneven"),
    ("tp 4", "qwen3 untied uneven"),
    ("dp 3 x tp 2", "qwen2 tied uneven"),
    ("dp 3 x tp 2", "qwen3 untied uneven"),
]
SAVED = [
    ("tp 2", "qwen3 tied"),
    ("dp 2 x tp 2", "qwen3 untied uneven"),
    ("hsdp 2 x tp 2", "qwen3 tied"),
    ("dp 3 x tp 2", "qwen2 tied uneven"),
]


def make_models(folder: Path) -> None:
    """Every weight is drawn, norms and biases too, so that none is neutral."""
    from make_tiny_model import character_tokenizer
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    for name, shape in MODELS.items():
        has_bias = {"attention_bias": True, "mlp_bias": True} if "bias" in shape else {}
        config = AutoConfig.for_model(
            shape["arch"],
            vocab_size=shape["vocab_size"],
            hidden_size=48,
            intermediate_size=shape["intermediate_size"],
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=shape["kv"],
            head_dim=8,
            tie_word_embeddings=shape["tied"],
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
            num_labels=1,
            dtype="float32",
            **has_bias,
        )
        family = AutoModelForSequenceClassification if "scoring" in name else AutoModelForCausalLM
        model = family.from_config(config)
        draw = torch.Generator().manual_seed(0)
        for n, p in model.named_parameters():
            p.data = ("norm" in n) + 0.1 * torch.randn(p.shape, generator=draw)
        model.save_pretrained(folder / name)
        character_tokenizer().save_pretrained(folder / name)


def ragged(num: int, seed: int, words: int) -> list[TrainingSample]:
    draw, samples = random.Random(seed), []
    for i in range(num):
        mask = [0] * draw.randint(1, 9) + [1] * draw.choice([1, 12, 30])
        advantage = draw.gauss(0, 1)
        samples.append(
            TrainingSample(
                token_ids=[draw.randrange(words) for _ in mask],
                loss_mask=mask,
                group_id=f"{i // 2:04d}",
                rollout_logprobs=[-4.6 * m for m in mask],
                policy_versions=[m - 1 for m in mask],
                advantages=[advantage * m for m in mask],
            )
        )
    return samples


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def outputs(policy: PolicyModel, ranks: Ranks, words: int) -> dict[str, torch.Tensor]:
    """Logprobs and entropies of one batch, which all ranks compute, and the gradient of a sum over them."""
    batch = pack_samples(ragged(6, 100, words))
    logprobs, entropy = policy(batch, 0.9)
    weights = torch.linspace(-1, 1, len(logprobs)) / len(logprobs)
    # FSDP averages what ranks with the same batch have alike.
    ((weights * logprobs).sum() + (weights.flip(0) * entropy).sum()).backward()
    if ranks.mesh.tp > 1:
        sum_partial_gradients(policy.hf, ranks.weights_mesh["tp"])
    found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    found |= {f"grad {n}": whole(p.grad) for n, p in policy.hf.named_parameters()}
    policy.zero_grad()
    return found


def make_learner(model: Path, ranks: Ranks, *flags: str) -> Learner:
    config = parse_config(["--model", str(model), "--algorithm", "grpo", *FLAGS, *OPTIM, *flags])
    is_scoring = "scoring" in str(model)
    policy = make_policy(
        str(model), torch.float32, ranks, config.learner.activations == "recompute", is_scoring=is_scoring
    )
    return Learner(config, make_algorithm(config.algorithm, config.algo), policy, ranks)


def train(learner: Learner, first: int = 0, num: int = 3) -> dict[str, float]:
    """The metrics of some steps."""
    facts, words = {}, learner.policy.hf.config.vocab_size
    for step in range(first, first + num):
        samples = ragged(14, step, words)
        mine = [s for i, s in enumerate(samples) if (i // 2) % learner.ranks.size == learner.ranks.rank]
        minibatches, _ = learner.shard(mine)
        learner.annotate(minibatches)
        found = reduce_metrics(learner.step(minibatches, step), learner.ranks)
        facts |= {f"{step} {name}": value for name, value in found.items()}
    return facts


def everything(learner: Learner) -> dict[str, torch.Tensor]:
    """Weights and what the optimizer knows of each."""
    found = {n: whole(w) for n, w in named_weights(learner.policy)}
    for group in learner.optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            found |= {f"{kind} {name}": whole(value) for kind, value in learner.optimizer.state[p].items()}
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


def compare(models: Path, out: Path) -> None:
    """Every rank: each case, and the same on one rank, worked out here too. Rank 0 writes how far they are apart."""
    ranks = init_ranks(60)
    results = {"logprobs": logprobs_of_a_split_vocabulary(init_device_mesh("cpu", (ranks.size,)))}
    alone = Ranks(rank=0, size=1, device=ranks.device)
    cases = [(mesh, model) for mesh, model in CASES if MESHES[mesh].size == ranks.size]
    for model in dict.fromkeys(model for _, model in cases):
        is_scoring, path = "scoring" in model, models / model
        one = make_learner(path, alone)
        words = MODELS[model]["vocab_size"]
        start = {n: w.clone() for n, w in named_weights(one.policy)}
        expected = outputs(one.policy, alone, words)
        facts = {} if is_scoring else train(one)
        trained = everything(one)
        for name in [mesh for mesh, other in cases if other == model]:
            on = on_mesh(ranks, MESHES[name])
            learner = make_learner(path, on, *(["--learner.activations", "recompute"] if "llama" in model else []))
            held = sum(p.to_local().numel() for p in learner.policy.parameters())
            result = {"loaded": distance(start, {n: w.clone() for n, w in named_weights(learner.policy)})}
            result["held"] = held * ranks.size / on.mesh.dp_replicate / sum(w.numel() for w in start.values())
            result["outputs"] = distance(expected, outputs(learner.policy, on, words))
            result["facts"] = {} if is_scoring else train(learner), facts
            result["trained"] = distance(trained, everything(learner))
            result["moved"] = distance(start, {n: w.clone() for n, w in named_weights(learner.policy)})
            if (name, model) in SAVED:
                result |= travels(path, learner, out, alone)
            results[f"{name}, {model}"] = result
    results["bf16"] = in_bf16(models / "qwen3 tied", ranks, alone)
    if ranks.rank == 0:
        out.write_text(json.dumps(results))
    close_ranks(ranks)


def logprobs_of_a_split_vocabulary(mesh: DeviceMesh) -> dict[str, float]:
    """How far they and their gradients are from those of a whole one: of one tile and several, by torch and by Triton."""
    found = {}
    kernels = {"torch": fused.triton_kernels}
    if importlib.util.find_spec("triton"):
        for name in [n for n in sys.modules if "triton" in n and "_C" not in n]:
            del sys.modules[name]  # forked ranks have them imported to be compiled, not interpreted
        kernels["Triton"] = lambda hidden: importlib.import_module("rl_core.options.triton_logprobs")
    for kind, how in kernels.items():
        for num_tokens, num_words in [(9, 37), (600, 4999)] if kind == "torch" else [(9, 37)]:
            draw = torch.Generator().manual_seed(0)
            hidden, weight = (torch.randn(n, 16, generator=draw) for n in (num_tokens, num_words))
            labels = torch.randint(num_words, (num_tokens,), generator=draw)
            share, both = torch.randn(num_tokens, generator=draw) / num_tokens, []
            for split in (False, True):
                h, w = hidden.clone().requires_grad_(), weight.clone()
                w = (distribute_tensor(w, mesh, [Shard(0)]) if split else w).requires_grad_()
                fused.triton_kernels = how if split else kernels["torch"]
                logprobs, entropy = fused.fused_logprobs(h, w, labels, 0.7)
                ((logprobs + entropy) * share).sum().backward()
                values = logprobs, entropy, h.grad, w.grad
                both.append({str(i): whole(value) for i, value in enumerate(values)})
            fused.triton_kernels = kernels["torch"]
            found[f"{kind} {num_tokens}"] = distance(*both)
    return found


def travels(path: Path, learner: Learner, out: Path, alone: Ranks) -> dict[str, float]:
    """How far weights and state are from themselves after a checkpoint, read by other meshes, and an export."""
    ranks, before, found = learner.ranks, everything(learner), {}
    folder = out.with_name("checkpoints") / "step_000003"
    save_checkpoint(folder, {"policy": learner}, {"step": 3}, ranks, 1)
    written = sum(f.stat().st_size for f in folder.glob("policy/*.safetensors"))
    found["written"] = written / sum(v.nbytes for v in before.values())
    one = make_learner(path, alone)
    load_checkpoint(folder, {"policy": one})
    found["to one rank"] = distance(before, everything(one))
    sharded = make_learner(path, on_mesh(ranks, Mesh(dp_shard=ranks.size)))
    load_checkpoint(folder, {"policy": sharded})
    found["to dp"] = distance(before, everything(sharded))
    barrier(ranks)  # all have read it
    save_checkpoint(folder, {"policy": sharded}, {"step": 3}, sharded.ranks, 1)
    again = make_learner(path, ranks)
    load_checkpoint(folder, {"policy": again})
    found["and back"] = distance(before, everything(again))
    goes_on, expected = train(again, 3, 1), train(learner, 3, 1)
    assert goes_on == expected, (goes_on, expected)
    export_policy(learner.policy, AutoTokenizer.from_pretrained(path), out.with_name("export"), ranks)
    barrier(ranks)
    exported = make_policy(str(out.with_name("export")), torch.float32, alone, False)
    found["exported"] = distance(dict(named_weights(exported)), {n: whole(w) for n, w in named_weights(learner.policy)})
    barrier(ranks)
    return found


def in_bf16(path: Path, ranks: Ranks, alone: Ranks) -> dict[str, float]:
    """How far computing in bf16 is from fp32, with matrices split and whole."""
    exact = outputs(make_policy(str(path), torch.float32, alone, False), alone, 104)
    found = {}
    for name, mesh in {"whole": Mesh(dp_shard=ranks.size), "split": Mesh(dp_shard=ranks.size // 2, tp=2)}.items():
        on = on_mesh(ranks, mesh)
        found[name] = distance(exact, outputs(make_policy(str(path), torch.bfloat16, on, True), on, 104))
    return found


@pytest.fixture(scope="module")
def results(torchrun, tmp_path_factory):
    """results(number of ranks), worked out once."""
    folder = tmp_path_factory.mktemp("tp")
    make_models(folder)

    @functools.cache
    def run(size: int) -> dict:
        out = folder / str(size) / "results.json"
        out.parent.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            torchrun(size, __file__, folder, out, timeout_s=300)
        return json.loads(out.read_text())

    return run


def marked(cases: list[tuple[str, str]]) -> list:
    return [pytest.param(*case, marks=[pytest.mark.slow] if MESHES[case[0]].size == 6 else []) for case in cases]


@pytest.mark.parametrize("mesh, model", marked(CASES))
def test_split_matrices_give_what_whole_ones_give(results, mesh, model):
    found = results(MESHES[mesh].size)[f"{mesh}, {model}"]
    assert found["loaded"] == 0
    assert found["held"] == pytest.approx(1, abs=0.06)  # norms and some biases are whole on every rank
    assert found["outputs"] < 1e-5
    got, expected = found["facts"]
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert found["trained"] < 1e-5
    if "scoring" not in model:
        assert expected["0 grad_norm"] > 0.1  # so that it was bounded
        assert found["moved"] > 1e-3


@pytest.mark.parametrize("mesh, model", marked(SAVED))
def test_a_checkpoint_of_any_mesh_is_read_by_any_other(results, mesh, model):
    found = results(MESHES[mesh].size)[f"{mesh}, {model}"]
    assert found["to one rank"] == found["to dp"] == found["and back"] == found["exported"] == 0
    assert found["written"] < 1.3  # headers are large beside so few weights; but no part is written twice


@pytest.mark.parametrize("size", [2, 4])
def test_logprobs_of_a_split_vocabulary_are_those_of_a_whole_one(results, size):
    found = results(size)["logprobs"]
    assert max(found.values()) < 1e-5
    assert found["torch 9"] > 0  # another order of sums: they were split


@pytest.mark.parametrize("size", [2, 4])
def test_bf16_is_as_near_as_without(results, size):
    found = results(size)["bf16"]
    assert found["split"] < 1.5 * found["whole"]


def test_ppo_on_split_models_goes_on_with_whole_ones(tiny_model, torchrun, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"messages": [{"role": "user", "content": "digits"}]}\n' * 4)
    env = tmp_path / "env.py"
    env.write_text("def reward_fn(completion):\n    return sum(c in '0123456789' for c in completion) / 8\n")
    flags = ["--model", tiny_model, "--env_path", env, "--data.train", tmp_path / "tasks.jsonl", "--algorithm", "ppo"]
    flags += ["--tasks_per_step", 4, "--group_size", 4, "--max_tokens", 8, "--max_prompt_tokens", 16]
    # A large eps: an untrained critic has gradients that are nothing but rounding.
    flags = [str(f) for f in [*flags, "--algo.kl_coef", 0.1, "--optim.lr", 1e-3, "--optim.eps", 1e-4]]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*flags, "--num_steps", "3", "--out", str(one)]) == 0
    torchrun(2, "-m", "rl_core.train", *flags, "--num_steps", 2, "--out", two, "--tp", 2)
    assert main([*flags, "--num_steps", "3", "--out", str(two), "--resume"]) == 0
    rows = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 3
    for a, b in zip(*rows, strict=True):
        for name in [n for n in a if n.startswith(("learn/", "rollout/")) and "time" not in n]:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-5), name
    a, b = (load_file(out / "hf/policy/model.safetensors") for out in (one, two))
    assert distance(a, b) < 2e-5
    assert distance(a, load_file(tiny_model / "model.safetensors")) > 1e-4


def test_a_run_with_a_model_that_cannot_be_split_is_refused(tiny_model, torchrun, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n' * 4)
    flags = [
        "--model",
        tiny_model,
        "--algorithm",
        "sft",
        "--data.train",
        tmp_path / "rows.jsonl",
        "--out",
        tmp_path / "x",
    ]
    done = torchrun(3, "-m", "rl_core.train", *flags, "--tp", 3, check=False)
    assert done.returncode != 0
    assert "--tp=3 must divide the model's num_attention_heads=4" in done.stderr + done.stdout


@pytest.mark.parametrize(
    "tp, arch, change, message",
    [
        (3, "qwen3", {}, r"--tp=3 must divide .*num_attention_heads=8, num_key_value_heads=4, .*try --tp 2"),
        (8, "qwen3", {}, r"num_key_value_heads=4.*try --tp 4"),
        (2, "llama", {"intermediate_size": 77}, r"intermediate_size=77.*try --tp 1"),
        (4, "llama", {"vocab_size": 9}, r"words of 9 to every rank; try --tp 2"),
        (2, "gpt2", {}, r"--tp=2: a gpt2 model has no plan in transformers; take --tp 1"),
        (2, "apertus", {}, r"--tp=2: the plan for a apertus model leaves out layers.0.mlp.act_fn, .*; take --tp 1"),
        (2, "qwen3_moe", {}, r"--tp=2: a qwen3_moe model splits layers as .* not known here; take --tp 1"),
    ],
)
def test_models_that_cannot_be_split_are_refused_with_the_nearest_choice(tp, arch, change, message):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 104}
    config = AutoConfig.for_model(arch, hidden_size=64, **(sizes | change))
    check_tensor_parallel(1, config)
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(tp, config)


def test_adapters_are_not_split():
    config = AutoConfig.for_model("qwen3", num_attention_heads=8, num_key_value_heads=4, intermediate_size=96)
    check_tensor_parallel(2, config, LoraConfig())
    with pytest.raises(ValueError, match=r"--tp=2 does not split adapters; take --tp 1"):
        check_tensor_parallel(2, config, LoraConfig(rank=4))


if __name__ == "__main__":
    compare(Path(sys.argv[1]), Path(sys.argv[2]))
