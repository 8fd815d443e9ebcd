"""CPU offload: a learner's tensors while engines sample, an unused reference, and activations
between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from rl_core.distributed import local
from rl_core.host_copies import HostCopies
from rl_core.learning.policy import PolicyModel

MIN_BYTES = 1024  # of an activation that is worth moving
OnDevice = Callable[[], object]  # makes a context in which the tensors are on the device


def offloaded(
    tensors: Callable[[], Iterable[Tensor]], device: torch.device, is_constant: bool = False
) -> OnDevice:
    """A context in which the tensors are on the device. They leave it at the end of the first
    context. Contexts may be nested. Constant tensors are copied to the CPU once."""
    copies, depth = HostCopies(device, is_constant), 0

    @contextmanager
    def on_device() -> Iterator[None]:
        nonlocal depth
        if not depth:
            copies.to_device()
        depth += 1
        try:
            yield
        finally:
            depth -= 1
        if not depth:  # not after an error, which ends the run
            copies.to_host(tensors())

    return on_device


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # After a forward without a backward some parameters are still gathered.
            module.reshard()
    return map(local, model.parameters())


def offload_weights(model: PolicyModel, device: torch.device) -> OnDevice:
    return offloaded(lambda: weights_of(model), device)


def offload_frozen(model: PolicyModel, device: torch.device) -> OnDevice:
    """For weights that never change; they leave the device at once."""
    on_device = offloaded(lambda: weights_of(model), device, is_constant=True)
    with on_device():
        pass
    return on_device


def offload_state(optimizer: torch.optim.Optimizer, device: torch.device) -> OnDevice:
    def tensors() -> Iterator[Tensor]:
        return (
            local(v)
            for state in optimizer.state.values()
            for v in state.values()
            if isinstance(v, Tensor)
        )

    return offloaded(tensors, device)


def activations_on_host() -> saved_tensors_hooks:
    """A context in which a forward keeps its saved tensors on the CPU, except weights."""
    # All copies are on the compute stream, which the backward uses too: nothing waits for them
    # here.
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
