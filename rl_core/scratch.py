"""Temporary folders with their owner in the name. A killed process leaves its folders behind; the
next process that makes one removes them.

The name has a hash of the machine's boot and PID namespace, the owner's process id and start time:
machines and containers that share a temporary folder never remove each other's folders.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

# rl_core_KIND_MACHINE_PID_START_RANDOM
NAME = re.compile(r"rl_core_[a-z]+_([0-9a-f]{8})_(\d+)_(\d+)_\w+")


def scratch_prefix(kind: str) -> str:
    """The prefix for names of this process's temporary folders. The first call removes those of
    killed processes."""
    remove_orphans_once()
    pid = os.getpid()
    try:
        return f"rl_core_{kind}_{machine()}_{pid}_{start_of(pid)}_"
    except OSError:  # Not Linux, or a container that hides /proc.
        return f"rl_core_{kind}_"


def machine() -> str:
    """Hash of this machine's boot and PID namespace. Raises OSError if /proc lacks them."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    space = os.stat("/proc/self/ns/pid").st_ino
    text = f"{os.uname().nodename} {boot} {space}"  # Copies of a machine may share the boot.
    return f"{zlib.crc32(text.encode()):08x}"


def start_of(pid: int) -> int:
    """Start time of a process in clock ticks since boot. Raises OSError if it does not exist."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[19])


@cache
def remove_orphans_once() -> None:
    remove_orphans()


def remove_orphans(*folders: str) -> None:
    """Removes this user's temporary folders whose owners have ended, from the temporary folder,
    /tmp and `folders`."""
    try:
        here = machine()
    except OSError:
        return
    for folder in {tempfile.gettempdir(), "/tmp", *folders}:
        entries = []
        with suppress(OSError), os.scandir(folder) as scanned:
            entries = list(scanned)
        for entry in entries:
            match = NAME.fullmatch(entry.name)
            if not match or match[1] != here:
                continue
            with suppress(OSError):  # Another rank may remove the folder first.
                if is_orphan(entry, int(match[2]), int(match[3])):
                    shutil.rmtree(entry.path, ignore_errors=True)


def is_orphan(entry: os.DirEntry, pid: int, start: int) -> bool:
    """True if the entry is a folder of this user whose owner has ended. `start` differs if another
    process has the owner's id."""
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
        return False
    try:
        return start_of(pid) != start
    except OSError:
        return True
