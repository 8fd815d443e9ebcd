"""Joins the ranks of a run: their store, their process groups and the mesh."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist

from rl_core.distributed import Mesh, Ranks, explain_timeouts, on_mesh
from rl_core.engines.addresses import addresses_towards, is_one_node
from rl_core.models.device import this_device
from rl_core.run.process.heartbeat import BEATS, CONNECT_HINT, MAX_BEAT_S, Heartbeat, first_line
from rl_core.types import RunError


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
    with explain_timeouts("start", ranks), connecting(rank, heartbeat, timeout_s):
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
