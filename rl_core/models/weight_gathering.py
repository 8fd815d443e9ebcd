"""Gathers sharded weights in few collectives: small tensors travel together."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from rl_core.distributed import local, unsharded

# The dtype of each tensor by its name, or that of all; None: its own.
DTypes = torch.dtype | Mapping[str, torch.dtype] | None
GROUP_BYTES = 64 << 20  # Unsharded bytes that travel together; twice as many are allocated.
# Dimensions of the meshes that split weights. FSDP splits the slices of tensor parallelism and a
# rank's experts, so FSDP's split is undone first.
DIMENSIONS = ("dp_shard_cp", "expert_shard", "ep", "tp")
# torch 2.13 renamed all_gather_into_tensor().
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered_weights(
    named: Iterable[tuple[str, Tensor]], dtypes: DTypes = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, unsharded tensor in its dtype) of each tensor, in their order. Up to GROUP_BYTES are
    gathered by one collective per dimension of the mesh and dtype, and a larger tensor by several.
    No reference to a yielded large tensor is kept. Every rank must exhaust the iterator."""
    group: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, value in named:
        dtype = dtype_of(name, value, dtypes)
        size = value.numel() * dtype.itemsize
        if group and num_bytes + size > GROUP_BYTES:
            yield from gathered_group(group)
            group, num_bytes = [], 0
        # Weights are cast before they travel.
        group.append((name, value.detach().to(dtype)))
        num_bytes += size
    if group:
        yield from gathered_group(group)


def dtype_of(name: str, value: Tensor, dtypes: DTypes) -> torch.dtype:
    dtype = dtypes.get(name) if isinstance(dtypes, Mapping) else dtypes
    return dtype or value.dtype


def gathered_group(group: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    names, values = zip(*group, strict=True)
    if len(values) == 1:
        yield names[0], unsharded_in_pieces(values[0])
    else:
        yield from zip(names, unsharded_together(values), strict=True)


def exhaust(weights: Iterable[object]) -> None:
    """Takes part in gathering weights that this rank does not need, and holds none of them."""
    deque(weights, maxlen=0)


@torch.no_grad()
def unsharded_together(values: Sequence[Tensor]) -> list[Tensor]:
    """unsharded() of each tensor."""
    return joined([local(value) for value in values], [splits_of(value) for value in values])


@torch.no_grad()
def unsharded_in_pieces(value: Tensor) -> Tensor:
    """unsharded() by collectives of GROUP_BYTES at most. A piece has a share of a dimension that
    the ranks do not split."""
    shard, splits = local(value), splits_of(value)
    dims = {*range(value.ndim)} - {split.dim for split in splits.values()}
    if not splits or not dims:
        return unsharded(value)
    full, dim = shard.new_empty(value.shape), min(dims)
    num = max(1, math.ceil(full.nbytes / GROUP_BYTES))
    for piece, target in zip(shard.chunk(num, dim), full.chunk(num, dim), strict=True):
        target.copy_(joined([piece], [splits])[0])
    return full


def joined(tensors: list[Tensor], splits: Sequence[Mapping[str, Split]]) -> list[Tensor]:
    """The unsharded tensors of shards with these splits, by one collective per dimension of the
    mesh and dtype."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    for name, kind in itertools.product(DIMENSIONS, dtypes):
        numbers = [i for i, t in enumerate(tensors) if t.dtype == kind and name in splits[i]]
        if not numbers:
            continue
        full = join_chunks([tensors[i] for i in numbers], [splits[i][name] for i in numbers])
        for i, tensor in zip(numbers, full, strict=True):
            tensors[i] = tensor
    return tensors


@dataclass(kw_only=True, slots=True)
class Split:
    """A dimension that the ranks of a group have in chunks of one length, the last ones shorter or
    empty."""

    dim: int
    length: int  # Sum of the chunks.
    group: dist.ProcessGroup

    @property
    def chunk_length(self) -> int:
        return -(-self.length // self.group.size())


def splits_of(value: Tensor) -> dict[str, Split]:
    """The splits of a tensor by dimension of the mesh."""
    splits: dict[str, Split] = {}
    if not isinstance(value, DTensor):
        return splits
    mesh, shape = value.device_mesh, list(value.shape)
    for name in reversed(DIMENSIONS):  # The order in which the splits were made.
        names = mesh.mesh_dim_names or ()
        dim = getattr(value.placements[names.index(name)], "dim", None) if name in names else None
        if dim is None:
            continue
        split = Split(dim=dim, length=shape[dim], group=mesh.get_group(name))
        start = mesh.get_local_rank(name) * split.chunk_length
        shape[dim] = max(0, min(split.chunk_length, split.length - start))
        splits[name] = split
    assert tuple(shape) == value.to_local().shape, (value.placements, mesh)
    return splits


def join_chunks(tensors: Sequence[Tensor], splits: Sequence[Split]) -> list[Tensor]:
    """Each tensor, of which this rank has a chunk, by one collective. The splits have one group."""
    group = splits[0].group
    if group.size() == 1:
        return list(tensors)
    padded = []
    for tensor, split in zip(tensors, splits, strict=True):
        missing = split.chunk_length - tensor.shape[split.dim]
        later = [0, 0] * (tensor.ndim - 1 - split.dim)
        padded.append(pad(tensor, [*later, 0, missing]) if missing else tensor)
    flat = torch.cat([tensor.flatten() for tensor in padded])
    rows = flat.new_empty(group.size(), len(flat))
    all_gather(rows.view(-1), flat, group=group)
    joined = []
    pieces = rows.split([tensor.numel() for tensor in padded], 1)
    for piece, tensor, split in zip(pieces, padded, splits, strict=True):
        chunks = piece.unflatten(1, tensor.shape).movedim(0, split.dim)
        full = chunks.flatten(split.dim, split.dim + 1).narrow(split.dim, 0, split.length)
        joined.append(full.contiguous())  # Chunks of one row leave a view.
    return joined
