"""Optimizers of torch, and the sizes of all optimizers' state."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from rl_core.config import OptimConfig
from rl_core.distributed import local
from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import Named

# Muon: 4 of matrices in blocks, 8 of embeddings and heads.
STATE_BYTES = {"adamw": 8.0, "adamw8bit": 2.03, "sgd": 4.0, "muon": 5.0}


def adamw(named: Named, config: OptimConfig) -> Optimizer:
    groups = parameter_groups(named, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def sgd(named: Named, config: OptimConfig) -> Optimizer:
    groups = parameter_groups(named, config.weight_decay)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])


def state_bytes(name: str) -> float:
    """Bytes of state of a trained parameter. Optimizers of other names count as AdamW."""
    return STATE_BYTES.get(name, STATE_BYTES["adamw"])


def missing_state_bytes(learner: Learner) -> float:
    """Bytes of optimizer state that the first updates of a learner and its critic will add to this
    rank's device, and that stay there while engines sample."""
    total = 0.0
    for trained in learner.trained():
        if trained.config.learner.offload == "none" and not trained.optimizer.state:
            sizes = [local(parameter).numel() for _, parameter in trained.trained_parameters()]
            total += sum(sizes) * state_bytes(trained.config.optim.name)
    return total


def parameter_groups(named: Named, weight_decay: float) -> list[dict]:
    """Applies weight decay to matrices, not to norms and biases. torch computes with a group's
    parameters together, which must therefore be sharded over one mesh."""
    groups: dict[tuple, dict] = {}
    for name, parameter in named:
        # gpt-oss stacks the biases of all experts into a matrix: gate_up_proj_bias.
        decays = parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]
        key = decays, getattr(parameter, "device_mesh", None)
        group = groups.setdefault(key, {"params": [], "weight_decay": weight_decay * decays})
        group["params"].append((name, parameter))
    return list(groups.values())
