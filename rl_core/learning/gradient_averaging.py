"""Data parallelism with a full replica on each rank (--dp_replicate as large as the number of
ranks, fp32): one all-reduce of gradients per update, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_core.config import Config
from rl_core.learning.learner import Learner, Metrics
from rl_core.learning.minibatches import Minibatch
from rl_core.models.loading import compute_dtype, load_model_config, on_meta

# A rank holds 20 bytes per trained parameter: at most 2 GB, and as much for a critic.
MOST_PARAMETERS = 100_000_000


def num_copies(config: Config, num_ranks: int, actors: Iterable[str]) -> int:
    """Number of replicas of these actors' weights on `num_ranks` ranks: --dp_replicate, or by
    default one per rank where small models learn on CPUs in fp32, else one."""
    if config.dp_replicate != "auto":
        return config.dp_replicate
    if torch.cuda.is_available() or config.cp * config.tp > 1:
        return 1
    num_parameters = 0
    for name in actors:
        settings, actor = config.of(name), config.actors[name]
        is_plain = settings.learner.offload != "always" and actor.lora.quantize == "none"
        has_others = settings.algo.teacher or settings.algo.reference  # These may be larger.
        if compute_dtype(settings) != torch.float32 or not is_plain or has_others:
            return 1
        if actor.share:  # Counted with the other actor.
            continue
        try:
            model = on_meta(load_model_config(actor.model))
        except (OSError, ValueError):
            return 1  # The checks of the model raise the error.
        num_parameters += sum(parameter.numel() for parameter in model.parameters())
    return num_ranks if num_parameters <= MOST_PARAMETERS else 1


def with_replicas(learner_class: type[Learner]) -> type[Learner]:
    """A subclass that averages gradients over ranks that each hold a replica."""

    class ReplicaLearner(learner_class):
        def backward(self, minibatch: Minibatch) -> Metrics:
            metrics = super().backward(minibatch)
            if self.ranks.size > 1 and not self.policy.is_sharded:
                parameters = [parameter for _, parameter in self.trained_parameters()]
                average_gradients(parameters, self.ranks.size)
            return metrics

    return ReplicaLearner


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
