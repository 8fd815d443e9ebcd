"""AdamW with 8-bit state."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rl_core.config import OptimConfig
from rl_core.distributed import local
from rl_core.learning.learner_context import Named
from rl_core.learning.optimizers import parameter_groups


def adamw8bit(named: Named, config: OptimConfig) -> Optimizer:
    """bitsandbytes' AdamW with 8-bit state, in blocks of 256 (Dettmers et al. 2021,
    arXiv:2110.02861)."""
    import bitsandbytes.optim

    views, links = local_views(named)
    groups = parameter_groups(views, config.weight_decay)
    optimizer = bitsandbytes.optim.AdamW8bit(
        groups, lr=config.lr, betas=config.betas, eps=config.eps
    )
    optimizer.register_step_pre_hook(lambda *_: refresh_views(links))
    # A view must not keep its gradient alive.
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    return optimizer


def local_views(
    named: Named,
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[nn.Parameter, DTensor]]]:
    """(named plain parameters, pairs (view, sharded)): bitsandbytes does not support DTensor, so a
    view shares the memory of this rank's shard. A rank without a shard of a parameter has no view
    of it."""
    views, links = [], []
    for name, parameter in named:
        if isinstance(parameter, DTensor):
            view = nn.Parameter(parameter.to_local().detach())
            links.append((view, parameter))
            parameter = view
        if parameter.numel():
            views.append((name, parameter))
    return views, links


def refresh_views(links: list[tuple[nn.Parameter, DTensor]]) -> None:
    """Points the views to the shards, which FSDP may have moved, and to their gradients."""
    for view, parameter in links:
        view.data = parameter.to_local().detach()
        view.grad = None if parameter.grad is None else local(parameter.grad)
