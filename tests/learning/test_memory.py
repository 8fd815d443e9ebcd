"""Memory savers change no result: weights that each rank reads by itself, and tensors kept on the
host.

Run as a file it is one rank of a comparison.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import kit
import pytest
import torch
from kit import assert_same, of_ranks, run, weights, words
from models_table import make_family
from safetensors.torch import load_file, save_file
from test_learner import gradients, make_learner, ragged_samples
from test_lora import LORA, make_lora_learner
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from rl_core.config import LoraConfig
from rl_core.distributed import Mesh, Ranks, on_mesh
from rl_core.learning.lora import adapter_parameters
from rl_core.learning.policies import compile_blocks, make_policy
from rl_core.models import loading
from rl_core.models.activation_offload import activations_on_host
from rl_core.models.cpu_offload import HostCopies, piece_sizes
from rl_core.models.parallel import fsdp
from rl_core.models.parallel.fsdp import local_slices
from rl_core.models.policy import Policy
from rl_core.run.process.joining import init_ranks

ARCHITECTURES = ("qwen3", "llama", "qwen2")


def save_model(
    folder: Path, like: Path, is_tied: bool = True, seed: int = 0, dtype=torch.bfloat16, **changes
) -> Path:
    """A random model in several files."""
    config = AutoConfig.from_pretrained(like, tie_word_embeddings=is_tied, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # Gives biases and norms other values than their defaults.
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0)
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder, max_shard_size="100KB" if "vocab_size" not in changes else "1GB")
    return folder


def differences(policy, plain) -> list[str]:
    """Names of this rank's weights and buffers that differ from the unsharded model's."""
    expected = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    got = dict(policy.hf.named_parameters(remove_duplicate=False)) | dict(policy.hf.named_buffers())
    got = {n.replace(".base_layer.", "."): v for n, v in got.items() if ".lora_" not in n}
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    shards = {name: local_slices(value) for name, value in got.items()}
    wanted = {name: expected[name].detach()[slices] for name, (_, slices) in shards.items()}
    return [
        n
        for n, (values, _) in shards.items()
        if values.dtype != wanted[n].dtype or not torch.equal(values, wanted[n])
    ]


def weights_after(learner, num_steps: int = 4, leaves: bool = False) -> dict[str, torch.Tensor]:
    for step in range(num_steps):
        with learner.on_device():
            minibatches, _ = learner.shard(ragged_samples(seed=step))
            learner.annotate(minibatches)
            learner.step(minibatches, step)
        if leaves:
            assert sum(t.untyped_storage().nbytes() for t in held(learner)) == 0
            assert sum(t.numel() * t.element_size() for t in held(learner)) > 0
    with learner.on_device():
        return {n: w.clone() for n, w in learner.named_weights()}


def held(learner) -> list[torch.Tensor]:
    """The optimizer's state and the weights that it changes, as they are on this rank."""
    states = [
        v
        for s in learner.optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    ]
    states = list({id(v): v for v in states}.values())  # 8-bit states share some tensors.
    return [local_slices(t)[0] for t in [*learner.policy.parameters(), *states]]


UPDATES = {
    "phase": "--learner.offload phase",
    "always": "--learner.offload always",
    "phase, 8 bits": "--learner.offload phase --optim.name adamw8bit",
    "phase, muon": "--learner.offload phase --optim.name muon",
    "always, muon": "--learner.offload always --optim.name muon",
    "always, tp 2": "--learner.offload always",
    "phase, 8 bits, ep 2": "--learner.offload phase --optim.name adamw8bit",
    "phase, fp16, ep 2": "--learner.offload phase --learner.dtype float16",
}


def compare_updates(ranks: Ranks, model: str, experts: str) -> dict:
    """Every rank: the weights after four updates of a learner that leaves the device, and of one
    that stays."""
    results_of = {}
    for name, more in UPDATES.items():
        of_mesh, path = ranks, model
        if "tp" in name:
            of_mesh = on_mesh(ranks, Mesh(tp=2))
        elif "ep" in name:
            of_mesh, path = on_mesh(ranks, Mesh(dp_shard=2, ep=2)), experts
        results = {}
        for is_plain in (True, False):
            plain = "--learner.offload none" if is_plain else ""
            learner = kit.make_learner(path, "--optim.lr 0.01", more, plain, ranks=of_mesh)
            start = {n: w.clone() for n, w in learner.named_weights()}
            results[is_plain] = weights_after(
                learner, leaves=learner.config.learner.offload == "phase"
            )
        moved = max((w - results[False][n]).abs().max().item() for n, w in start.items())
        equal = all(torch.equal(w, results[False][n]) for n, w in results[True].items())
        # 8-bit state is of views, which are not the learner's parameters.
        trained = [p for group in learner.optimizer.param_groups for p in group["params"]]
        is_free = all(parameter.grad is None for parameter in trained)
        results_of[name] = {"moved": moved, "equal": equal, "is_free": is_free}
    return results_of


def compare_loading(ranks: Ranks, *models: str) -> dict:
    """Every rank: each model as the learner loads it and as transformers does."""
    differing = {}
    kinds = {
        "dp 2": (ranks, None, False),
        "scores": (ranks, None, True),
        "lora": (ranks, {"default": (LoraConfig(rank=4), 0)}, False),
        "tp 2": (on_mesh(ranks, Mesh(tp=2)), None, False),
    }
    for path in models:
        plain = loading.load_hf_model(path, torch.float32, ranks.device)
        scores = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32
        )
        torch.nn.init.zeros_(scores.score.weight)
        for kind, (ranks_of_kind, adapters, is_scoring) in kinds.items():
            policy = make_policy(
                path, torch.float32, ranks_of_kind, None, adapters, is_scoring=is_scoring
            )
            expected = scores if is_scoring else plain
            differing[f"{Path(path).name} {kind}"] = differences(policy, expected)
            assert (
                is_scoring
                or policy.hf.generation_config.to_dict() == plain.generation_config.to_dict()
            )
            for name, parameter in adapter_parameters(policy.hf):
                assert local_slices(parameter)[0].any() == (".lora_A." in name)
    return differing


@pytest.fixture(scope="module")
def updated(tiny_model, tmp_path_factory):
    experts = tmp_path_factory.mktemp("updated") / "experts"
    make_family(experts, "qwen3_moe")
    return of_ranks(2, __file__, "compare_updates", tiny_model, experts)


@pytest.mark.parametrize("kind", UPDATES)
def test_sharded_weights_that_wait_on_the_host_are_trained_the_same(updated, kind):
    for of_rank in updated:
        assert of_rank[kind]["equal"] and of_rank[kind]["moved"] > 1e-3
        assert of_rank[kind]["is_free"], "no gradient is left after the update"


@pytest.fixture(scope="module")
def loaded(make_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    models = [
        save_model(
            folder / f"{arch} {'tied' if is_tied else 'untied'}", make_model(arch), is_tied, seed
        )
        for seed, arch in enumerate(ARCHITECTURES)
        for is_tied in (True, False)
    ]
    return of_ranks(2, __file__, "compare_loading", *models)


@pytest.mark.parametrize("kind", ["dp 2", "scores", "lora", "tp 2"])
@pytest.mark.parametrize("ties", ["tied", "untied"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_rank_reads_the_very_weights_that_transformers_loads(loaded, arch, ties, kind):
    for of_rank in loaded:
        assert of_rank[f"{arch} {ties} {kind}"] == []


def test_a_learner_that_waits_on_the_host_between_steps_learns_the_same(tiny_model):
    """With adapters an engine has a copy of the weights, so that all of the learner leaves."""
    flags = [*LORA, "--optim.lr", "0.01"]
    stays = make_lora_learner(tiny_model, *flags, algorithm="grpo")
    leaves = make_lora_learner(tiny_model, *flags, "--learner.offload", "phase", algorithm="grpo")
    for parameter in leaves.policy.parameters():  # a file's pages are not given back
        parameter.data = parameter.data.clone()
    expected, start = weights_after(stays), dict(make_lora_learner(tiny_model).named_weights())
    got = weights_after(leaves, leaves=True)
    assert all(torch.equal(w, got[n]) for n, w in expected.items())
    assert max((w - start[n]).abs().max() for n, w in got.items()) > 1e-3
    with pytest.raises(AssertionError, match="on_device"):
        leaves.policy(leaves.shard(ragged_samples())[0][0].batches[0], 1.0)


def test_the_optimizers_state_is_on_the_device_within_a_step_alone(tiny_model):
    """An engine that wakes for new weights finds the learner's weights there, and nothing else."""
    learner = make_lora_learner(tiny_model, *LORA, "--learner.offload", "phase", algorithm="grpo")
    with learner.on_device():
        learner.step(learner.shard(ragged_samples())[0], 0)
        states = [v for s in learner.optimizer.state.values() for v in s.values()]
        assert states and not any(v.untyped_storage().nbytes() for v in states)
        assert learner.policy.is_on_device and dict(learner.named_weights())


def test_a_reference_is_copied_to_the_host_once(tiny_model):
    reference = make_policy(str(tiny_model), torch.float32, init_ranks(60), is_frozen=True)
    for parameter in reference.parameters():  # a file's pages are not given back
        parameter.data = parameter.data.clone()
    first = next(reference.parameters())
    before = first.clone()
    copies = HostCopies(torch.device("cpu"), is_constant=True)
    copies.to_host(reference.held())
    assert not reference.is_on_device
    with copies.on_device(reference.held):
        assert torch.equal(first, before)
        first.data.zero_()  # nothing changes a reference: this does not reach the host
    with copies.on_device(reference.held):
        assert torch.equal(first, before)


@pytest.mark.parametrize("num_bytes", [1, 4096, 2**20, 4 * 3072 * 1024, 9 * 2**20 + 7])
def test_pinned_copies_in_pieces_waste_less_than_a_mebibyte(num_bytes):
    """Torch rounds each pinned allocation up to a power of two."""
    sizes = piece_sizes(num_bytes)
    assert sum(1 << (size - 1).bit_length() for size in sizes) - num_bytes < 2**20
    value = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    expected, copies = value.clone(), HostCopies(torch.device("cpu"))
    copies.to_host([value])
    assert value.untyped_storage().nbytes() == 0
    copies.to_device()
    assert torch.equal(value, expected)


def count_reductions(ranks: Ranks, model: str) -> dict:
    """Every rank, with a copy of the weights each: reductions and gradient norm of an update in one
    microbatch, and in several."""
    ranks, counts = on_mesh(ranks, Mesh(dp_replicate=ranks.size)), {}
    key = "fsdp::chunk_cat" if ranks.size == 1 else "c10d::allreduce_"
    for tokens in (8192, 100):
        # Compute in fp32 has no shards on one rank.
        dtype = "bfloat16" if ranks.size == 1 else "float32"
        flags = f"--learner.dtype {dtype} --learner.microbatch_tokens {tokens}"
        learner = kit.make_learner(model, flags, ranks=ranks)
        (minibatch,), _ = learner.shard(ragged_samples(20))
        with torch.profiler.profile() as profile:
            norm = learner.update(minibatch, 0)[0]["grad_norm"].total
        count = sum(e.count for e in profile.key_averages() if e.key == key)
        counts[len(minibatch.batches)] = count, norm
    return counts


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_copies_of_the_weights_add_up_their_gradients_once_for_an_update(num_ranks, tiny_model):
    one, several = of_ranks(num_ranks, __file__, "count_reductions", tiny_model)[0].items()
    (num_one, (count, norm)), (num_several, (count_of_several, norm_of_several)) = one, several
    assert num_one == "1" and int(num_several) >= 2 and count == count_of_several > 0
    assert norm_of_several == pytest.approx(norm, rel=0.01 if num_ranks == 1 else 1e-4)


def test_weights_that_an_engine_reads_in_place_stay(tiny_model):
    learner = make_learner(tiny_model, "--learner.offload", "phase")
    weights_after(learner)
    assert all(p.untyped_storage().nbytes() for p in learner.policy.parameters())
    states = [v for s in learner.optimizer.state.values() for v in s.values()]
    assert states and not any(v.untyped_storage().nbytes() for v in states)


def test_activations_are_copied_to_the_host_and_weights_are_not():
    layer, x = torch.nn.Linear(64, 64), torch.randn(32, 64, requires_grad=True)
    before = x.detach().clone()
    with activations_on_host():
        product = layer(x).grad_fn
    assert product._saved_mat2.data_ptr() == layer.weight.data_ptr()
    x.data.zero_()  # its memory is used for something else
    assert torch.equal(product._saved_mat1, before)


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
def test_compiled_blocks_give_the_same_gradient_and_are_compiled_once(make_model):
    """Once for 12 blocks, batches of three sizes, and recomputation."""
    from torch._dynamo.utils import counters

    model = make_model(layers=12)
    plain, compiled = make_learner(model), make_learner(model, "--learner.kernels", "compile")
    checkpointed = make_learner(model, "--learner.activations", "recompute")
    compile_blocks(checkpointed.policy)
    counters.clear()
    for num in (12, 16, 20):
        expected, _ = gradients(plain, ragged_samples(num, seed=num))
        for learner in (compiled, checkpointed):
            assert_same(gradients(learner, ragged_samples(num, seed=num))[0], expected)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def load_onto_the_host(ranks: Ranks, model: str) -> dict:
    """Devices of weights and buffers. A device "meta" stands for the GPU."""
    hf, read = fsdp.load_on_meta(model, torch.float32)
    policy = Policy(hf, torch.float32, torch.float32, None)
    fsdp.shard_policy(policy, torch.float32, ranks)
    fsdp.load_shards(policy, read, torch.device("meta"), torch.device("cpu"))
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    return {
        "weights": sorted({p.device.type for p in policy.parameters()}),
        "buffers": sorted({b.device.type for b in hf.buffers()}),
        "is_tied": head.weight is embedding.weight,
    }


def test_weights_that_are_kept_on_the_host_stay_there_if_they_are_tied(tiny_model):
    expected = {"weights": ["cpu"], "buffers": ["meta"], "is_tied": True}
    assert of_ranks(2, __file__, "load_onto_the_host", tiny_model) == [expected] * 2


@pytest.mark.gpu
def test_nothing_of_a_learner_is_left_on_the_gpu_while_it_waits(tiny_model):
    learner = make_lora_learner(tiny_model, *LORA, "--learner.offload", "phase", algorithm="grpo")
    held_bytes = sum(t.nbytes for t in learner.policy.parameters())
    with learner.on_device():
        minibatches, _ = learner.shard(ragged_samples())
        learner.step(minibatches, 0)
        del minibatches
        before = torch.cuda.memory_allocated()
    assert before - torch.cuda.memory_allocated() >= held_bytes


@pytest.mark.gpu
def test_activations_on_the_host_take_less_of_the_gpu(tiny_model):
    peaks = {}
    for mode in ("keep", "offload"):
        learner = make_learner(tiny_model, "--learner.activations", mode)
        gradients(learner, ragged_samples(64))
        torch.cuda.reset_peak_memory_stats()
        gradients(learner, ragged_samples(64))
        peaks[mode] = torch.cuda.max_memory_allocated()
    assert peaks["offload"] < peaks["keep"]


@pytest.mark.parametrize(
    "change, message",
    [
        ("missing", r"its files lack model\.layers\.1\.mlp\.up_proj\.weight"),
        ("extra", r"its files hold model\.layers\.7\.mlp\.up_proj\.weight"),
        ("shape", r"model\.layers\.1\.mlp\.up_proj\.weight.*is .*, 32.*asks for .*, 64"),
        ("cut", "cannot be read|cannot be loaded"),
    ],
)
def test_files_that_are_not_the_models_are_refused(tiny_model, tmp_path, change, message):
    folder, name = tmp_path / "model", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(tiny_model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    if change == "missing":
        del weights[name]
    elif change == "extra":
        weights[name.replace("1", "7")] = weights[name].clone()
    elif change == "shape":
        weights[name] = weights[name][:, ::2].contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=message):
        loading.load_hf_model(str(folder), torch.float32, torch.device("cpu"))


def test_models_with_other_weight_names_load_as_in_transformers(tiny_model, tmp_path):
    """Such as the backbone alone, whose names have no prefix."""
    AutoModel.from_pretrained(tiny_model).save_pretrained(tmp_path)
    got = make_policy(str(tmp_path), torch.float32, init_ranks(60)).hf.state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert got.keys() == expected.keys() and all(
        torch.equal(v, got[n]) for n, v in expected.items()
    )


def test_a_run_learns_the_same_wherever_its_learner_waits(tiny_model, tmp_path):
    """All through the command: a policy with a critic and a reference, evaluated, saved, and
    resumed."""
    (tmp_path / "env.py").write_text(
        'def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]\n'
        "def reward_fn(completion): return len(completion) + sum(map(ord, completion)) % 7\n"
    )
    flags = words(
        f"--model {tiny_model} --env_path {tmp_path / 'env.py'}",
        "--max_tokens 8 --max_prompt_tokens 16",
    )
    flags += words(
        "--algorithm ppo --tasks_per_step 2 --group_size 2 --optim.lr 1e-3 --optim.eps 1e-3 "
        "--algo.kl_coef 0.01"
    )
    flags += words("--eval_every 2 --eval.num_tasks 2 --eval.samples 0 --learner.offload")
    weights_of = {}
    for offload in ("none", "phase", "always"):
        more = "--learner.activations offload" if offload == "always" else ""
        run(tmp_path / offload, flags, offload, more, "--num_steps 2")
        run(tmp_path / offload, flags, offload, more, "--num_steps 5 --save_every 1 --resume")
        weights_of[offload] = weights(tmp_path / offload)
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert max((w - start[n]).abs().max() for n, w in weights_of["none"].items()) > 1e-4
    differences = {}
    for offload in ("phase", "always"):
        of_weights = [
            (w - weights_of[offload][n]).abs().max() for n, w in weights_of["none"].items()
        ]
        differences[offload] = max(of_weights).item()
    # --learner.offload always shards weights and uses the model's forward. Adam's eps bounds how
    # a gradient's rounding moves a weight: by lr / eps = 1 times 8 units of fp32 of about 5 nats,
    # in each of 5 steps.
    bound = 5 * (8 * 2**-24 * 5)
    assert differences["phase"] == 0 and differences["always"] < bound, differences


def peak_mib() -> float:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def measure_peak(ranks: Ranks, model: str, small: str) -> dict:
    """Every rank: MiB by which its peak grew while the model was loaded and split, in both ways."""
    mib = {}
    make_policy(small, torch.float32, ranks)  # imports, threads
    for mode in ("parts", "whole"):
        Path("/proc/self/clear_refs").write_text("5")  # Resets the peak to the memory in use.
        before = peak_mib()
        load = loading.load_hf_model if mode == "whole" else make_policy
        module = load(model, torch.float32, ranks.device if mode == "whole" else ranks)
        mib[mode] = peak_mib() - before
        mib["model"] = sum(p.numel() for p in module.parameters()) * 4 / 2**20
        del module
    return mib


def test_a_rank_holds_little_more_than_its_own_part_while_it_loads(tiny_model, tmp_path):
    """40 M parameters, 155 MiB in fp32, from files in bf16 of half that size, of which each of two
    ranks needs half."""
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }
    sizes |= {"layer_types": ["full_attention"] * 8, "head_dim": 64, "vocab_size": 32000}
    model = save_model(tmp_path / "model", tiny_model, **sizes)
    for mib in of_ranks(2, __file__, "measure_peak", model, tiny_model):
        print(f"{mib}, MiB")
        assert mib["model"] > 140
        assert mib["parts"] < 0.65 * mib["model"] < mib["model"] < mib["whole"]


if __name__ == "__main__":
    kit.answer(globals())
