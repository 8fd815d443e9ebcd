"""Mixture of experts: router choices, load balance, and the auxiliary loss that balances the load.

Legend: T tokens of a forward, R routers (one for each layer with experts), E experts, K experts
that a token is routed to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.config import Config
from rl_core.distributed import Ranks
from rl_core.learning.learner_context import ExtendedLearner
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.learning.minibatches import Minibatch
from rl_core.metrics import Mean, Metric
from rl_core.models.loading import on_meta
from rl_core.models.policy import Policy
from rl_core.models.routers import find_routers
from rl_core.types import PackedBatch

TOPK = (torch.topk, Tensor.topk)
SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)


class RouterChoice(TorchFunctionMode):
    """Records a router's top-k choice of experts, and replaces it where `forced` [T, K] is not
    negative. The router computes everything else from the choice, such as the weights of experts.
    """

    def __init__(self, num_experts: int, forced: Tensor | None):
        super().__init__()
        self.num_experts, self.forced = num_experts, forced
        self.experts: Tensor | None = None  # [T, K]
        self.is_sigmoid = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        chosen = func(*args, **(kwargs or {}))
        self.is_sigmoid |= func in SIGMOIDS
        # A choice among groups of experts has another shape.
        if func in TOPK and args[0].ndim == 2 and args[0].shape[1] == self.num_experts:
            if self.forced is not None:
                experts = torch.where(self.forced < 0, chosen.indices, self.forced)
                chosen = torch.return_types.topk((args[0].gather(1, experts), experts))
            self.experts = chosen.indices
        return chosen


class Routers:
    """The routers of a model. While open, records the outputs of a forward."""

    def __init__(self, hf: PreTrainedModel):
        recorder, self.modules = find_routers(hf)
        self.logits_at = recorder.index if recorder else 0
        # A family for which transformers has an auxiliary loss uses a softmax.
        self.has_loss = hasattr(sys.modules[type(hf).__module__], "load_balancing_loss_func")
        self.is_open, self.is_sigmoid = False, False
        self.logits: list[Tensor] = []  # R of [T, E]
        self.experts: list[Tensor] = []  # R of [T, K]
        # [T, R, K] experts that replace the routers' choices; -1: the router chooses.
        self.forced: Tensor | None = None
        self.choices: list[RouterChoice] = []  # Of the router that is computing now.
        for number, module in enumerate(self.modules):
            module.register_forward_pre_hook(partial(self.begin, number))
            module.register_forward_hook(self.end, always_call=True)

    def begin(self, number: int, router: nn.Module, *_) -> None:
        if not self.is_open and self.forced is None:
            return
        forced = None if self.forced is None else self.forced[:, number].long()
        self.choices.append(RouterChoice(cast(int, router.num_experts), forced))
        self.choices[-1].__enter__()

    def end(self, router: nn.Module, inputs: tuple, output: tuple) -> None:
        if not self.choices:
            return
        choice = self.choices.pop()
        choice.__exit__(None, None, None)
        if self.is_open:
            self.logits.append(output[self.logits_at])
            if choice.experts is not None:  # None: the router calls no topk.
                self.experts.append(choice.experts)
            self.is_sigmoid = choice.is_sigmoid

    def open(self) -> None:
        self.logits, self.experts, self.is_open = [], [], True

    def close(self) -> None:
        self.is_open = False

    def forget(self) -> None:
        self.logits, self.experts, self.forced = [], [], None

    def probabilities(self) -> Tensor:
        """[R, T, E] fp32, routing probabilities of the last forward. Sigmoids are normalized by
        their sum (DeepSeek-V3, arXiv:2412.19437, eq. 15 and 19)."""
        logits = torch.stack(self.logits).float()
        if not self.is_sigmoid or self.has_loss:
            return logits.softmax(-1)
        return logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)


def check_experts(config: Config, name: str, model_config: PretrainedConfig) -> None:
    """Raises ValueError if the actor's router flags cannot be used, before any weight is read."""
    actor = config.actors[name]
    flag = f"--actors.{name}.router_aux_loss_coef={actor.router_aux_loss_coef}"
    if actor.router_replay:
        flag = f"--actors.{name}.router_replay=true"
    if not actor.is_trained:
        raise ValueError(f"{flag} needs an actor that learns; leave it out")
    if config.learner.kernels == "compile":
        raise ValueError(f"{flag} cannot be combined with --learner.kernels=compile; remove one")
    routers = Routers(on_meta(model_config))
    if routers.modules:
        size, router = model_config.get_text_config().hidden_size, routers.modules[0]
        routers.open()
        router(torch.empty(2, size, dtype=router.get_parameter("weight").dtype, device="meta"))
    if not routers.experts:
        raise ValueError(
            f"{flag} needs a mixture of experts; transformers {transformers.__version__} has no "
            f"routers in {model_config.model_type}: leave it out"
        )


class Experts(LearnerExtension):
    """Load and auxiliary loss of a policy's experts. Each sample's tokens count once, except the
    last, which no forward reads: a shared prompt counts for each of its samples."""

    def __init__(self, policy: Policy, ranks: Ranks, coef: float):
        self.policy, self.ranks, self.coef = policy, ranks, coef
        self.routers = Routers(policy.hf)
        self.weights: Tensor | None = None  # [T] count of each token of the last forward
        # [R, E] tokens of the minibatch; summed over ranks if is_summed.
        self.counts: Tensor | None = None
        self.is_summed = False
        self.aux_loss: Tensor | float = 0.0  # The minibatch's tokens on this rank.

    @contextmanager
    def around(self, batch: PackedBatch) -> Iterator[None]:
        """Context of a forward of this batch. Forced experts stay until the next forward, because
        the backward recomputes."""
        tokens = self.policy.forward_pass.tokens(batch)
        self.weights = token_weights(batch, tokens, self.policy.forward_pass.repeats_prompts)
        self.routers.forced = None if batch.experts is None else batch.experts[tokens.clamp(0)]
        self.routers.open()
        try:
            yield
        finally:
            self.routers.close()
            if not torch.is_grad_enabled():
                self.routers.forced = None

    def before_update(
        self, learner: ExtendedLearner, minibatch: Minibatch, step: float
    ) -> dict[str, Metric]:
        """Counts the load of the minibatch, which the loss needs: with several batches by one more
        forward."""
        self.counts, self.aux_loss, self.is_summed = None, 0.0, False
        if self.coef and len(minibatch.batches) > 1:
            with torch.no_grad():
                for batch in minibatch.batches:
                    learner.forward(batch)
                    self.count()
            self.sum_counts()
        return {}

    def count(self) -> None:
        """Adds the tokens of the last forward."""
        experts = torch.stack(self.routers.experts)  # [R, T, K]
        assert self.weights is not None
        num_routers, _, top_k = experts.shape
        if self.counts is None:
            self.counts = self.weights.new_zeros(num_routers, self.routers.logits[0].shape[1])
        weights = self.weights.repeat_interleave(top_k).expand(num_routers, -1)
        self.counts.scatter_add_(1, experts.flatten(1), weights)

    def sum_counts(self) -> Tensor:
        """The counts of the minibatch, summed over the ranks on the device."""
        assert self.counts is not None
        if not self.is_summed and self.ranks.size > 1:
            dist.all_reduce(self.counts)
            self.counts /= self.ranks.mesh.tp  # Ranks of tp have the same tokens.
        self.is_summed = True
        return self.counts

    def loss(
        self, batch: PackedBatch, minibatch: Minibatch, outputs: tuple[Tensor, ...]
    ) -> Tensor | float:
        """The last forward's share of coef * E * sum_i f_i P_i, differentiable: f_i is the fraction
        of the minibatch's tokens that are routed to expert i, and P_i their mean routing
        probability, both over all layers and ranks (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6,
        for K experts as in transformers: sum_i f_i = K)."""
        if not self.is_summed:
            self.count()
        if not self.coef:
            return 0.0
        counts = self.sum_counts()
        num_experts, top_k = counts.shape[1], self.routers.experts[0].shape[1]
        total = counts.sum() / top_k
        mass = torch.einsum("rte,t->e", self.routers.probabilities(), self.weights)
        loss = num_experts * (counts.sum(0) @ mass) / total**2
        self.aux_loss = self.aux_loss + loss.detach()
        return self.coef * loss

    def metrics(self) -> dict[str, Metric]:
        """Metrics after an update, still on the device. expert_load_maxvio: tokens of the fullest
        expert divided by the mean, minus 1, averaged over layers (MaxVio of Wang et al. 2024,
        arXiv:2408.15664, eq. 4); 0 is balanced, E / K - 1 the worst."""
        self.routers.forget()
        counts = self.sum_counts()
        violation = counts.amax(1) / counts.mean(1) - 1
        metrics: dict[str, Metric] = {"expert_load_maxvio": Mean(violation.mean())}
        if self.coef:
            share = self.ranks.mesh.tp / self.ranks.size
            metrics["router_aux_loss"] = Mean(self.aux_loss, share)
        return metrics


def token_weights(batch: PackedBatch, tokens: Tensor, repeats_prompts: bool) -> Tensor:
    """[n] fp32, count of each token of a forward. `tokens` [n]: index of each in the batch, -1 for
    padding."""
    device = batch.input_ids.device
    read = sent(torch.from_numpy(np.concatenate([np.arange(0), *batch.paths])), device)
    counts = torch.zeros(len(batch.input_ids), device=device)
    counts.index_add_(0, read, torch.ones_like(read, dtype=torch.float32))
    if repeats_prompts:
        counts.clamp_(max=1)
    return torch.where(tokens < 0, 0.0, counts[tokens.clamp(0)])


def sent(value: Tensor, device: torch.device) -> Tensor:
    """The value on the device, copied to a GPU asynchronously."""
    if device.type != "cuda":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)
