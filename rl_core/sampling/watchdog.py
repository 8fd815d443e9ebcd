"""Ends a process in which hooks run: within a deadline, and without interpreter teardown.

run_hooks() is asyncio.run() with these bounds. Watchdog handles hooks that let nothing else run,
signal handlers included.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import faulthandler
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType
from typing import NoReturn, TypeVar

END_S = 3.0  # Time for tasks and threads that hooks left running.
HELD_MARGIN_S = 10.0  # Added to two deadlines of a hook.
BEAT_S = 1.0  # An async hook that blocks the event loop from one beat to the next is named.
MODULE_PREFIX = "rl_core_env_"  # Module name of an environment's file, before the file's name.

T = TypeVar("T")
# The watchdog that bounds the hooks of a process.
WATCHDOG: ContextVar[Watchdog] = ContextVar("WATCHDOG")


def run_hooks(work: Coroutine[object, object, T], hook_timeout_s: float | None = None) -> T:
    """Runs `work` on a new event loop and returns its result. With a hook's deadline the watchdog
    may end the process."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    bound_s = None if hook_timeout_s is None else 2 * hook_timeout_s + HELD_MARGIN_S
    watchdog, context = Watchdog(loop, bound_s), contextvars.copy_context()
    context.run(WATCHDOG.set, watchdog)
    main = loop.create_task(work, context=context)
    try:
        return loop.run_until_complete(main)
    finally:
        if not main.done():  # Ctrl-C.
            main.cancel()
            loop.run_until_complete(asyncio.wait({main}))
        loop.run_until_complete(end_tasks())
        watchdog.close()
        asyncio.set_event_loop(None)
        loop.close()


class Watchdog:
    """Watches an event loop from a separate thread. Names async hooks that block the loop. With
    `bound_s`, ends the process with the stacks of all threads if a hook lets nothing else run for
    that time: it holds the GIL, as re.match(r"(a+)+$", ...) does, or it is async and does not
    await.

    No Python code could run then; faulthandler's thread needs none. The watchdog's thread resets
    faulthandler's timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bound_s: float | None = None):
        """Must be made in the loop's thread."""
        self.loop, self.bound_s = loop, bound_s
        self.loop_thread = threading.get_ident()
        self.num_running = 0  # Running hooks.
        self.lock = threading.Lock()
        self.is_closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog of hooks", daemon=True)
        self.thread.start()

    @contextmanager
    def hook_runs(self) -> Iterator[None]:
        """Counts a running hook. Work without hooks may hold the GIL for longer."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self.lock:
            self.num_running += change
            if self.num_running == max(0, change):  # The first one began, or the last one ended.
                self._set_timer()

    def _set_timer(self) -> None:
        if self.bound_s is None or self.is_closed.is_set():
            return
        if self.num_running:
            faulthandler.dump_traceback_later(self.bound_s, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        named: set[str] = set()
        has_turned = threading.Event()
        has_turned.set()
        while not self.is_closed.wait(BEAT_S):
            inside = [] if has_turned.is_set() else self._hook_frames()
            if inside and (name := inside[-1].f_code.co_name) not in named:
                named.add(name)
                print(
                    f"{inside[0].f_code.co_filename}:{inside[0].f_lineno}: async {name}() has "
                    f"blocked the event loop for {BEAT_S:g} s, so that all episodes stand still; "
                    "await an async client (AsyncOpenAI, not OpenAI), make it once instead of in "
                    "each episode, or write the function as def, which runs in a thread",
                    file=sys.stderr,
                    flush=True,
                )
            if not inside:
                with self.lock:
                    self._set_timer()
            if has_turned.is_set():
                has_turned.clear()
                try:
                    self.loop.call_soon_threadsafe(has_turned.set)
                except RuntimeError:  # The loop is closed.
                    return

    def _hook_frames(self) -> list[FrameType]:
        """Frames of environments' files in the loop's thread, innermost first. None if a coroutine
        of rl_core runs that the file awaits, such as respond()."""
        frame, frames = sys._current_frames().get(self.loop_thread), []
        for inside, _ in traceback.walk_stack(frame) if frame else ():
            module = inside.f_globals.get("__name__", "")
            if module.startswith(MODULE_PREFIX):
                frames.append(inside)
            elif module.startswith("rl_core.") and inside.f_code.co_flags & inspect.CO_COROUTINE:
                return frames
        return frames

    def close(self) -> None:
        self.is_closed.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()


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


def exit_process(status: int) -> NoReturn:
    """Like sys.exit(), without interpreter teardown. Bounds Python's wait for threads and processes
    that hooks and trackers started to END_S."""
    names = [
        t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()
    ]
    if "multiprocessing" in sys.modules:
        names += [process.name for process in sys.modules["multiprocessing"].active_children()]
    if names:
        threading.Thread(target=end_soon, args=(status, names), daemon=True).start()
    atexit.register(end_without_teardown, status)
    sys.exit(status)


def end_without_teardown(status: int) -> NoReturn:
    """Ends the process without interpreter teardown. During a teardown a thread of a process group
    (gloo) may release a tensor of the last collective, and C++ then ends the process with SIGABRT
    after a complete run; a teardown also takes most of a second. Libraries' exit functions run."""
    atexit.unregister(end_without_teardown)
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader is gone, or a hook closed the file.
            file.flush()
    os._exit(status)


def end_soon(status: int, names: list[str]) -> None:
    threading.main_thread().join()  # The interpreter has begun to end.
    time.sleep(END_S)
    warn(f"the process ends without waiting for what still runs: {', '.join(names)}")
    os._exit(status)


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
