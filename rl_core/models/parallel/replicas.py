"""The mesh of ranks by the flags: how many copies of the weights they hold, and in which shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rl_core.config import Config
from rl_core.distributed import Mesh, make_mesh
from rl_core.models.loading import compute_dtype, load_model_config, on_meta

# A replica takes 20 bytes per trained parameter: 2 GB at most, and as much for a critic.
MAX_PARAMETERS = 100_000_000


def mesh_of_flags(
    config: Config, num_ranks: int, actors: list[str], rollout_ranks: int = 0
) -> Mesh:
    """The mesh on which these actors learn. Raises the errors of make_mesh()."""
    sizes = {"cp": config.cp, "tp": config.tp, "rollout_ranks": rollout_ranks}
    sizes["dp_replicate"] = num_replicas(config, num_ranks - rollout_ranks, actors)
    mesh = make_mesh(num_ranks, **sizes)
    if config.ep == 1:
        return mesh
    from rl_core.models.parallel.expert_parallel import num_expert_ranks

    ep = num_expert_ranks(config, mesh.dp_shard * mesh.cp, actors)
    return make_mesh(num_ranks, **sizes, ep=ep)


def num_replicas(config: Config, num_ranks: int, actors: Iterable[str]) -> int:
    """--dp_replicate for these actors. `auto`: a replica on each rank for small models in fp32 on
    CPUs, else one over all ranks."""
    if config.dp_replicate != "auto":
        return config.dp_replicate
    is_split = config.cp * config.tp > 1 or config.ep != 1
    if num_ranks < 2 or torch.cuda.is_available() or is_split:
        return 1
    return num_ranks if are_small(config, actors) else 1


def are_small(config: Config, actors: Iterable[str]) -> bool:
    """True if the trained weights of these actors, all in fp32, have at most MAX_PARAMETERS."""
    num_parameters = 0
    for name in actors:
        settings, actor = config.of(name), config.actors[name]
        is_plain = settings.learner.offload != "always" and actor.lora.quantize == "none"
        has_frozen_models = settings.algo.teacher or settings.algo.reference  # Of any size.
        if compute_dtype(settings) != torch.float32 or not is_plain or has_frozen_models:
            return False
        if actor.lora_base:  # Trains an adapter of another actor's weights.
            continue
        try:
            assert actor.model
            model = on_meta(load_model_config(actor.model))
        except (OSError, ValueError):
            return False  # The checks of models report the error.
        num_parameters += sum(parameter.numel() for parameter in model.parameters())
    return num_parameters <= MAX_PARAMETERS
