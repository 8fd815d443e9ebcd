"""The end of remote_programs.py inside a box. Standard library only, as root. `prepare` closes
the box's files for programs; `play` runs the processes of one program, each as another user, ends
and removes all that they leave, and says whether that succeeded."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rl_core.sandbox import isolation
from rl_core.sandbox.job import WORKERS_IN_BOX, Job, Limits
from rl_core.sandbox.pool import Pool
from rl_core.sandbox.sandbox import Sandbox

CLEAN_S = 3.0
MAX_PRINTED = 1 << 19  # Characters of an answer; a longer one is a file.
LONG_ANSWER = "/tmp/.rl_core_answer"  # Each program's replaces the last one's.
# Devices that anybody may write.
SHARED = [f"/dev/{name}" for name in (*isolation.DEVICES, "tty")]
KERNEL = ("proc", "sysfs", "cgroup", "cgroup2")
USERS = range(isolation.FIRST_USER, isolation.FIRST_USER + isolation.NUM_USERS)


def main(verb: str) -> None:
    os.umask(0o077)
    if verb == "prepare":
        try:
            return prepare()
        except OSError as error:
            sys.exit(str(error))
    # The forking process starts before the program and its tests are in this process's memory.
    sandbox = Sandbox(workers=WORKERS_IN_BOX)
    sandbox._pool = Pool([isolation.BOX])
    try:
        sandbox.start()
        answer = asyncio.run(play(sandbox, json.load(sys.stdin)))
    except (RuntimeError, OSError) as error:
        answer = {"error": str(error)}
    sandbox.close()
    text = json.dumps(answer | {"is_clean": is_clean()})
    if len(text) > MAX_PRINTED:
        with open(LONG_ANSWER, "w", encoding="utf-8") as file:
            file.write(text)
        text = json.dumps({"file": LONG_ANSWER})
    print(text)


async def play(sandbox: Sandbox, wanted: dict[str, Any]) -> dict[str, Any]:
    sandbox.limits = Limits(**wanted["limits"])
    outcomes = await sandbox.play_here(Job(**wanted["job"]))
    return {"outcomes": [plain(dataclasses.asdict(outcome)) for outcome in outcomes]}


def plain(outcome: dict[str, Any]) -> dict[str, Any]:
    for name in ("stdout", "stderr", "back"):
        outcome[name] = base64.b64encode(outcome[name]).decode()
    return outcome


def prepare() -> None:
    """Leaves programs no file or folder that they can write, but their private folders. Raises
    OSError if this box cannot isolate them."""
    isolation.prepare(isolation.BOX)
    os.makedirs(isolation.PROGRAMS, exist_ok=True)
    for path in (os.path.dirname(isolation.PROGRAMS), isolation.PROGRAMS):
        os.chmod(path, 0o711)
    for path in writable_paths():
        os.chown(path, 0, 0)
        os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~0o022)
    os.chmod("/tmp", 0o700)  # Programs and their tests pass through here.


def writable_paths() -> Iterator[str]:
    """Files and folders that any user, or a user of programs, can write."""
    with open("/proc/self/mounts") as file:
        mounts = [line.split() for line in file]
    for _, path, kind, options, *_ in mounts:
        if options.split(",")[0] == "rw" and kind not in KERNEL:
            folder = path.encode().decode("unicode_escape")
            yield from writable_below(folder)


def writable_below(top: str) -> Iterator[str]:
    """Leaves out other mounts below."""
    folders, device = [top], os.lstat(top).st_dev
    while folders:
        path = folders.pop()
        status = os.lstat(path)
        if status.st_dev != device or stat.S_ISLNK(status.st_mode) or path in SHARED:
            continue
        if status.st_mode & 0o002 or status.st_uid in USERS or status.st_gid in USERS:
            yield path
        if stat.S_ISDIR(status.st_mode):
            folders += [os.path.join(path, name) for name in os.listdir(path)]


def is_clean() -> bool:
    """True if no process and no file of a program is left."""
    deadline = time.monotonic() + CLEAN_S
    while time.monotonic() < deadline:
        users = running_users()
        for user in users:
            isolation.kill_user(user)
        folders = os.listdir(isolation.PROGRAMS)
        if not users and not folders:
            return True
        if not users:
            for name in folders:
                isolation.remove_folder(os.path.join(isolation.PROGRAMS, name))
        time.sleep(0.01)
    return False


def running_users() -> set[int]:
    """Users of programs that have a process."""
    users = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/status", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
            user = int(fields["Uid"].split()[0])
            if user in USERS and not fields["State"].strip().startswith("Z"):
                users.add(user)
    return users


if __name__ == "__main__":
    main(sys.argv[1])
