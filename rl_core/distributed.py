"""Ranks and their collectives. Values travel as JSON and plain tensors, never pickled.

With one rank every function here is the identity, and mostly no process group exists.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rl_core.types import RunError

T = TypeVar("T")

CONNECT_HINT = (
    "Every node must reach every other at any port; GLOO_SOCKET_IFNAME names the interface (eth0)"
)
# Beats of a heartbeat in one --timeout_s, and the longest time between two of them.
BEATS, MAX_BEAT_S = 10, 5.0
MPS = "mps"  # torch's name of an Apple GPU.
NAMES_A_GPU = re.compile(r"\s*(\d|GPU-|MIG-)")  # A value of CUDA_VISIBLE_DEVICES.


@dataclass(kw_only=True, slots=True, frozen=True)
class Mesh:
    """The sizes of each dimension of parallelism; neighbours in rank divide the innermost:
    rank = ((replica * dp_shard + shard) * cp + chunk) * tp + slice. Ranks beyond its size only
    sample."""

    dp_replicate: int = 1  # copies of the weights, each split over dp_shard * cp ranks (HSDP)
    dp_shard: int = 1  # data parallel ranks of one copy
    cp: int = 1  # ranks that hold parts of the same sequences
    tp: int = 1  # ranks that hold parts of the same matrices

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
MESH_FLAGS = ("dp_replicate", "cp", "tp", "rollout_ranks")


def make_mesh(
    num_ranks: int, dp_replicate: int = 1, cp: int = 1, tp: int = 1, rollout_ranks: int = 0
) -> Mesh:
    """The mesh of all ranks that learn; dp_shard takes the ranks that other dimensions leave.
    Raises ValueError if the other dimensions do not divide the number of ranks."""
    num_learners, others = num_ranks - rollout_ranks, dp_replicate * cp * tp
    if num_learners < 1:
        raise ValueError(
            f"--rollout_ranks={rollout_ranks} must leave at least one rank of {num_ranks} to "
            "learn; "
            "raise --nproc_per_node, or lower it"
        )
    if num_learners % others:
        raise ValueError(
            f"--dp_replicate {dp_replicate} * --cp {cp} * --tp {tp} must divide the {num_learners} "
            "ranks; lower one"
        )
    return Mesh(dp_replicate=dp_replicate, dp_shard=num_learners // others, cp=cp, tp=tp)


@dataclass(kw_only=True, slots=True)
class Ranks:
    rank: int
    size: int
    device: torch.device  # Device of this rank's model.
    mesh: Mesh = Mesh()
    # Dp_replicate, dp_shard * cp, tp; None where weights are not sharded.
    weights_mesh: DeviceMesh | None = None
    # Ranks that hold parts of the same sequences; None if that is this one.
    cp_group: dist.ProcessGroup | None = None
    rollout_ranks: int = 0  # how many ranks only sample; 0: each rank does both
    is_engine: bool = False  # its engines are asked by ranks that play episodes
    group: int = 0  # number of its process group; 0 plays episodes
    store: dist.Store = dataclasses.field(default_factory=dist.HashStore)  # shared by all ranks
    heartbeat: Heartbeat | None = None  # None without other ranks.

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


class Heartbeat:
    """A thread that counts up in the store while this process runs, and watches the count of the
    next rank. A frozen process closes no connection: the ranks that it should ask or answer would
    wait for ever. The ranks form a ring, so that each costs the store two requests per beat.

    Silence is counted in beats of this process, so that a job that was suspended as a whole
    resumes.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float):
        # A client that waits for a key answers nobody else. torch's stubs lack clone().
        self.store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self.rank, self.watched = rank, (rank + 1) % size
        self.timeout_s = timeout_s
        self.period_s = min(timeout_s / BEATS, MAX_BEAT_S)
        self.lost = ""  # Names the rank that stopped responding.
        self.when_lost: Callable[[], object] | None = None
        self.is_closed = threading.Event()
        self.asked = 0  # The number of the beat that the store has not answered, or 0.
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def _beat(self) -> None:
        count, num_silent, num_beats = 0, 0, 0
        while not self.is_closed.wait(self.period_s):
            num_beats += 1
            self.asked = num_beats
            try:
                self.store.add(f"beats/{self.rank}", 1)
                newest = self.store.add(f"beats/{self.watched}", 0)
            except RuntimeError:  # The store is gone or frozen.
                newest = count
            self.asked = 0
            num_silent = 0 if newest != count else num_silent + 1
            count = newest
            if num_silent * self.period_s > self.timeout_s and not self.lost:
                self.lost = (
                    f"rank {self.watched} has stood still for --timeout_s={self.timeout_s:g}: no "
                    f"heartbeat of it reached rank {self.rank}. Check that its process is not "
                    "stopped and that its machine answers, then resume with --resume"
                )
                # This rank's heartbeat continues for the other ranks.
                when_lost = self.when_lost
                if when_lost:
                    when_lost()

    def _watch_store(self) -> None:
        """Prints a line once the store has not answered for the deadline: its client waits for ever
        for a process that is stopped, in this thread and in those that work. A launcher that is
        suspended may resume; a first rank that has the store and stands still ends this process."""
        is_told, num_waits, asked = False, 0, 0
        while not self.is_closed.wait(self.period_s):
            before, asked = asked, self.asked
            num_waits = num_waits + 1 if asked and asked == before else 0
            if num_waits * self.period_s <= self.timeout_s:
                is_told = False
            elif not is_told:
                is_told = True
                is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                host = "the launcher (torchrun or rl-core train)" if is_launchers else "rank 0"
                print(
                    f"{'warning' if is_launchers else 'error'}: rank {self.rank} waits for {host}, "
                    f"which has stood still for --timeout_s={self.timeout_s:g}: the store of all "
                    "ranks does not answer. Look whether that process is stopped",
                    file=sys.stderr,
                    flush=True,
                )
                if not is_launchers:
                    os._exit(1)  # A thread that waits in C++ hears no exception.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the current task is cancelled once the watched rank stands still. Then raises
        RunError."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self.when_lost = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self.lost:  # while the models loaded
                raise RunError(self.lost)
            yield
        except asyncio.CancelledError:
            if not self.lost:
                raise
            raise RunError(self.lost) from None
        finally:
            self.when_lost = None

    def close(self) -> None:
        self.is_closed.set()
        self.thread.join(self.period_s)


def device_of_rank(local_rank: int, num_visible: int, visible: str | None) -> torch.device:
    """The device of a rank if torch sees `num_visible` GPUs, which it numbers from 0 in the order
    of CUDA_VISIBLE_DEVICES (`visible`). A launcher may show each rank a different single GPU, whose
    number is 0. Raises ValueError if the rank would have no GPU, or if the variable names GPUs and
    torch sees none."""
    if num_visible == 0:
        if NAMES_A_GPU.match(visible or ""):
            raise ValueError(
                f"CUDA_VISIBLE_DEVICES={visible} names GPUs and torch sees none: an id is unknown "
                "or comes twice, or the driver is missing. Correct it (nvidia-smi -L lists ids), "
                "or set CUDA_VISIBLE_DEVICES='' to run on the CPU"
            )
        return torch.device("cpu")
    if 1 < num_visible <= local_rank:
        raise ValueError(
            f"LOCAL_RANK={local_rank} needs {local_rank + 1} GPUs and torch sees {num_visible} "
            f"(CUDA_VISIBLE_DEVICES={visible}): each rank needs its own GPU. Lower "
            f"--nproc_per_node to {num_visible}, or make more GPUs visible"
        )
    return torch.device("cuda", 0 if num_visible == 1 else local_rank)


def this_device(name: str = "auto") -> torch.device:
    """The device of this process, by --device and LOCAL_RANK. Raises the errors of check_device()
    and device_of_rank(). "auto" never takes an Apple GPU: results are those of other CPUs."""
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    check_device(name, num_visible, torch.backends.mps.is_available(), num_ranks)
    if name == MPS:
        return torch.device(MPS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if torch.backends.cuda.is_built() else None
    return device_of_rank(int(os.environ.get("LOCAL_RANK", 0)), num_visible, visible)


def check_device(name: str, num_visible: int, has_mps: bool, num_ranks: int) -> None:
    """Raises ValueError if a machine with these GPUs lacks the device that --device names, or if
    several ranks cannot use that device."""
    if name == "cuda" and not num_visible:
        raise ValueError("--device=cuda: torch sees no GPU; leave --device out to run on the CPU")
    if name == "cpu" and num_visible:
        raise ValueError(
            f"--device=cpu: torch sees {num_visible} GPUs; hide them by CUDA_VISIBLE_DEVICES=''"
        )
    if name == MPS and not has_mps:
        raise ValueError(
            "--device=mps: torch sees no Apple GPU, which needs macOS on Apple silicon; leave "
            "--device out to run on the CPU"
        )
    if name == MPS and num_ranks > 1:
        raise ValueError(
            f"--device=mps: {num_ranks} ranks cannot exchange tensors of an Apple GPU, since gloo "
            "does not support MPS; start one rank, or leave --device out"
        )


def in_fp64(value: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The value in fp64 on the device, by default its own; on the CPU if that is an Apple GPU,
    which has no fp64."""
    device = device or value.device
    return value.to("cpu" if device.type == MPS else device).double()


def check_gpus_differ(gpus: Sequence[str]) -> None:
    """Raises RunError if two ranks have one GPU. `gpus`: the UUID of each rank's GPU, "" for the
    CPU."""
    first_rank: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        other = first_rank.setdefault(gpu, rank)
        if gpu and other != rank:
            raise RunError(
                f"ranks {other} and {rank} have the same GPU, {gpu}: NCCL needs one for each rank. "
                "Start as many ranks on a machine as it has GPUs (--nproc_per_node), or let the "
                "launcher set LOCAL_RANK or CUDA_VISIBLE_DEVICES for each rank"
            )


def init_ranks(
    timeout_s: float,
    mesh: Mesh | None = None,
    is_sharded: bool = False,
    groups: Sequence[Sequence[int]] = (),
    device_name: str = "auto",
) -> Ranks:
    """This process's ranks, from torchrun's variables. Makes a process group for several ranks, or
    for a single rank with sharded weights (mixed precision). Without a mesh all ranks are data
    parallel. Ranks beyond the mesh only sample; learning and sampling ranks form separate process
    groups, numbered from 0. So do `groups`, whose first rank plays episodes; `mesh` is then that of
    this rank's group. `device_name`: --device. Raises RunError if a rank does not join within
    `timeout_s`."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = this_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1 and not is_sharded:
        return Ranks(rank=0, size=1, device=device)
    mesh, timeout = mesh or Mesh(dp_shard=size), timedelta(seconds=timeout_s)
    store: dist.Store = dist.HashStore()
    heartbeat = None
    if size > 1:
        store = meet(rank, size, timeout_s, device)
        heartbeat = Heartbeat(store, rank, size, timeout_s)
    rollout_ranks = 0 if groups else size - mesh.size
    groups = groups or (range(mesh.size), range(mesh.size, size))
    number = [rank in group for group in groups].index(True)
    ranks = Ranks(
        rank=groups[number].index(rank),
        size=len(groups[number]),
        device=device,
        rollout_ranks=rollout_ranks,
        is_engine=number > 0,
        group=number,
        store=dist.PrefixStore("rl_core", store),
        heartbeat=heartbeat,
    )
    if rollout_ranks and ranks.is_engine:
        mesh = Mesh(dp_shard=ranks.size)
    with explain_timeouts("start", ranks, timeout_s), connecting(rank, heartbeat, timeout_s):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"group{number}", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timeout,
        )
        return on_mesh(ranks, mesh)


@contextmanager
def connecting(rank: int, heartbeat: Heartbeat | None, timeout_s: float) -> Iterator[None]:
    """Ends this process if ranks do not connect within `timeout_s`: gloo would wait five times as
    long, in C++."""

    def end() -> None:
        why = (heartbeat and heartbeat.lost) or CONNECT_HINT
        print(
            f"error: rank {rank} waited at the start for connections to the other ranks; they did "
            f"not come within --timeout_s={timeout_s:g}: {why}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    # A heartbeat that stops is noticed after one more beat.
    timer = threading.Timer(timeout_s + 2 * min(timeout_s / BEATS, MAX_BEAT_S), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(rank: int, size: int, timeout_s: float, device: torch.device) -> dist.Store:
    """The store of all ranks, once every rank has checked its flags and the folder. Raises RunError
    that names the ranks that do not come, or that have the same GPU."""
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} waited at the start for the store of all ranks, at MASTER_ADDR="
            f"{os.environ['MASTER_ADDR']} and MASTER_PORT={os.environ['MASTER_PORT']}, which did "
            f"not answer within --timeout_s={timeout_s:g}: {first_line(error)}"
        ) from error
    store.set_timeout(timeout)
    names = [f"present/{other}" for other in range(size)]
    is_gpu = device.type == "cuda"
    publish_address(store)
    store.set(names[rank], str(torch.cuda.get_device_properties(device).uuid) if is_gpu else "")
    try:
        store.wait(names)
        choose_interface(store)
    except RuntimeError as error:
        missing = []
        with suppress(RuntimeError):  # The store itself may be lost.
            missing = [str(other) for other, name in enumerate(names) if not store.check([name])]
        raise RunError(
            f"rank {rank} waited at the start for the other ranks; "
            f"{', '.join(missing) or 'some'} of {size} did not come within "
            f"--timeout_s={timeout_s:g}: {first_line(error)}"
        ) from error
    check_gpus_differ([gpu.decode() for gpu in store.multi_get(names)])
    return store


def is_one_node() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def addresses_towards(host: str, port: int) -> tuple[str, str]:
    """(address of this machine, address of the host) as they reach each other."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # UDP sends nothing when it connects.
        probe.connect(address)
        return probe.getsockname()[0], probe.getpeername()[0]


def node_addresses() -> list[str]:
    """Addresses of this node and of the first node, as they reach each other, except loopback
    addresses. Empty if all ranks are on one node."""
    if is_one_node():
        return []
    both = addresses_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return [address for address in both if not ip_address(address).is_loopback]


def publish_address(store: dist.Store) -> None:
    """Tells the first node the address at which other nodes reach it: there its name may be an
    address of the loopback interface."""
    if addresses := node_addresses():
        store.set("first_node", addresses[-1])


def choose_interface(store: dist.Store) -> None:
    """Lets gloo connect over the interface that reaches the other nodes, unless GLOO_SOCKET_IFNAME
    is set. gloo would take the address of the hostname, which Debian's /etc/hosts resolves to
    127.0.1.1."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not store.check(["first_node"]):
        return
    import psutil

    addresses = node_addresses() or [store.get("first_node").decode()]
    for name, of_interface in psutil.net_if_addrs().items():
        if addresses[0] in [each.address.partition("%")[0] for each in of_interface]:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def first_line(error: Exception) -> str:
    line = str(error).splitlines()[0]
    return f"{line}. {CONNECT_HINT}" if "connectFullMesh" in line else line


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
    return dataclasses.replace(ranks, mesh=mesh, weights_mesh=weights_mesh, cp_group=cp_group)


def close_ranks(ranks: Ranks) -> None:
    if ranks.heartbeat:
        ranks.heartbeat.close()
    if dist.is_initialized():
        barrier(ranks)
        dist.destroy_process_group()


LOST = re.compile(
    r"timed out|timeout|connection (was )?(closed|reset|refused)|broken pipe|aborted", re.IGNORECASE
)


@contextmanager
def explain_timeouts(phase: str, ranks: Ranks, timeout_s: float):
    """Raises RunError, with the phase of the step in it, where another rank did not come in time or
    is gone."""
    try:
        yield
    except RuntimeError as error:
        if ranks.heartbeat is None or not LOST.search(str(error)):
            raise
        rank = os.environ.get("RANK", ranks.rank)  # its number among all
        raise RunError(
            f"rank {rank} waited in the phase {phase!r} for another rank, which is gone or did not "
            "come within "
            f"--timeout_s={timeout_s:g}: {ranks.heartbeat.lost or first_line(error)}"
        ) from error


def all_gather_json(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in the order of ranks. Scalars of numpy and torch become numbers."""
    if ranks.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value, default=float).encode()), dtype=torch.uint8)
    # Not all_gather_into_tensor(), which torch 2.13 warns about, nor what replaces it, which 2.11
    # has not.
    sizes = list(torch.zeros(ranks.size, dtype=torch.int64).split(1))
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


def unsharded(value: torch.Tensor) -> torch.Tensor:
    """The full tensor of a tensor that is split over ranks; other tensors are returned. Every rank
    must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value
