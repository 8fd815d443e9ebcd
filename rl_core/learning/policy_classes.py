"""Policies with adapters, and policies whose layers are split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rl_core.config import LearnerConfig, LoraConfig
from rl_core.distributed import Ranks
from rl_core.errors import split
from rl_core.models.policy import Policy


def policy_maker(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    learner: LearnerConfig,
    adapters: dict[str, tuple[LoraConfig, int]],
    is_served: bool,
) -> tuple[Callable[..., Policy], dict]:
    """(maker of the policy, arguments of from_pretrained that quantize its weights)."""
    if not adapters:
        from rl_core.models.parallel.tensor_parallel import TensorParallelPolicy

        return TensorParallelPolicy, {}
    from rl_core.learning import lora

    policy_class = lora.AdapterPolicy
    if ranks.mesh.tp > 1:
        from rl_core.learning.tensor_parallel_lora import TensorParallelAdapterPolicy

        policy_class = TensorParallelAdapterPolicy
    parts = split(learner.train) or lora.LANGUAGE
    quantized = lora.quantization(adapters, dtype, ranks.device)
    return partial(policy_class, adapters, path, is_served, parts), quantized
