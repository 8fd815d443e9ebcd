"""Boxes by docker or podman: a container for each, and `exec` for each command. Its image needs
/bin/sh and the usual small tools. docs/sandbox.md"""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import subprocess
import tarfile
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl_core.sandbox.box_settings import (
    MAX_FILE_BYTES,
    BoxEnded,
    BoxSettings,
    ExecResult,
    Upload,
    make_upload,
)
from rl_core.sandbox.engines import (
    ask_engine,
    bind_flags,
    memory_flags,
    remove_line,
    right_flags,
    run_line,
)
from rl_core.sandbox.output import MAX_OUTPUT_BYTES, Output
from rl_core.sandbox.sidecars import OPEN_S, container_name, ended_sidecars, start_sidecars
from rl_core.scratch import scratch_prefix

TRANSFER_S = 120.0
DRAIN_S = 2.0  # Output that is still in the pipes at a command's end is awaited so long.
SHM = "64m"
# The first process: it ends with its stdin, which is its owner's, and cannot be killed from inside.
KEEP = (
    "exec 3<&0; echo ready; "
    "while :; do cat <&3 >/dev/null & wait $!; [ $? -gt 128 ] || exit 0; done"
)
# An image without a working folder has /app.
ENTER = '[ "$PWD" != / ] || { mkdir -p /app && cd /app; }; '
SHELL = ENTER + 'if command -v bash >/dev/null; then exec bash -c "$1"; else exec sh -c "$1"; fi'
MARK = "RL_CORE_EXEC"  # variable that all processes of one command inherit
KILL_MARKED = (
    "for _ in 1 2 3; do for p in /proc/[0-9]*; do "
    'if tr "\\0" "\\n" < $p/environ 2>/dev/null | grep -qx "$1"; then kill -9 ${p#/proc/}; fi; '
    "done; done"
)
PUT = ENTER + 'mkdir -p "$(dirname "$1")" && rm -f "$1" && cat > "$1" && chmod "$2" "$1"'
UNPACK = ENTER + 'mkdir -p "$1" && tar -xf - -C "$1"'
NO_FILE, NOT_REGULAR = 44, 45
GET = ENTER + (
    f'[ -e "$1" ] || exit {NO_FILE}; [ -f "$1" ] || exit {NOT_REGULAR}; exec head -c "$2" "$1"'
)


def shell_argv(command: str | Sequence[str]) -> list[str]:
    """Arguments of `sh -c` for a command: text is run by a shell of the box, a list as it is."""
    if isinstance(command, str):
        return [SHELL, "sh", command]
    return [ENTER + 'exec "$@"', "sh", *command]


def end_container(engine: str, names: list[str], client: subprocess.Popen, owner: int) -> None:
    """Its first process ends with its stdin; the engine removes the rest by force. In a fork of the
    owner it only forgets the container. `names`: services of the box, then the box."""
    with suppress(OSError):
        client.stdin.close()
    if os.getpid() != owner:
        return
    for name in names:
        with suppress(OSError, subprocess.TimeoutExpired):  # An engine that hangs holds up nobody.
            ask_engine(engine, remove_line(engine, [name])[1:])
    client.kill()
    client.wait()
    client.stdout.close()
    client.stderr.close()


class ContainerBox:
    """One box. It is never emptied for another: its image's files may have changed."""

    can_be_reset = False
    scratch: tempfile.TemporaryDirectory[str] | None = None  # Files that services see.

    def __init__(self, settings: BoxSettings):
        self.settings = settings
        self.engine = settings.driver
        self.name = f"rl-core-box-{secrets.token_hex(6)}"
        self.client = self.start()
        names = [container_name(self.name, each) for each in settings.sidecars]
        self.finalizer = weakref.finalize(
            self, end_container, self.engine, [*names, self.name], self.client, os.getpid()
        )

    def start(self) -> subprocess.Popen:
        limits = self.settings.limits
        line = run_line(self.engine, network=self.settings.network, processes=limits.processes)
        line += ["--interactive", "--name", self.name, "--shm-size", SHM]
        line += memory_flags(f"{limits.memory_mib}m")
        if limits.cpus:
            line += ["--cpus", f"{limits.cpus:g}"]
        line += right_flags()
        for sidecar in self.settings.sidecars:
            for name in sidecar.host_names:
                line += ["--add-host", f"{name}:127.0.0.1"]
        for inside, path in self.settings.binds:
            line += bind_flags(path.removesuffix(":rw"), inside, path.endswith(":rw"))
        return subprocess.Popen(
            [*line, "--entrypoint", "/bin/sh", self.settings.image, "-c", KEEP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tempfile.gettempdir(),  # Podman leaves a file `oom` here if memory runs out.
            start_new_session=True,  # Ctrl-C is for the owner
        )

    @classmethod
    async def open(cls, settings: BoxSettings) -> ContainerBox:
        """Raises OSError if the engine makes no such container."""
        box = await asyncio.to_thread(cls, settings)
        try:
            ready = asyncio.to_thread(box.client.stdout.readline)
            hello = await asyncio.wait_for(ready, OPEN_S)
            if not hello:
                reason = await asyncio.to_thread(box.client.stderr.read)
                raise OSError(reason.decode(errors="replace").strip()[-2000:])
            if settings.sidecars:
                box.scratch = tempfile.TemporaryDirectory(prefix=scratch_prefix("hosts"))
                hosts = Path(box.scratch.name, "hosts")
                await start_sidecars(box.engine, box.name, settings, hosts)
        except BaseException:
            # Otherwise a thread waits for the output of an engine that hangs.
            box.client.kill()
            await asyncio.to_thread(box.finalizer)
            raise
        return box

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 60.0,
        stdin: str = "",
        environ: dict[str, str] | None = None,
        cwd: str = "",
    ) -> ExecResult:
        """The command's result. At its deadline, or when this is cancelled, its processes are
        killed, but for those that hide: end_processes() ends these too."""
        mark = f"{MARK}={secrets.token_hex(8)}"
        flags = ["--env", mark]
        for name, value in (environ or {}).items():
            flags += ["--env", f"{name}={value}"]
        if cwd:
            flags += ["--workdir", cwd]
        argv = shell_argv(command)
        stdout, stderr = Output(MAX_OUTPUT_BYTES), Output(MAX_OUTPUT_BYTES)
        data = stdin.encode(errors="surrogateescape")
        timed_out = False
        try:
            code = await asyncio.wait_for(self.run(argv, data, stdout, stderr, flags), timeout_s)
        except TimeoutError:
            timed_out, code = True, 137
        except asyncio.CancelledError:
            with suppress(BoxEnded, OSError, TimeoutError):
                await asyncio.shield(self.kill(mark))
            raise
        if timed_out:
            await self.kill(mark)
        return ExecResult(
            code=code, stdout=stdout.text(), stderr=stderr.text(), timed_out=timed_out
        )

    async def run(
        self,
        argv: list[str],
        stdin: bytes,
        stdout: Output,
        stderr: Output,
        flags: Sequence[str] = (),
    ) -> int:
        """The exit status of `sh -c argv[0]` in the container. Raises BoxEnded."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *[self.engine, "exec", "--interactive", *flags, self.name, "/bin/sh", "-c", *argv],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        transfers = [
            asyncio.ensure_future(pump(process.stdout, stdout)),
            asyncio.ensure_future(pump(process.stderr, stderr)),
            asyncio.ensure_future(feed(process.stdin, stdin)),
        ]
        try:
            code = await process.wait()
            await asyncio.wait(transfers[:2], timeout=DRAIN_S)
        finally:
            for task in transfers:
                task.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code and self.client.poll() is not None:
            raise BoxEnded(f"the box {self.name} has ended: {stderr.text()[-300:].strip()}")
        return code

    async def kill(self, mark: str) -> None:
        await self.ask([KILL_MARKED, "sh", mark])

    async def ask(
        self, argv: list[str], stdin: bytes = b"", max_bytes: int = 1 << 16
    ) -> ClientResult:
        stdout, stderr = Output(2 * max_bytes), Output(1 << 16)
        code = await asyncio.wait_for(self.run(argv, stdin, stdout, stderr), TRANSFER_S)
        return ClientResult(code=code, data=stdout, complaint=stderr.text().strip())

    async def put(self, path: str, data: bytes | str | Path) -> None:
        """Writes a file, or a folder of the host with all below it. Raises OSError."""
        upload = await asyncio.to_thread(make_upload, "", data)
        if upload.folders:
            answer = await self.ask([UNPACK, "sh", path], packed(upload))
        else:
            [(_, mode, content)] = upload.files
            answer = await self.ask([PUT, "sh", path, f"{mode:o}"], content)
        if answer.code:
            raise OSError(f"{path}: {answer.complaint}")

    async def get(self, path: str) -> bytes:
        """A file's content, at most 64 MiB. Raises FileNotFoundError, OSError."""
        most = str(MAX_FILE_BYTES + 1)
        answer = await self.ask([GET, "sh", path, most], max_bytes=MAX_FILE_BYTES + 1)
        if answer.code == NO_FILE:
            raise FileNotFoundError(path)
        if answer.code == NOT_REGULAR:
            raise OSError(f"{path} is not a file")
        if answer.code or answer.data.num_bytes > MAX_FILE_BYTES:
            raise OSError(f"{path}: {answer.complaint or 'over 64 MiB'}")
        return answer.data.data()

    async def end_processes(self) -> None:
        """Kills everything that runs in the box as its user."""
        await self.ask(["kill -9 -1", "sh"])

    async def ended_sidecars(self) -> list[str]:
        return await ended_sidecars(self.engine, self.name, self.settings.sidecars)

    async def close(self) -> None:
        """Removes the container. Idempotent."""
        await asyncio.to_thread(self.finalizer)


@dataclass(kw_only=True, slots=True)
class ClientResult:
    code: int
    data: Output
    complaint: str


def packed(upload: Upload) -> bytes:
    """A tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in filter(None, upload.folders):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for path, mode, content in upload.files:
            entry = tarfile.TarInfo(path)
            entry.mode, entry.size = mode, len(content)
            tar.addfile(entry, io.BytesIO(content))
        for path, target in upload.links:
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return buffer.getvalue()


async def pump(stream: asyncio.StreamReader, output: Output) -> None:
    while data := await stream.read(1 << 16):
        output.add(data)


async def feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()
