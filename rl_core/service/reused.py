"""The first process of a reused container. Loads the environment file once and forks a process for
each session. Between two sessions it kills the processes and removes the files of the last one. If
the container still differs from its initial state, the container ends."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rl_core.sandbox.reaper import descendants, send
from rl_core.service.wire import MAX_MESSAGE

LOOK_S = 1.0  # Interval of checks that a session's process is alive.
KILL_S = 5.0  # Timeout for killing a session's processes.
IN_MEMORY = ("tmpfs", "mqueue")  # Writable filesystems that are cleaned after a session.
OF_KERNEL = ("proc", "sysfs", "devpts", "cgroup", "cgroup2", "securityfs")
SET_DUMPABLE, SET_SUBREAPER = 4, 36  # Options of prctl().


def serve(session: Callable[[int, int], None], requests: int, replies: int) -> None:
    """Forwards frames between the worker (two file descriptors) and a forked process per session,
    which runs session(requests, replies). An empty frame ends a session; an empty frame in return
    reports a clean container. Exits when `requests` closes. Raises ValueError if a writable mount
    cannot be cleaned."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_DUMPABLE, 0)  # Sessions cannot read this process's memory or open files.
    prctl(SET_SUBREAPER, 1)
    mounts = writable_mounts()
    before = contents(mounts)
    while True:
        pid, down, up = fork_session(session, requests, replies)
        is_over = pass_on(pid, requests, down, up, replies)
        os.close(down)
        os.close(up)
        kill_descendants()
        if is_over:
            os._exit(0)
        clean(mounts, before)
        os.write(replies, bytes(4))


def fork_session(
    session: Callable[[int, int], None], requests: int, replies: int
) -> tuple[int, int, int]:
    """(process ID, descriptor for requests, descriptor of replies) of a new session process."""
    child_in, down = os.pipe()
    up, child_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        for other in (requests, replies, down, up):
            os.close(other)
        if "numpy" in sys.modules:  # Python reseeds its own generator after a fork.
            sys.modules["numpy"].random.seed()
        session(child_in, child_out)
        os._exit(0)
    os.close(child_in)
    os.close(child_out)
    return pid, down, up


def pass_on(pid: int, requests: int, down: int, up: int, replies: int) -> bool:
    """Forwards the frames of one session. Returns True when the worker is gone, False when the
    worker ends the session. Exits with the session process's status if that process dies."""
    while True:
        # The timeout is needed because children of a dead session may hold its pipe open.
        ready, _, _ = select.select([requests, up], [], [], LOOK_S)
        if not ready and (code := exit_code(pid)) is not None:
            end_all(code)
        if requests in ready:
            frame = read_frame(requests)
            if not frame:
                return True
            if len(frame) == 4:
                return False
            with suppress(BrokenPipeError):
                write_all(down, frame)
        if up in ready:
            frame = read_frame(up)
            if len(frame) <= 4:
                time.sleep(0.05)  # The exit status follows shortly after the pipe closes.
                end_all(exit_code(pid) or 1)
            write_all(replies, frame)


def exit_code(pid: int) -> int | None:
    """Exit code of a child process, or None while the process runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return abs(os.waitstatus_to_exitcode(status)) if ended else None


def end_all(code: int) -> None:
    kill_descendants()
    os._exit(code or 1)


def read_frame(file: int) -> bytes:
    """A frame with its length prefix. Returns b"" at the end of the file and for a frame above
    MAX_MESSAGE."""
    head = read_exactly(file, 4)
    size = int.from_bytes(head, "big")
    if len(head) < 4 or size > MAX_MESSAGE:
        return b""
    body = read_exactly(file, size)
    return head + body if len(body) == size else b""


def read_exactly(file: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := os.read(file, size - len(data))):
        data += chunk
    return bytes(data)


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def kill_descendants() -> None:
    """Kills all descendants. Orphans become children of this process, which is a subreaper."""
    until_s = time.monotonic() + KILL_S
    while pids := descendants(os.getpid()):
        send(pids, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > until_s:
            refuse(f"processes {pids[:5]} of a session could not be killed")
        time.sleep(0.005)


def writable_mounts() -> list[Path]:
    """Mount points that this user can write to. Raises ValueError for a writable folder on a
    disk."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, last = line.partition(" - ")
        _, _, _, _, escaped, options, *_ = first.split()
        kind, _, super_options = last.split()
        path = Path(escaped.encode().decode("unicode_escape"))
        is_writable = "rw" in options.split(",") and "rw" in super_options.split(",")
        if kind in OF_KERNEL or not is_writable or not os.access(path, os.W_OK):
            continue
        if kind not in IN_MEMORY and path.is_dir():
            raise ValueError(
                f'container = "reuse": {path} ({kind}) is writable and cannot be cleaned; '
                'use container = "exclusive"'
            )
        mounts.append(path)
    return mounts


def contents(mounts: list[Path]) -> dict[str, tuple[int, ...]]:
    """Path -> its mode, plus inode and time of last change for files and links. Includes System V
    IPC segments."""
    states = {f"/proc/sysvipc/{kind}": segments(kind) for kind in ("shm", "sem", "msg")}
    for mount in mounts:
        paths = [mount, *mount.rglob("*")] if mount.is_dir() else [mount]
        for path in paths:
            with suppress(FileNotFoundError):
                states[str(path)] = state(path)
    return states


def state(path: Path) -> tuple[int, ...]:
    now = path.lstat()
    is_file = stat.S_ISREG(now.st_mode) or stat.S_ISLNK(now.st_mode)
    return (now.st_mode, now.st_ino, now.st_ctime_ns) if is_file else (now.st_mode, now.st_ino)


def segments(kind: str) -> tuple[int, ...]:
    path = Path(f"/proc/sysvipc/{kind}")
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return tuple(int(line.split()[1]) for line in lines)


def clean(mounts: list[Path], before: dict[str, tuple[int, ...]]) -> None:
    """Removes new files and folders. Exits if any other file has changed."""
    for path in map(Path, contents(mounts).keys() - before.keys()):
        is_folder = path.is_dir() and not path.is_symlink()
        with suppress(OSError):  # The path may have been removed with its folder.
            shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink()
    after = contents(mounts)
    if after != before:
        changed = [name for name in after | before if after.get(name) != before.get(name)]
        refuse(f"the session changed {', '.join(sorted(changed)[:5])}")


def refuse(why: str) -> None:
    print(f"the container cannot be reused: {why}", file=sys.stderr, flush=True)
    os._exit(1)
