"""Servers that sample. One of this rank's own is in a process group of its own: it ends with the rank, and what it says goes
to a file. One that runs already is only asked."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rl_core.http import request
from rl_core.sampling.engine import EngineDied

LOG_LINES = 12  # quoted when it dies
PROGRESS_S = 30.0
# What torchrun tells its ranks is not for their children, who would join the ranks' groups.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # expandable segments break SGLang's memory saver


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def child_environment(**more: str) -> dict[str, str]:
    left_out = (*TORCHRUN, *ALLOCATOR)
    kept = {k: v for k, v in os.environ.items() if k not in left_out and not k.startswith(TORCHRUN_PREFIXES)}
    return kept | more


def die_with(parent: int) -> None:
    """This process is killed when the thread that started it ends (Linux); called by the child."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


class RunningServer:
    """One that somebody else started, and may start again. `key` "": it wants none."""

    def __init__(self, name: str, url: str, key: str):
        self.name, self.url, self.key = name, url.rstrip("/"), key
        self.is_alive = False  # as far as anybody knows

    async def start(self, timeout_s: float) -> None:
        """Returns once it answers. Raises EngineDied if it does not in time."""
        await self._wait(timeout_s)
        self.is_alive = True

    async def _wait(self, timeout_s: float) -> None:
        began = told = time.monotonic()
        while not await self._answers():
            now = time.monotonic()
            if self._has_ended():
                raise self.died("did not start")
            if now - began > timeout_s:
                self.stop()
                raise self.died(f"did not answer within {timeout_s:g} s")
            if now - told > PROGRESS_S:
                told = now
                last = f": {line}" if (line := self.log_end(1)) else ""
                print(f"{self} has not answered yet, for {now - began:.0f} s{last}", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)

    def _has_ended(self) -> bool:
        return False  # somebody may start it at any time

    async def _answers(self) -> bool:
        try:
            asked = request(f"{self.url}/model_info", b"", self.headers, "GET")
            status, _ = await asyncio.wait_for(asked, 10)
        except (OSError, EOFError, asyncio.TimeoutError):
            return False
        if status in (401, 403):
            self.stop()
            raise self.died(f"wants another key ({status}); SGLANG_API_KEY is to hold it")
        return status == 200

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def __str__(self) -> str:
        return f"engine {self.name} at {self.url}"

    def log_end(self, num_lines: int) -> str:
        return ""

    def died(self, what: str) -> EngineDied:
        return EngineDied(f"{self} {what}")

    async def gone(self, error: Exception) -> EngineDied:
        """What to raise where the server closed a connection without an answer."""
        self.is_alive = self.is_alive and await self._answers()  # another, if it was started anew
        return self.died(f"does not answer ({type(error).__name__}: {error})")

    def stop(self) -> None:
        self.is_alive = False


class ServerProcess(RunningServer):
    """Runs `module` with an order as JSON on its standard input; {port} of the order's args is a free one."""

    def __init__(self, name: str, module: str, args: list[str], log: Path, key: str, env: dict[str, str]):
        self.name, self.url, self.key = name, "", key
        self.module, self.args, self.log, self.env = module, args, log, env
        self.process: subprocess.Popen | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def start(self, timeout_s: float) -> None:
        """Returns once it answers. Raises EngineDied if it ended, or did not answer in time."""
        self.stop()
        self._launch()
        await self._wait(timeout_s)

    def _has_ended(self) -> bool:
        return not self.is_alive

    def _launch(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        order = {"parent": os.getpid(), "args": [a.format(port=port) for a in self.args], "key": self.key}
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,
            )
        # Not as an argument: every user of this machine can read those, and the order has the server's key.
        self.process.stdin.write(json.dumps(order).encode())
        self.process.stdin.close()

    def log_end(self, num_lines: int = LOG_LINES) -> str:
        with contextlib.suppress(OSError):
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
                lines = file.read().decode(errors="replace").splitlines()
            return "\n".join([line[:300] for line in lines if line.strip()][-num_lines:])
        return ""

    def died(self, what: str) -> EngineDied:
        code = self.process.poll() if self.process else None
        return EngineDied(f"engine {self.name} {what} (exit status {code}); the end of {self.log}:\n{self.log_end()}")

    async def gone(self, error: Exception) -> EngineDied:
        for _ in range(50):
            if not self.is_alive:
                return self.died("has died")
            await asyncio.sleep(0.1)
        return self.died(f"lives but does not answer ({type(error).__name__}: {error})")

    def stop(self) -> None:
        """Kills it and its children; nothing if it does not run."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
