"""What waits on the host: a learner's tensors while engines have the device, and what a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from rl_core.distributed import local
from rl_core.host_copies import HostCopies

MIN_BYTES = 1024  # of an activation that is worth moving


class Offload:
    """The weights, gradients and optimizer state of a learner, on the device only where on_device() is entered."""

    def __init__(
        self,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        shared: Offload | None = None,
    ):
        self.models, self.optimizers, self.copies = models, optimizers, HostCopies(device)
        self.shared = shared  # of weights that other learners work with too
        self.depth = 0

    @contextmanager
    def on_device(self):
        with nullcontext() if self.shared is None else self.shared.on_device():
            if not self.depth:
                self.to_device()
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
            if not self.depth:  # not after an error, which ends the run
                self.to_host()

    def to_host(self) -> None:
        self.copies.to_host(self.tensors())
        for model in self.models:
            model.is_away = True

    def to_device(self) -> None:
        if self.shared is not None:
            self.shared.to_device()
        self.copies.to_device()
        for model in self.models:
            model.is_away = False

    def tensors(self) -> Iterator[Tensor]:
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # after a forward without a backward some parameters are still whole
            for parameter in model.parameters():
                yield local(parameter)
                if parameter.grad is not None:
                    yield local(parameter.grad)
        for optimizer in self.optimizers:
            yield from (local(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))


def activations_on_host() -> saved_tensors_hooks:
    """A context in which a forward keeps what its backward needs on the host; weights stay where they are."""
    # All copies are in the order of the stream that computes, which is also the backward's: nothing waits for them here.
    return saved_tensors_hooks(to_host, to_device)


def to_host(value: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    is_weight = isinstance(value if value._base is None else value._base, nn.Parameter)
    if is_weight or value.nbytes < MIN_BYTES:
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    return value.device, host.copy_(value, non_blocking=True)


def to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
