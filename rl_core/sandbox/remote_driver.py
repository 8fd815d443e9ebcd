"""The interface of drivers for boxes in a cluster or at a sandbox service. docs/remote_boxes.md"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from rl_core.sandbox.box_settings import BoxLimits, Sidecar

T = TypeVar("T")

MAX_LATE_BYTES = 1 << 20  # Of background processes after a command's end.
RETRIED = (408, 429, 500, 502, 503, 504)  # Statuses after which a request is sent again.


@dataclass(kw_only=True, slots=True, frozen=True)
class RemoteSettings:
    """Flags --sandbox.*: the same for all remote boxes of a process."""

    box_driver: str = ""
    max_boxes: int = 256  # The limit of this process; 0 if there are more ranks than boxes.
    idle_s: float = 900.0  # Boxes of a process that was killed end after this time.
    lifetime_s: float = 14_400.0  # Limit of one box.
    kubernetes_namespace: str = ""
    run_file: str = ""  # A file with the run's name in labels of boxes; made with the first box.
    rank: int = 0


FLAGS = [field for field in fields(RemoteSettings) if field.name not in ("run_file", "rank")]


def add_box_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --sandbox.* to a command that has no run."""
    for field in FLAGS:
        parser.add_argument(
            f"--sandbox.{field.name}",
            type=type(field.default),
            default=field.default,
            help="boxes, as of rl-core train",
        )


def box_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of RemoteSettings from the flags of add_box_flags()."""
    return {field.name: getattr(args, f"sandbox.{field.name}") for field in FLAGS}


@dataclass(kw_only=True, slots=True, frozen=True)
class BoxRequest:
    """Settings of one new sandbox."""

    name: str  # Unique; of letters, digits and "-".
    image: str
    limits: BoxLimits
    network: bool
    run: str  # A label: reap() recognises boxes of a killed run by it. May be "".
    idle_s: float
    lifetime_s: float
    sidecars: Sequence[Sidecar] = ()  # Of drivers in box_settings.WITH_SIDECARS.


@dataclass(kw_only=True, slots=True)
class Fault:
    """An error of a service's client."""

    message: str
    status: int = 0  # An HTTP status; 0 if the connection failed.
    retry_after_s: float = 0.0
    was_sent: bool = True  # False if the request certainly did not reach the service.

    @property
    def is_transient(self) -> bool:
        return not self.status or self.status in RETRIED


class RemoteError(OSError):
    """A sandbox service refused a request, or did not answer. The text holds no key."""


class EndUnknown(Exception):
    """The service did not prove how a command ended. The command must not be run again."""


def exit_status(*records: object) -> int:
    """The exit status in the service's records of a command's end. The end of a stream is no
    record, and neither is an output. Raises EndUnknown if there is no record, if one is not an exit
    status, or if two differ."""
    first = records[0] if records else None
    if first is None:
        raise EndUnknown("the connection was cut before the command ended")
    is_one = all(record == first for record in records)
    if is_one and isinstance(first, int) and 0 <= first <= 255:
        return first
    raise EndUnknown(f"the service gave no exit status, but {records}")


@contextmanager
def following(errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Inside, a command runs: an error of the service's client leaves its end unknown."""
    try:
        yield
    except errors as error:
        raise EndUnknown(f"{type(error).__name__}: {error}") from error


class MarkedOutputs:
    """The outputs of a command at a service that does not prove that they are whole: `script`,
    which runs behind the command, prints a mark to each. As a context, raises EndUnknown at its end
    if an output has no mark, and gives the rest of that output.

    Programs can read the mark, and print it: a mark that another one follows is output. Late output
    of background processes is left out, and so is a newline that the service added."""

    def __init__(self, on_output: Callable[[int, bytes], None]):
        mark = secrets.token_hex(16)
        self.script = f"code=$?; printf {mark}; printf {mark} >&2"
        self.mark = mark.encode()
        self.on_output = on_output
        # The bytes from a mark on, or the last ones if a mark may begin there.
        self.held = {1: b"", 2: b""}

    def add(self, stream: int, data: bytes) -> None:
        data = self.held[stream] + data
        start = data.rfind(self.mark)
        if start < 0 or len(data) - start > MAX_LATE_BYTES:
            start = max(0, len(data) - len(self.mark))
            while not self.mark.startswith(data[start:]):
                start += 1
        self.on_output(stream, data[:start])
        self.held[stream] = data[start:]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        cut = [data for data in self.held.items() if not data[1].startswith(self.mark)]
        for stream, data in cut:
            self.on_output(stream, data)
        if cut and kind is None:
            raise EndUnknown("the output was cut before the command ended")


class RemoteSandbox(Protocol):
    """A sandbox of a service. Its methods raise RemoteDriver.errors, and are not retried within."""

    id: str

    async def wait(self) -> None:
        """Returns when commands can run. Raises RemoteError, with the fix, if none ever will."""
        ...

    async def exec(
        self,
        argv: list[str],
        on_output: Callable[[int, bytes], None],
        *,
        timeout_s: float,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        """The result of exit_status(). `on_output` receives (1, stdout) or (2, stderr) as they
        come. `stdin`: None for an empty one; only if the driver has_stdin. Cancelled at the
        deadline `timeout_s`; the caller then ends the processes. Raises EndUnknown for all that
        fails once the command may run."""
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Writes a new file in /tmp."""
        ...

    async def download(self, path: str) -> bytes: ...

    async def renew(self) -> None:
        """Called every idle_s / 3, so that the service does not take an open box as idle."""
        ...

    async def end_reason(self) -> str:
        """The reason why the box has ended; "" if it runs."""
        ...

    async def kill(self) -> None:
        """Removes the box. No error if it is gone already."""
        ...


class RemoteDriver(Protocol):
    """A service. Made as Driver(settings) without a connection; raises RuntimeError, with the fix,
    if a key or another setting is missing."""

    errors: tuple[type[Exception], ...]  # Exceptions that the service's client raises.
    has_stdin: bool  # Commands can be written to as they run, which agents in boxes need.
    # True if processes of the service run in the box under the user of its commands, or shells that
    # mark the end of outputs.
    shares_processes: bool

    def __init__(self, settings: RemoteSettings) -> None: ...

    @property
    def secrets(self) -> tuple[str, ...]:
        """Keys, which errors leave out."""
        ...

    def fault(self, error: Exception) -> Fault:
        """Describes one of `errors`."""
        ...

    async def create(self, request: BoxRequest) -> RemoteSandbox: ...

    async def reap(self, run: str) -> None:
        """Removes boxes that a killed process of this run left behind."""
        ...

    async def close(self) -> None: ...


def read_key(driver: str, *names: str) -> tuple[str, ...]:
    """Values of environment variables. Raises RuntimeError if one is not set."""
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(f"box driver {driver} needs the variable {missing[0]}: set it")
    return tuple(os.environ[name] for name in names)


async def with_stdin(
    running: Coroutine[Any, Any, T],
    stdin: AsyncIterator[bytes],
    send: Callable[[bytes], Awaitable[Any]],
    close: Callable[[], Awaitable[Any]],
) -> T:
    """The result of `running`, which `stdin` is sent to. Raises the error of a failed send."""

    async def feed() -> None:
        async for data in stdin:
            await send(data)
        await close()

    tasks = (asyncio.ensure_future(running), asyncio.ensure_future(feed()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            await tasks[1]
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
