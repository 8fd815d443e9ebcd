"""Ranks, and what they tell each other. Values travel as JSON and plain tensors, never pickled.

With one rank every function here is the identity, and mostly no process group exists.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(kw_only=True, slots=True)
class Ranks:
    rank: int
    size: int
    device: torch.device  # of this rank's model
    store: dist.Store | None  # shared by all ranks; None with one

    def counter(self, name: str):
        """Draws 0, 1, 2 ... shared by all ranks: each number goes to exactly one of them."""
        if self.store is None:
            return itertools.count()
        return (self.store.add(f"counter/{name}", 1) - 1 for _ in itertools.count())


def init_ranks(timeout_s: float, is_sharded: bool = False) -> Ranks:
    """This process's place, from the variables that torchrun sets; starts the process group if there are several, or if
    one alone is to hold its weights as shards, which is what mixed precision asks for."""
    size, rank, local = (int(os.environ.get(k, d)) for k, d in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    if size == 1 and not is_sharded:
        return Ranks(rank=0, size=1, device=device, store=None)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if size == 1:
        store = dist.HashStore()
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend, store=dist.PrefixStore("groups", store), rank=rank, world_size=size, timeout=timeout
    )
    return Ranks(rank=rank, size=size, device=device, store=dist.PrefixStore("rl_core", store))


def close_ranks(ranks: Ranks) -> None:
    if ranks.store is not None:
        dist.barrier()
        dist.destroy_process_group()


def all_gather_json(value: Any, ranks: Ranks) -> list[Any]:
    """Every rank's value, in the order of ranks."""
    if ranks.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.size)]
    dist.all_gather(sizes, torch.tensor([data.numel()]))
    longest = int(max(sizes))
    padded = torch.nn.functional.pad(data, (0, longest - data.numel()))
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks.size)]
    dist.all_gather(gathered, padded)
    return [json.loads(g[: int(n)].numpy().tobytes()) for g, n in zip(gathered, sizes, strict=True)]


def exchange(outgoing: list[torch.Tensor], incoming_sizes: list[int], ranks: Ranks) -> list[torch.Tensor]:
    """What every rank sent to this one. outgoing[r]: 1-D float64 tensor on the host for rank r; incoming_sizes[r]: how
    many numbers rank r sends here. All sends and receives run at once; nothing passes through a third rank."""
    incoming = [torch.empty(n, dtype=torch.float64) for n in incoming_sizes]
    incoming[ranks.rank] = outgoing[ranks.rank]
    others = [r for r in range(ranks.size) if r != ranks.rank]
    operations = [dist.P2POp(dist.isend, outgoing[r], r) for r in others if outgoing[r].numel()]
    operations += [dist.P2POp(dist.irecv, incoming[r], r) for r in others if incoming[r].numel()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return incoming
