"""Memory of tensors that waits on the host while others have the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Tensors stay the same objects and keep their shapes; their memory goes, so that all that refers to them stays
    right."""

    def __init__(self, device: torch.device):
        self.device = device
        self.waiting: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []  # emptied, its copy on the host

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        assert not self.waiting
        synchronize(self.device)  # FSDP's streams too have ended
        for storage in self.storages(tensors):
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            host = host.untyped_storage()
            host.copy_(storage, non_blocking=True)
            self.waiting.append((storage, host))
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
        self.waiting.clear()

    def storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The memory of all tensors, each once. What is not torch's own to give back (a file's pages) is left out."""
        found = (t.untyped_storage() for t in tensors if t.device.type == self.device.type)
        return list({s.data_ptr(): s for s in found if s.nbytes() and s.resizable()}.values())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
