"""The process that forks programs. Waits inside the box with everything imported. Programs and
tests go through sockets that this process only passes on, so none of its forks has them in
memory."""

from __future__ import annotations

import bisect  # noqa: F401
import collections  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import os
import random  # noqa: F401
import re  # noqa: F401
import resource
import select
import signal
import socket
import string  # noqa: F401
import sys
import time
import typing  # noqa: F401
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rl_core.sandbox import checker, isolation, runner
from rl_core.sandbox.values import send

# In a remote box the package is next to this one, whose folder leaves sys.path.
with suppress(ImportError, OSError, RuntimeError):
    import pyseccomp  # noqa: F401


def serve(level: str, where: int | str, owner_fd: int = -1) -> None:
    """Forks a supervisor for every request until the socket closes or the owner, a pidfd, ends.
    `where`: the socket, or its path in a container; the pidfd then comes with the first message."""
    if isinstance(where, str):
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.connect(where)
        _, [owner_fd], _, _ = socket.recv_fds(control, 1, 1)
    else:
        control = socket.socket(fileno=where)
    try:
        confinement = isolation.prepare(level)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(json.dumps({"level": level, "seccomp": confinement[0] is not None}).encode())
    gc.collect()
    gc.freeze()
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    waiting.register(owner_fd, select.POLLIN)
    while True:
        if any(fd == owner_fd for fd, _ in waiting.poll()):
            return
        header, fds, _, _ = socket.recv_fds(control, 1 << 16, 8)
        if not header:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.close(owner_fd)
            in_child(lambda: supervise(json.loads(header), fds, level, confinement))  # noqa: B023
        for fd in fds:
            os.close(fd)


def in_child(work: Callable[[], int]) -> None:
    status = 70
    try:
        status = work() or 0
    except BaseException as error:
        with suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def supervise(
    wanted: dict[str, Any], fds: list[int], level: str, confinement: tuple[Any, bool]
) -> int:
    """Runs one program in a separate process, ends all its processes, and sends the outcome. `fds`:
    status, job, stdout, stderr, and the socket between program and tests."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Orphans become children of this process, so that is_alone() sees them.
    isolation.LIBC.prctl(isolation.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    status = socket.socket(fileno=os.dup(fds[0]))
    # Opened before a program's namespaces hide /proc.
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        folder = isolation.open_folder(level, wanted["limits"]["disk_mib"], wanted["user"])
    except OSError as error:
        send(status, {"refused": str(error)})
        return 1
    problem, at_program = os.pipe()
    pid = os.fork()
    if pid == 0:
        in_child(lambda: become_program(wanted, [*fds, at_program], level, folder, confinement))
    for fd in (*fds, at_program):
        os.close(fd)
    began = time.monotonic()
    timed_out = wait_for(pid, status, wanted["timeout_s"], wanted["max_wait"], proc)
    _, code, used = os.wait4(pid, 0)
    if level == isolation.BOX:
        isolation.kill_user(wanted["user"])
    elif level != "bubblewrap":
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    outcome = {
        "timed_out": timed_out,
        "exit": os.waitstatus_to_exitcode(code),
        "wall_s": time.monotonic() - began,
    }
    usage = resource.getrusage(resource.RUSAGE_SELF)
    outcome["cpu_s"] = used.ru_utime + used.ru_stime
    outcome["supervisor_s"] = usage.ru_utime + usage.ru_stime
    if text := os.read(problem, 1 << 12):
        outcome = {"refused": f"a program could not be isolated: {text.decode()}"}
    with suppress(OSError):  # The owner may be gone.
        send(status, outcome)
    status.close()
    if level != "bubblewrap":
        # Removal comes after the answer: removing many files may take seconds.
        os.chdir("/")
        isolation.remove_folder(folder)
    return 0


def wait_for(pid: int, status: socket.socket, timeout_s: float, max_wait: float, proc: int) -> bool:
    """Waits for the process and returns True if it ran out of time. Kills the process then, and
    when the owner closes the socket or is gone. Time spent waiting for a core does not count, up to
    `max_wait` times timeout_s, unless the process has children or threads."""
    process, waiting, began = os.pidfd_open(pid), select.poll(), time.monotonic()
    waiting.register(process, select.POLLIN)
    waiting.register(status, select.POLLIN)
    left, events = timeout_s, []
    while left > 0 and not events:
        events = waiting.poll(left * 1000 + 1)
        left = (
            timeout_s + min(waited_s(pid, proc), max_wait * timeout_s) - (time.monotonic() - began)
        )
    if process not in {fd for fd, _ in events}:
        os.kill(pid, signal.SIGKILL)
    return not events


def waited_s(pid: int, proc: int) -> float:
    """Seconds in which the process was ready and had no core. Returns 0 if the kernel does not
    count them, and for a process that may have waited for its children or threads."""
    try:
        if not is_alone(pid, proc):
            return 0.0
        return int(read(proc, f"{pid}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def is_alone(pid: int, proc: int) -> bool:
    """True if a child of this process has one thread, and neither has nor had children. Raises
    OSError if the kernel does not list children."""
    ours = os.getpid()
    if read(proc, f"{pid}/task/{pid}/children").split():
        return False
    if read(proc, f"{ours}/task/{ours}/children").split() != [str(pid)]:
        return False
    fields = read(proc, f"{pid}/stat").rpartition(")")[2].split()
    faults_of_children, num_threads = int(fields[8]), int(fields[17])
    return faults_of_children == 0 and num_threads == 1


def read(proc: int, name: str) -> str:
    """Text of a file below /proc."""
    with open(os.open(name, os.O_RDONLY, dir_fd=proc), encoding="utf-8", errors="replace") as file:
        return file.read()


def become_program(
    wanted: dict[str, Any], fds: list[int], level: str, folder: str, confinement: tuple[Any, bool]
) -> int:
    if level == isolation.BOX:
        isolation.become_nobody(user=wanted["user"])
    isolation.LIBC.prctl(isolation.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()  # kill(0) reaches a process group across pid namespaces.
    _, job, out, err, *rpc, problem = fds
    high = [os.dup2(fd, 100 + n, inheritable=False) for n, fd in enumerate([job, *rpc, problem])]
    for n, fd in enumerate((os.open("/dev/null", os.O_RDONLY), out, err)):
        os.dup2(fd, n)
    for n, fd in enumerate(high):
        os.dup2(fd, 3 + n, inheritable=False)
    os.closerange(3 + len(high), 1 << 20)
    os.environ.update(HOME=folder, TMPDIR=folder)
    job = socket.socket(fileno=3)
    other = socket.socket(fileno=4) if rpc else None
    problem = 2 + len(high)
    try:
        isolation.confine(level, folder, wanted["limits"], *confinement)
    except OSError as error:
        os.write(problem, str(error).encode()[: 1 << 12])
        raise
    os.close(problem)
    return checker.check(job, other) if wanted["role"] == "check" else runner.run(job, other)
