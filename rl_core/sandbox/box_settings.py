"""Settings and results of boxes, the same for every driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WITH_SIDECARS = ("docker", "podman", "kubernetes")  # Drivers of boxes with services.
COMPLETED = "service_completed_successfully"  # The condition of a service that ends before others.
MAX_FILE_BYTES = 64 << 20  # The limit of one file that is put or got.


class BoxEnded(RuntimeError):
    """The box is gone: closed, or its first process was killed from outside."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BoxLimits:
    """Limits of one box. docs/sandbox.md lists those that each driver enforces."""

    memory_mib: int = 2048
    processes: int = 256
    disk_mib: int = 1024
    cpus: float = 0.0  # 0: all


@dataclass(kw_only=True, slots=True, frozen=True)
class Root:
    """A root folder made of layers, as images are.

    Example: Root(layers=("/cache/task", "/cache/debian"), protected=("/usr", "/opt/venv"))
    """

    layers: tuple[str, ...]  # folders of the host, the topmost first
    protected: tuple[str, ...] = ()  # read-only folders
    workdir: str = ""  # writable though in a protected folder


@dataclass(kw_only=True, slots=True)
class HealthCheck:
    """A command that succeeds once a box or a service is ready. A text is for the shell."""

    command: str | list[str]
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0  # Failures before this time are not counted.
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(kw_only=True, slots=True)
class Sidecar:
    """A service next to a box: a container that shares the box's network.

    Example: Sidecar(name="db", image="postgres:16", environ={"POSTGRES_PASSWORD": "x"})
    """

    name: str
    image: str
    host_names: list[str] = field(default_factory=list)  # Names of 127.0.0.1 in the box.
    entrypoint: list[str] | None = None  # None: the image's.
    command: list[str] = field(default_factory=list)  # Empty: the image's.
    environ: dict[str, str] = field(default_factory=dict)
    binds: dict[str, str] = field(default_factory=dict)  # Path inside -> path of the host.
    tmpfs: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)  # Paths of volumes that no other shares.
    user: str = ""
    workdir: str = ""
    check: HealthCheck | None = None
    # Name of a service that is ready before -> its condition, as in a compose file.
    waits_for: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True, frozen=True)
class BoxSettings:
    driver: str
    image: str = ""
    limits: BoxLimits = BoxLimits()
    network: bool = False
    # (path inside, path of the host, with ":rw" at its end where it may be written)
    binds: tuple[tuple[str, str], ...] = ()
    # Bubblewrap only: the box's root folder instead of this machine's system.
    root: Root | None = None
    sidecars: Sequence[Sidecar] = ()  # In the order of their start.


@dataclass(kw_only=True, slots=True)
class ExecResult:
    """The result of a command. `code`: 128 + its number if a signal ended it, as shells say."""

    code: int
    stdout: str
    stderr: str
    timed_out: bool = False


class Box(Protocol):
    """A private set of files and processes."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: str = "",
        environ: dict[str, str] | None = None,
        cwd: str = "",
    ) -> ExecResult: ...

    async def put(self, path: str, data: bytes | str | Path) -> None: ...

    async def get(self, path: str) -> bytes: ...

    async def end_processes(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class Upload:
    """Files on their way into a box."""

    files: list[tuple[str, int, bytes]] = field(default_factory=list)  # path, mode, data
    folders: list[str] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)  # path, target


def make_upload(path: str, data: bytes | str | Path) -> Upload:
    """Links of a folder stay links: nothing outside the folder is read. Raises FileNotFoundError
    and ValueError."""
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes):
        return Upload(files=[(path, 0o644, checked(path, data))])
    if not data.is_dir():
        return Upload(files=[(path, mode_of(data), checked(path, data.read_bytes()))])
    upload = Upload(folders=[path])
    for file in sorted(data.rglob("*")):
        target = os.path.join(path, file.relative_to(data))
        if file.is_symlink():
            upload.links.append((target, os.readlink(file)))
        elif file.is_dir():
            upload.folders.append(target)
        elif file.is_file():
            upload.files.append((target, mode_of(file), checked(target, file.read_bytes())))
    return upload


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o777


def checked(path: str, data: bytes) -> bytes:
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {len(data)} bytes; a file put into a box has at most 64 MiB")
    return data
