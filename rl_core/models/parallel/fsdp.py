"""FSDP: shards a model over ranks and loads its weights from files. transformers maps the files,
the model is created empty on torch's meta device, and each rank reads the slices of its shards.

A weight that transformers merges from several, such as all experts of a layer, is merged from the
slices alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from rl_core.distributed import Mesh, Ranks
from rl_core.models.loading import kept_in_fp32, load_hf_model
from rl_core.models.policy import Policy, blocks_of, tower_blocks

CONVERT = WeightConverter.convert


def shard_policy(
    policy: Policy, dtype: torch.dtype, ranks: Ranks, cpu_offload: bool = False
) -> None:
    """Shards each block and the rest of the policy (FSDP2; HSDP with several replicas), after the
    policy's own split. Computes in `dtype` and reduces gradients in fp32."""
    assert ranks.weights_mesh is not None
    # torch advises on every rank to gather weights that are split twice in another way, which FSDP2
    # does not offer.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    placement = policy.split(ranks.weights_mesh)
    dims = ("dp_replicate", "dp_shard_cp") if ranks.mesh.dp_replicate > 1 else ("dp_shard_cp",)
    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    kwargs = {"mesh": ranks.weights_mesh[dims], "offload_policy": offload}
    kwargs["shard_placement_fn"] = placement
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if ranks.experts_mesh is not None:
        from rl_core.models.parallel.expert_parallel import split_again, split_experts

        others = ranks.experts_mesh[(*dims[:-1], "expert_shard")]
        again = partial(split_again, num_parts=ranks.experts_mesh["expert_shard"].size())
        # The router's weights stay in their dtype.
        as_given = dataclasses.replace(precision, cast_forward_inputs=False)
        of_experts = {"mp_policy": as_given, "shard_placement_fn": again, "offload_policy": offload}
        for experts in split_experts(policy.hf, ranks.experts_mesh["ep"]):
            fully_shard(experts, mesh=others, **of_experts)
    blocks = [*blocks_of(policy.hf)]
    if policy.vision is not None:
        blocks += tower_blocks(policy.hf)
    for block in blocks:
        fully_shard(block, mp_policy=precision, **kwargs)
    root = dataclasses.replace(precision, output_dtype=torch.float32)
    fully_shard(policy, mp_policy=root, **kwargs)


def defer_reduction(policy: FSDPModule, mesh: Mesh, is_last: bool, is_offloaded: bool) -> None:
    """Defers the reduction over replicas, and the copies of a rank with all weights, to the last
    microbatch of a minibatch. Sharded gradients are reduced with each microbatch: otherwise every
    rank would hold unsharded ones."""
    if mesh.dp_replicate > 1:
        policy.set_requires_all_reduce(is_last)
    if mesh.num_shards == 1 and not is_offloaded:
        policy.set_requires_gradient_sync(is_last)


def load_on_meta(
    path: str, dtype: torch.dtype, is_scoring: bool = False
) -> tuple[PreTrainedModel, dict[str, Tensor | FusedWeight]]:
    """(an empty model of `dtype` on "meta", name -> weight in its files, to be indexed). Tied
    weights stay tied. Weights that transformers keeps in fp32 are in fp32."""
    with fused_later() as fused:
        model = load_hf_model(path, "auto", None, is_scoring)
    weights: dict[str, Tensor | FusedWeight] = dict(model.named_parameters())
    empty: dict[Tensor, nn.Parameter] = {}
    held = dict.fromkeys(kept_in_fp32(model, dtype), torch.float32)
    for prefix, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight not in empty:
                in_dtype = held.get(f"{prefix}.{name}", dtype)
                like = torch.empty_like(weight, dtype=in_dtype, device="meta")
                empty[weight] = nn.Parameter(like)
            module._parameters[name] = None if weight is None else empty[weight]
    return model, weights | fused


@torch.no_grad()
def load_shards(
    policy: Policy,
    weights: dict[str, Tensor | FusedWeight],
    device: torch.device,
    weights_on: torch.device | str,
) -> None:
    """Copies the weights, adapters excepted, to `weights_on`. A rank reads only the slices of its
    shards."""

    def placed(t: Tensor) -> Tensor:
        if t.is_meta:
            return torch.empty_like(t, device=weights_on)
        # Adapters, and a tied weight that comes a second time, have memory already.
        return t.to(weights_on if isinstance(t, nn.Parameter) else device)

    # to_empty() would destroy the buffers. FSDP notices through its _apply.
    policy._apply(placed)
    for name, parameter in policy.hf.named_parameters():
        # Layers with adapters keep the weight in base_layer.
        weight = weights.get(name.replace(".base_layer", ""))
        if weight is not None:
            local, slices = local_slices(parameter)
            local.copy_(weight[slices])
            if isinstance(weight, Tensor):
                forget_pages(weight)


def local_slices(value: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """(this rank's shard of a parameter, the shard's slices in the unsharded parameter)."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value, tuple(slice(0, n) for n in value.shape)
    shape, start = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return value.to_local(), tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def forget_pages(*weights: Tensor) -> None:
    """Releases pages of mapped files, which count as this process's memory once they are read
    (Linux)."""
    page = mmap.PAGESIZE
    for weight in weights:
        begin = weight.data_ptr()
        start, end = -(-begin // page) * page, (begin + weight.nbytes) // page * page
        if sys.platform == "linux" and start < end and not weight.untyped_storage().resizable():
            address, size = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
            ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED)


class FusedWeight:
    """A weight that transformers would merge from weights in files. Indexing reads only the experts
    in the slice."""

    def __init__(
        self,
        converter: WeightConverter,
        parts: dict[str, list[Tensor]],
        name: str,
        like: Tensor,
        options: dict,
    ):
        self.converter, self.parts, self.name = converter, parts, name
        self.like, self.options = like, options
        first, *rest = converter.operations
        self.is_by_expert = isinstance(first, MergeModulelist) and first.dim == 0
        self.is_by_expert &= all(isinstance(op, Concatenate) and op.dim != 0 for op in rest)

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        if not self.like[slices].numel():  # More ranks than experts.
            return torch.empty(self.like[slices].shape)
        experts, rest = slice(None), slices
        if self.is_by_expert:
            experts, rest = slices[0], (slice(None), *slices[1:])
        parts = {pattern: tensors[experts] for pattern, tensors in self.parts.items()}
        weight = converted(self.converter, parts, self.name, self.options)[self.name][rest]
        forget_pages(*itertools.chain(*parts.values()))
        return weight


def converted(
    converter: WeightConverter, parts: dict[str, list[Tensor]], name: str, options: dict
) -> dict[str, Tensor]:
    collected = {pattern: list(tensors) for pattern, tensors in parts.items()}
    # transformers reads files in threads, and takes tensors that are loaded too.
    converter.collected_tensors = collected  # pyright: ignore[reportAttributeAccessIssue]
    weights = {}
    for key, value in CONVERT(converter, name, **options).items():
        weights[key] = value[0] if isinstance(value, list) else value
    return weights


@contextmanager
def fused_later() -> Iterator[dict[str, FusedWeight]]:
    """A context in which transformers converts weights on "meta". Yields name -> FusedWeight."""
    fused: dict[str, FusedWeight] = {}

    def convert(converter: WeightConverter, layer_name: str, **options) -> dict[str, Tensor]:
        parts = converter.materialize_tensors()  # Views of mapped files.
        forget_pages(*itertools.chain(*parts.values()))
        shapes = {}
        for pattern, tensors in parts.items():
            shapes[pattern] = [tensor.to("meta") for tensor in tensors]
        made = converted(converter, shapes, layer_name, options)
        for name, like in made.items():
            fused[name] = FusedWeight(converter, parts, name, like, options)
        return made

    with patch.object(WeightConverter, "convert", convert):
        yield fused
