"""Ends a process in which hooks run: within a deadline, and with status 0 only after a complete
run.

run_hooks() is asyncio.run() with these bounds. Watchdog handles hooks that let nothing else run,
signal handlers included.
"""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import io
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from rl_core.sampling.hooks import LoopClock

END_S = 3.0  # Time for tasks and threads that hooks left running.
HELD_MARGIN_S = 10.0  # Added to two deadlines of a hook.
BEAT_S = 1.0
BLOCKED_S = 1.0  # An async hook that blocks the event loop for this time is named.
NUM_LOOKS = 4  # Looks at the event loop's thread in BLOCKED_S.
IDLE_FRAC = 0.05  # A thread that uses a smaller fraction of a processor waits for an answer.
# Types of file objects that buffer unwritten text or bytes.
WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

T = TypeVar("T")
exit_now = os._exit  # refusing_exits() replaces os._exit.


def run_hooks(work: Coroutine[object, object, T], hook_timeout_s: float | None = None) -> T:
    """Runs `work` on a new event loop and returns its result. First removes temporary folders of
    killed processes. With a hook's deadline a Watchdog observes the process."""
    from rl_core.sampling.hooks import LoopClock
    from rl_core.scratch import remove_orphans

    remove_orphans()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    main, watchdog = loop.create_task(work), None
    clock = LoopClock(loop)
    name_what_blocks(clock)
    try:
        if hook_timeout_s is not None:
            watchdog = Watchdog(clock, 2 * hook_timeout_s + HELD_MARGIN_S)
        return loop.run_until_complete(main)
    finally:
        if not main.done():  # Ctrl-C.
            main.cancel()
            loop.run_until_complete(asyncio.wait({main}))
        loop.run_until_complete(end_tasks())
        if watchdog is not None:
            watchdog.close()
        asyncio.set_event_loop(None)
        loop.close()


def name_what_blocks(clock: LoopClock) -> None:
    """From now on each async hook that blocks the event loop for BLOCKED_S is named on stderr,
    once. A hook whose thread waits for a processor meanwhile, on a busy machine, is not named: it
    neither computes for BLOCKED_S nor waits for an answer."""
    cpu_time = cpu_clock_of(clock.loop_thread)

    def watch() -> None:
        warned: set[str] = set()
        last_beat_s, beat_cpu_s = clock.last_s, cpu_time()
        cpu_s = deque([beat_cpu_s], maxlen=NUM_LOOKS + 1)  # At the last looks.
        while not clock.loop.is_closed():
            time.sleep(BLOCKED_S / NUM_LOOKS)
            if clock.last_s != last_beat_s:  # The event loop has turned.
                last_beat_s, beat_cpu_s = clock.last_s, cpu_time()
            cpu_s.append(cpu_time())
            computes = cpu_s[-1] - beat_cpu_s >= BLOCKED_S
            waits = cpu_s[-1] - cpu_s[0] < IDLE_FRAC * BLOCKED_S
            inside = frames_that_block(clock) if computes or waits else []
            if inside and (name := inside[-1].f_code.co_name) not in warned:
                warned.add(name)
                print(
                    f"{inside[0].f_code.co_filename}:{inside[0].f_lineno}: async {name}() has "
                    f"blocked the event loop for {BLOCKED_S:g} s, so that all episodes and "
                    "deadlines stand still; await an async client (AsyncOpenAI, not OpenAI), make "
                    "it once instead of in each episode, or write the function as def, which "
                    "runs in a thread",
                    file=sys.stderr,
                    flush=True,
                )

    threading.Thread(target=watch, name="what blocks", daemon=True).start()


def cpu_clock_of(thread: int) -> Callable[[], float]:
    """A clock of the seconds that a thread has computed. The clock stands still without Linux's
    clocks, and after the thread's end."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return lambda: 0.0
    clock = time.pthread_getcpuclockid(thread)

    def computed_s() -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:
            return 0.0

    return computed_s


def frames_that_block(clock: LoopClock) -> list[FrameType]:
    """Frames of hooks' files, innermost first, that have blocked the loop's thread for
    BLOCKED_S."""
    frame = sys._current_frames().get(clock.loop_thread)
    if frame is None or clock.real() - clock.last_s < BLOCKED_S:
        return []
    return [f for f, _ in traceback.walk_stack(frame) if f.f_code.co_filename in clock.paths]


async def end_tasks() -> None:
    """Cancels the other tasks of the loop. Names tasks that still run, and leaves them behind."""
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
        warn(f"a hook still runs although it was cancelled, and is left behind: {', '.join(names)}")
    for task in left:
        # The warning is printed; asyncio has no public switch for its own.
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]


def leave_threads(status: int) -> None:
    """Bounds Python's wait for threads and processes that hooks and trackers started to END_S. A
    rank of torchrun then ends at once."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        atexit.register(end_without_teardown, status)
    names = [
        t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
    ]
    if "multiprocessing" in sys.modules:
        names += [process.name for process in sys.modules["multiprocessing"].active_children()]
    if names:
        threading.Thread(target=end_soon, args=(status, names), daemon=True).start()


def exit_process(status: int) -> NoReturn:
    """Like sys.exit(), without interpreter teardown."""
    atexit.register(end_without_teardown, status)
    sys.exit(status)


def end_without_teardown(status: int) -> NoReturn:
    """Ends the process without interpreter teardown. During a teardown a thread of a process group
    (gloo) may release a tensor of the last collective, and C++ then ends the process with SIGABRT
    after a complete run; a teardown also takes most of a second. Libraries' exit functions run, and
    files are flushed."""
    atexit.unregister(end_without_teardown)
    atexit._run_exitfuncs()
    # Flushes files that hooks left open.
    values = gc.get_objects()
    kinds = {kind for kind in set(map(type, values)) if issubclass(kind, WRITERS)}
    files = [value for value in values if type(value) in kinds]
    for file in (*files, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader is gone, or a hook closed the file.
            file.flush()
    exit_now(status)


def end_soon(status: int, names: list[str]) -> None:
    threading.main_thread().join()  # The interpreter has begun to end.
    time.sleep(END_S)
    warn(f"the process ends without waiting for what still runs: {', '.join(names)}")
    exit_now(status)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def refusing_exits() -> Iterator[None]:
    """A context in which os._exit() in a hook fails the hook's episode, instead of ending the run
    half-done with status 0. Processes that a hook forks may call os._exit()."""
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


class Watchdog:
    """Ends the process with the stacks of all threads if a hook lets nothing else run for
    `bound_s`: it holds the GIL, as re.match(r"(a+)+$", ...) does, or it is async and does not
    await.

    No Python code could run then; faulthandler's thread needs none. A thread resets its timer."""

    def __init__(self, clock: LoopClock, bound_s: float):
        self.clock, self.bound_s = clock, bound_s
        self.is_closed = threading.Event()
        self.is_set = False
        self.lock = threading.Lock()
        clock.look = self.look
        self.thread = threading.Thread(target=self._beat, name="watchdog of the run", daemon=True)
        self.thread.start()

    def look(self) -> None:
        """Called when hooks begin or end."""
        with self.lock:
            is_running = self.clock.num_running > 0
            if is_running != self.is_set:
                self._set(is_running)

    def _set(self, is_running: bool) -> None:
        self.is_set = is_running
        if is_running:
            faulthandler.dump_traceback_later(self.bound_s, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        while not self.is_closed.wait(BEAT_S):
            with self.lock:
                if self.is_set and not frames_that_block(self.clock):
                    self._set(True)

    def close(self) -> None:
        self.is_closed.set()
        self.thread.join()
        # A hook that was left behind may end later.
        self.clock.look = None
        faulthandler.cancel_dump_traceback_later()
