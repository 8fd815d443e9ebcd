"""Boxes at Modal, by its SDK. docs/remote_boxes.md"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import modal
from modal.exception import (
    AlreadyExistsError,
    AuthError,
    ConflictError,
    ConnectionError,
    Error,
    NotFoundError,
    ResourceExhaustedError,
    ServiceError,
    TimeoutError,
)

from rl_core.errors import keep_ends
from rl_core.sandbox.remote_driver import (
    BoxRequest,
    Fault,
    MarkedOutputs,
    RemoteError,
    RemoteSettings,
    exit_status,
    following,
    read_key,
    with_stdin,
)

logging.getLogger("hpack").setLevel(logging.INFO)  # Its DEBUG level logs the key.
APP = "rl-core-boxes"
RUN = "rl_core_run"  # Tag of a sandbox.
GRACE_S = 60.0  # The caller's deadline comes first.
TRANSFER_S = 110.0  # The caller gives up after two minutes.
CHUNK_BYTES = 1 << 20
STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (ResourceExhaustedError, 429),
    (AuthError, 401),
    (NotFoundError, 404),
    (ConflictError, 409),
    (ServiceError, 0),
    (ConnectionError, 0),
    (TimeoutError, 0),
    (Error, 400),
)


class ModalDriver:
    errors: tuple[type[Exception], ...] = (Error, OSError)
    has_stdin = True
    shares_processes = True

    def __init__(self, settings: RemoteSettings):
        self.secrets = read_key("modal", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")
        self.client: modal.Client | None = None
        self.app: modal.App | None = None

    async def connect(self) -> tuple[modal.Client, modal.App]:
        """A client by the variables, whatever ~/.modal.toml says."""
        if self.client is None:
            self.client = await modal.Client.from_credentials.aio(*self.secrets)
        if self.app is None:
            self.app = await modal.App.lookup.aio(APP, client=self.client, create_if_missing=True)
        return self.client, self.app

    def fault(self, error: Exception) -> Fault:
        status = next((number for kind, number in STATUSES if isinstance(error, kind)), 0)
        fix = "; check MODAL_TOKEN_ID and MODAL_TOKEN_SECRET" if status == 401 else ""
        return Fault(message=f"{type(error).__name__}: {error}{fix}", status=status)

    async def create(self, request: BoxRequest) -> ModalSandbox:
        client, app = await self.connect()
        limits = request.limits
        image = modal.Image.debian_slim()
        if request.image:
            image = modal.Image.from_registry(request.image)
        try:
            sandbox = await modal.Sandbox.create.aio(
                *["sleep", "infinity"],
                app=app,
                client=client,
                name=request.name,
                tags={RUN: request.run} if request.run else None,
                image=image,
                timeout=round(request.lifetime_s),
                idle_timeout=round(request.idle_s),
                cpu=(limits.cpus, limits.cpus) if limits.cpus else None,
                memory=(limits.memory_mib, limits.memory_mib),
                block_network=not request.network,
            )
        except AlreadyExistsError:
            # An earlier try made the sandbox, and its answer was lost.
            sandbox = await modal.Sandbox.from_name.aio(APP, request.name, client=client)
        return ModalSandbox(sandbox)

    async def reap(self, run: str) -> None:
        client, app = await self.connect()
        listed = modal.Sandbox.list.aio(app_id=app.app_id, tags={RUN: run}, client=client)
        async for sandbox in listed:
            await ModalSandbox(sandbox).kill()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close.aio()


class ModalSandbox:
    def __init__(self, sandbox: modal.Sandbox):
        self.sandbox = sandbox
        self.id = sandbox.object_id

    async def wait(self) -> None:
        pass  # The first command waits for the start.

    async def exec(
        self,
        argv: list[str],
        on_output: Callable[[int, bytes], None],
        *,
        timeout_s: float,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        # The end of a stream is a status of gRPC, which does not say how long the output is.
        outputs = MarkedOutputs(on_output)
        source = "" if stdin is not None else "</dev/null"
        argv = ["/bin/sh", "-c", f'"$@" {source}; {outputs.script}; exit $code', "sh", *argv]
        # The SDK asks for ever about a command of a lost machine that has no deadline.
        limit_s = math.ceil(timeout_s + GRACE_S)
        process = await self.sandbox.exec.aio(*argv, timeout=limit_s, text=False)

        async def send(data: bytes) -> None:
            for start in range(0, len(data), CHUNK_BYTES):
                process.stdin.write(data[start : start + CHUNK_BYTES])
                await process.stdin.drain.aio()

        async def close() -> None:
            process.stdin.write_eof()
            await process.stdin.drain.aio()

        with outputs, following(ModalDriver.errors):
            if stdin is None:
                code = exit_status(await read_outputs(process, outputs.add))
            else:
                running = read_outputs(process, outputs.add)
                code = exit_status(await with_stdin(running, stdin, send, close))
        return code

    async def upload(self, path: str, data: bytes) -> None:
        async def content() -> AsyncIterator[bytes]:
            yield data

        await self.run(f"cat > {path}", content())

    async def download(self, path: str) -> bytes:
        return await self.run(f"cat {path}")

    async def run(self, script: str, stdin: AsyncIterator[bytes] | None = None) -> bytes:
        outputs: dict[int, list[bytes]] = {1: [], 2: []}
        code = await self.exec(
            ["/bin/sh", "-c", script],
            lambda stream, data: outputs[stream].append(data),
            timeout_s=TRANSFER_S,
            stdin=stdin,
        )
        if code:
            complaint = b"".join(outputs[2]).decode(errors="replace").strip()
            raise RemoteError(f"modal: box {self.id}: {keep_ends(complaint, 500)}")
        return b"".join(outputs[1])

    async def renew(self) -> None:
        await self.run("true")  # A sandbox that runs no command is idle.

    async def end_reason(self) -> str:
        code = await self.sandbox.poll.aio()
        return "" if code is None else f"terminated, or its time was over (code {code})"

    async def kill(self) -> None:
        with suppress(NotFoundError):
            await self.sandbox.terminate.aio()


async def read_outputs(process: Any, on_output: Callable[[int, bytes], None]) -> int:
    """The exit status of a ContainerProcess, once its outputs have ended; -1 after its time."""

    async def read(stream: int, reader: AsyncIterator[bytes]) -> None:
        async for data in reader:
            on_output(stream, data)

    reading = asyncio.gather(read(1, process.stdout), read(2, process.stderr))
    try:
        await reading
        return await process.wait.aio()
    finally:
        reading.cancel()
