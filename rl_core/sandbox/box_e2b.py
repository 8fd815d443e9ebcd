"""Boxes at E2B, by its SDK. docs/remote_boxes.md

An image of a registry becomes a template on first use; a name without ":" and "/" is a template.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
from connectrpc.errors import ConnectError
from e2b import (
    AsyncCommandHandle,
    AsyncSandbox,
    AsyncTemplate,
    AuthenticationException,
    BuildException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    SandboxLifecycle,
    SandboxNotFoundException,
    SandboxQuery,
    Template,
)
from e2b.envd.process.process_pb import ProcessEvent
from e2b.exceptions import SandboxNotRunningException, ServiceBusyException

from rl_core.sandbox.remote_driver import (
    BoxRequest,
    Fault,
    RemoteSettings,
    exit_status,
    following,
    read_key,
    with_stdin,
)

EndEvent = ProcessEvent.EndEvent
TRANSFER_S = 110.0  # The caller gives up after two minutes.
RUN = "rl_core_run"  # Metadata of a sandbox.
CPUS = 2  # E2B's default, for limits without `cpus`.
USER = "root"  # Containers run as root too.
SIGNALLED = "signal: "  # Before the name of the signal that ended a command.
# Name -> number.
SIGNALS = {(signal.strsignal(number) or "").lower(): number for number in signal.valid_signals()}
STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (RateLimitException, 429),
    (ServiceBusyException, 503),
    (AuthenticationException, 401),
    (SandboxNotRunningException, 410),
    (NotFoundException, 404),
    (InvalidArgumentException, 400),
    (BuildException, 400),
    (ValueError, 502),
)


class E2BDriver:
    errors: tuple[type[Exception], ...] = (
        SandboxException,
        AuthenticationException,
        ServiceBusyException,
        BuildException,
        ConnectError,
        httpx.HTTPError,
        OSError,
        ValueError,  # An answer that is not the service's.
        StopAsyncIteration,  # A command's stream without an event.
    )
    has_stdin = True
    shares_processes = True

    def __init__(self, settings: RemoteSettings):
        self.secrets = read_key("e2b", "E2B_API_KEY")
        self.builds: dict[str, asyncio.Future[None]] = {}

    def fault(self, error: Exception) -> Fault:
        status = getattr(error, "status_code", None) or 0
        for kind, number in STATUSES:
            if isinstance(error, kind):
                status = number
        causes = [error, error.__cause__, getattr(error.__cause__, "__cause__", None)]
        # The SDK's transport raises ConnectionError only before it has sent a request.
        is_unsent = any(isinstance(e, (ConnectionError, httpx.ConnectError)) for e in causes)
        fix = "; check E2B_API_KEY" if status == 401 else ""
        return Fault(message=f"{error}{fix}", status=status, was_sent=not is_unsent)

    async def create(self, request: BoxRequest) -> E2BSandbox:
        end = time.monotonic() + request.lifetime_s
        sandbox = await AsyncSandbox.create(
            await self.template(request),
            timeout=round(min(request.idle_s, request.lifetime_s)),
            metadata={RUN: request.run} if request.run else None,
            allow_internet_access=request.network,
            lifecycle=SandboxLifecycle(on_timeout="kill"),
            idempotency_key=request.name,
        )
        return E2BSandbox(sandbox, request.idle_s, end)

    async def template(self, request: BoxRequest) -> str | None:
        """The template's name; None for E2B's default. Builds one of an image, once."""
        image = request.image
        if not re.search("[:/]", image):
            return image or None
        cpus = max(1, round(request.limits.cpus)) if request.limits.cpus else CPUS
        memory_mib = request.limits.memory_mib + request.limits.memory_mib % 2
        digest = zlib.crc32(f"{image} {cpus} {memory_mib}".encode())
        name = f"rl-core-{re.sub('[^a-z0-9]+', '-', image.lower())}-{digest:08x}"
        if name not in self.builds or failed(self.builds[name]):
            self.builds[name] = asyncio.ensure_future(build(name, image, cpus, memory_mib))
        await asyncio.shield(self.builds[name])
        return name

    async def reap(self, run: str) -> None:
        pages = AsyncSandbox.list(SandboxQuery(metadata={RUN: run}))
        while pages.has_next:
            for info in await pages.next_items():
                await AsyncSandbox.kill(info.sandbox_id)

    async def close(self) -> None:
        pass


class E2BSandbox:
    def __init__(self, sandbox: AsyncSandbox, idle_s: float, end: float):
        self.sandbox = sandbox
        self.id = sandbox.sandbox_id
        self.idle_s = idle_s
        self.end = end  # The end of its lifetime by the monotonic clock.

    async def wait(self) -> None:
        pass  # The service answers when it runs.

    async def exec(
        self,
        argv: list[str],
        on_output: Callable[[int, bytes], None],
        *,
        timeout_s: float,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        handle = await self.sandbox.commands.run(
            f"exec {shlex.join(argv)}",
            background=True,
            user=USER,
            stdin=stdin is not None,
            on_stdout=lambda text: on_output(1, text.encode()),
            on_stderr=lambda text: on_output(2, text.encode()),
            timeout=timeout_s + TRANSFER_S,  # The caller's deadline comes first.
            retain_output=False,
        )
        # The SDK leaves out the fields that prove an end. It begins to read when this task waits.
        ends: list[EndEvent] = []
        handle._events = noting_ends(handle._events, ends)
        try:
            with following(E2BDriver.errors):
                if stdin is None:
                    await wait(handle)
                else:
                    await with_stdin(wait(handle), stdin, handle.send_stdin, handle.close_stdin)
        finally:
            await handle.disconnect()
        return exit_status(*map(status_of, ends))

    async def upload(self, path: str, data: bytes) -> None:
        await self.sandbox.files.write(path, data, user=USER, request_timeout=TRANSFER_S)

    async def download(self, path: str) -> bytes:
        files = self.sandbox.files
        return bytes(await files.read(path, "bytes", user=USER, request_timeout=TRANSFER_S))

    async def renew(self) -> None:
        left_s = self.end - time.monotonic()
        await self.sandbox.set_timeout(max(1, round(min(self.idle_s, left_s))))

    async def end_reason(self) -> str:
        try:
            info = await self.sandbox.get_info()
        except SandboxNotFoundException:
            return "E2B has no such sandbox: it was killed, or its time was over"
        return "" if info.state.value == "running" else f"its state is {info.state.value}"

    async def kill(self) -> None:
        await self.sandbox.kill()


async def wait(handle: AsyncCommandHandle[Any]) -> None:
    """Returns when the events of a command have ended."""
    try:
        await handle.wait()
    except CommandExitException:
        pass
    except Exception as error:
        if type(error) is not Exception:  # The SDK's, if there was no end.
            raise


async def noting_ends(events: AsyncGenerator[Any], ends: list[EndEvent]) -> AsyncGenerator[Any]:
    """The same events of a command. Those of its end are added to `ends`."""
    try:
        async for event in events:
            content = event.event and event.event.event
            if content and content.field == "end":
                ends.append(content.value)
            yield event
    finally:
        await events.aclose()


def status_of(end: EndEvent) -> object:
    """The record of a command's end."""
    text = end.error or end.status
    if not end.exited and text.startswith(SIGNALLED):
        return 128 + SIGNALS.get(text.removeprefix(SIGNALLED), signal.SIGKILL)
    return end.exit_code if end.exited else str(end)


def failed(build: asyncio.Future[None]) -> bool:
    return build.done() and (build.cancelled() or build.exception() is not None)


async def build(name: str, image: str, cpus: int, memory_mib: int) -> None:
    if not await AsyncTemplate.exists(name):
        template = Template().from_image(image)
        await AsyncTemplate.build(template, name, cpu_count=cpus, memory_mb=memory_mib)
