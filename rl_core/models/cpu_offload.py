"""Memory of tensors that waits on the host while others have the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MIN_PIECE_BYTES = 1 << 20


class HostCopies:
    """Tensors stay the same objects and keep their shapes; their memory goes, so that all that
    refers to them stays right. Constant ones keep their copy on the host, and only go and come."""

    def __init__(self, device: torch.device, is_constant: bool = False):
        self.device, self.is_constant = device, is_constant
        # (memory, pieces of its copy on the host); of constant tensors also on the device
        self.waiting: list[tuple[torch.UntypedStorage, list[Tensor]]] = []
        self.depth = 0  # contexts that are open

    @contextmanager
    def on_device(self, tensors: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
        """A context in which the tensors are on the device. Contexts may be nested; the outermost
        one moves the tensors back."""
        if not self.depth:
            self.to_device()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
        if not self.depth:  # Skipped after an error, which ends the run.
            self.to_host(tensors())

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # FSDP's streams too have ended
        if not self.waiting:
            storages = {}
            for tensor in tensors:
                storage = tensor.untyped_storage()
                is_here = tensor.device.type == self.device.type and storage.nbytes() > 0
                # A file's pages are not torch's to give back.
                if is_here and storage.resizable():
                    storages[storage.data_ptr()] = storage
            for storage in storages.values():
                self.waiting.append((storage, [pinned_copy(piece) for piece in pieces(storage)]))
        for storage, _ in self.waiting:
            storage.resize_(0)
        release_cached_memory()

    def to_device(self) -> None:
        for storage, copies in self.waiting:
            storage.resize_(sum(map(len, copies)))
            for piece, host in zip(pieces(storage), copies, strict=True):
                piece.copy_(host)
        if not self.is_constant:
            self.waiting = []


def pieces(storage: torch.UntypedStorage) -> tuple[Tensor, ...]:
    """Consecutive bytes of the storage. Torch rounds pinned memory up to a power of two: a copy
    of the whole, such as an embedding of 0.58 GiB, would take up to twice its bytes."""
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return memory.split(piece_sizes(len(memory)))


def piece_sizes(num_bytes: int) -> list[int]:
    """Powers of two, the largest first, and a rest below MIN_PIECE_BYTES."""
    sizes = []
    while num_bytes >= MIN_PIECE_BYTES:
        sizes.append(1 << num_bytes.bit_length() - 1)
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes


def pinned_copy(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value)


def release_cached_memory() -> None:
    """Torch keeps memory that its tensors have left. Call this before another process gets the
    device."""
    torch.cuda.empty_cache()  # does nothing where there is no GPU
