"""Folders in memory that both an engine's server and the rank that started it read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "rl_core_weights_"
SETTLED_S = 60.0  # after which a folder that nobody has locked is nobody's


def shared_memory() -> str | None:
    """A folder in memory where there is one; else the usual temporary one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class SharedFolder(tempfile.TemporaryDirectory):
    """In `place`; locked as long as this process has it. The system gives up the lock of one that is killed."""

    def __init__(self, place: str | None):
        super().__init__(prefix=f"{PREFIX}{os.getpid()}_", dir=place)
        lock = os.open(self.name, os.O_RDONLY)
        weakref.finalize(self, os.close, lock)
        with contextlib.suppress(OSError):  # of other machines' file systems
            fcntl.flock(lock, fcntl.LOCK_SH)


def remove_abandoned() -> None:
    """Of this user's folders in shared memory those whose process was killed. A lock tells it, as the number of a process
    cannot where containers share the memory."""
    for folder in Path(shared_memory() or tempfile.gettempdir()).glob(f"{PREFIX}[0-9]*_*"):
        try:
            facts = folder.stat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < SETTLED_S:
                continue
            lock = os.open(folder, os.O_RDONLY)
        except OSError:  # gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # somebody has it
            pass
        finally:
            os.close(lock)
