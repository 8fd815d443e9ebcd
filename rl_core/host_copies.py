"""Memory of tensors that waits on the host while others have the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Tensors stay the same objects and keep their shapes; their memory goes, so that all that refers to them stays
    right. Constant ones keep their copy on the host, and only go and come."""

    def __init__(self, device: torch.device, is_constant: bool = False):
        self.device, self.is_constant = device, is_constant
        # (memory, its copy on the host); of constant tensors also while they are on the device
        self.waiting: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        synchronize(self.device)  # FSDP's streams too have ended
        self.waiting = self.waiting or [(storage, self.copied(storage)) for storage in self.storages(tensors)]
        synchronize(self.device)
        for storage, _ in self.waiting:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # who comes next may be another process

    def to_device(self) -> None:
        for storage, host in self.waiting:
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        synchronize(self.device)
        self.waiting = self.waiting if self.is_constant else []

    def copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda").untyped_storage()
        return host.copy_(storage, non_blocking=True)

    def storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The memory of all tensors, each once. A file's pages are left out: they are not torch's to give back."""
        found = (t.untyped_storage() for t in tensors if t.device.type == self.device.type)
        return list({s.data_ptr(): s for s in found if s.nbytes() and s.resizable()}.values())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
