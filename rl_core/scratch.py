"""Folders in the temporary folder, by the process that owns them. A process that is killed leaves
its folders behind; the next run removes them.

A name holds the machine's boot and namespace of process ids, the owner's process id and its start
time, so that machines and containers that share a temporary folder never remove each other's.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

# rl_core_KIND_MACHINE_PID_START_RANDOM
NAME = re.compile(r"rl_core_[a-z]+_([0-9a-f]{8})_(\d+)_(\d+)_\w+")


def scratch_prefix(kind: str) -> str:
    """The beginning of the name of a temporary folder of this process, for tempfile."""
    pid = os.getpid()
    try:
        return f"rl_core_{kind}_{machine()}_{pid}_{start_of(pid)}_"
    except OSError:  # No Linux, or a container that hides /proc.
        return f"rl_core_{kind}_"


def machine() -> str:
    """Identifies the boot of this machine and the namespace in which process ids are counted.
    Raises OSError where the system does not say."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    space = os.stat("/proc/self/ns/pid").st_ino
    text = f"{os.uname().nodename} {boot} {space}"  # Copies of a machine may share the boot.
    return f"{zlib.crc32(text.encode()):08x}"


def start_of(pid: int) -> int:
    """Clock ticks from boot to the start of a process. Raises OSError if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[19])


def remove_orphans(*folders: str) -> None:
    """Removes temporary folders of this user whose owners are gone, from the temporary folder, from
    /tmp and from `folders`."""
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
            with suppress(OSError):  # Another rank may remove the folder.
                if is_orphan(entry, int(match[2]), int(match[3])):
                    shutil.rmtree(entry.path, ignore_errors=True)


def is_orphan(entry: os.DirEntry, pid: int, start: int) -> bool:
    """True if it is a folder of this user, and its owner is gone. Another process may have the
    owner's number."""
    status = entry.stat(follow_symlinks=False)
    if status.st_uid != os.geteuid() or not entry.is_dir(follow_symlinks=False):
        return False
    try:
        return start_of(pid) != start
    except OSError:
        return True
