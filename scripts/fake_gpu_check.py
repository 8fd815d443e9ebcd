"""What would wait for a GPU, or mix devices, found without one: forwards and losses on fake CUDA tensors, which have no values.

Needs a CUDA build of torch and no GPU; scripts/fake_gpu_check.sh makes an environment with one. Prints a line for each check
and, for one that fails, the line of rl_core where it read a value or met a tensor of another device. The exit status is the
number of checks that failed. Not run: backward passes, Triton's kernels, several devices.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import traceback

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3Config

from rl_core.config import parse_config
from rl_core.data.packing import pack_samples
from rl_core.engines.slots import SlotCache, SlotModel, sample
from rl_core.learning import logprobs
from rl_core.learning.algorithms import PRESETS, make_algorithm, token_losses
from rl_core.learning.attention import NAME
from rl_core.learning.model import PolicyModel
from rl_core.types import PackedBatch, TrainingSample

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 96, "vocab_size": 512}
FLAGS = "--model m --env_path e.py --out o --max_prompt_tokens 40 --max_tokens 60 --algorithm"


def samples(shared_prompt: bool) -> list[TrainingSample]:
    draw, found = random.Random(0), []
    for group in range(3):
        prompt = [draw.randrange(512) for _ in range(30 + group)]
        for _ in range(4):
            prompt = prompt if shared_prompt else [draw.randrange(512) for _ in prompt]
            ids = prompt + [draw.randrange(512) for _ in range(draw.randint(2, 9))]
            mask = [i >= len(prompt) for i in range(len(ids))]
            values = {"rollout_logprobs": [-1.0] * len(ids), "policy_versions": [0] * len(ids), "advantages": mask}
            found.append(TrainingSample(token_ids=ids, loss_mask=mask, group_id=str(group), **values))
    return found


# Packing is work of the host, with values.
PACKED = {shared_prompt: pack_samples(samples(shared_prompt)) for shared_prompt in (False, True)}


def on_gpu(batch: PackedBatch) -> PackedBatch:
    """The batch as learner.to_device() leaves it: cu_seqlens stay on the host."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {n: torch.empty_like(x, device="cuda") for n, x in values.items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(batch, **{n: x for n, x in moved.items() if n != "cu_seqlens"})


def like(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(value, device="cuda")
    return torch.nn.Parameter(made, value.requires_grad) if isinstance(value, torch.nn.Parameter) else made


def make_policy(config=None, is_scoring: bool = False, has_lora: bool = False) -> PolicyModel:
    family = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    config = config or Qwen3Config(**SIZES, head_dim=16, num_labels=1)
    with unset_fake_temporarily(), torch.device("meta"):
        hf = family.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
        if has_lora:
            hf = inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "up_proj"]), hf)
    for module in hf.modules():
        for held in (module._parameters, module._buffers):
            held |= {name: like(value) for name, value in held.items() if value is not None}
    return PolicyModel(hf, torch.bfloat16)


def learner_forward(shared_prompt: bool = True, **how) -> None:
    outputs, _ = make_policy(**how)(on_gpu(PACKED[shared_prompt]), 1.0)
    assert outputs.device.type == "cuda"


def sliding_forward() -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6}
    learner_forward(config=Qwen2Config(**SIZES, **layers, max_window_layers=1))


def preset_loss(name: str, *more: str) -> None:
    config = parse_config([*FLAGS.split(), name, *more])
    algorithm = make_algorithm(name, config.algo)
    batch = on_gpu(PACKED[True])
    made = torch.empty_like(batch.rollout_logprobs)
    batch.old_logprobs = batch.ref_logprobs = made
    token_losses(algorithm, batch, made.clone(), made.clone())


def engine_step(is_decode: bool) -> None:
    with torch.device("cuda"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES, head_dim=16), dtype=torch.bfloat16).eval()
        slots, cache = SlotModel(model), SlotCache(4, 64)
        tokens, starts = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, dtype=torch.long)
        with slots.borrowed():
            hidden = slots.forward(cache, slice(0, 3), tokens, None, 7)
            if is_decode:
                hidden = slots.forward(cache, slice(0, 3), tokens[:, :1], starts, 8)
        sample(slots.logits(hidden[:, 0]), torch.zeros(6, 3, dtype=torch.float64))


CHECKS = {
    "learner: packed sequences": lambda: learner_forward(False),
    "learner: shared prompts": learner_forward,
    "learner: sliding window": sliding_forward,
    "learner: LoRA": lambda: learner_forward(has_lora=True),
    "learner: critic or reward model": lambda: learner_forward(is_scoring=True),
    "engine: prefill": lambda: engine_step(False),
    "engine: decode": lambda: engine_step(True),
    "loss: corrections": lambda: preset_loss("grpo", "--algo.correction", "sequence_mask", "--algo.kl_coef", "0.1"),
}
CHECKS |= {f"loss: {name}": lambda name=name: preset_loss(name) for name in PRESETS if name not in ("dpo", "rm")}


def main() -> int:
    if torch.version.cuda is None:
        sys.exit("error: this torch is no CUDA build; scripts/fake_gpu_check.sh makes an environment with one")
    logprobs.triton_kernels = lambda hidden: None  # which need a device
    num_failed = 0
    for name, check in CHECKS.items():
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                check()
            print(f"ok      {name}", flush=True)
        except Exception as error:
            num_failed += 1
            ours = [f for f in traceback.extract_tb(error.__traceback__) if "/rl_core/" in f.filename] or [None]
            where = f"{ours[-1].filename.split('rl_core/')[-1]}:{ours[-1].lineno} {ours[-1].line}" if ours[-1] else ""
            print(f"FAILED  {name}: {type(error).__name__} at {where}: {str(error).splitlines()[0][:150]}", flush=True)
    print(f"torch {torch.__version__}: {len(CHECKS) - num_failed} of {len(CHECKS)} wait for no device")
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
