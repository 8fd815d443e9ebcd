"""Ranks and their collectives. Values travel as JSON and plain tensors, never pickled.

With one rank every function here is the identity, and mostly no process group exists.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from rl_core.errors import counted
from rl_core.types import RunError

if TYPE_CHECKING:
    from rl_core.run.process.heartbeat import Heartbeat

T = TypeVar("T")

MPS = "mps"  # torch's name of an Apple GPU.


@dataclass(kw_only=True, slots=True, frozen=True)
class Mesh:
    """The sizes of each dimension of parallelism; neighbours in rank divide the innermost:
    rank = ((replica * dp_shard + shard) * cp + chunk) * tp + slice. Ranks beyond its size only
    sample."""

    dp_replicate: int = 1  # copies of the weights, each split over dp_shard * cp ranks (HSDP)
    dp_shard: int = 1  # data parallel ranks of one copy
    cp: int = 1  # ranks that hold parts of the same sequences
    tp: int = 1  # ranks that hold parts of the same matrices
    ep: int = 1  # ranks among the dp_shard * cp of a copy that hold different experts

    @property
    def dp(self) -> int:
        """Ranks that train on different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy of the weights together."""
        return self.dp_shard * self.cp * self.tp

    @property
    def size(self) -> int:
        return self.dp_replicate * self.num_shards


# Names of numbers that all ranks share: a signal that a rank received, and the signal that ended
# the run.
SIGNAL_RECEIVED, ENDED_BY_SIGNAL = "signal_received", "ended_by_signal"


@dataclass(kw_only=True, slots=True)
class Ranks:
    rank: int
    size: int
    device: torch.device  # Device of this rank's model.
    mesh: Mesh = Mesh()
    # Dp_replicate, dp_shard * cp, tp; None where weights are not sharded.
    weights_mesh: DeviceMesh | None = None
    # Dp_replicate, expert_shard, ep; None without --ep.
    experts_mesh: DeviceMesh | None = None
    # Ranks that hold parts of the same sequences; None if that is this one.
    cp_group: dist.ProcessGroup | None = None
    rollout_ranks: int = 0  # how many ranks only sample; 0: each rank does both
    is_engine: bool = False  # its engines are asked by ranks that play episodes
    group: int = 0  # number of its process group; 0 plays episodes
    store: dist.Store = field(default_factory=dist.HashStore)  # shared by all ranks
    heartbeat: Heartbeat | None = None  # None without other ranks.

    @property
    def layout(self) -> str:
        """Ranks and flags that shards depend on, such as "4 ranks, --ep 2"."""
        sizes = {name: getattr(self.mesh, name) for name in ("dp_replicate", "tp", "ep")}
        flags = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
        return ", ".join([counted(self.size, "rank"), *flags])

    @property
    def is_writer(self) -> bool:
        """True on the rank that writes the files of a run."""
        return self.rank == 0 and not self.is_engine

    @property
    def dp_rank(self) -> int:
        return self.dp_rank_of(self.rank)

    @property
    def cp_rank(self) -> int:
        return self.rank // self.mesh.tp % self.mesh.cp

    def dp_rank_of(self, rank: int) -> int:
        return rank // (self.mesh.cp * self.mesh.tp)

    def add(self, name: str, n: int) -> int:
        """The sum of what all ranks added by this name, those that only sample too."""
        return self.store.add(name, n)

    def set_number(self, name: str, number: int) -> None:
        """On any rank number(name) is this one from now on."""
        self.store.set(name, str(number))

    def number(self, name: str) -> int:
        """0 before a rank has set it."""
        return int(self.store.get(name)) if self.store.check([name]) else 0


def in_fp64(value: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The value in fp64 on the device, by default its own; on the CPU if that is an Apple GPU,
    which has no fp64."""
    device = device or value.device
    return value.to("cpu" if device.type == MPS else device).double()


def on_mesh(ranks: Ranks, mesh: Mesh) -> Ranks:
    """The same ranks with this mesh. Every rank must call it."""
    kind = ranks.device.type
    weights_mesh = init_device_mesh(
        kind,
        (mesh.dp_replicate, mesh.dp_shard * mesh.cp, mesh.tp),
        mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"),
    )
    cp_group = None
    if mesh.cp > 1:
        shape = (mesh.dp, mesh.cp, mesh.tp)
        samples_mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "cp", "tp"))
        cp_group = samples_mesh.get_group("cp")
    experts_mesh = None
    if mesh.ep > 1:
        sizes = mesh.dp_replicate, mesh.dp_shard * mesh.cp // mesh.ep, mesh.ep
        names = ("dp_replicate", "expert_shard", "ep")
        experts_mesh = init_device_mesh(kind, sizes, mesh_dim_names=names)
    meshes = {"weights_mesh": weights_mesh, "experts_mesh": experts_mesh}
    return replace(ranks, mesh=mesh, cp_group=cp_group, **meshes)


def close_ranks(ranks: Ranks) -> None:
    if ranks.heartbeat:
        ranks.heartbeat.close()
    if dist.is_initialized():
        barrier(ranks)
        dist.destroy_process_group()


@contextmanager
def explain_timeouts(phase: str, ranks: Ranks):
    """Raises RunError, with the phase of the step in it, where another rank did not come in time or
    is gone."""
    try:
        yield
    except RuntimeError as error:
        if ranks.heartbeat and (reason := ranks.heartbeat.explain(error, phase)):
            raise RunError(reason) from error
        raise


def all_gather_json(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in the order of ranks. Scalars of numpy and torch become numbers."""
    return [value] if ranks.size == 1 else gather_json(value, ranks.size)


def gather_json(value: T, num_ranks: int) -> list[T]:
    data = torch.frombuffer(bytearray(json.dumps(value, default=float).encode()), dtype=torch.uint8)
    # Not all_gather_into_tensor(), which torch 2.13 warns about, nor what replaces it, which 2.11
    # has not.
    sizes = list(torch.zeros(num_ranks, dtype=torch.int64).split(1))
    dist.all_gather(sizes, torch.tensor([len(data)]))
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: len(data)] = data
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    values = []
    for row, size in zip(gathered, sizes, strict=True):
        values.append(json.loads(row[: int(size)].numpy().tobytes()))
    return values


def barrier(ranks: Ranks) -> None:
    """Returns once every rank has called it."""
    if ranks.size > 1:
        dist.all_reduce(torch.zeros(1))  # Made on the CPU, which waits for no device.


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that is split over ranks; other tensors are returned."""
    return value.to_local() if isinstance(value, DTensor) else value


def sum_over(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors on each of them. Its gradient, which must be equal on all
    ranks, is that of each tensor."""
    parts = DTensor.from_local(value, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def unsharded(value: torch.Tensor) -> torch.Tensor:
    """The full tensor of a tensor that is split over ranks; other tensors are returned. Every rank
    must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
