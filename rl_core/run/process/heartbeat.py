"""Notices ranks, and a store of all ranks, that stand still."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rl_core.types import RunError

# Beats of a heartbeat in one --timeout_s, and the longest time between two of them.
BEATS, MAX_BEAT_S = 10, 5.0
CONNECT_HINT = (
    "Every node must reach every other at any port; GLOO_SOCKET_IFNAME names the interface (eth0)"
)
LOST = re.compile(
    r"timed out|timeout|connection (was )?(closed|reset|refused)|broken pipe|aborted", re.IGNORECASE
)


class Heartbeat:
    """A thread that counts up in the store while this process runs, and watches the count of the
    next rank. A frozen process closes no connection: the ranks that it should ask or answer would
    wait for ever. The ranks form a ring, so that each costs the store two requests per beat.

    Silence is counted in beats of this process, so that a job that was suspended as a whole
    resumes.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float):
        # A client that waits for a key answers nobody else. torch's stubs lack clone().
        self.store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        self.rank, self.watched = rank, (rank + 1) % size
        self.timeout_s = timeout_s
        self.period_s = min(timeout_s / BEATS, MAX_BEAT_S)
        self.lost = ""  # Names the rank that stopped responding.
        self.when_lost: Callable[[], object] | None = None
        self.is_closed = threading.Event()
        self.asked = 0  # The number of the beat that the store has not answered, or 0.
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def _beat(self) -> None:
        count, num_silent, num_beats = 0, 0, 0
        while not self.is_closed.wait(self.period_s):
            num_beats += 1
            self.asked = num_beats
            try:
                self.store.add(f"beats/{self.rank}", 1)
                newest = self.store.add(f"beats/{self.watched}", 0)
            except RuntimeError:  # The store is gone or frozen.
                newest = count
            self.asked = 0
            num_silent = 0 if newest != count else num_silent + 1
            count = newest
            if num_silent * self.period_s > self.timeout_s and not self.lost:
                self.lost = (
                    f"rank {self.watched} has stood still for --timeout_s={self.timeout_s:g}: no "
                    f"heartbeat of it reached rank {self.rank}. Check that its process is not "
                    "stopped and that its machine answers, then resume with --resume"
                )
                # This rank's heartbeat continues for the other ranks.
                when_lost = self.when_lost
                if when_lost:
                    when_lost()

    def _watch_store(self) -> None:
        """Prints a line once the store has not answered for the deadline: its client waits for ever
        for a process that is stopped, in this thread and in those that work. A launcher that is
        suspended may resume; a first rank that has the store and stands still ends this process."""
        is_told, num_waits, asked = False, 0, 0
        while not self.is_closed.wait(self.period_s):
            before, asked = asked, self.asked
            num_waits = num_waits + 1 if asked and asked == before else 0
            if num_waits * self.period_s <= self.timeout_s:
                is_told = False
            elif not is_told:
                is_told = True
                is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
                host = "the launcher (torchrun or rl-core train)" if is_launchers else "rank 0"
                print(
                    f"{'warning' if is_launchers else 'error'}: rank {self.rank} waits for {host}, "
                    f"which has stood still for --timeout_s={self.timeout_s:g}: the store of all "
                    "ranks does not answer. Look whether that process is stopped",
                    file=sys.stderr,
                    flush=True,
                )
                if not is_launchers:
                    os._exit(1)  # A thread that waits in C++ hears no exception.

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the current task is cancelled once the watched rank stands still. Then raises
        RunError."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self.when_lost = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self.lost:  # while the models loaded
                raise RunError(self.lost)
            yield
        except asyncio.CancelledError:
            if not self.lost:
                raise
            raise RunError(self.lost) from None
        finally:
            self.when_lost = None

    def explain(self, error: RuntimeError, phase: str) -> str:
        """The reason of an error in this phase of a step if another rank did not come in time or is
        gone, else ""."""
        if not LOST.search(str(error)):
            return ""
        return (
            f"rank {self.rank} waited in the phase {phase!r} for another rank, which is gone or "
            f"did not come within --timeout_s={self.timeout_s:g}: {self.lost or first_line(error)}"
        )

    def close(self) -> None:
        self.is_closed.set()
        self.thread.join(self.period_s)


def first_line(error: Exception) -> str:
    line = str(error).splitlines()[0]
    return f"{line}. {CONNECT_HINT}" if "connectFullMesh" in line else line
