"""The number of replicas: how many copies of the weights the ranks of a run hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rl_core.config import Config
from rl_core.models.loading import compute_dtype, load_model_config, on_meta

# A replica takes 20 bytes per trained parameter: 2 GB at most, and as much for a critic.
MAX_PARAMETERS = 100_000_000


def num_replicas(config: Config, num_ranks: int, actors: Iterable[str]) -> int:
    """--dp_replicate for these actors. `auto`: a replica on each rank for small models in fp32 on
    CPUs, else one over all ranks."""
    if config.dp_replicate != "auto":
        return config.dp_replicate
    if num_ranks < 2 or torch.cuda.is_available() or config.cp * config.tp > 1:
        return 1
    num_parameters = 0
    for name in actors:
        settings, actor = config.of(name), config.actors[name]
        is_plain = settings.learner.offload != "always" and actor.lora.quantize == "none"
        has_frozen_models = settings.algo.teacher or settings.algo.reference  # Of any size.
        if compute_dtype(settings) != torch.float32 or not is_plain or has_frozen_models:
            return 1
        if actor.lora_base:  # Trains an adapter of another actor's weights.
            continue
        try:
            assert actor.model
            model = on_meta(load_model_config(actor.model))
        except (OSError, ValueError):
            return 1  # The checks of models report the error.
        num_parameters += sum(parameter.numel() for parameter in model.parameters())
    return num_ranks if num_parameters <= MAX_PARAMETERS else 1
