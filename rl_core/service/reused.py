"""The first process of a container that is used again. It holds the environment's file as it was
loaded, and forks a process for each session. Between two sessions it kills what the last one left
running and removes what it wrote. A container that is not as before then ends."""

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

LOOK_S = 1.0  # how often it is asked whether a session's process is there
KILL_S = 5.0  # that processes of a session may take to die
IN_MEMORY = ("tmpfs", "mqueue")  # filesystems that a session may write to, and that are cleaned
OF_KERNEL = ("proc", "sysfs", "devpts", "cgroup", "cgroup2", "securityfs")
SET_DUMPABLE, SET_SUBREAPER = 4, 36  # of prctl()


def serve(session: Callable[[int, int], None], requests: int, replies: int) -> None:
    """Passes frames on between the worker (two file descriptors) and a process for each session,
    which runs session(its requests, its replies). A frame of no bytes ends a session, and answers
    once all is clean. Ends with its requests. Raises ValueError where it could not clean up."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SET_DUMPABLE, 0)  # no process of a session reads this one's memory or files
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
    """(its process, where its requests go, where its replies come from)"""
    child_in, down = os.pipe()
    up, child_out = os.pipe()
    pid = os.fork()
    if pid == 0:
        for other in (requests, replies, down, up):
            os.close(other)
        if "numpy" in sys.modules:  # Python's own generator is seeded anew by a fork
            sys.modules["numpy"].random.seed()
        session(child_in, child_out)
        os._exit(0)
    os.close(child_in)
    os.close(child_out)
    return pid, down, up


def pass_on(pid: int, requests: int, down: int, up: int, replies: int) -> bool:
    """True once the worker is gone, False once it asks for a clean container. Ends this process
    with the status of a session's that dies."""
    while True:
        # What a session's process leaves running may hold its end of the pipe open.
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
                time.sleep(0.05)  # its pipe closes before its status is there
                end_all(exit_code(pid) or 1)
            write_all(replies, frame)


def exit_code(pid: int) -> int | None:
    """None while the process is there."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return abs(os.waitstatus_to_exitcode(status)) if found else None


def end_all(code: int) -> None:
    kill_descendants()
    os._exit(code or 1)


def read_frame(file: int) -> bytes:
    """Its length and what it holds; nothing at the end, or for one that is too long."""
    head = read_exactly(file, 4)
    size = int.from_bytes(head, "big")
    if len(head) < 4 or size > MAX_MESSAGE:
        return b""
    body = read_exactly(file, size)
    return head + body if len(body) == size else b""


def read_exactly(file: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := os.read(file, size - len(data))):
        data += part
    return bytes(data)


def write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def kill_descendants() -> None:
    """Kills what sessions started, until none is left. Orphans are this process's children."""
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
    """Mount points that this user can write to. Raises ValueError for one that is neither in memory
    nor a file."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, last = line.partition(" - ")
        _, _, _, _, escaped, options, *_ = first.split()
        kind, _, whole = last.split()
        path = Path(escaped.encode().decode("unicode_escape"))
        is_writable = "rw" in options.split(",") and "rw" in whole.split(",")
        if kind in OF_KERNEL or not is_writable or not os.access(path, os.W_OK):
            continue
        if kind not in IN_MEMORY and path.is_dir():
            raise ValueError(
                f'container = "reuse": {path} ({kind}) can be written to and not be cleaned; '
                'use container = "exclusive"'
            )
        found.append(path)
    return found


def contents(mounts: list[Path]) -> dict[str, tuple[int, ...]]:
    """Path -> its kind, and of what is no folder its inode and the time of its last change.
    Segments of System V are in it too."""
    found = {f"/proc/sysvipc/{kind}": segments(kind) for kind in ("shm", "sem", "msg")}
    for mount in mounts:
        paths = [mount, *mount.rglob("*")] if mount.is_dir() else [mount]
        for path in paths:
            with suppress(FileNotFoundError):
                found[str(path)] = state(path)
    return found


def state(path: Path) -> tuple[int, ...]:
    now = path.lstat()
    is_file = stat.S_ISREG(now.st_mode) or stat.S_ISLNK(now.st_mode)
    return (now.st_mode, now.st_ino, now.st_ctime_ns) if is_file else (now.st_mode, now.st_ino)


def segments(kind: str) -> tuple[int, ...]:
    path = Path(f"/proc/sysvipc/{kind}")
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return tuple(int(line.split()[1]) for line in lines)


def clean(mounts: list[Path], before: dict[str, tuple[int, ...]]) -> None:
    """Removes what is new. Ends this process if anything else has changed."""
    for path in map(Path, contents(mounts).keys() - before.keys()):
        is_folder = path.is_dir() and not path.is_symlink()
        with suppress(OSError):  # it may be gone with its folder
            shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink()
    after = contents(mounts)
    if after != before:
        changed = [name for name in after | before if after.get(name) != before.get(name)]
        refuse(f"{', '.join(sorted(changed)[:5])} is not as before the session")


def refuse(why: str) -> None:
    print(f"the container is not used again: {why}", file=sys.stderr, flush=True)
    os._exit(1)
