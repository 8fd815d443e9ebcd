"""Runs a command and kills the processes that the command leaves behind. Run as a program, this
file is the command's parent and a child subreaper: processes that call setsid() or clear their
environment stay its descendants. macOS has no subreapers: there a process whose parent has ended
is left behind. Uses only the standard library.

    python -I -S reaper.py PARENT REPORT COMMAND...

PARENT: process id of the caller; the command ends with the caller. REPORT: a file descriptor that
gets the errno if the command cannot be started. The exit status or signal is the command's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_ROUNDS = 50
ROUND_S = 0.002
PARENT_S = 0.2  # Between two looks at the parent, where the kernel sends no signal.
# Python ignores these signals, and a command would inherit that.
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


def kill_descendants(ancestor: int) -> bool:
    """Kills every process that descends from `ancestor`. Stops all of them first, so that none can
    fork. Returns False if some are left."""
    for _ in range(KILL_ROUNDS):
        pids = descendants(ancestor)
        send(pids, signal.SIGSTOP)
        if set(descendants(ancestor)) == set(pids):
            send(pids, signal.SIGKILL)
            return True
        time.sleep(ROUND_S)
    return False


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(ancestor: int) -> list[int]:
    """Process ids of all processes that descend from `ancestor`, parents before their children.
    Zombies count: a process whose main thread has ended is shown as one, while its other threads
    run."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents() if sys.platform == "linux" else listed_parents():
        children.setdefault(parent, []).append(pid)
    pids = list(children.get(ancestor, []))
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def parents() -> Iterator[tuple[int, int]]:
    """Pairs (process id, its parent's) of all processes."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            with open(f"/proc/{name}/stat", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            yield int(name), parent


def listed_parents() -> Iterator[tuple[int, int]]:
    """The same by ps, for systems without /proc."""
    import subprocess

    with subprocess.Popen(["ps", "-axo", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
        for line in ps.stdout or ():
            pid, parent = map(int, line.split())
            if pid != ps.pid:
                yield pid, parent


def end_with(parent: int) -> None:
    """Ends this process, the command and their descendants when the parent ends."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    end(128 + signal.SIGTERM)


def main(parent: int, report: int, command: list[str]) -> None:
    # Imported here because kill_descendants() does not need it.
    import ctypes

    is_linux = sys.platform == "linux"
    signal.signal(signal.SIGTERM, lambda *_: end(128 + signal.SIGTERM))
    if is_linux:
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")
    child = os.fork()
    if child == 0:
        if is_linux:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        become(command, report)
    os.close(report)
    if not is_linux:
        import threading

        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    status = None
    while status is None:
        pid, code = os.waitpid(-1, 0)
        if pid == child:
            status = os.waitstatus_to_exitcode(code)
    end(status)


def become(command: list[str], report: int) -> None:
    """Replaces this process with the command, in a new session."""
    os.setsid()
    os.set_inheritable(report, False)
    for number in (*IGNORED, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(report, str(error.errno).encode())
    os._exit(127)


def end(status: int) -> None:
    """Kills all descendants, then ends this process with the command's exit status or signal."""
    kill_descendants(os.getpid())
    if status < 0 and -status != signal.SIGKILL:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGSTOP has no handler to reset.
            signal.signal(-status, signal.SIG_DFL)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
