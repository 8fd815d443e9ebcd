"""Options of a model's forward: attention kernel, logprob kernel, CPU decoder, activation offload.

Each function imports its module when the option is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType

import torch
from transformers import PreTrainedModel

from rl_core.config import LearnerConfig
from rl_core.distributed import MPS
from rl_core.models.kernels.segments import Kernel
from rl_core.models.policy import Policy, backbone

# Model types in Llama's layout, for which the CPU decoder and the engine's KV slots are written.
LLAMA_LAYOUT = ("llama", "mistral", "qwen2", "qwen3")


def choose_attention(name: str, device: torch.device) -> Kernel:
    """The attention kernel that --attention names; `auto` depends on the device."""
    if device.type in ("cpu", MPS) and name in ("auto", "torch"):
        from rl_core.models.kernels.cpu_attention import DENSE

        return DENSE
    from rl_core.models.kernels.gpu_attention import find_kernel

    return find_kernel(name, device)


def choose_logprob_kernel(device: torch.device) -> ModuleType | None:
    """The Triton kernel on a GPU; None if torch computes logprobs."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from rl_core.models.kernels import triton_logprobs

    return triton_logprobs


def activation_context(learner: LearnerConfig) -> Callable[[], AbstractContextManager]:
    """The context of a forward with gradient: activations move to the CPU if
    --learner.activations is offload."""
    if learner.activations != "offload":
        return nullcontext
    from rl_core.models.activation_offload import activations_on_host

    return activations_on_host


def use_cpu_decoder(policy: Policy, learner: LearnerConfig) -> None:
    """Uses the fast CPU decoder for unsharded fp32 models without compile or recomputation."""
    is_plain = learner.kernels != "compile" and learner.activations != "recompute"
    is_local = policy.hf.device.type == "cpu" and not policy.is_sharded
    if is_plain and is_local and policy.hf.config.model_type in LLAMA_LAYOUT:
        from rl_core.models.kernels.llama_cpu import LlamaDecoder

        policy.use_decoder(LlamaDecoder(backbone(policy.hf)))


def use_liger(models: Iterable[PreTrainedModel]) -> None:
    from rl_core.models.kernels.liger import apply_liger

    apply_liger(models)
