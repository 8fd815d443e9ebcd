"""Optimizers by name, over sharded parameters too, and the learning rate's schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_core.config import OptimConfig
from rl_core.learning.model import Policy

WSD_DECAY_FRAC = 0.2


def make_optimizer(model: Policy, config: OptimConfig) -> torch.optim.Optimizer:
    """Over the parameters that are trained, by name; weight decay on matrices, not on norms and biases. torch computes
    with a group's parameters together, which must therefore be sharded over one mesh."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if config.name == "adamw8bit":
        named, links = local_views(named)
    kinds: dict[tuple, list] = {}
    for name, p in named:
        kinds.setdefault((p.ndim > 1, getattr(p, "device_mesh", None)), []).append((name, p))
    groups = [
        {"params": part, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), part in kinds.items()
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.betas[0])
    settings = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    import bitsandbytes.optim

    optimizer = bitsandbytes.optim.AdamW8bit(groups, **settings)
    optimizer.register_step_pre_hook(lambda *_: refresh_views(links))
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())  # a gradient must not live on in a view
    return optimizer


def local_views(named: list[tuple[str, Tensor]]) -> tuple[list[tuple[str, Tensor]], list[tuple[Tensor, Tensor]]]:
    """This rank's part of each sharded parameter as a plain one that shares its memory, and the pairs (view, sharded):
    bitsandbytes knows no DTensor. A rank that holds nothing of a parameter has no view of it."""
    views, links = [], []
    for name, parameter in named:
        if isinstance(parameter, DTensor):
            view = nn.Parameter(parameter.to_local().detach())
            links.append((view, parameter))
            parameter = view
        if parameter.numel():
            views.append((name, parameter))
    return views, links


def refresh_views(links: list[tuple[Tensor, Tensor]]) -> None:
    """The views show what the sharded parameters hold, which FSDP may have moved, and their gradients."""
    for view, parameter in links:
        view.data = parameter.to_local().detach()
        view.grad = None if parameter.grad is None else parameter.grad.to_local()


def learning_rate(config: OptimConfig, step: float, num_steps: int) -> float:
    """The learning rate of an update that starts `step` (a fraction for later minibatches) of num_steps. wsd: constant
    until the last fifth of the run, then linear (Hu et al. 2024, arXiv:2404.06395, section 4)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    height = {
        "constant": lambda: 1.0,
        "linear": lambda: 1 - done,
        "cosine": lambda: 0.5 * (1 + math.cos(math.pi * done)),
        "wsd": lambda: min(1.0, (num_steps - step) / (WSD_DECAY_FRAC * num_steps)),
    }[config.schedule]()
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * height)
