"""Gradients of replicas (--dp_replicate equal to the number of ranks, fp32): one all-reduce an
update, as in DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_core.learning.learner_context import ExtendedLearner
from rl_core.learning.learner_extension import LearnerExtension


class GradientAveraging(LearnerExtension):
    """Averages the gradients of replicas: every rank holds all weights."""

    def after_backward(self, learner: ExtendedLearner) -> None:
        if not learner.policy.is_sharded:
            parameters = [parameter for _, parameter in learner.trained_parameters()]
            average_gradients(parameters, learner.ranks.size)


@torch.no_grad()
def average_gradients(parameters: list[nn.Parameter], num_ranks: int) -> None:
    """Averages gradients over ranks, as FSDP does. A parameter that no rank used keeps no gradient.
    Every rank must call it."""
    is_used = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(is_used)
    grads: list[Tensor] = []
    for parameter, is_used_anywhere in zip(parameters, is_used.tolist(), strict=True):
        if not is_used_anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grads.append(parameter.grad)
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads]).div_(num_ranks)
    dist.all_reduce(flat)
    averages = flat.split([grad.numel() for grad in grads])
    for grad, average in zip(grads, averages, strict=True):
        grad.copy_(average.view_as(grad))
