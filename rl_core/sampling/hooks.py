"""Calls functions of a user's file by the names of their parameters, each with a deadline, and reads their rewards."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import numbers
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from rl_core.data.tasks import shorten

BEAT_S = 0.05  # the event loop wakes up at least so often
# Few: hooks that compute share one interpreter lock with the engine. Those that wait can be async.
MAX_THREADS = 16


class HookError(RuntimeError):
    """A hook of the user's file raised. The message names the hook and the line."""


@dataclass(kw_only=True)
class Hook:
    name: str
    function: Callable
    path: str  # of the user's file
    timeout_s: float | None  # None: the caller has a deadline
    ours: frozenset[str]  # arguments that the caller gives; all others are columns
    required: frozenset[str] = field(init=False)
    optional: frozenset[str] = field(init=False)  # parameters with a default
    takes_all: bool = field(init=False)  # has **kwargs
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        call = getattr(self.function, "__call__", None)  # noqa: B004  (an object's async __call__)
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        parameters = list(inspect.signature(self.function).parameters.values())
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = frozenset(p.name for p in named if p.default is p.empty)
        self.optional = frozenset(p.name for p in named) - self.required
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def names(self, argument: str) -> bool:
        """Whether the function gets this argument of ours."""
        return argument in self.ours and (self.takes_all or argument in self.required | self.optional)

    def arguments(self, row: dict[str, Any], given: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Argument -> value. Columns are copied: a hook cannot change the row for the next episode."""
        names = self.required | self.optional
        if self.takes_all:
            names = names | (self.ours - {"actors"}) | row.keys()
        ours = {name: given[name]() for name in names & self.ours}
        return ours | {
            name: copy.deepcopy(row[name]) for name in names - self.ours if name in row or name in self.required
        }

    async def __call__(self, task_id: str, row: dict[str, Any], given: Mapping[str, Callable[[], Any]]) -> Any:
        """What the function returns; `given` makes our arguments. Raises HookError, or TimeoutError after timeout_s."""
        call, clock = partial(self.function, **self.arguments(row, given)), LoopClock.of_running_loop()
        if self.is_async:
            clock.watch(self.path)
            result, error = await self._in_time(task_id, outcome(call()))
        else:
            async with clock.threads:  # waiting for a thread is not the hook's time
                result, error = await self._in_time(task_id, clock.in_thread(call))
            if inspect.isawaitable(result):
                result, error = await self._in_time(task_id, outcome(result))
        if error is not None:
            raise HookError(f"{self.name}() failed for task {task_id}: {describe_error(error, self.path)}") from error
        return result

    async def _in_time(self, task_id: str, awaitable: Awaitable) -> tuple[Any, BaseException | None]:
        task = asyncio.ensure_future(awaitable)
        try:
            # Not wait_for, which waits for ever for a coroutine that ignores its cancellation.
            await asyncio.wait({task}, timeout=self.timeout_s)
            is_done = task.done()
        finally:
            task.cancel()
        if not is_done:
            raise TimeoutError(
                f"{self.path}: {self.name}() ran longer than {self.timeout_s:g} s for task {task_id}; "
                "make it faster or raise --rollout.hook_timeout_s"
            )
        return (None, RuntimeError("it was cancelled")) if task.cancelled() else task.result()


async def outcome(awaitable: Awaitable) -> tuple[Any, BaseException | None]:
    """(result, exception). A SystemExit that leaves a task would end the event loop."""
    try:
        return await awaitable, None
    except (Exception, SystemExit) as error:
        return None, error


def work(jobs: SimpleQueue) -> None:
    """A thread's loop: runs one (function, future of (result, exception)) after another, until None."""
    while run_job(jobs.get()):
        pass


def run_job(job: tuple[Callable[[], Any], asyncio.Future] | None) -> bool:
    """False if the thread is to end. What waits between two jobs holds no event loop alive."""
    if job is None:
        return False
    function, future = job
    try:
        found = function(), None
    except BaseException as error:
        found = None, error
    try:
        future.get_loop().call_soon_threadsafe(lambda: future.done() or future.set_result(found))
    except RuntimeError:  # the loop is closed: nobody waits
        return False
    return True


def end_threads(idle: list[SimpleQueue]) -> None:
    for jobs in idle:
        jobs.put(None)


class LoopClock:
    """The clock of an event loop and of all its deadlines. It stands still while something blocks the loop's thread, such as a
    save: nothing that waits could continue meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.real, self.held_s, self.last_s = loop, loop.time, 0.0, loop.time()
        self.threads, self.idle = asyncio.Semaphore(MAX_THREADS), []  # of sync hooks
        self.loop_thread, self.watched = threading.get_ident(), set()
        self.blocked_s, self.tell = 1.0, lambda text: print(text, file=sys.stderr, flush=True)
        loop.time = self
        weakref.finalize(self, end_threads, self.idle)
        self._beat()

    @classmethod
    def of_running_loop(cls) -> LoopClock:
        loop = asyncio.get_running_loop()
        return loop.time if isinstance(loop.time, cls) else cls(loop)

    def in_thread(self, function: Callable[[], Any]) -> asyncio.Future:
        """Future of (result, exception) of a function in a daemon thread. A function that hangs outlives its deadline, but blocks
        neither the loop nor the interpreter's exit."""
        if not self.idle:
            self.idle.append(SimpleQueue())
            threading.Thread(target=work, args=(self.idle[-1],), name="hook", daemon=True).start()
        jobs, future = self.idle.pop(), self.loop.create_future()
        # A thread ends with a function that was given up.
        idle = self.idle
        future.add_done_callback(lambda done: jobs.put(None) if done.cancelled() else idle.append(jobs))
        jobs.put((function, future))
        return future

    def __call__(self) -> float:
        now = self.real()
        # The loop reads the clock at least every BEAT_S, unless its thread is blocked.
        self.held_s += max(0.0, now - self.last_s - 2 * BEAT_S)
        self.last_s = now
        return now - self.held_s

    def _beat(self) -> None:
        self.loop.call_later(BEAT_S, self._beat)

    def watch(self, path: str) -> None:
        """From now on tell() names a function of this file, once, if it blocks the loop's thread for blocked_s."""
        if not self.watched:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        self.watched.add(path)

    def _watch(self) -> None:
        told: set[str] = set()
        while not self.loop.is_closed():
            time.sleep(self.blocked_s / 4)
            frame = sys._current_frames().get(self.loop_thread)
            if frame is None or self.real() - self.last_s < self.blocked_s:
                continue
            inside = [f for f, _ in traceback.walk_stack(frame) if f.f_code.co_filename in self.watched]
            if inside and (name := inside[-1].f_code.co_name) not in told:
                told.add(name)
                self.tell(
                    f"{inside[0].f_code.co_filename}:{inside[0].f_lineno}: async {name}() has blocked the event loop for "
                    f"{self.blocked_s:g} s, so that all episodes and deadlines stand still; await inside it, or write it as "
                    "def, which runs in a thread"
                )


async def wait_for_all(awaitables: Iterable[Awaitable]) -> list[Any]:
    """Their results. Raises the first error once all have ended, so that none runs on unseen."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def describe_error(error: BaseException, path: str) -> str:
    """`file:line: Type: message` of the innermost line in the user's file."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = [f for e in (error, error.__cause__) if e is not None for f in traceback.extract_tb(e.__traceback__)]
    inside = [frame for frame in frames if frame.filename == path] or frames[-1:]
    place = f"{inside[-1].filename}:{inside[-1].lineno}: " if inside else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())}"


def finite(value: Any, what: str) -> float:
    """A Python float of a bool, an int, a float, or a scalar of numpy or torch."""
    with suppress(ValueError, RuntimeError, OverflowError):  # an array of several numbers, or an int too large
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, numbers.Real) and math.isfinite(number):
            return float(number)
    raise ValueError(f"{what} is {shorten(value)}; a reward must be a finite number, or a dict of them")


def finite_parts(value: Any, name: str, what: str) -> dict[str, float]:
    """The parts of a reward: those of a dict, or one number under `name`."""
    if not isinstance(value, dict):
        return {name: finite(value, what)}
    if not value or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{what} is {shorten(value)}; a dict must name each part, as 'format': 0.5")
    return {part: finite(number, f"{what}: part {part!r}") for part, number in value.items()}
