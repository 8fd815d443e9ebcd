"""Products in fp32 by oneDNN, on CPUs where it is quicker than MKL. Gradients are the caller's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

# A product of this many multiply-adds is quicker by oneDNN than by MKL, where there is AVX512: half
# the time at ten times as many, on an AMD EPYC. A smaller one waits for oneDNN's overhead.
LARGE_PRODUCT = 2**22
# oneDNN keeps 0.6 MiB of memory for each shape that it has seen. Rows are padded to one of these:
FEW_ROWS, MANY_ROWS = 8, 128


@cache
def has_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_plain(module: nn.Module) -> bool:
    """True if it computes x @ W.T + bias and nothing else."""
    return type(module) is nn.Linear and not module._forward_hooks


def rows_for_onednn(weight: Tensor) -> float:
    """Rows of x from which on x @ weight.T is quicker by oneDNN."""
    is_fit = weight.dtype == torch.float32 and weight.device.type == "cpu" and has_onednn()
    return LARGE_PRODUCT / weight.numel() if is_fit else math.inf


def linear(module: nn.Module, x: Tensor, large_product: Callable[..., Tensor]) -> Tensor:
    """What a linear layer gives for x [..., in]; by large_product(x, weight, bias) where oneDNN is
    quicker."""
    num_rows = x.numel() // x.shape[-1]
    if is_plain(module) and num_rows >= rows_for_onednn(module.weight):
        return large_product(x, module.weight, module.bias)
    return module(x)


def mlp(module: nn.Module, x: Tensor, large_product: Callable[..., Tensor]) -> Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202), its three products by linear()."""
    gates = module.act_fn(linear(module.gate_proj, x, large_product))
    up = linear(module.up_proj, x, large_product)
    return linear(module.down_proj, gates * up, large_product)


def num_padding(num_rows: int) -> int:
    """Rows to add, so that there are few shapes."""
    return -num_rows % (FEW_ROWS if num_rows <= MANY_ROWS else MANY_ROWS)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] @ weight.T + bias"""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight.T + bias, for any number of rows."""
    rows = x.flatten(0, -2)
    num_rows = len(rows)
    out = product(pad(rows, (0, 0, 0, num_padding(num_rows))), weight, bias)
    return out[:num_rows].view(*x.shape[:-1], -1)
