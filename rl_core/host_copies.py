"""Memory of tensors that waits on the host while others have the device."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Tensors stay the same objects and keep their shapes; their memory goes, so that all that
    refers to them stays right. Constant ones keep their copy on the host, and only go and come."""

    def __init__(self, device: torch.device, is_constant: bool = False):
        self.device, self.is_constant = device, is_constant
        # (memory, its copy on the host); of constant tensors also while they are on the device
        self.waiting: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        synchronize(self.device)  # FSDP's streams too have ended
        self.waiting = self.waiting or [
            (storage, self.copied(storage)) for storage in self.storages(tensors)
        ]
        synchronize(self.device)
        for storage, _ in self.waiting:
            storage.resize_(0)
        release_cached_memory()

    def to_device(self) -> None:
        for storage, host in self.waiting:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        synchronize(self.device)
        self.waiting = self.waiting if self.is_constant else []

    def copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        ).untyped_storage()
        return host.copy_(storage, non_blocking=True)

    def storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The memory of all tensors, each once. A file's pages are left out: they are not torch's
        to give back."""
        found = (t.untyped_storage() for t in tensors if t.device.type == self.device.type)
        return list({s.data_ptr(): s for s in found if s.nbytes() and s.resizable()}.values())


def release_cached_memory() -> None:
    """Torch keeps memory that its tensors have left. Call this before another process gets the
    device."""
    torch.cuda.empty_cache()  # does nothing where there is no GPU


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, or this rank's even share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
