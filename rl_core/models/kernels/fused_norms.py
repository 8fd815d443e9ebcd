"""RMSNorm by torch's fused CUDA kernel, instead of the eight kernels of transformers' modules.

In bf16 the fused kernel rounds once, after the multiplication by the weight; transformers' modules
round before it too.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class FusedRMSNorm(nn.RMSNorm):
    """Zhang and Sennrich 2019, arXiv:1910.07467, with the weight of another module."""

    def __init__(self, weight: nn.Parameter, epsilon: float):
        super().__init__(weight.shape, epsilon, elementwise_affine=False)
        self.weight = weight
        self.variance_epsilon = epsilon  # The name in transformers' modules.


def fuse_norms(model: nn.Module) -> None:
    """Replaces each RMSNorm of a model; weights, their names and their gradients stay."""
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if (epsilon := epsilon_of(module)) is not None:
                setattr(parent, name, FusedRMSNorm(module.get_parameter("weight"), epsilon))


def epsilon_of(module: nn.Module) -> float | None:
    """Epsilon of a module that computes torch's rms_norm(), which a trial shows; None for others,
    such as Gemma's, whose weight counts from 1, and norms with a gate."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    state = [*module.named_parameters(), *module.named_buffers()]
    if epsilon is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    if [name for name, _ in state] != ["weight"]:
        return None
    if isinstance(module, FusedRMSNorm) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    [width] = module.get_parameter("weight").shape
    weight, x = torch.linspace(0.5, 2, width), torch.linspace(-1, 3, 2 * width).view(2, width)
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = module._parameters | {"weight": nn.Parameter(weight)}
    out: Tensor = trial.forward(x)
    is_equal = out.shape == x.shape and torch.allclose(out, rms_norm(x, (width,), weight, epsilon))
    return epsilon if is_equal else None
