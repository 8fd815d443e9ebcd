"""A loss and an optimizer of a script: train(config, loss=..., optimizer=...)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rl_core.algorithms import sequence_sums
from rl_core.config import Config, OptimConfig
from rl_core.learning.learner import Learner, Metrics, Named, mean_of
from rl_core.rules import nearest
from rl_core.types import PackedBatch

# What an own loss may name. All but the last two are [M], of the trained tokens.
LOSS_ARGUMENTS = (
    "logprobs",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "advantages",
    "entropy",
    "sequences",
    "batch",
    "config",
)


@dataclass(kw_only=True, slots=True, frozen=True)
class OwnParts:
    """`loss`: names of LOSS_ARGUMENTS -> [M] losses of the trained tokens, in nats times advantage.
    `optimizer`: (named parameters, config.optim) -> an Optimizer, or a class of torch.optim, which
    gets the learning rate alone."""

    loss: Callable[..., Tensor] | None = None
    optimizer: Callable[..., Optimizer] | None = None

    def check(self, config: Config) -> None:
        """Raises ValueError for what does not fit the interface."""
        if self.loss is not None:
            check_loss(self.loss, config)
        if self.optimizer is not None and not is_optimizer_class(self.optimizer):
            check_optimizer(self.optimizer)

    def learner(self, make: partial) -> partial:
        """`make`: makes a learner, of an actor or a critic. The same with the own optimizer."""
        if self.optimizer is None:
            return make
        return partial(make, make_optimizer=self.make_optimizer)

    def make_optimizer(self, named: Named, optim: OptimConfig) -> Optimizer:
        if is_optimizer_class(self.optimizer):
            return self.optimizer(list(named), lr=optim.lr)
        made = self.optimizer(list(named), optim)
        if not isinstance(made, Optimizer):
            raise ValueError(
                f"optimizer={name_of(self.optimizer)} gave {made!r}; it must return a "
                "torch.optim.Optimizer"
            )
        return made

    def actor_learner(self, make: partial) -> partial:
        """The same of an actor's learner, which alone has the own loss."""
        if self.loss is None:
            return make
        own = with_loss(make.func, self.loss)
        return partial(own, *make.args, **make.keywords)


def check_loss(loss: Any, config: Config) -> None:
    if config.algorithm in ("dpo", "rm"):
        raise ValueError(
            f"loss is of trained tokens, and --algorithm {config.algorithm} learns from pairs; "
            "leave it out, or take another algorithm"
        )
    if not callable(loss):
        raise ValueError(f"loss={loss!r} must be a function of {', '.join(LOSS_ARGUMENTS)}")
    for parameter in inspect.signature(loss).parameters.values():
        is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        is_given = is_open or parameter.default is not parameter.empty
        if parameter.name not in LOSS_ARGUMENTS and not is_given:
            raise ValueError(
                f"loss {name_of(loss)}() names {parameter.name!r}, which is none of its "
                f"arguments; {nearest(parameter.name, LOSS_ARGUMENTS)}"
            )
        if parameter.name == "ref_logprobs" and not (config.algo.kl_coef or config.algo.log_kl):
            raise ValueError(
                f"loss {name_of(loss)}() names 'ref_logprobs', and there is no reference model; "
                "give algo={'log_kl': True}"
            )


def check_optimizer(make: Any) -> None:
    rule = "it must be a class of torch.optim, or a function of (named_parameters, config.optim)"
    if not callable(make):
        raise ValueError(f"optimizer={make!r}: {rule}")
    try:
        inspect.signature(make).bind(None, None)
    except TypeError as error:
        raise ValueError(f"optimizer={name_of(make)}: {error}; {rule}") from None


def is_optimizer_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer)


def name_of(value: Any) -> str:
    return getattr(value, "__name__", repr(value))


def with_loss(learner_class: type[Learner], loss: Callable[..., Tensor]) -> type[Learner]:
    """The class with this loss in the place of the algorithm's."""
    names = [name for name in inspect.signature(loss).parameters if name in LOSS_ARGUMENTS]

    class OwnLossLearner(learner_class):
        def losses(self, batch: PackedBatch) -> tuple[Tensor, Metrics]:
            logprobs, entropy = self.forward(batch)
            old = batch.old_logprobs
            known = {
                "logprobs": logprobs,
                "old_logprobs": logprobs.detach() if old is None else old,
                "entropy": entropy,
                "batch": batch,
                "config": self.config,
            }
            given = {}
            for name in names:
                given[name] = known[name] if name in known else getattr(batch, name)
            losses = loss(**given)
            if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
                found = getattr(losses, "shape", losses)
                raise ValueError(
                    f"loss {name_of(loss)}() gave {found}; it must give a loss for each of the "
                    f"{len(logprobs)} trained tokens, {tuple(logprobs.shape)}: neither mean nor sum"
                )
            if self.algorithm.aggregation == "sequence":
                losses = losses / sequence_sums(logprobs.new_ones(len(logprobs)), batch)
            metrics = self.measure(batch, logprobs.detach())
            return losses, metrics | {"entropy_nats": mean_of(entropy)}

    return OwnLossLearner
