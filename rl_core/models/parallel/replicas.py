"""The mesh of ranks by the flags: how many copies of the weights they hold, and in which shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rl_core.config import Config
from rl_core.distributed import Mesh
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


def make_mesh(
    num_ranks: int,
    dp_replicate: int = 1,
    cp: int = 1,
    tp: int = 1,
    rollout_ranks: int = 0,
    ep: int = 1,
) -> Mesh:
    """The mesh of all ranks that learn; dp_shard takes the ranks that other dimensions leave.
    Raises ValueError if the other dimensions do not divide the number of ranks, or if `ep` does not
    divide the ranks of a copy."""
    num_learners, others = num_ranks - rollout_ranks, dp_replicate * cp * tp
    if num_learners < 1:
        raise ValueError(
            f"--rollout_ranks={rollout_ranks} must leave at least one rank of {num_ranks} to "
            "learn; raise --nproc_per_node, or lower it"
        )
    if num_learners % others:
        raise ValueError(
            f"--dp_replicate {dp_replicate} * --cp {cp} * --tp {tp} must divide the {num_learners} "
            "ranks; lower one"
        )
    mesh = Mesh(dp_replicate=dp_replicate, dp_shard=num_learners // others, cp=cp, tp=tp, ep=ep)
    if mesh.dp_shard * cp % ep:
        raise ValueError(
            f"--ep={ep} must divide the {mesh.dp_shard * cp} ranks of one copy of the weights "
            f"(--dp_replicate {dp_replicate}); lower it"
        )
    return mesh


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
