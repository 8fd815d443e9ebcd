"""Services of a box by docker or podman: containers that share its network."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rl_core.sandbox.box_settings import (
    COMPLETED,
    BoxSettings,
    ExecResult,
    HealthCheck,
    Sidecar,
)
from rl_core.sandbox.engines import (
    CONFINED,
    OWNER,
    RIGHTS,
    ask_engine,
    bind_flags,
    memory_flags,
    owner,
    right_flags,
)

OPEN_S = 300.0  # An image may have to be pulled.
LOGS = {"docker": ["local", "max-size=1m"], "podman": ["k8s-file", "max-size=1mb"]}
TMPFS = "rw,nosuid,nodev,size=64m"
POLL_S = 0.2
MAX_LOG = 1000  # Characters of a service's output in an error.
STATE = "{{.State.Running}} {{.State.ExitCode}}"


def container_name(box: str, sidecar: Sidecar) -> str:
    return f"{box}-{sidecar.name}"


async def start_sidecars(engine: str, box: str, settings: BoxSettings, hosts: Path) -> None:
    """Starts the services of a box, and returns when all are ready. `hosts`: path of a new file,
    which outlives the services. Raises OSError."""
    try:
        await asyncio.wait_for(start_in_order(engine, box, settings, hosts), OPEN_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        names = ", ".join(sidecar.name for sidecar in settings.sidecars)
        raise OSError(f"the services {names} were not ready within {OPEN_S:.0f} s") from None


async def start_in_order(engine: str, box: str, settings: BoxSettings, hosts: Path) -> None:
    write_hosts(hosts, settings.sidecars)
    services = {each.name: Service(engine, box, each) for each in settings.sidecars}
    for service in services.values():
        for name, condition in service.sidecar.waits_for.items():
            await services[name].wait(condition)
        await service.start(settings, hosts)
    for service in services.values():
        await service.wait("service_healthy" if service.sidecar.check else "service_started")


async def ended_sidecars(engine: str, box: str, sidecars: Sequence[Sidecar]) -> list[str]:
    """Names of services that should run, and have ended."""
    names = []
    for sidecar in sidecars:
        running, code = await Service(engine, box, sidecar).state()
        if not running and (code or sidecar.check):
            names.append(sidecar.name)
    return names


def write_hosts(file: Path, sidecars: Sequence[Sidecar]) -> None:
    names = [name for sidecar in sidecars for name in sidecar.host_names]
    file.write_text(f"127.0.0.1 localhost {' '.join(names)}\n")


class Service:
    """A container of a sidecar."""

    def __init__(self, engine: str, box: str, sidecar: Sidecar):
        self.engine = engine
        self.box = box
        self.sidecar = sidecar
        self.name = container_name(box, sidecar)

    async def ask(self, *args: str, timeout_s: float = OPEN_S) -> str:
        return await asyncio.to_thread(ask_engine, self.engine, [*args], timeout_s)

    async def start(self, settings: BoxSettings, hosts: Path) -> None:
        sidecar, limits = self.sidecar, settings.limits
        driver, option = LOGS[self.engine]
        line = ["run", "--detach", "--stop-timeout", "0", *CONFINED]
        line += ["--log-driver", driver, "--log-opt", option]
        line += ["--name", self.name, "--label", f"{OWNER}={owner()}"]
        line += ["--network", f"container:{self.box}", "--pids-limit", str(limits.processes)]
        line += memory_flags(f"{limits.memory_mib}m")
        line += right_flags([*RIGHTS, "NET_BIND_SERVICE"])
        line += ["--cpus", f"{limits.cpus:g}"] if limits.cpus else []
        line += ["--user", sidecar.user] if sidecar.user else []
        line += ["--workdir", sidecar.workdir] if sidecar.workdir else []
        for name, value in sidecar.environ.items():
            line += ["--env", f"{name}={value}"]
        # Podman does not share the box's file.
        for inside, path in ({"/etc/hosts": str(hosts)} | sidecar.binds).items():
            line += bind_flags(path, inside)
        for path in sidecar.tmpfs:
            line += ["--tmpfs", f"{path}:{TMPFS}"]
        for path in sidecar.volumes:
            line += ["--mount", f"type=volume,target={path}"]
        command = sidecar.command
        if sidecar.entrypoint is not None:
            line += ["--entrypoint", *(sidecar.entrypoint[:1] or [""])]
            command = [*sidecar.entrypoint[1:], *command]
        try:
            await self.ask(*line, sidecar.image, *command)
        except OSError as error:
            raise OSError(f"the service {sidecar.name} does not start: {error}") from None

    async def wait(self, condition: str) -> None:
        """Returns when the condition holds. Raises OSError if it never will."""
        check = self.sidecar.check
        if condition == COMPLETED:
            while await self.is_running():  # noqa: ASYNC110 -- the engine wakes nobody
                await asyncio.sleep(POLL_S)
        elif condition == "service_healthy" and not await is_healthy(check, self.exec):
            raise await self.failure("its healthcheck failed")
        else:
            await self.is_running()

    async def is_running(self) -> bool:
        """Raises OSError if the service has failed."""
        running, code = await self.state()
        if not running and code:
            raise await self.failure(f"it ended with exit code {code}")
        return running

    async def state(self) -> tuple[bool, int]:
        """(True if the service runs, its exit code)."""
        running, code = (await self.ask("inspect", "--format", STATE, self.name)).split()
        return running == "true", int(code)

    async def exec(self, command: str | list[str], timeout_s: float) -> ExecResult:
        """Runs a health check. Raises OSError if the service has failed."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        try:
            await self.ask("exec", self.name, *argv, timeout_s=min(timeout_s, OPEN_S))
        except (OSError, subprocess.TimeoutExpired):
            await self.is_running()
            return ExecResult(code=1, stdout="", stderr="")
        return ExecResult(code=0, stdout="", stderr="")

    async def failure(self, why: str) -> OSError:
        wrote = await asyncio.to_thread(
            subprocess.run,
            [self.engine, "logs", "--tail", "20", self.name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=OPEN_S,
        )
        text = wrote.stdout.decode(errors="replace").strip()[-MAX_LOG:]
        return OSError(f"the service {self.sidecar.name} is not ready: {why}: {text}")


async def is_healthy(
    check: HealthCheck | None, run: Callable[[str | list[str], float], Awaitable[ExecResult]]
) -> bool:
    """True as soon as a run of the command succeeds; False after `retries` failures."""
    if check is None:
        return True
    counted_from, num_failures = time.monotonic() + check.start_period_sec, 0
    while True:
        is_starting = time.monotonic() < counted_from
        done = await run(check.command, check.timeout_sec)
        if done.code == 0 and not done.timed_out:
            return True
        num_failures += not is_starting
        if num_failures >= check.retries:
            return False
        pause_s = check.start_interval_sec if is_starting else check.interval_sec
        await asyncio.sleep(max(pause_s, POLL_S))
