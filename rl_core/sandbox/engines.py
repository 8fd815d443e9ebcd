"""docker and podman: which one answers, what closes every container of ours in, and what removes
those whose owner is gone."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ENGINES = ("docker", "podman")
OWNER = "rl_core.owner"  # label: HOST PID START of the process that asked for the container
CONFINED = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
HARDENED = ["--rm", *CONFINED, "--log-driver", "none"]
# Installers, shells and services of images need these rights of root.
RIGHTS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID", "KILL"]
ENGINE_S = 60.0  # The deadline of an engine that lists or removes containers.


def run_line(engine: str, *, network: bool = False, processes: int = 512) -> list[str]:
    """The beginning of the command of every container: no rights, no network unless asked for, and
    a label with its owner."""
    line = [engine, "run", *HARDENED, "--pids-limit", str(processes)]
    line += ["--network", "bridge" if network else "none"]
    return [*line, "--label", f"{OWNER}={owner()}"]


def memory_flags(memory: str) -> list[str]:
    """Flags for this much memory, and no swap."""
    return ["--memory", memory, "--memory-swap", memory]


def bind_flags(source: str | Path, target: str, writable: bool = False) -> list[str]:
    mount = f"type=bind,source={source},target={target}"
    return ["--mount", mount if writable else f"{mount},readonly"]


def remove_line(engine: str, names: list[str]) -> list[str]:
    """The command that removes containers and their unnamed volumes."""
    return [engine, "rm", "--force", "--volumes", *names]


def right_flags(rights: Sequence[str] = RIGHTS) -> list[str]:
    return [flag for right in rights for flag in ("--cap-add", right)]


def ask_engine(engine: str, args: list[str], timeout_s: float = ENGINE_S) -> str:
    """The output of the engine. Raises OSError with its stderr."""
    done = subprocess.run(
        [engine, *args],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise OSError(" ".join(done.stderr.split())[-300:])
    return done.stdout


def reap(engine: str) -> None:
    """Removes containers whose owners, of this host, are no more. Raises OSError if there is no
    engine."""
    listed = ask_engine(
        engine, ["ps", "--all", "--filter", f"label={OWNER}", "--format", "{{.Names}} {{.Labels}}"]
    )
    # docker writes owner=X,other=Y and podman map[owner:X other:Y]
    labels = re.findall(rf"^(\S+) .*\b{re.escape(OWNER)}[=:](\S+ \d+ \d*)", listed, re.MULTILINE)
    dead = [name for name, label in labels if is_dead(label)]
    # A box has a shorter name than its services, which podman removes before it alone.
    for name in sorted(dead, key=len, reverse=True):
        with suppress(OSError):  # Another process that starts removes the same.
            ask_engine(engine, remove_line(engine, [name])[1:])


def find_engine(why: str, engines: tuple[str, ...] = ENGINES) -> str:
    """docker or podman, whichever answers; what dead owners left is removed. Raises ValueError
    without one."""
    tried = []
    for engine in engines:
        if not shutil.which(engine):
            tried.append(f"{engine} is not installed")
            continue
        try:
            reap(engine)
            return engine
        except (OSError, subprocess.TimeoutExpired) as error:
            tried.append(f"{engine}: {error}")
    raise ValueError(f"{why}, which needs {' or '.join(engines)}: {'; '.join(tried)}")


def owner() -> str:
    return f"{socket.gethostname()} {os.getpid()} {start_time(os.getpid())}"


def is_dead(label: str) -> bool:
    """True if the label's owner ran on this host and has ended."""
    host, _, rest = label.partition(" ")
    pid, _, began = rest.partition(" ")
    return host == socket.gethostname() and pid.isdecimal() and start_time(int(pid)) != began


def start_time(pid: int) -> str:
    """The start of a process, in ticks of the kernel; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
