"""Work on a device never waits for it: on meta tensors a read of a value raises, and so does a
tensor of another device."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchgen
import yaml
from kit import part_of
from models_table import family_config
from test_experts import needs_routers
from test_learner import FLAGS, ragged_samples
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_core import distributed
from rl_core.algorithms import PRESETS, make_algorithm
from rl_core.config import parse_config
from rl_core.engines.adapters import AdapterTable
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.engines.kv_slots import RowParams, SlotModel, sample
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.learning.extensions import build_learner
from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.moe import sent
from rl_core.learning.options import OPTIMIZERS
from rl_core.models.attention import NAME
from rl_core.models.kernels import torch_logprobs
from rl_core.models.kernels.cpu_attention import DENSE
from rl_core.models.policy import PackedForward, Policy
from rl_core.run.evaluation.evaluation import loss_of_rows
from rl_core.run.process.joining import init_ranks

META, CPU = torch.device("meta"), torch.device("cpu")
SGD = ["--optim.name", "sgd"]  # fused AdamW refuses meta tensors
# Every preset, each with what else looks at values: several updates, corrections, clipping, KL,
# entropy.
LOSSES = dict.fromkeys(PRESETS, "")
LOSSES |= {
    "grpo": "--learner.epochs 2 --algo.kl_coef 0.1 --algo.entropy_coef 0.01 --algo.importance_correction tis",
    "dr_grpo": "--algo.importance_correction mask --algo.target_kl 9 --learner.updates_per_epoch 2",
    "dapo": "--algo.dual_clip 3",
    "gspo": "--learner.epochs 2 --algo.importance_correction sequence_mask",
    "rloo": "--algo.kl_coef 0.1",
    "ppo": "--learner.epochs 2 --algo.kl_coef 0.1",
}
OFFLOADS = ("none", "always")


class Reads(TorchFunctionMode):
    """Inside, a list of numbers may be read from the device: all are 1. Each read is counted."""

    num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not Tensor.tolist or args[0].device != META:
            return func(*args, **(kwargs or {}))
        self.num += 1
        return torch.ones(args[0].shape).tolist()


class Fetched(torch.autograd.Function):
    """FSDP's CPU offload: a weight comes to the device, its gradient returns to the
    CPU."""

    @staticmethod
    def forward(ctx, weight):
        return torch.empty_like(weight, device=META)

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(grad, device="cpu")


class OffloadedPolicy(Policy):
    """Its weights wait on the CPU, and come to the device for each forward, as --learner.offload
    always has it."""

    def wait_on_the_cpu(self) -> None:
        for module in self.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.zeros_like(weight, device="cpu")))

    def forward(self, *args):
        plain = PlainForward(self)
        weights = {name: Fetched.apply(weight) for name, weight in plain.named_parameters()}
        return functional_call(plain, weights, args)


class PlainForward(nn.Module):
    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, *args):
        return Policy.forward(self.policy, *args)


def meta_policy(config, is_scoring: bool, dtype: torch.dtype, offload: str) -> Policy:
    family = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    with META:
        hf = family.from_config(config, dtype=dtype, attn_implementation=NAME)
    hf.tie_weights()
    if offload != "always":
        return Policy(hf, dtype, torch.float32, PackedForward(DENSE))
    policy = OffloadedPolicy(hf, dtype, torch.float32, PackedForward(DENSE))
    policy.wait_on_the_cpu()
    return policy


def meta_learner(
    model, algorithm: str, flags: str, dtype=torch.float32, offload: str = "none"
) -> Learner:
    """`model`: a folder, or a configuration."""
    name = ["--model", "m", "--algorithm", algorithm, "--learner.offload", offload]
    config = parse_config([*name, *FLAGS, *flags.split(), *(SGD if offload == "none" else [])])
    model = AutoConfig.from_pretrained(model, num_labels=1) if isinstance(model, Path) else model
    preset = make_algorithm(algorithm, config.algo)
    ranks = dataclasses.replace(init_ranks(60), device=META)

    def load(path: str, is_frozen: bool = False, is_scoring: bool = False, **options) -> Policy:
        return meta_policy(model, is_scoring, dtype, "none" if is_frozen else offload)

    spec = LearnerContext(
        config=config,
        algorithm=preset,
        name="policy",
        policy=load("", is_scoring=preset.is_scoring),
        adapter="",
        ranks=ranks,
        load=load,
        make_optimizer=OPTIMIZERS[config.optim.name](),
    )
    return build_learner(spec)


def learn_a_step(learner: Learner) -> None:
    """Asserts that the device is waited for once an update, and at most twice before the first."""
    samples = ragged_samples(16, shared_prompt=30)
    if learner.algorithm.is_pairs:
        samples = [dataclasses.replace(s, group_id=f"{i // 2:04d}") for i, s in enumerate(samples)]
    minibatches, _ = learner.shard(samples)
    assert minibatches[0].batches[0].labels.device == META
    with Reads() as before:
        learner.annotate(minibatches)
    assert before.num <= 2
    with Reads() as reads:
        metrics = learner.step(minibatches, 0)
    updates = [metric.value for name, metric in metrics.items() if name.endswith("updates")]
    # One read an update; a norm on the CPU needs none, and a target of the KL one more.
    assert updates and reads.num <= sum(updates) * (1 + bool(learner.algorithm.target_kl))
    with Reads() as reads, torch.no_grad():
        assert learner.algorithm.is_rl or loss_of_rows(learner, minibatches)["loss"].count > 0
    assert reads.num <= 1


@pytest.mark.parametrize("dtype, offload", [(torch.float32, "always"), (torch.bfloat16, "none")])
@pytest.mark.parametrize("algorithm", LOSSES)
def test_a_step_reads_no_value_before_its_updates_end(tiny_model, algorithm, dtype, offload):
    learn_a_step(meta_learner(tiny_model, algorithm, LOSSES[algorithm], dtype, offload))


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_mixture_of_experts_waits_for_no_device_either(family, offload):
    flags = "--actors.policy.router_aux_loss_coef 0.1 --learner.microbatch_tokens 300"
    learner = meta_learner(family_config(family), "grpo", flags, torch.bfloat16, offload)
    needs_routers(learner.policy.hf)
    assert part_of(learner, "Experts")
    learn_a_step(learner)


@pytest.mark.parametrize("sampler", [SlotModel, LlamaSlots])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_reads_no_value_before_its_tokens(tiny_model, dtype, sampler):
    decode_a_step(tiny_model, dtype, sampler)


def decode_a_step(path: Path, dtype: torch.dtype, sampler: type[SlotModel]) -> None:
    with META:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=dtype
        ).eval()
        slots = sampler(model)
        cache = slots.make_cache(4, 64)
        tokens, numbers = torch.zeros(3, 7, dtype=torch.long), torch.zeros(5, 3)
        sizes, starts = torch.zeros(2, 3, dtype=torch.long)
        with slots.borrowed(), torch.inference_mode():
            slots.forward(cache, slice(0, 3), tokens, None, 7)  # prompts
            # A prompt behind cached turns.
            slots.forward(cache, slice(0, 3), tokens, starts, 14, sizes)
            hidden = slots.forward(cache, slice(0, 3), tokens[:, :1], starts, 15)
            logits = slots.logits(hidden[:, 0])
            for num_ordered, num_kept in ((0, 0), (5, 3), (logits.shape[-1], 3)):
                params = RowParams(numbers=numbers, num_ordered=num_ordered, num_kept=num_kept)
                sampled = sample(logits, torch.zeros(3), params)
                assert sampled.device == META and len(sampled) == 2 + num_kept


@cache
def operators() -> dict[str, dict]:
    """torch's table of operators and of the devices that have a kernel of each."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    rows = yaml.load(table.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {row["func"].partition("(")[0]: row for row in rows}


def has_mps_kernel(name: str) -> bool:
    row = operators().get(name, {})  # A variant that torch generates is composed of others.
    if delegate := row.get("structured_delegate"):
        return has_mps_kernel(delegate)
    devices = ", ".join(row.get("dispatch", ["Composite"]))
    return "Composite" in devices or "MPS" in devices.split(", ")


class OnMps(TorchDispatchMode):
    """Inside, meta tensors are those of an Apple GPU: without fp64 and asynchronous copies, and
    with the operators that torch has for MPS. A copy on the CPU has the values 1."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_copy = func is torch.ops.aten._to_copy.default and args[0].device == META
        if is_copy and kwargs.get("device") == CPU:
            assert kwargs.get("dtype", args[0].dtype) == args[0].dtype
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if any(x.device == META for x in tensors):
            name = func._schema.name.removeprefix("aten::")
            overload = func._schema.overload_name
            name = f"{name}.{overload}" if overload else name
            assert has_mps_kernel(name), f"{name} has no kernel for MPS"
            assert not (kwargs or {}).get("non_blocking"), f"{name}: may read freed memory"
            wide = [x.shape for x in tensors if x.dtype == torch.float64 and x.device == META]
            assert not wide, f"{name}: MPS has no fp64"
        return result


@pytest.fixture
def meta_is_mps(monkeypatch):
    for module in (distributed, torch_logprobs):
        monkeypatch.setattr(module, "MPS", "meta")


@pytest.mark.parametrize("algorithm", [*LOSSES, "qwen3_moe"])
def test_a_step_needs_no_fp64_and_no_operator_that_mps_lacks(tiny_model, algorithm, meta_is_mps):
    if algorithm in LOSSES:
        learner = meta_learner(tiny_model, algorithm, LOSSES[algorithm])
    else:
        config = family_config(algorithm)
        config._experts_implementation = (
            "batched_mm"  # grouped_mm on meta tensors takes bf16 alone.
        )
        learner = meta_learner(config, "grpo", "--actors.policy.router_aux_loss_coef 0.1")
    samples = ragged_samples(16, shared_prompt=30)
    if learner.algorithm.is_pairs:
        samples = [dataclasses.replace(s, group_id=f"{i // 2:04d}") for i, s in enumerate(samples)]
    with OnMps(), Reads():
        minibatches, _ = learner.shard(samples)
        learner.annotate(minibatches)
        learner.step(minibatches, 0)


@pytest.mark.parametrize("sampler", [SlotModel, LlamaSlots])
def test_a_decode_step_needs_no_operator_that_mps_lacks(tiny_model, sampler, meta_is_mps):
    with OnMps():
        decode_a_step(tiny_model, torch.float32, sampler)


def test_copies_to_mps_are_not_asynchronous(meta_is_mps):
    model = SimpleNamespace(device=META)
    with OnMps(), AdapterTable(model, {"a": {"r": 2}}).of_rows(["a", ""]):
        assert sent(torch.ones(2), META).device == META
        engine = SimpleNamespace(model=model)
        assert EmbeddedEngine._to_device(engine, [1.0], torch.float32).device == META
