"""The warm process of a Sandbox, and one program run by it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from rl_core.sandbox import isolation
from rl_core.sandbox.engines import bind_flags, reap, run_line

START_TIMEOUT_S = 60.0
MAX_WAIT = 10  # Longest wait of a program for a free core, in multiples of its timeout_s.
GRACE_S = 30.0  # Time after a program's deadline until its supervisor counts as lost.
BEGIN = (
    "import sys; sys.path[0] = {path!r}; from rl_core.sandbox.zygote import serve; del "
    "sys.path[0]; serve({args})"
)


class SystemRefusedError(RuntimeError):
    """This machine cannot isolate a program."""


class WorkerLostError(RuntimeError):
    """A supervisor ended without a result, for example killed for memory."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The end of one process of a program. `back`: bytes that the process sent over its job
    socket."""

    stdout: bytes
    stderr: bytes
    back: bytes
    cut: bool  # True if the program was ended because of too much output.
    timed_out: bool
    exit: int  # Exit status; negative for a signal.
    wall_s: float
    cpu_s: float
    supervisor_s: float  # CPU seconds of the supervisor.


def listen(path: str) -> socket.socket:
    """A listening socket that processes of a container, which run as nobody, can reach."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    os.chmod(os.path.dirname(path), 0o711)
    os.chmod(path, 0o666)
    listener.listen()
    listener.settimeout(0.2)
    return listener


def accept(listener: socket.socket, process: subprocess.Popen) -> socket.socket:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(TimeoutError):
            return listener.accept()[0]
    process.kill()
    raise OSError(
        process.communicate()[1].decode(errors="replace")[-2000:].strip() or "it did not connect"
    )


def close_all(control: socket.socket, process: subprocess.Popen) -> None:
    control.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Pool:
    """Starts the process that forks programs at the first level of `levels` that works here. Safe
    in threads and after a fork."""

    def __init__(self, levels: list[str], image: str = "", flags: Sequence[str] = ()):
        self.image, self.flags = image, list(flags)
        self.levels, self.lock, self.pid, self.level, self.has_seccomp = (
            levels,
            threading.Lock(),
            0,
            "",
            False,
        )
        self.control: socket.socket | None = None
        self.finalizer: Any = None
        self.process: subprocess.Popen | None = None
        self.numbers = itertools.count()

    def start(self) -> str:
        """The level of isolation. Raises SystemRefusedError with the reason of each level."""
        with self.lock:
            if self.pid == os.getpid() and self.control is not None:
                return self.level
            if sys.platform != "linux":
                raise SystemRefusedError(
                    "code that a model wrote is isolated by Linux's kernel, and this machine runs "
                    f"{sys.platform}; train on Linux, or in a Linux container (docker run -it "
                    "python:3.12)"
                )
            reasons = []
            for level in self.levels:
                try:
                    self.begin(level)
                    return self.level
                # AttributeError: Python was built without pidfds.
                except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
                    reasons.append(f"{level}: {error}")
        raise SystemRefusedError(
            "this machine cannot close off network and files for code that a model wrote; install "
            f"bubblewrap and allow user namespaces, or use Landlock ({'; '.join(reasons)})"
        )

    def begin(self, level: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.pidfd_open(os.getpid())  # Becomes readable when this process ends.
        with ExitStack() as stack:
            stack.callback(theirs.close)
            stack.callback(os.close, owner)
            fds = [theirs.fileno(), owner]
            in_container = level in isolation.CONTAINERS
            folder = (
                stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_core_sandbox_"))
                if in_container
                else ""
            )
            listener = stack.enter_context(listen(f"{folder}/socket")) if in_container else None
            process = subprocess.Popen(
                self.command(level, fds, folder),
                env=None if in_container else isolation.program_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                pass_fds=fds,
                start_new_session=True,  # The owner handles Ctrl-C and closes the socket.
            )
            if listener is not None:
                ours.close()
                ours = accept(listener, process)
                socket.send_fds(ours, [b"o"], [owner])
        ours.settimeout(START_TIMEOUT_S)
        finalizer = weakref.finalize(self, close_all, ours, process)
        try:
            answer = json.loads(ours.recv(1 << 16) or b"{}")
            problem = ""
            if not answer.get("level"):
                problem = answer.get("error") or process.stderr.read(2000).decode().strip()
        except OSError as error:
            problem, answer = str(error), {}
        process.stderr.close()
        if problem or not answer:
            finalizer()
            raise OSError(problem or "its process ended at once")
        if self.finalizer is not None and self.pid == os.getpid():
            self.finalizer()
        elif self.finalizer is not None:
            self.finalizer.detach()  # After a fork the process belongs to the parent.
        self.control, self.pid, self.level, self.finalizer = ours, os.getpid(), level, finalizer
        self.process = process
        self.has_seccomp = answer["seccomp"]

    def command(self, level: str, fds: list[int], folder: str) -> list[str]:
        """The command that starts the process that forks programs."""
        args = [level, *fds] if not folder else [level, f"{isolation.BOX_FOLDER}/socket"]
        boxed = level == "bubblewrap" or folder
        path = os.path.dirname(isolation.BOX_PACKAGE) if boxed else str(isolation.PACKAGE.parent)
        argv = [
            sys.executable,
            "-s",
            "-c",
            BEGIN.format(path=path, args=", ".join(map(repr, args))),
        ]
        if folder:
            reap(level)
            return container(level, self.image, self.flags, folder, argv)
        if level == "bubblewrap" and not shutil.which("bwrap"):
            raise OSError("bwrap is not installed")
        return isolation.bubblewrap(argv) if level == "bubblewrap" else argv

    def launch(self, header: dict[str, Any], fds: list[int]) -> None:
        """Sends a request to the warm process. Raises WorkerLostError if that process has died;
        start() then makes another one."""
        with self.lock:
            control = self.control
            try:
                assert control is not None and self.pid == os.getpid()
                number = next(self.numbers) % isolation.NUM_USERS
                header = header | {"user": isolation.FIRST_USER + number}
                socket.send_fds(control, [json.dumps(header).encode()], fds)
            except (OSError, AssertionError) as error:
                if self.control is control:
                    self.control = None
                raise WorkerLostError(str(error)) from error

    def close(self) -> None:
        with self.lock:
            if self.finalizer is not None and self.pid == os.getpid():
                self.finalizer()
            self.control = self.finalizer = None


def container(
    runtime: str, image: str, flags: list[str], folder: str, argv: list[str]
) -> list[str]:
    """The command that runs argv in a container of docker or podman. `folder` holds the socket of
    this process."""
    line = [*run_line(runtime), "--read-only", f"--user={isolation.NOBODY}:{isolation.NOBODY}"]
    line += ["--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777", "--workdir=/tmp"]
    line += bind_flags(isolation.PACKAGE, isolation.BOX_PACKAGE) + bind_flags(
        folder, isolation.BOX_FOLDER, writable=True
    )
    variables = isolation.program_environment()
    del variables["PATH"]
    line += [f"--env={name}={value}" for name, value in variables.items()]
    return [*line, *flags, "--entrypoint=python3", image, *argv[1:]]


class Channels:
    """The four sockets of one process: status, job, stdout, stderr. Reads them and ends the
    process."""

    def __init__(self, pool: Pool, header: dict[str, Any], rpc: socket.socket | None):
        self.pairs = [socket.socketpair() for _ in range(4)]
        self.status, self.job, self.out, self.err = (ours for ours, _ in self.pairs)
        self.rpc, self.cut, self.limits = rpc, False, header["limits"]
        try:
            for ours, _ in self.pairs:
                ours.setblocking(False)
            pool.launch(
                header,
                [end.fileno() for _, end in self.pairs]
                + ([rpc.fileno()] if rpc is not None else []),
            )
        except BaseException:
            self.close()
            raise
        for end in [end for _, end in self.pairs] + ([rpc] if rpc is not None else []):
            end.close()

    def close(self) -> None:
        for end in [end for pair in self.pairs for end in pair] + (
            [self.rpc] if self.rpc is not None else []
        ):
            end.close()

    def end(self) -> None:
        """Asks the supervisor to end the process."""
        with suppress(OSError):
            self.status.shutdown(socket.SHUT_WR)

    async def read(self, source: socket.socket, most: int) -> bytes:
        data, loop = bytearray(), asyncio.get_running_loop()
        with suppress(ConnectionError):
            while chunk := await loop.sock_recv(source, 1 << 16):
                num_left = most - len(data)
                data += chunk[:num_left]
                if len(chunk) > num_left:
                    self.cut = True
                    self.end()
        return bytes(data)

    async def read_all(self, sources: Sequence[tuple[socket.socket, int]]) -> list[bytes]:
        return await asyncio.gather(*(self.read(*source) for source in sources))

    async def feed(self, parts: list[bytes]) -> None:
        with suppress(ConnectionError):
            for data in parts:
                await asyncio.get_running_loop().sock_sendall(self.job, data)
            self.job.shutdown(socket.SHUT_WR)

    async def end_after(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.end()


async def run_process(
    pool: Pool,
    header: dict[str, Any],
    parts: list[bytes],
    rpc: socket.socket | None = None,
    stop: asyncio.Event | None = None,
) -> Outcome:
    """Runs one process of a program. `header`: role, limits, timeout_s. `parts`: data for its job
    socket. `rpc`: its end of a socket to another process, closed here. `stop`: ends the process
    when set; cancellation ends the process too. Raises WorkerLostError and
    SystemRefusedError."""
    channels = Channels(pool, header, rpc)
    limits = header["limits"]
    most, back = limits["output_kib"] << 10, limits["file_mib"] + 1 << 20
    tasks = [asyncio.ensure_future(channels.feed(parts))]
    tasks += [asyncio.ensure_future(channels.end_after(stop))] if stop is not None else []
    try:
        sources = (
            (channels.status, 1 << 20),
            (channels.out, most),
            (channels.err, most),
            (channels.job, back),
        )
        reading = channels.read_all(sources)
        most_s = (MAX_WAIT + 1) * header["timeout_s"] + GRACE_S
        status, stdout, stderr, sent = await asyncio.wait_for(reading, most_s)
    except TimeoutError:
        raise RuntimeError(
            f"a program was not ended within {most_s:g} s; its supervisor was stopped or killed"
        ) from None
    finally:
        for task in tasks:
            task.cancel()
        channels.close()
    if len(status) < 4:
        raise WorkerLostError(
            "the supervisor of a program ended without a result: "
            f"{stderr[-300:].decode(errors='replace')}"
        )
    end = json.loads(status[4:])
    if "refused" in end:
        raise SystemRefusedError(end["refused"])
    return Outcome(stdout=stdout, stderr=stderr, back=sent, cut=channels.cut, **end)
