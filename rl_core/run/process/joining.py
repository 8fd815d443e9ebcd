"""Joins the ranks of a run: their store, their process groups and the mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rl_core.distributed import Mesh, Ranks, explain_timeouts, on_mesh
from rl_core.models.device import this_device


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
    return join(rank, size, device, timeout_s, mesh or Mesh(dp_shard=size), groups)


def join(
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    mesh: Mesh,
    groups: Sequence[Sequence[int]],
) -> Ranks:
    """Meets the other ranks and makes the process groups."""
    from rl_core.run.process.heartbeat import Heartbeat
    from rl_core.run.process.meeting import connecting, meet

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
            timeout=timedelta(seconds=timeout_s),
        )
        return on_mesh(ranks, mesh)
