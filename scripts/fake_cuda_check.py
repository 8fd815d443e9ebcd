"""Steps of learner and engine on fake CUDA tensors, which find waits for the GPU and mixed devices
without a GPU.

Requires a CUDA build of torch and no GPU; scripts/fake_cuda_check.sh makes such an environment.
Prints a line for each check. A failed check names the line of rl_core that read a value or mixed
devices. The exit status is the number of failed checks. Not run: backward passes (gradients are
zeros), Triton's kernels, the moves of --learner.offload phase, several devices. With
`gpu_check.py --fake` whole programs run on a CPU.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import traceback
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rl_core.algorithms import PRESETS, make_algorithm
from rl_core.config import parse_config
from rl_core.data.packing import pack_samples
from rl_core.distributed import init_ranks
from rl_core.engines.kv_slots import RowParams, SlotModel, sample
from rl_core.engines.llama_slots import LlamaSlots
from rl_core.learning.extensions import build_learner
from rl_core.learning.learner import Learner, LearnerContext
from rl_core.learning.minibatches import shard_samples
from rl_core.learning.options import OPTIMIZERS
from rl_core.models.activation_offload import activations_on_host
from rl_core.models.attention import NAME
from rl_core.models.kernels.gpu_attention import find_kernel
from rl_core.models.policy import PackedForward, Policy
from rl_core.types import PackedBatch, TrainingSample

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES |= {"intermediate_size": 96, "vocab_size": 512}
FLAGS = "--model m --env_path e.py --out o --max_prompt_tokens 40 --max_tokens 60 --algorithm"


def samples(shared_prompt: bool) -> list[TrainingSample]:
    draw, made = random.Random(0), []
    for group in range(3):
        prompt = [draw.randrange(512) for _ in range(30 + group)]
        for _ in range(4):
            prompt = prompt if shared_prompt else [draw.randrange(512) for _ in prompt]
            ids = prompt + [draw.randrange(512) for _ in range(draw.randint(2, 9))]
            mask = [i >= len(prompt) for i in range(len(ids))]
            made.append(
                TrainingSample(
                    token_ids=ids,
                    loss_mask=mask,
                    group_id=str(group),
                    rollout_logprobs=[-1.0] * len(ids),
                    policy_versions=[0] * len(ids),
                    advantages=mask,
                )
            )
    return made


# Packing runs on the host and needs values.
PACKED = {shared_prompt: pack_samples(samples(shared_prompt)) for shared_prompt in (False, True)}
PAIRS = [dataclasses.replace(s, group_id=f"{i // 2:03d}") for i, s in enumerate(samples(True))]
SAMPLES = {False: samples(True), True: PAIRS}


def on_gpu(batch: PackedBatch) -> PackedBatch:
    """The batch after learner.to_device(): cu_seqlens stay on the host."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {
        n: torch.empty_like(x, device="cuda")
        for n, x in values.items()
        if isinstance(x, torch.Tensor)
    }
    return dataclasses.replace(batch, **{n: x for n, x in moved.items() if n != "cu_seqlens"})


def like(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(value, device="cuda")
    return (
        torch.nn.Parameter(made, value.requires_grad)
        if isinstance(value, torch.nn.Parameter)
        else made
    )


def make_policy(
    config=None, is_scoring: bool = False, has_lora: bool = False, activations=nullcontext
) -> Policy:
    family = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    config = config or Qwen3Config(**SIZES, head_dim=16, num_labels=1)
    with unset_fake_temporarily(), torch.device("meta"):
        hf = family.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
        if has_lora:
            hf = inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "up_proj"]), hf)
    for module in hf.modules():
        for tensors in (module._parameters, module._buffers):
            tensors |= {name: like(value) for name, value in tensors.items() if value is not None}
    forward_pass = PackedForward(find_kernel("auto", torch.device("cuda")))
    return Policy(hf, torch.bfloat16, torch.bfloat16, forward_pass, activations)


def learner_forward(shared_prompt: bool = True, **options) -> None:
    outputs, _ = make_policy(**options)(on_gpu(PACKED[shared_prompt]), 1.0)
    assert outputs.device.type == "cuda"


def sliding_forward() -> None:
    layers = {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 6,
    }
    learner_forward(config=Qwen2Config(**SIZES, **layers, max_window_layers=1))


class Update(TorchFunctionMode):
    """Replaces backward passes by gradients of zeros on the weights' device, and answers reads from
    the device with ones. Counts these reads."""

    def __init__(self, learner: Learner):
        super().__init__()
        self.learners, self.reads = learner.trained(), 0
        self.readable = patch.object(FakeTensor, "tolist", lambda tensor: self.read(tensor))

    def __enter__(self):
        self.readable.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.readable.stop()
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Fake tensors accept scalars of the CPU on every device.
        if func in (torch.stack, torch.cat):
            devices = {tensor.device.type for tensor in args[0]}
            assert len(devices) == 1, devices
        if func is torch.Tensor.pin_memory:  # Fake tensors have no pinned memory.
            return args[0]
        if func is not torch.Tensor.backward:
            return func(*args, **(kwargs or {}))
        for learner in self.learners:
            for _, weight in learner.trained_parameters():
                weight.grad = torch.zeros_like(weight)

    def read(self, tensor: FakeTensor) -> list:
        self.reads += tensor.is_cuda
        return np.ones(tensor.shape).tolist()


class OffloadedPolicy(Policy):
    """--learner.offload always: weights stay on the CPU and move to the device for each forward."""

    def forward(self, *args):
        plain = PlainForward(self)
        weights = {name: weight.to("cuda") for name, weight in plain.named_parameters()}
        return functional_call(plain, weights, args)


class PlainForward(torch.nn.Module):
    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def forward(self, *args):
        return Policy.forward(self.policy, *args)


def offloaded(policy: Policy) -> Policy:
    for module in policy.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="cpu")))
    policy.__class__ = OffloadedPolicy
    return policy


def preset_step(name: str, *flags: str, config: PretrainedConfig | None = None) -> None:
    """Annotates and updates like a run."""
    config_of_run = parse_config([*FLAGS.split(), name, *flags])
    algorithm = make_algorithm(name, config_of_run.algo)
    on_cpu = init_ranks(60)
    on_gpu_ranks = dataclasses.replace(on_cpu, device=torch.device("cuda"))
    is_offloaded = config_of_run.learner.offload == "always"

    def load(path: str, is_frozen: bool = False, **options) -> Policy:
        options.pop("learner", None)
        policy = make_policy(config, **options)
        return offloaded(policy) if is_offloaded and not is_frozen else policy

    activations = nullcontext
    if config_of_run.learner.activations == "offload":
        activations = activations_on_host
    policy = make_policy(config, algorithm.is_scoring, activations=activations)
    if is_offloaded:
        policy = offloaded(policy)
    spec = LearnerContext(
        config=config_of_run,
        algorithm=algorithm,
        name="policy",
        policy=policy,
        ranks=on_gpu_ranks,
        load=load,
        adapter="",
        make_optimizer=OPTIMIZERS[config_of_run.optim.name](),
    )
    learner = build_learner(spec)
    with unset_fake_temporarily():
        minibatches, _ = shard_samples(
            SAMPLES[algorithm.is_pairs], algorithm, config_of_run, learner.budget, on_cpu
        )
    for minibatch in minibatches:
        minibatch.batches = [on_gpu(batch) for batch in minibatch.batches]
    with Update(learner):
        learner.annotate(minibatches)
    with Update(learner) as update:
        metrics = learner.step(minibatches, 0)
    num_updates = sum(m.value for name, m in metrics.items() if name.endswith("updates"))
    # Each update reads the gradient norm, and its KL if there is a target.
    per_update = 2 if algorithm.target_kl else 1
    assert update.reads <= per_update * num_updates, "waits too often"


def engine_step(
    is_decode: bool, sampler: type[SlotModel] = SlotModel, dtype: torch.dtype = torch.bfloat16
) -> None:
    with torch.device("cuda"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**SIZES, head_dim=16), dtype=dtype
        ).eval()
        slots = sampler(model)
        cache = slots.make_cache(4, 64)
        tokens, starts = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, dtype=torch.long)
        with slots.borrowed():
            hidden = slots.forward(cache, slice(0, 3), tokens, None, 7)
            if is_decode:
                hidden = slots.forward(cache, slice(0, 3), tokens[:, :1], starts, 8)
        params = RowParams(numbers=torch.ones(5, 3), num_ordered=1)
        sample(slots.logits(hidden[:, 0]), torch.zeros(3), params)


CHECKS = {
    "learner: packed sequences": lambda: learner_forward(False),
    "learner: shared prompts": learner_forward,
    "learner: sliding window": sliding_forward,
    "learner: LoRA": lambda: learner_forward(has_lora=True),
    "learner: critic or reward model": lambda: learner_forward(is_scoring=True),
    "engine: prefill": lambda: engine_step(False),
    "engine: decode": lambda: engine_step(True),
    "engine: decode of Llama's layout": lambda: engine_step(True, LlamaSlots),
    "engine: the same in fp32": lambda: engine_step(True, LlamaSlots, torch.float32),
}
# transformers' grouped products query the device's properties.
EXPERTS = {
    "experts_implementation": "batched_mm",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
STEPS = {name: name for name in PRESETS} | {
    "corrections": "grpo --algo.importance_correction sequence_mask --learner.epochs 2",
    "KL": "grpo --algo.kl_coef 0.1 --algo.target_kl 1 --learner.updates_per_epoch 2",
    "SGD": "sft --optim.name sgd",
}
for offload in ("none", "always"):
    for name, flags in STEPS.items():
        CHECKS[f"step, offload {offload}: {name}"] = partial(
            preset_step, *flags.split(), "--learner.offload", offload
        )
    CHECKS[f"step, offload {offload}: mixture of experts"] = partial(
        preset_step, "grpo", "--learner.offload", offload, config=Qwen3MoeConfig(**SIZES, **EXPERTS)
    )
CHECKS["step: activations offloaded"] = partial(
    preset_step, "grpo", "--learner.activations", "offload"
)


def main() -> int:
    if torch.version.cuda is None:
        sys.exit(
            "error: torch was built without CUDA; scripts/fake_cuda_check.sh makes an environment "
            "with a CUDA build"
        )
    num_failed = 0
    for name, check in CHECKS.items():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                check()
            print(f"ok      {name}", flush=True)
        except Exception as error:
            num_failed += 1
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "/rl_core/" in frame.filename]
            where = f"{ours[-1].filename}:{ours[-1].lineno} {ours[-1].line}" if ours else ""
            print(
                f"FAILED  {name}: {type(error).__name__} at {where}: "
                f"{str(error).splitlines()[0][:150]}",
                flush=True,
            )
    print(
        f"torch {torch.__version__}: {len(CHECKS) - num_failed} of {len(CHECKS)} wait for no device"
    )
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
