"""Weights in flat buckets on the device, which SGLang calls the load format flattened_bucket."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing  # It teaches ForkingPickler to share tensors' memory.
from torch import Tensor

from rl_core.types import JSONObject


@dataclass(kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype in contiguous memory, so that each begins at a multiple of its
    itemsize."""

    memory: Tensor  # [bytes] uint8
    dtype: torch.dtype
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # Order in memory.
    num_bytes: int = 0

    def holds(self, num_bytes: int, dtype: torch.dtype) -> bool:
        return dtype == self.dtype and self.num_bytes + num_bytes <= len(self.memory)

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        """Casts and copies in one pass, without a tensor in between."""
        end = self.num_bytes + value.numel() * self.dtype.itemsize
        self.memory[self.num_bytes : end].view(self.dtype).view(value.shape).copy_(value)
        self.shapes[name], self.num_bytes = value.shape, end

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8"""
        return self.memory[: self.num_bytes]

    def blob(self) -> str:
        """A pickle in base64 that leads the server to this memory, once: on a GPU by a handle of
        CUDA IPC, on a CPU by a file descriptor. No value is in it. SimpleNamespace stands for the
        server's own class, so that nothing of SGLang is imported."""
        pieces, start = [], 0
        for name, shape in self.shapes.items():
            size = shape.numel() * self.dtype.itemsize
            piece = {"name": name, "shape": shape, "dtype": self.dtype}
            piece |= {"start_idx": start, "end_idx": start + size, "numel": size}
            pieces.append(SimpleNamespace(**piece))
            start += size
        file = io.BytesIO()
        ForkingPickler(file).dump({"flattened_tensor": self.flat, "metadata": pieces})
        return base64.b64encode(file.getvalue()).decode()

    def facts(self) -> JSONObject:
        """Names, types and shapes that a server needs before it receives the broadcast."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "names": list(self.shapes),
            "dtypes": [dtype] * len(self.shapes),
            "shapes": [list(shape) for shape in self.shapes.values()],
        }


def in_flat_buckets(
    named_weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int,
) -> Iterator[Bucket]:
    """Buckets of at most bucket_bytes, floating-point weights in `dtype`. A larger tensor has
    its own bucket.

    Two buffers alternate, because the server may still copy from a bucket on the device after its
    response. A bucket is valid until the second one after it is drawn."""
    buffers: list[Tensor] = []
    bucket = None
    for name, value in named_weights:
        sent_dtype = dtype if value.is_floating_point() else value.dtype
        size = value.numel() * sent_dtype.itemsize
        if bucket is not None and not bucket.holds(size, sent_dtype):
            yield bucket
            bucket = None
        if bucket is None:
            memory = next_buffer(buffers, max(size, bucket_bytes), device)
            bucket = Bucket(memory=memory, dtype=sent_dtype)
        bucket.add(name, value)
        del value  # Its memory is free before the next one is gathered.
    if bucket is not None:
        yield bucket


def next_buffer(buffers: list[Tensor], num_bytes: int, device: torch.device) -> Tensor:
    """The older of two buffers, or a new one if the size differs."""
    old = buffers.pop(0) if len(buffers) > 1 else None
    if old is None or len(old) != num_bytes:
        del old
        old = torch.empty(0, dtype=torch.uint8, device=device)
        if device.type == "cpu":  # Other processes can read shared memory only.
            old.set_(torch.UntypedStorage._new_shared(num_bytes))
        else:
            old.resize_(num_bytes)
    buffers.append(old)
    return old
