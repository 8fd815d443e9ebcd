"""The handle of an engine's HTTP server, a child process or a server that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from multiprocessing import current_process
from typing import ClassVar

from rl_core.engines.remote import ask
from rl_core.sampling.engine import EngineDied, EngineSpec

POLL_S = 0.5
POLLS_PER_NOTE = 60  # Polls between two messages about a server that does not answer yet.
LOG_LINES = 12  # Lines of the log that an error quotes.
LOG_BYTES = 200_000  # Bytes at the log's end that are searched for errors.
NUM_ERRORS = 3  # Errors of the log that are quoted. The first one is the likely cause.
DYING_S = 1.0  # Time from a closed connection to the end of the process.
# Variables that the child does not inherit. With torchrun's, the child would join the ranks'
# process groups. Expandable segments break the servers' memory savers.
NOT_FOR_CHILDREN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PYTORCH(_CUDA)?_ALLOC_CONF)$"
    r"|TORCHELASTIC_|GROUP_|ROLE_"
)


def check_own_flags(
    args: str, flags: Mapping[str, str], server: str, others: Collection[str] = ()
) -> None:
    """Raises ValueError if --engine_args sets a flag that rl_core sets itself. flags: flag of the
    server -> the flag of rl_core to set instead; others: see own_flag()."""
    for name in filter(None, (own_flag(arg, flags, others) for arg in shlex.split(args))):
        instead = f"give {flags[name]}" if flags[name] else "leave it out"
        raise ValueError(
            f"--engine_args={args}: rl_core itself sets {name} of {server}'s server; {instead}"
        )


def quoted_log(log: str) -> str:
    """The last lines of a server's log, and the first errors before these lines: a server may log
    its cause far above its end."""
    lines = [line[:300] for line in log.splitlines() if line.strip()]
    end = lines[-LOG_LINES:]
    errors: dict[str, None] = {}
    for line in lines[:-LOG_LINES]:
        if match := re.search(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)", line):
            errors[match[1]] = None
    if errors:
        end += ["errors before these lines:", *list(errors)[:NUM_ERRORS]]
    return "\n".join(end)


def own_flag(arg: str, flags: Collection[str], others: Collection[str] = ()) -> str:
    """The flag among `flags` that an argument sets, or "". argparse accepts abbreviations of flags,
    and vLLM keys of their values: --flag.key. others: flags of the server that are the beginning
    of one of `flags`."""
    name = re.split("[=.]", arg)[0].replace("_", "-").replace("--no-", "--", 1)
    if name in flags:
        return name
    if not re.match("--.", name) or name in others:
        return ""
    return next((flag for flag in flags if flag.startswith(name)), "")


def package_version(package: str) -> str | None:
    """None if it is not installed. A look-up reads all folders of sys.path, and a plan asks a
    thousand times."""
    return version_on(tuple(sys.path), package)


@functools.cache
def version_on(path: tuple[str, ...], package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def check_package(package: str, oldest: tuple[int, ...], is_planned: bool) -> None:
    """Raises ValueError if the package of an engine's server is too old or, unless is_planned, not
    installed. Imports nothing."""
    version = package_version(package)
    if version is None:
        if is_planned:
            return
        raise ValueError(
            f"--engine={package} needs {package}, which is not installed: pip install "
            f"'rl_core[{package}]'"
        )
    if numbers(version) < oldest:
        raise ValueError(
            f"--engine={package} needs {package} >= {'.'.join(map(str, oldest))}, {version} is "
            "installed"
        )


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


class ServerProcess:
    """An engine's HTTP server: a child process in a new process group, or a running server at
    spec.server.url. A subclass names its routes and the order for the child."""

    # Arguments of Python in the child, which reads its order from standard input.
    command: ClassVar[tuple[str, ...]]
    probe: ClassVar[str]  # Route that answers with status 200 once the server is ready.
    key_name: ClassVar[str]  # Variable with the key of a server that runs already.

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.is_own = not spec.server.url
        self.url, self.key = spec.server.url.rstrip("/"), os.environ.get(self.key_name, "")
        self.process: subprocess.Popen | None = None
        self.log_start = 0  # Bytes of the log that earlier processes wrote.
        self.num_starts = 0
        self._answered = False
        if self.is_own:
            self.port = reserved_port()
            self.url = f"http://127.0.0.1:{self.port.getsockname()[1]}"
            self.key = secrets.token_hex(16)

    def __str__(self) -> str:
        where = "" if self.is_own else f" at {self.url}"
        return f"engine {self.spec.name}{where}"

    @property
    def is_alive(self) -> bool:
        if self.is_own:
            return self.process is not None and self.process.poll() is None
        return self._answered

    async def start(self) -> None:
        """Starts the server and waits until it answers. Raises EngineDied if it ends or does not
        answer in time."""
        self.num_starts += 1
        if self.is_own:
            self._launch()
        began, num_polls = time.monotonic(), 0
        while not await self._answers():
            waited_s = time.monotonic() - began
            if self.is_own and not self.is_alive:
                raise self.died("did not start")
            if waited_s > self.spec.start_timeout_s:
                self.stop()
                raise self.died(f"did not answer within {self.spec.start_timeout_s:g} s")
            num_polls += 1
            if num_polls % POLLS_PER_NOTE == 0:
                print(f"{self} has not answered for {waited_s:.0f} s", file=sys.stderr, flush=True)
            await asyncio.sleep(POLL_S)
        self._answered = True

    async def _answers(self) -> bool:
        try:
            status, _ = await ask(f"{self.url}/{self.probe}", None, self.key, 10)
        except EngineDied:
            return False
        if status in (401, 403):
            self.stop()
            raise self.died(f"wants another key ({status}); set {self.key_name}")
        return status == 200

    def order(self, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """(arguments, environment) of the next child, without host, port and key."""
        raise NotImplementedError

    def _launch(self) -> None:
        self.stop()
        env = {
            name: value for name, value in os.environ.items() if not NOT_FOR_CHILDREN.match(name)
        }
        args, env = self.order(env)
        args += ["--host", "127.0.0.1", "--port", str(self.port.getsockname()[1])]
        order = {
            "parent": os.getpid(),
            "args": args,
            "key": self.key,
            # Lets the child receive file descriptors of this process: weights in shared memory.
            "authkey": current_process().authkey.hex(),
        }
        log = os.open(self.spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.log_start = os.fstat(log).st_size
        self.process = subprocess.Popen(
            [sys.executable, *self.command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
        os.close(log)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode())
        self.process.stdin.close()

    def died(self, reason: str) -> EngineDied:
        if self.process is None:
            return EngineDied(f"{self} {reason}")
        log = self.spec.log.read_bytes()[self.log_start :]
        quote = quoted_log(log[-LOG_BYTES:].decode(errors="replace"))
        status = f"exit status {self.process.poll()}"
        return EngineDied(f"{self} {reason} ({status}); the end of {self.spec.log}:\n{quote}")

    async def lost(self, number: int, reason: str) -> EngineDied:
        """The error for a request without a response. Stops the server, unless it has restarted:
        `number` is num_starts at the time of the request."""
        if self.is_own:
            await asyncio.sleep(DYING_S)  # Waits for the exit status.
        error = self.died(reason)
        if self.num_starts == number:
            self.stop()
        return error

    def stop(self) -> None:
        """Kills the child process and its children, if there are any."""
        self._answered = False
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def reserved_port() -> socket.socket:
    """A socket bound to a free port of the loopback interface. It does not listen: a child process
    can, and no other process gets the port, also between two starts of the child."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port
