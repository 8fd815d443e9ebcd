"""Activation offloading: saved tensors wait on the CPU between forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

MIN_BYTES = 1024  # Smaller tensors are not worth a copy.


def activations_on_host() -> saved_tensors_hooks:
    """A context in which a forward saves its tensors on the CPU, except weights."""
    # All copies are on the compute stream, which the backward uses too, so no wait is needed.
    return saved_tensors_hooks(to_host, to_device)


def to_host(value: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    original = value if value._base is None else value._base
    if isinstance(original, nn.Parameter) or value.nbytes < MIN_BYTES:
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
    return value.device, host.copy_(value, non_blocking=True)


def to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)
