"""SGLang's HTTP server as the handle of a child process, and the arguments of that process
(sglang_server_main.py)."""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Mapping
from multiprocessing import current_process

import torch

from rl_core.engines.remote import ask
from rl_core.engines.sglang_cuda import (
    GRAPH_SAVER,
    check_tp_devices,
    cuda_args,
    cuda_environment,
    releases_graphs,
    with_room,
)
from rl_core.engines.sglang_versions import OLDEST, installed_version, numbers
from rl_core.engines.weight_transfer import keeps_backup
from rl_core.sampling.engine import EngineDied, EngineSpec

POLL_S = 0.5
POLLS_PER_NOTE = 60  # Polls between two messages about a server that does not answer yet.
LOG_LINES = 12  # Lines of the log that an error quotes.
DYING_S = 1.0  # Time from a closed connection to the end of the process.
# Flag of the server that --engine_args may not set -> the flag of rl_core that sets it.
OWN_FLAGS = {
    "--model-path": "--model",
    "--model": "--model",
    "--tp-size": "--engine_tp",
    "--tensor-parallel-size": "--engine_tp",
    "--dtype": "--learner.dtype",
    "--random-seed": "--seed",
    "--max-running-requests": "--rollout.max_concurrent",
    "--mem-fraction-static": "--engine_memory_frac",
    "--max-lora-rank": "--actors.NAME.lora.rank",
    "--lora-target-modules": "--actors.NAME.lora.targets",
    "--base-gpu-id": "CUDA_VISIBLE_DEVICES",
    "--host": "",
    "--port": "",
    "--nccl-port": "",
    "--api-key": "",
    "--device": "",
    "--log-level-http": "",
    "--skip-server-warmup": "",
    "--enable-fp32-lm-head": "",
    "--enable-tf32-matmul": "",
    "--mm-feature-transport": "",
    "--enable-memory-saver": "",
    "--enable-weights-cpu-backup": "",
    "--enable-lora": "",
    "--max-loras-per-batch": "",
}
# The only flag of SGLang, other than OWN_FLAGS, that is also the beginning of one of OWN_FLAGS.
LOG_LEVEL = "--log-level"
# Variables that the child does not inherit. With torchrun's, the child would join the ranks'
# process groups. Expandable segments break SGLang's memory saver.
NOT_FOR_CHILDREN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PYTORCH(_CUDA)?_ALLOC_CONF)$"
    r"|TORCHELASTIC_|GROUP_|ROLE_"
)


def check_sglang(args: str = "", is_planned: bool = False) -> None:
    """Raises ValueError if `args` sets a flag that rl_core sets itself, or if SGLang is too old or,
    unless is_planned, not installed. Imports nothing."""
    for name in filter(None, map(own_flag, shlex.split(args))):
        instead = f"give {OWN_FLAGS[name]}" if OWN_FLAGS[name] else "leave it out"
        raise ValueError(
            f"--engine_args={args}: rl_core itself sets {name} of SGLang's server; {instead}"
        )
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        if is_planned:
            return
        raise ValueError(
            "--engine=sglang needs sglang, which is not installed: pip install 'rl_core[sglang]'"
        ) from None
    if numbers(version) < OLDEST:
        raise ValueError(
            f"--engine=sglang needs sglang >= {'.'.join(map(str, OLDEST))}, {version} is installed"
        )


def own_flag(arg: str) -> str:
    """The flag of OWN_FLAGS that an argument sets, or "". argparse accepts abbreviations of
    flags."""
    name = arg.partition("=")[0].replace("_", "-").replace("--no-", "--", 1)
    if not re.match("--.", name) or name == LOG_LEVEL:
        return ""
    return next((flag for flag in OWN_FLAGS if flag.startswith(name)), "")


class SGLangServer:
    """SGLang's HTTP server: a child process in a new process group, or a running server at
    spec.server.url."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.is_own = not spec.server.url
        self.url, self.key = spec.server.url.rstrip("/"), os.environ.get("SGLANG_API_KEY", "")
        self.process: subprocess.Popen | None = None
        self.group_port: socket.socket | None = None
        self.num_starts = 0
        self._answered = False
        if self.is_own:
            if spec.device.type == "cuda":
                first, num_visible = spec.device.index or 0, torch.cuda.device_count()
                check_tp_devices(spec.server.tp, num_visible, first)
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
            status, _ = await ask(f"{self.url}/model_info", None, self.key, 10)
        except EngineDied:
            return False
        if status in (401, 403):
            self.stop()
            raise self.died(f"wants another key ({status}); set SGLANG_API_KEY")
        return status == 200

    def _launch(self) -> None:
        self.stop()
        spec = self.spec
        if spec.device.type == "cuda":
            spec = with_room(spec, self.num_starts == 1)
        # Port of the process group of the server's ranks. SGLang itself would look for a free one
        # early and bind it much later. Each start has a new one: ranks of a killed server may hold
        # theirs until the driver has freed their memory.
        self.group_port = reserved_port()
        args = ["--host", "127.0.0.1", "--port", str(self.port.getsockname()[1])]
        args += ["--nccl-port", str(self.group_port.getsockname()[1])]
        order = {
            "parent": os.getpid(),
            "args": [*server_args(spec), *args],
            "key": self.key,
            # Lets the child receive file descriptors of this process: weights in shared memory.
            "authkey": current_process().authkey.hex(),
        }
        log = os.open(self.spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rl_core.engines.sglang_server_main"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=child_environment(spec, os.environ),
            start_new_session=True,
        )
        os.close(log)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode())
        self.process.stdin.close()

    def died(self, reason: str) -> EngineDied:
        if self.process is None:
            return EngineDied(f"{self} {reason}")
        log = self.spec.log.read_bytes()[-20_000:].decode(errors="replace")
        lines = [line[:300] for line in log.splitlines() if line.strip()]
        end = "\n".join(lines[-LOG_LINES:])
        status = f"exit status {self.process.poll()}"
        return EngineDied(f"{self} {reason} ({status}); the end of {self.spec.log}:\n{end}")

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


def child_environment(
    spec: EngineSpec, environ: Mapping[str, str], version: tuple[int, ...] | None = None
) -> dict[str, str]:
    """Environment variables of the server. `version`: of SGLang; None: the installed one."""
    env = {name: value for name, value in environ.items() if not NOT_FOR_CHILDREN.match(name)}
    if spec.device.type == "cuda":
        env = cuda_environment(env)
        releases = releases_graphs(spec, version or installed_version(), env)
        return env | {GRAPH_SAVER: "true"} if releases else env
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    if spec.server.tp > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(spec.server.tp)))
    return env


def server_args(spec: EngineSpec, version: tuple[int, ...] | None = None) -> list[str]:
    """Arguments of sglang.launch_server. `version`: of SGLang; None: the installed one."""
    dtype, tp = str(spec.dtype).removeprefix("torch."), spec.server.tp
    args = f"--dtype {dtype} --tp-size {tp} --random-seed {spec.seed} "
    args += f"--max-running-requests {max(spec.num_slots, tp)} --log-level-http warning "
    # The warm-up request may come after the first response, and the server crashes if it has to
    # sleep then.
    args += "--skip-server-warmup "
    # The learner computes logits in fp32.
    args += "--enable-fp32-lm-head "
    if spec.adapters:
        configs = spec.adapters.values()
        targets = sorted({name for config in configs for name in config["target_modules"]})
        # Requests without an adapter need a slot too.
        args += (
            f"--enable-lora --max-lora-rank {max(c['r'] for c in configs)} --max-loras-per-batch "
            f"{len(configs) + 1} "
        )
        args += f"--lora-target-modules {' '.join(targets)} "
        args += "--lora-backend torch_native " if spec.device.type == "cpu" else ""
    if spec.device.type == "cpu":
        # Avoids SGLang's own CPU kernels, which few processors can run.
        args += (
            "--device cpu --attention-backend torch_native --sampling-backend pytorch "
            "--disable-cuda-graph "
        )
        args += (
            "--disable-overlap-schedule --max-total-tokens "
            f"{spec.num_slots * spec.max_context_tokens + 256}"
        )
    else:
        args += f"--base-gpu-id {spec.device.index or 0} --mem-fraction-static {spec.memory_frac} "
        args += "--enable-memory-saver "
        args += "--enable-weights-cpu-backup " if keeps_backup(spec) else ""
        args += " ".join(cuda_args(spec, version or installed_version(), os.environ))
    return ["--model-path", spec.model, *args.split(), *shlex.split(spec.server.args)]
