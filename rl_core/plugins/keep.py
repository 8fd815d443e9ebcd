"""When a run saves, and when it ends before its last step: by the clock, by a signal, and the best
by an evaluation.

Each rank notes signals and the age of its last checkpoint beside a step's metrics, so that all
ranks decide alike without one more exchange.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rl_core.data.rows import read_object, write_whole
from rl_core.metrics import Max, Metric
from rl_core.types import RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
WATCH_S = 0.2


class Keeper:
    """`best`: an evaluation's metric such as greedy_score, the best of which is kept in
    `folder`."""

    def __init__(self, folder: Path, minutes: float, best: str | None, is_writer: bool):
        self.folder, self.max_age_s, self.metric, self.is_writer = (
            folder,
            60 * minutes,
            best,
            is_writer,
        )
        self.saved_at, self.saved_step, self.is_due = time.monotonic(), -1, False
        self.received = self.signal = 0  # the signal that this rank got; that all ranks know of
        self.before: dict[int, object] = {}
        self.sees_others = False
        # A loss is best where it is lowest.
        self.sign = -1 if best and best.endswith("loss") else 1
        self.best = None
        with suppress(FileNotFoundError):
            self.best = read_object(folder / "best.json").get(best)

    def listen(self) -> None:
        """From now on a signal is for the end of the step. Two of them, one of which is Ctrl-C, end
        this process."""
        # Not where each rank has a parent of its own, such as a wrapper.
        self.sees_others = not has_lost_a_neighbour()
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def close(self) -> None:
        """Signals are again what they were before."""
        while self.before:
            signal.signal(*self.before.popitem())

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:  # schedulers, srun and torchrun may all send theirs
            if signal.SIGINT in (self.received, number):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received = number
        if self.is_writer:
            name = signal.Signals(number).name
            again = " again" if number == signal.SIGINT else ""
            text = f"\n{name}: saves when this step is done, and ends; Ctrl-C{again} ends at once\n"
            os.write(2, text.encode())
        if self.sees_others:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Ends this rank if another one has ended: then there is nothing to wait for."""
        while self.before:
            if has_lost_a_neighbour():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(WATCH_S)

    def metrics(self) -> dict[str, Metric]:
        return {
            "keep/signal": Max(self.received),
            "keep/age_s": Max(time.monotonic() - self.saved_at),
        }

    def agree(self, values: dict[str, float]) -> dict[str, float]:
        """Reads what all ranks noted."""
        self.signal = int(values.pop("keep/signal"))
        self.is_due = 0 < self.max_age_s <= values.pop("keep/age_s")
        return values

    def saved(self, step: int) -> None:
        self.saved_at, self.saved_step, self.is_due = time.monotonic(), step, False

    def is_best(self, values: dict[str, float]) -> bool:
        """Whether this evaluation is better than all before, by the mean over environments. Raises
        RunError if it lacks the metric."""
        known = {name: value for name, value in values.items() if name.startswith("eval/")}
        found = [value for name, value in known.items() if name.endswith(f"/{self.metric}")]
        if not found:
            names = sorted({name.rpartition("/")[2] for name in known})
            raise RunError(
                f"--keep_best {self.metric} is no metric of this evaluation; it has "
                f"{', '.join(names)}"
            )
        value = sum(found) / len(found)
        if not (self.best is None or self.sign * value > self.sign * self.best):  # NaN is none
            return False
        self.best = value
        return True

    def note_best(self, step: int) -> None:
        """Once its models are written."""
        if self.is_writer:
            write_whole(
                self.folder / "best.json", json.dumps({"step": step, self.metric: self.best})
            )


def has_lost_a_neighbour() -> bool:
    """Whether torchrun has fewer ranks than it started here: then it signals because one failed
    (Linux)."""
    parent, size = os.getppid(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        alive = [child for child in children if Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return False
    return size > 1 and sys.platform == "linux" and len(alive) < size
