"""The end of a process in which hooks run is bounded in time, and has status 0 only if the run came
to it.

run_hooks() is asyncio.run() with these bounds. For a hook that lets nothing else run, signal
handlers included, see Watchdog.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rl_core.types import RunError

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.sampling.hooks import LoopClock

EXIT_HELD = 70  # exit status of a process that a hook held
END_S = 3.0  # for what hooks left running
HELD_MARGIN_S = 10.0  # beyond two deadlines of a hook
BEAT_S = 1.0
LOST_S = 3.0  # torchrun ends the other ranks by itself where one failed
SIGEV_SIGNAL, SIGEV_THREAD = 0, 2  # of <signal.h>
ADVICE = "raise --rollout.hook_timeout_s"
NUM_CHARS = 1000  # of the watchdog's text

exit_now = os._exit  # refusing_exits() replaces that name


def run_hooks(work: Coroutine, hook_timeout_s: float | None = None, advice: str = ADVICE) -> Any:
    """What `work` returns, on an event loop of its own. With a hook's deadline a Watchdog looks
    after the process, whose line ends with `advice`."""
    from rl_core.sampling.hooks import LoopClock

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    main, watchdog = loop.create_task(work), None
    try:
        if hook_timeout_s is not None and sys.platform == "linux":
            watchdog = Watchdog(LoopClock(loop), 2 * hook_timeout_s + HELD_MARGIN_S, advice)
        return loop.run_until_complete(main)
    finally:
        if not main.done():  # Ctrl-C
            main.cancel()
            loop.run_until_complete(asyncio.wait({main}))
        loop.run_until_complete(end_tasks())
        if watchdog is not None:
            watchdog.close()
        asyncio.set_event_loop(None)
        loop.close()


async def end_tasks() -> None:
    """Cancels the other tasks of the loop. Those that go on are named and left behind."""
    loop, tasks = asyncio.get_running_loop(), asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    closing = {
        loop.create_task(loop.shutdown_asyncgens()),
        loop.create_task(loop.shutdown_default_executor()),
    }
    _, left = await asyncio.wait(tasks | closing, timeout=END_S)
    names = sorted({task.get_name() for task in left - closing})
    if left & closing:
        names.append("an asynchronous generator, or a function in asyncio's threads")
    if names:
        tell(f"a hook goes on although it was cancelled, and is left behind: {', '.join(names)}")
    for task in left:
        task._log_destroy_pending = False  # it was told


def leave_threads(status: int) -> None:
    """Python waits at its end for threads and processes that hooks and trackers started. It does so
    for END_S."""
    names = [
        t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
    ]
    if "multiprocessing" in sys.modules:
        names += [process.name for process in sys.modules["multiprocessing"].active_children()]
    if names:
        threading.Thread(target=end_soon, args=(status, names), daemon=True).start()


def end_soon(status: int, names: list[str]) -> None:
    threading.main_thread().join()  # the interpreter has begun to end
    time.sleep(END_S)
    tell(f"the process ends without waiting for what still runs: {', '.join(names)}")
    exit_now(status)


def tell(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def refusing_exits() -> Iterator[None]:
    """os._exit(0) in a hook would end the run with status 0, half-done. It fails the hook's episode
    instead. Processes that a hook forks may call it."""
    process = os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != process:
            exit_now(status)
        raise SystemExit(f"os._exit({status}) would end the whole run; raise an error instead")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_now


class Neighbours:
    """Ends this rank if another one of this machine is gone that had not come to its end. torchrun
    does so if it failed, but takes status 0 for a good end, and its ranks would wait for
    --timeout_s."""

    def __init__(self, ranks: Ranks):
        from rl_core.plugins.signal_handler import has_lost_a_neighbour

        self.ranks, self.is_closed = ranks, threading.Event()
        self.has_others = ranks.size + ranks.engine_ranks > 1
        # All ranks have met by now. Who misses one has a launcher that starts each in a process of
        # its own.
        if self.has_others and not has_lost_a_neighbour():
            threading.Thread(target=self._watch, name="watch over ranks", daemon=True).start()

    def close(self) -> None:
        """This rank comes to its end."""
        self.is_closed.set()
        if self.has_others:
            # The store may be gone with its rank, which must not hide the error that ends this one.
            with suppress(RuntimeError):
                self.ranks.set_flag("comes to its end")

    def _watch(self) -> None:
        from rl_core.plugins.signal_handler import has_lost_a_neighbour
        from rl_core.plugins.under_torchrun import tell_failure

        lost_at = math.inf
        while not self.is_closed.wait(BEAT_S):
            if not has_lost_a_neighbour() or self._is_ending():
                lost_at = math.inf
                continue
            lost_at = min(lost_at, time.monotonic())
            if time.monotonic() - lost_at >= LOST_S:
                text = (
                    "a rank of this machine has ended in the middle of the run, with status 0 or "
                    "without a word"
                )
                tell_failure(RunError(f"{text}; go on with --resume"), self.ranks)
                exit_now(1)

    def _is_ending(self) -> bool:
        try:
            return self.ranks.has_flag("comes to its end")
        except RuntimeError:  # the store went with its rank
            return False


class Event(ctypes.Structure):
    """struct sigevent of Linux: what a timer does when its time is over."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("unused", ctypes.c_char * 64),
    )


class TimerSpec(ctypes.Structure):
    """struct itimerspec. 0 s turns the timer off."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class Watchdog:
    """Ends the process if hooks are running and one of them lets nothing else run for `bound_s`: it
    holds the interpreter's lock, as re.match(r"(a+)+$", ...) does, or it is async and does not
    await.

    No Python could run then, so it takes three timers of the kernel, which run C functions:
    faulthandler writes the stacks, warnx which hooks were running, _exit ends the process with
    EXIT_HELD. A thread sets the timers back. Linux only."""

    def __init__(self, clock: LoopClock, bound_s: float, advice: str = ADVICE):
        self.clock, self.bound_s, self.is_closed = clock, bound_s, threading.Event()
        self.advice = advice
        self.lock = threading.Lock()  # of the timers
        self.text = ctypes.create_string_buffer(NUM_CHARS)
        self.signal = signal.SIGRTMIN + 9  # of those that are free for any use
        faulthandler.register(self.signal, file=2, all_threads=True)
        self.libc = ctypes.CDLL(None)
        self.timers = [
            self._timer(Event(notify=SIGEV_SIGNAL, signal=self.signal)),
            self._timer(self._call(self.libc.warnx, ctypes.addressof(self.text))),
            self._timer(self._call(self.libc._exit, EXIT_HELD)),
        ]
        clock.watchdog = self
        self.thread = threading.Thread(target=self._beat, name="watchdog of the run", daemon=True)
        self.thread.start()

    def _call(self, function: Any, value: int) -> Event:
        address = ctypes.cast(function, ctypes.c_void_p).value
        return Event(notify=SIGEV_THREAD, function=address, value=value)

    def _timer(self, event: Event) -> ctypes.c_void_p:
        timer = ctypes.c_void_p()
        if self.libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            raise OSError("timer_create failed")
        return timer

    def look(self) -> None:
        """Hooks began or ended."""
        running = self.clock.running()
        text = (
            f"error: for {self.bound_s:g} s nothing could run but {' or '.join(running)}, whose "
            "stack is above: "
            "a hook must not hold the interpreter's lock nor block the event loop for so long; run "
            "what it waits for in "
            f"another process, or {self.advice}"
        )
        self.text.value = text.encode().replace(b"%", b"%%")[: NUM_CHARS - 1]
        with self.lock:
            self._set(self.bound_s if running else 0)

    def _set(self, seconds: float) -> None:
        for number, timer in enumerate(self.timers):
            after_s = seconds and seconds + number / 4  # one after the other
            spec = TimerSpec(after_s=int(after_s), after_ns=int(after_s % 1 * 1e9))
            self.libc.timer_settime(timer, 0, ctypes.byref(spec), None)

    def _beat(self) -> None:
        while not self.is_closed.wait(BEAT_S):
            with self.lock:
                if self.clock.running() and not self.clock.frames_that_block():
                    self._set(self.bound_s)

    def close(self) -> None:
        self.is_closed.set()
        self.thread.join()
        # A hook that was left behind ends later, and the timers are gone then.
        self.clock.watchdog = None
        for timer in self.timers:
            self.libc.timer_delete(timer)
        faulthandler.unregister(self.signal)
