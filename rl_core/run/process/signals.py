"""Ends a run on a signal, once its step is done and saved. An evaluation ends at once.

Each rank reduces its signal with the step's metrics, so that all ranks decide the same without
another collective. It also writes the signal to the store of all ranks: ranks that play no episodes
reduce no metrics, and an evaluation polls the store while it waits for episodes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from rl_core.distributed import ENDED_BY_SIGNAL, SIGNAL_RECEIVED
from rl_core.metrics import Max, Metric
from rl_core.plugin import Plugin, RunState

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
WATCH_S = 0.2


class SignalHandler(Plugin):
    """Handles signals of a run, on each of its ranks."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.received = 0  # The signal that this rank received.
        self.before: dict[int, Callable | int | signal.Handlers | None] = {}
        self.sees_others = False

    async def before_start(self) -> None:
        """Installs handlers: a signal ends the run after the step. Two signals, one of them
        Ctrl-C, kill this process."""
        # False if each rank has a separate parent, such as a wrapper.
        self.sees_others = num_local() > 1 and not has_lost_a_neighbour()
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    async def start(self) -> None:
        self._end_after_signal()  # A signal in the evaluation of the initial weights.

    def reduced_flags(self) -> dict[str, Metric]:
        ranks = self.trainer.ranks
        received = self.received or (ranks.is_writer and ranks.number(SIGNAL_RECEIVED))
        return {"signal": Max(received)}

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        self._end_after_signal()

    async def give_up(self) -> None:
        self._end_after_signal()

    def _end_after_signal(self) -> None:
        if number := self.trainer.signal:
            name = signal.Signals(number).name
            if self.trainer.ranks.is_writer:
                self.trainer.ranks.set_number(ENDED_BY_SIGNAL, number)
            self.trainer.end(f"ended by {name}")

    async def close(self) -> None:
        """Restores the previous signal handlers."""
        while self.before:
            signal.signal(*self.before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:  # Schedulers, srun and torchrun may each send a signal.
            if signal.SIGINT in (self.received, number):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received = number
        if self.trainer.ranks.is_writer:
            name = signal.Signals(number).name
            again = " again" if number == signal.SIGINT else ""
            text = f"\n{name}: saves when this step is done, and ends; "
            text += f"Ctrl-C{again} ends at once, without saving\n"
            os.write(2, text.encode())
        # In a thread, since the store may be in use by the code that the signal interrupted.
        write, entry = self.trainer.ranks.set_number, (SIGNAL_RECEIVED, number)
        threading.Thread(target=write, args=entry, daemon=True).start()
        if self.sees_others:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Kills this rank if another one has ended, since collectives would wait for it."""
        while self.before:
            if has_lost_a_neighbour():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(WATCH_S)


def num_local() -> int:
    """Number of ranks that torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def has_lost_a_neighbour() -> bool:
    """True if torchrun has fewer live ranks than it started here: then its signal means that a rank
    failed (Linux)."""
    parent = os.getppid()
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        alive = [child for child in children if Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return False
    return sys.platform == "linux" and len(alive) < num_local()
