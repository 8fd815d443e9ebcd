"""Boxes at Daytona, by its SDK. docs/remote_boxes.md

A name without ":" and "/" is a snapshot of Daytona.
"""

from __future__ import annotations

import math
import re
import secrets
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import aiohttp
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaConfig,
    DaytonaConflictError,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaNotFoundError,
    DaytonaTimeoutError,
    ListSandboxesQuery,
    Resources,
    SandboxState,
    SessionExecuteRequest,
)

from rl_core.sandbox.remote_driver import (
    BoxRequest,
    Fault,
    MarkedOutputs,
    RemoteSettings,
    exit_status,
    following,
    read_key,
    with_stdin,
)

OPEN_S = 300.0  # An image may have to be pulled.
TRANSFER_S = 110.0  # The caller gives up after two minutes.
SESSION_ENDED = (400, 404, 409, 410)  # Statuses of a command that a killed session refused.
RUN = "rl_core_run"  # Label of a sandbox.
UNREACHED = (DaytonaConnectionError, DaytonaTimeoutError, aiohttp.ClientError, OSError)


class DaytonaDriver:
    errors: tuple[type[Exception], ...] = (
        DaytonaError,
        aiohttp.ClientError,
        OSError,
    )
    has_stdin = True
    shares_processes = True

    def __init__(self, settings: RemoteSettings):
        self.secrets = read_key("daytona", "DAYTONA_API_KEY")
        self.client: AsyncDaytona | None = None  # Needs the event loop that uses it.

    def daytona(self) -> AsyncDaytona:
        if self.client is None:
            # The SDK would read keys from files named .env. Each command holds a connection.
            config = DaytonaConfig(api_key=self.secrets[0], connection_pool_maxsize=None)
            self.client = AsyncDaytona(config)
        return self.client

    def fault(self, error: Exception) -> Fault:
        status, headers = getattr(error, "status_code", 0), getattr(error, "headers", None) or {}
        if isinstance(error, aiohttp.ClientResponseError):
            status = error.status
        is_cut = isinstance(error, UNREACHED) or "WebSocket" in str(error)
        if not status and not is_cut:
            status = 400  # The SDK refused the call, or the sandbox failed.
        seconds = {name.lower(): value for name, value in headers.items()}.get("retry-after", "")
        fix = "; check DAYTONA_API_KEY" if status == 401 else ""
        return Fault(
            message=f"{error}{fix}",
            status=status or 0,
            retry_after_s=float(seconds) if seconds.isdecimal() else 0.0,
            was_sent=not is_unsent(error),
        )

    async def create(self, request: BoxRequest) -> DaytonaSandbox:
        settings = {
            "name": request.name,
            "labels": {RUN: request.run} if request.run else {},
            "network_block_all": not request.network,
            "auto_stop_interval": math.ceil(request.idle_s / 60),
            "ephemeral": True,  # A stopped sandbox is deleted.
            "ttl_minutes": math.ceil(request.lifetime_s / 60),
        }
        if re.search("[:/]", request.image):
            limits = request.limits
            resources = Resources(
                cpu=math.ceil(limits.cpus) or None,
                memory=math.ceil(limits.memory_mib / 1024),
                disk=math.ceil(limits.disk_mib / 1024),
            )
            params = CreateSandboxFromImageParams(
                image=request.image, resources=resources, **settings
            )
        else:
            params = CreateSandboxFromSnapshotParams(snapshot=request.image or None, **settings)
        try:
            sandbox = await self.daytona().create(params, timeout=OPEN_S)
        except DaytonaConflictError:
            # An earlier try made the sandbox, and its answer was lost.
            sandbox = await self.daytona().get(request.name)
        return DaytonaSandbox(sandbox)

    async def reap(self, run: str) -> None:
        async for sandbox in self.daytona().list(ListSandboxesQuery(labels={RUN: run})):
            await DaytonaSandbox(sandbox).kill()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()


class DaytonaSandbox:
    def __init__(self, sandbox: AsyncSandbox):
        self.sandbox = sandbox
        self.id = sandbox.id
        self.idle_sessions: list[str] = []  # A session runs one command after another.

    async def wait(self) -> None:
        await self.sandbox.wait_for_sandbox_start(OPEN_S)

    async def exec(
        self,
        argv: list[str],
        on_output: Callable[[int, bytes], None],
        *,
        timeout_s: float,
        stdin: AsyncIterator[bytes] | None = None,
    ) -> int:
        process = self.sandbox.process
        outputs = MarkedOutputs(on_output)
        source = "" if stdin is not None else "</dev/null"
        line = f"{shlex.join(argv)} {source}; {outputs.script}; (exit $code)"
        asked = SessionExecuteRequest(command=line, run_async=True, suppress_input_echo=True)
        session, command = await self.submit(asked)
        running = process.get_session_command_logs_async(
            session,
            command,
            lambda text: outputs.add(1, text.encode()),
            lambda text: outputs.add(2, text.encode()),
        )

        async def send(data: bytes) -> None:
            await process.send_session_command_input(session, command, data.decode(), TRANSFER_S)

        async def close() -> None:
            pass  # The service cannot close a stdin.

        with outputs, following(DaytonaDriver.errors):
            if stdin is None:
                await running
            else:
                await with_stdin(running, stdin, send, close)
            ended = await process.get_session_command(session, command, TRANSFER_S)
            code = exit_status(ended.exit_code)
        self.idle_sessions.append(session)
        return code

    async def submit(self, asked: SessionExecuteRequest) -> tuple[str, str]:
        """(session, id) of the command, begun in an idle session, or in a new one. The service
        refuses a session whose shell was killed, as end_processes() does to all shells."""
        process = self.sandbox.process
        if self.idle_sessions:
            session = self.idle_sessions.pop()
            try:
                return session, (await process.execute_session_command(session, asked)).cmd_id
            except DaytonaError as error:
                if error.status_code not in SESSION_ENDED:
                    raise
                self.idle_sessions.clear()
        session = f"rl-core-{secrets.token_hex(6)}"
        await process.create_session(session, TRANSFER_S)
        return session, (await process.execute_session_command(session, asked)).cmd_id

    async def upload(self, path: str, data: bytes) -> None:
        await self.sandbox.fs.upload_file(data, path, timeout=int(TRANSFER_S))

    async def download(self, path: str) -> bytes:
        return await self.sandbox.fs.download_file(path, int(TRANSFER_S))

    async def renew(self) -> None:
        await self.sandbox.refresh_activity(TRANSFER_S)

    async def end_reason(self) -> str:
        try:
            await self.sandbox.refresh_data()
        except DaytonaNotFoundError:
            return "Daytona has no such sandbox: it was deleted, or its time was over"
        state = self.sandbox.state
        if state == SandboxState.STARTED:
            return ""
        return f"its state is {state and state.value} {self.sandbox.error_reason or ''}"

    async def kill(self) -> None:
        with suppress(DaytonaNotFoundError):
            await self.sandbox.delete(TRANSFER_S)


def is_unsent(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, aiohttp.ClientConnectorError):
        error = error.__cause__
    return error is not None
