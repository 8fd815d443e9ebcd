"""Ranks that each hold all weights (--dp_replicate as many as there are ranks, fp32): gradients are
summed once for an update, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_core.config import Config
from rl_core.learning.learner import Learner, Metrics
from rl_core.learning.loading import compute_dtype, load_model_config, on_meta
from rl_core.learning.minibatches import Minibatch

# A rank holds 20 bytes of each that is trained: 2 GB at most, and as much for a critic.
MOST_PARAMETERS = 100_000_000


def num_copies(config: Config, num_ranks: int, actors: Iterable[str]) -> int:
    """How many copies of these actors' weights so many ranks hold, unless --dp_replicate names a
    number: one each where small models learn on CPUs in fp32, else one together."""
    if config.dp_replicate != "auto":
        return config.dp_replicate
    if torch.cuda.is_available() or config.cp * config.tp > 1:
        return 1
    num_parameters = 0
    for name in actors:
        own, actor = config.of(name), config.actors[name]
        is_plain = own.learner.offload != "always" and actor.lora.quantize == "none"
        has_others = own.algo.teacher or own.algo.reference  # models that may be larger
        if compute_dtype(own) != torch.float32 or not is_plain or has_others:
            return 1
        if actor.share:  # the weights of another
            continue
        try:
            model = on_meta(load_model_config(actor.model))
        except (OSError, ValueError):
            return 1  # What is wrong with the model is told where it is checked.
        num_parameters += sum(parameter.numel() for parameter in model.parameters())
    return num_ranks if num_parameters <= MOST_PARAMETERS else 1


def with_whole_copies(learner_class: type[Learner]) -> type[Learner]:
    """The class, whose learners average gradients where several ranks each hold all weights."""

    class CopyLearner(learner_class):
        def backward(self, minibatch: Minibatch) -> Metrics:
            found = super().backward(minibatch)
            if self.ranks.size > 1 and not self.policy.is_sharded:
                parameters = [parameter for _, parameter in self.trained_parameters()]
                average_gradients(parameters, self.ranks.size)
            return found

    return CopyLearner


@torch.no_grad()
def average_gradients(parameters: list[nn.Parameter], num_ranks: int) -> None:
    """Over ranks, as FSDP does. A parameter that no rank used stays without a gradient. Every rank
    must call it."""
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
    parts = flat.split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view_as(grad))
