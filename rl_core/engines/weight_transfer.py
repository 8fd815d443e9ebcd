"""Weight transfer from a learner to an engine's server: by files in host memory, by device memory,
or by a broadcast."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

from rl_core.engines.addresses import addresses_towards
from rl_core.engines.buckets import Bucket, in_flat_buckets
from rl_core.engines.remote import in_buckets
from rl_core.engines.server_process import numbers
from rl_core.engines.sglang_cuda import unshared_memory
from rl_core.engines.sglang_versions import HAS_SESSIONS
from rl_core.engines.weights import on_host
from rl_core.models.weight_gathering import exhaust
from rl_core.sampling.engine import RESENT_BY_RANKS, EngineSpec, NamedWeights, ServerSpec
from rl_core.scratch import remove_orphans, scratch_prefix
from rl_core.types import JSONObject, RunError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

T = TypeVar("T")
Ask = Callable[[str, JSONObject | None], Awaitable[JSONObject]]


def choose_transfer(spec: EngineSpec) -> str:
    """A key of TRANSFERS. "auto" gives "device" on a GPU if the server can map its memory and gets
    weights that it lost again, otherwise "files"."""
    if spec.server.weight_sync != "auto":
        return spec.server.weight_sync
    if spec.resend is None or spec.device.type == "cpu" or spec.server.url:
        return "files"
    if unshared_memory(os.environ):
        return "files"
    return "device"


def described_transfer(spec: EngineSpec) -> str:
    """The key in TRANSFERS, with the reason if "files" takes host memory that another transfer
    would not."""
    name = choose_transfer(spec)
    if spec.server.weight_sync != "auto" or name != "files" or spec.device.type == "cpu":
        return name
    if spec.server.url:
        return "files (--weight_sync broadcast for a server on separate GPUs)"
    if spec.resend is None:
        return "files (its learners could not send them again to a server that died)"
    return f"files ({unshared_memory(os.environ)}; unset it for device)"


def keeps_backup(spec: EngineSpec) -> bool:
    """True if the run's own server keeps its weights on the host while it sleeps. Otherwise the
    learner sends them when it wakes."""
    return choose_transfer(spec) == "files" or spec.resend is None or bool(spec.adapters)


class Transfer(Protocol):
    """Sends a learner's weights to a server."""

    is_atomic: bool  # True if the server loads all weights or none.
    num_bytes: int  # Bytes sent.
    files: WeightFiles  # Files of adapters.

    def __init__(self, spec: EngineSpec, ask: Ask): ...

    @property
    def label(self) -> str:
        """Label of the newest weights on the server, or "" for the weights of its model."""
        ...

    @property
    def has_weights(self) -> bool:
        """False if load() needs another take() first."""
        ...

    def take(self, named_weights: NamedWeights) -> None: ...
    async def load(self) -> None: ...
    def drop(self) -> None: ...
    def close(self) -> None: ...


class FilesTransfer:
    """Safetensors in memory, which /update_weights_from_disk reads. They are kept until the next
    update, for a restart of the server."""

    is_atomic = True  # The server loads all weights or none.

    def __init__(self, spec: EngineSpec, ask: Ask):
        self.spec, self.ask, self.files = spec, ask, WeightFiles(spec.server)
        self.folder: Path | None = None
        self.num_bytes = 0  # Bytes sent.

    @property
    def label(self) -> str:
        """Label of the newest weights on the server; "" for those of its model."""
        return self.folder.name if self.folder else ""

    @property
    def has_weights(self) -> bool:
        """False if load() needs another take() first."""
        return True

    def take(self, named_weights: NamedWeights) -> None:
        """Prepares the weights for load(). Every rank exhausts them."""
        if self.folder:
            self.files.remove(self.folder)
        buckets = enumerate(in_buckets(on_host(named_weights, self.spec.dtype)))
        self.folder = self.files.write(
            (f"{n:05d}.safetensors", safetensors.torch.save(bucket)) for n, bucket in buckets
        )

    async def load(self) -> None:
        """Loads the newest weights into the server."""
        folder = self.folder
        assert folder is not None, "take() comes first"
        body = {"model_path": str(folder), "load_format": "safetensors"}
        # SGLang returns the label with each completion.
        body |= {"flush_cache": False, "weight_version": self.label}
        await self.ask("update_weights_from_disk", body)
        self.num_bytes += sum(file.stat().st_size for file in folder.iterdir())

    def drop(self) -> None:
        """Called after load(), even if it failed."""

    def close(self) -> None:
        self.files.close()


class BucketsTransfer:
    """Buckets on the device. The server reads a bucket before the second one after it is made. No
    copy is kept: the learner sends weights again to a server that restarts or wakes up."""

    is_atomic = False

    def __init__(self, spec: EngineSpec, ask: Ask):
        self.spec, self.ask, self.label = spec, ask, ""
        self.num_bytes = 0  # Bytes sent.
        self.version = ""  # Of the server that loaded the last weights.
        self.files = WeightFiles(spec.server)  # Adapters.
        self.coming: Iterator[tuple[str, Tensor]] | None = None
        sizes = (p.numel() * spec.dtype.itemsize for p in spec.module.state_dict().values())
        self.bucket_bytes = min(spec.server.bucket_bytes, max(1, sum(sizes)))

    @property
    def has_weights(self) -> bool:
        is_here = self.coming is not None or not self.label
        return is_here or self.spec.resend != RESENT_BY_RANKS

    def take(self, named_weights: NamedWeights) -> None:
        self.label, self.coming = uuid.uuid4().hex, iter(named_weights)

    async def load(self) -> None:
        """Sends the newest weights. Raises RunError if no learner can send them again."""
        if not self.label:
            await self.ask("update_weights_from_disk", {"model_path": self.spec.model})
            return
        weights, self.coming = self.coming or self.again(), None
        try:
            await self.send(weights)
        except BaseException:
            self.version = ""  # The next server may be another one.
            raise
        finally:
            exhaust(weights)  # Gathering is a collective.

    def again(self) -> Iterator[tuple[str, Tensor]]:
        if not callable(self.spec.resend):
            raise RunError(
                f"the server of engine {self.spec.name} died, and nobody can send its weights "
                f"again: --weight_sync={self.spec.server.weight_sync} keeps no copy. Continue with "
                "--resume; --weight_sync files keeps a copy"
            )
        return iter(self.spec.resend())

    async def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        has_session = await self.has_sessions()
        if has_session:
            await self.ask("begin_weight_update", {})
        spec, body = self.spec, {"load_format": "flattened_bucket", "flush_cache": False}
        body["weight_version"] = self.label
        for bucket in in_flat_buckets(weights, spec.dtype, spec.device, self.bucket_bytes):
            if spec.device.type == "cuda":
                torch.cuda.synchronize(spec.device)  # Another process reads the bucket.
            await self.send_bucket(bucket, body)
            self.num_bytes += bucket.num_bytes
        if has_session:
            await self.ask("end_weight_update", {})

    async def has_sessions(self) -> bool:
        """Asks for the server's version once, because the answer takes longer than a bucket."""
        self.version = self.version or (await self.ask("server_info", None))["version"]
        return numbers(self.version) >= HAS_SESSIONS

    async def send_bucket(self, bucket: Bucket, body: JSONObject) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        exhaust(self.coming or ())
        self.coming = None

    def close(self) -> None:
        self.files.close()


class DeviceTransfer(BucketsTransfer):
    """The run's own server maps the bucket's memory: CUDA IPC, or shared memory on a CPU."""

    async def send_bucket(self, bucket: Bucket, body: JSONObject) -> None:
        # Each rank of the server opens a separate handle: handles are counted.
        blobs = [bucket.blob() for _ in range(self.spec.server.tp)]
        await self.ask("update_weights_from_tensor", body | {"serialized_named_tensors": blobs})


async def both(sending: Awaitable[T], asking: Awaitable[JSONObject]) -> T:
    """The result of `sending`, once both have ended. Raises the server's error at once, without
    waiting for the broadcast, which would end at its deadline."""
    tasks = [asyncio.ensure_future(sending), asyncio.ensure_future(asking)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if tasks[1].done():
            tasks[1].result()
        return tasks[0].result()
    finally:
        for task in tasks:  # Nobody awaits the other one any more.
            task.cancel()


class BroadcastTransfer(BucketsTransfer):
    """A process group of this rank and the server's ranks: NCCL, or gloo on CPUs. For a server on
    other devices; NCCL refuses two ranks on one GPU."""

    def __init__(self, spec: EngineSpec, ask: Ask):
        super().__init__(spec, ask)
        self.group: dist.ProcessGroup | None = None
        self.group_name = ""

    async def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Sends in a new process group if the previous broadcast was interrupted."""
        try:
            if self.group is None:
                await self.join()
            await super().send(weights)
        except BaseException:
            self.group = None
            raise

    async def join(self) -> None:
        """Makes a process group with the server's ranks, which connect to a store of this
        process."""
        spec, timeout = self.spec, timedelta(seconds=self.spec.start_timeout_s)
        size = 1 + await self.num_ranks()
        parts = urlsplit(spec.server.url)
        assert parts.hostname
        host, _ = addresses_towards(parts.hostname, parts.port or 80)
        store = dist.TCPStore(host, 0, size, True, timeout, wait_for_workers=False)
        self.group_name = f"rl_core_{uuid.uuid4().hex}"
        backend = "nccl" if spec.device.type == "cuda" else "gloo"
        body = {"master_address": host, "master_port": store.port, "rank_offset": 1}
        body |= {"world_size": size, "group_name": self.group_name, "backend": backend}
        joining = asyncio.to_thread(
            _new_process_group_helper,
            size,
            0,
            [],
            Backend(backend),
            dist.PrefixStore(self.group_name, store),
            group_name=cast("GroupName", self.group_name),
            timeout=timeout,
        )
        group, _ = await both(joining, self.ask_to_join(body))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group

    async def num_ranks(self) -> int:
        """Number of the server's ranks."""
        return (await self.ask("server_info", None))["tp_size"]

    async def ask_to_join(self, body: JSONObject) -> JSONObject:
        return await self.ask("init_weights_update_group", body)

    async def ask_to_receive(self, bucket: Bucket, body: JSONObject) -> JSONObject:
        body = body | bucket.facts() | {"group_name": self.group_name}
        return await self.ask("update_weights_from_distributed", body)

    async def send_bucket(self, bucket: Bucket, body: JSONObject) -> None:
        sending = asyncio.to_thread(self.broadcast, bucket.flat)
        await both(sending, self.ask_to_receive(bucket, body))

    def broadcast(self, flat: Tensor) -> None:
        if flat.device.type == "cuda":
            torch.cuda.set_device(flat.device)  # Each thread has its own.
        assert self.group is not None
        self.group.broadcast(flat, 0).wait()


TRANSFERS = {"files": FilesTransfer, "device": DeviceTransfer, "broadcast": BroadcastTransfer}


class WeightFiles:
    """Folders that the server reads. For the run's own server each file is a link to memory of this
    process, which the system frees when the process ends. Another server may not see these links:
    it reads files in the spec's folder or /dev/shm."""

    def __init__(self, spec: ServerSpec):
        remove_orphans("/dev/shm", *filter(None, [spec.folder]))
        parent = spec.folder
        if parent is None and spec.url and os.access("/dev/shm", os.W_OK):
            parent = "/dev/shm"
        self.home = tempfile.TemporaryDirectory(prefix=scratch_prefix("weights"), dir=parent)
        self.are_links = not spec.url

    def write(self, files: Iterable[tuple[str, bytes]], prefix: str = "") -> Path:
        """A new folder with these files and a unique name."""
        folder = Path(self.home.name) / f"{prefix}{uuid.uuid4().hex}"
        folder.mkdir()
        for name, data in files:
            if self.are_links:
                (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}")
            (folder / name).write_bytes(data)
        return folder

    def remove(self, folder: Path) -> None:
        for file in folder.glob("*") if self.are_links else ():
            os.close(int(file.readlink().name))
        # The folder is missing if the weights of an update did not fit.
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for folder in Path(self.home.name).glob("*"):
            self.remove(folder)
        self.home.cleanup()
