"""What ranks that learn and ranks that only sample tell each other: words and finished groups by the store of the process
group, weights in buckets by a group of the first learner and all that sample. Nothing is pickled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rl_core.types import RunError

BUCKET_BYTES = 512 << 20
HANDED = "link/handed"  # counter of groups
CHUNK = 1 << 18  # words of a bucket that are weighed at once, in the cache of a processor


@dataclass(kw_only=True, slots=True)
class Link:
    store: dist.Store
    group: dist.ProcessGroup | None  # rank 0 is the first learner; None on the other learners
    rank: int  # torchrun's
    num_engines: int
    is_engine: bool  # this rank only samples
    device: torch.device  # on which weights travel
    timeout_s: float
    num_words: int = 0  # that this rank said or heard

    def say(self, word: dict[str, Any]) -> None:
        """The first learner's next word, which every rank that samples hears."""
        self.store.set(f"link/word/{self.num_words}", json.dumps(word))
        self.num_words += 1

    def hear(self) -> dict[str, Any] | None:
        """The next word, if it was said already."""
        key = f"link/word/{self.num_words}"
        if not self.store.check([key]):
            return None
        self.num_words += 1
        return json.loads(self.store.get(key))

    def hand(self, header: dict[str, Any], payload: bytes) -> None:
        """Gives a finished group to whoever learns from it."""
        index = self.store.add(HANDED, 1) - 1
        self.store.set(f"link/payload/{index}", payload)
        self.store.set(f"link/header/{index}", json.dumps(header))

    def headers(self, begin: int) -> list[dict[str, Any]]:
        """Of the groups handed from number `begin` on."""
        end = self.store.add(HANDED, 0)
        return [json.loads(self.store.get(f"link/header/{i}")) for i in range(begin, end)]

    def payload(self, index: int) -> bytes:
        """Of a group, which is then forgotten."""
        found = bytes(self.store.get(f"link/payload/{index}"))
        self.forget(index)
        return found

    def forget(self, index: int) -> None:
        for kind in ("payload", "header"):
            self.store.delete_key(f"link/{kind}/{index}")

    def answer(self, name: str, rank: int, value: Any) -> None:
        self.store.set(f"link/answer/{name}/{rank}", json.dumps(value))

    def answers(self, name: str) -> list[Any]:
        """What each rank that samples answered. Raises RunError if one has not within timeout_s seconds."""
        keys, until = (
            [f"link/answer/{name}/{rank}" for rank in range(self.num_engines)],
            time.monotonic() + self.timeout_s,
        )
        while not self.store.check(keys):
            if time.monotonic() > until:
                raise RunError(
                    f"a rank of --engine_ranks={self.num_engines} did not answer {name!r} within "
                    f"--timeout_s={self.timeout_s:g}"
                )
            time.sleep(0.01)
        keys = self.answer_keys(name)
        found = [json.loads(self.store.get(key)) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return found

    def has_answers(self, name: str) -> bool:
        return self.store.check(self.answer_keys(name))

    def answer_keys(self, name: str) -> list[str]:
        return [f"link/answer/{name}/{rank}" for rank in range(self.num_engines)]

    def send_weights(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """(name, full tensor) pairs, in `dtype`. Every learner must call it: all gather, the first one sends."""
        for bucket in in_buckets((name, value.to(dtype) if self.group else value) for name, value in weights):
            if self.group is not None:
                shapes = [[name, list(value.shape)] for name, value in bucket.items()]
                flat = torch.cat([value.reshape(-1) for value in bucket.values()]).to(self.device)
                facts = [str(dtype).removeprefix("torch."), shapes, checksum(flat)]
                self.broadcast(json.dumps(facts).encode())
                self.wait(flat)
        if self.group is not None:
            self.broadcast(b"[]")

    def receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Raises RunError at a bucket that is not what was sent."""
        number = 0
        while facts := json.loads(self.broadcast(None)):
            dtype, shapes, sent = facts
            sizes = [torch.Size(shape).numel() for _, shape in shapes]
            flat = self.wait(torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device))
            if (found := checksum(flat)) != sent:
                raise RunError(
                    f"rank {self.rank} received other weights than were sent to it: bucket {number}, from {shapes[0][0]} to "
                    f"{shapes[-1][0]}, has checksum {found:016x} instead of {sent:016x}; look at the network and the memory "
                    "between it and rank 0, and go on with --resume"
                )
            for (name, shape), part in zip(shapes, flat.split(sizes), strict=True):
                yield name, part.view(shape)
            number += 1

    def broadcast(self, data: bytes | None) -> bytes:
        """The first learner's bytes; None where they are received."""
        size = self.wait(torch.tensor([len(data or b"")], device=self.device))
        content = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8)
        return self.wait(content.to(self.device)).cpu().numpy().tobytes()

    def wait(self, tensor: Tensor) -> Tensor:
        self.group.broadcast(tensor, 0).wait()
        return tensor


def make_link(
    store: dist.Store, rank: int, size: int, num_engines: int, device: torch.device, timeout_s: float
) -> Link:
    """Of `size` ranks the last `num_engines` sample. Every rank must call it."""
    is_engine, group = rank >= size - num_engines, None
    if is_engine or rank == 0:
        place = rank - (size - num_engines) + 1 if is_engine else 0
        weights, timeout = dist.PrefixStore("weights", store), timedelta(seconds=timeout_s)
        if device.type == "cuda":
            group = dist.ProcessGroupNCCL(weights, place, num_engines + 1, dist.ProcessGroupNCCL.Options())
        else:
            group = dist.ProcessGroupGloo(weights, place, num_engines + 1, timeout)
    who = {"rank": rank, "num_engines": num_engines, "is_engine": is_engine}
    return Link(store=store, group=group, device=device, timeout_s=timeout_s, **who)


def in_buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Parts of at most BUCKET_BYTES, but for a larger tensor alone."""
    bucket, size = {}, 0
    for name, value in weights:
        if bucket and size + value.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = value
        size += value.nbytes
    if bucket:
        yield bucket


def checksum(flat: Tensor) -> int:
    """Of a tensor's bits, the same on every device: the sum, mod 2^64, of its words of 32 bits, each times an odd number that
    belongs to its place. One word that changes always gives another sum; so do parts that change places, nearly always."""
    whole = flat.reshape(-1).view(torch.uint8)
    end = whole.numel() // 4 * 4
    parts = [*whole[:end].view(torch.int32).split(CHUNK)]
    if end < whole.numel():
        parts.append(pad(whole[end:], (0, 4 - (whole.numel() - end))).view(torch.int32))
    # Mixed as splitmix64 does it: sums of a plain 1, 3, 5 ... are alike where numbers are regular.
    places = torch.arange(max(map(len, parts), default=0), device=flat.device) * 0x1E3779B97F4A7C15
    places = (places ^ (places >> 29)) * 0x3F58476D1CE4E5B9
    places = (places ^ (places >> 32)) | 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in parts:
        total = total * 1_000_003 + (part * places[: len(part)]).sum()
    return int(total) % 2**64
