"""LoRA adapters on matrices that tensor parallelism splits, y = W x + scale B A x.

    W split by     A                     B
    outputs        on each rank          rows of this rank's outputs
    inputs         columns of its inputs on each rank, before the layer's all-reduce

A matrix that each rank has gets the gradient of this rank's share; finish_gradients() sums it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.functional import linear

from rl_core.distributed import local, sum_over
from rl_core.learning.lora import AdapterPolicy
from rl_core.models.parallel.tensor_parallel import TensorParallelPolicy


class TensorParallelAdapterPolicy(TensorParallelPolicy, AdapterPolicy):
    """A frozen model with adapters, split over ranks."""

    def split_layer(self, layer: nn.Module, style: str) -> None:
        from peft.tuners.lora import LoraLayer

        if not isinstance(layer, LoraLayer):
            return super().split_layer(layer, style)
        base = layer.get_base_layer()
        if style == "colwise":
            super().split_layer(base, style)
            split, replicated, dim = layer.lora_B, layer.lora_A, 0
        else:
            self.split_module(base, RowwiseParallel(output_layouts=Partial()))
            layer.register_forward_hook(partial(add_up, self.mesh))
            split, replicated, dim = layer.lora_A, layer.lora_B, 1
        for name, each in replicated.items():
            replicated[name] = LocalLinear(each.get_parameter("weight"))
            self.partial.append(replicated[name])
        for name, each in split.items():
            split[name] = LocalLinear(self.split_weight(each.get_parameter("weight"), dim))


class LocalLinear(nn.Linear):
    """A linear layer that multiplies by this rank's slice of its weight."""

    def __init__(self, weight: nn.Parameter):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, DTensor):  # Its gradients are summed with those of other layers.
            input = input.to_local(grad_placements=[Partial()])
        return linear(input, local(self.weight))


def add_up(mesh: DeviceMesh, layer: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return sum_over(output, mesh)
