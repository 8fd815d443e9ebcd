"""The meeting of all ranks: each is there, has its own GPU, and connects by an address that the
others reach."""

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

from rl_core.engines.addresses import addresses_towards, is_one_node
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
