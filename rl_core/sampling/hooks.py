"""Functions of a user's file, called by the names of their parameters, each call with a deadline."""

from __future__ import annotations

import asyncio
import copy
import inspect
import queue
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


class HookError(RuntimeError):
    """A hook of the user's file raised; says which one and where."""


@dataclass(kw_only=True)
class Hook:
    name: str
    function: Callable
    path: str  # of the user's file
    timeout_s: float | None  # None: whoever calls it has a deadline
    threads: HookThreads
    ours: frozenset[str]  # names that the caller gives; all others are columns
    required: frozenset[str] = field(init=False)
    optional: frozenset[str] = field(init=False)  # parameters with a default
    takes_all: bool = field(init=False)  # has **kwargs
    is_async: bool = field(init=False)

    def __post_init__(self) -> None:
        call = getattr(self.function, "__call__", None)  # noqa: B004  (an object's async __call__)
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)
        parameters = list(inspect.signature(self.function).parameters.values())
        for p in parameters:
            if p.kind is p.POSITIONAL_ONLY:
                raise ValueError(f"{self.path}: {self.name}() gets arguments by name; drop the '/' after {p.name!r}")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = frozenset(p.name for p in named if p.default is p.empty)
        self.optional = frozenset(p.name for p in named) - self.required
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def is_given(self, name: str) -> bool:
        """Whether the function gets this argument of ours."""
        return name in self.ours and (self.takes_all or name in self.required | self.optional)

    def arguments(self, row: dict[str, Any], given: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        names = self.required | self.optional
        if self.takes_all:
            names = names | (self.ours - {"actors"}) | row.keys()
        # A column is copied, so that what a hook does to it does not reach the next episode of the same row.
        return {
            name: given[name]() if name in self.ours else copy.deepcopy(row[name])
            for name in names
            if name in self.ours or name in row or name in self.required
        }

    async def __call__(self, task_id: str, row: dict[str, Any], given: Mapping[str, Callable[[], Any]]) -> Any:
        """What the function returns, given makers of our arguments. Raises HookError if it raises, TimeoutError after
        timeout_s of running."""
        arguments = self.arguments(row, given)
        try:
            if self.is_async:
                return await self.within_deadline(self.function(**arguments))
            result = await self.threads.run(lambda: self.function(**arguments), self.timeout_s)
            return await self.within_deadline(result) if inspect.isawaitable(result) else result
        except Deadline:
            raise TimeoutError(
                f"{self.path}: {self.name}() ran longer than {self.timeout_s:g} s for task {task_id}; "
                "make it faster or raise --rollout.hook_timeout_s"
            ) from None
        except Raised as error:
            where = describe_error(error.cause, self.path)
            raise HookError(f"{self.name}() failed for task {task_id}: {where}") from error.cause

    async def within_deadline(self, awaitable: Awaitable) -> Any:
        task = asyncio.ensure_future(outcome(awaitable))
        try:
            # Not wait_for: that waits for ever for a coroutine that ignores its cancellation.
            await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(lambda t: t.cancelled() or t.exception())
        if not task.done():
            raise Deadline
        if task.cancelled():
            raise Raised(RuntimeError("it was cancelled"))
        result, error = task.result()
        if error is not None:
            raise Raised(error)
        return result


async def wait_for_all(awaitables: Iterable[Awaitable]) -> list[Any]:
    """Their results. All have ended when the first error is raised, so that none goes on where nobody looks."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def outcome(awaitable: Awaitable) -> tuple[Any, BaseException | None]:
    """(result, what it raised): a SystemExit that left a task of the event loop would end the loop."""
    try:
        return await awaitable, None
    except (Exception, SystemExit) as error:
        return None, error


def describe_error(error: BaseException, path: str) -> str:
    """`file:line: Type: message`, of the innermost line of the user's file that took part."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = [f for e in (error, error.__cause__) if e is not None for f in traceback.extract_tb(e.__traceback__)]
    inside = [frame for frame in frames if frame.filename == path] or frames[-1:]
    place = f"{inside[-1].filename}:{inside[-1].lineno}: " if inside else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())}"


class Deadline(Exception):
    """Ours: the hook's time is up. Not TimeoutError, which a hook may raise itself."""


class Raised(Exception):
    """Carries what the hook raised, which may be of a kind that no future can hold, such as StopIteration."""

    def __init__(self, cause: BaseException):
        super().__init__(cause)
        self.cause = cause


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future  # of (result, what it raised or None)
    started_s: float | None = None
    is_finished: bool = False
    is_abandoned: bool = False


class HookThreads:
    """Runs sync hooks off the event loop, in daemon threads: one that hangs holds up neither the loop nor the
    interpreter's exit. A thread whose job outlives its deadline is replaced, and ends when the job does."""

    def __init__(self, max_threads: int = 16):
        # Few: hooks that compute share one interpreter lock with the engine; those that wait can be async.
        self.max_threads = max_threads
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.lock = threading.Lock()  # of the two counts, and of a job's last two fields
        self.num_threads = 0
        self.num_jobs = 0  # queued or running, without the abandoned

    async def run(self, function: Callable[[], Any], timeout_s: float) -> Any:
        """What the function returns. Raises Raised with what it raises, Deadline once it has run for timeout_s."""
        loop = asyncio.get_running_loop()
        job = Job(function=function, loop=loop, future=loop.create_future())
        with self.lock:
            self.num_jobs += 1
            self.add_thread_if_needed()
        self.jobs.put(job)
        timer = loop.call_later(timeout_s, self.check_deadline, job, timeout_s)
        # If the caller is cancelled here the timer goes on, so that a thread that hangs is still replaced.
        result, error = await job.future
        timer.cancel()
        if error is not None:
            raise error if isinstance(error, Deadline) else Raised(error)
        return result

    def add_thread_if_needed(self) -> None:
        if self.num_threads < min(self.max_threads, self.num_jobs):
            self.num_threads += 1
            threading.Thread(target=self.work, name="hook", daemon=True).start()

    def work(self) -> None:
        while True:
            job = self.jobs.get()
            job.started_s = time.monotonic()
            result = error = None
            try:
                if not job.future.cancelled():
                    result = job.function()
            except BaseException as raised:  # the thread lives on; the caller raises it
                error = raised
            with self.lock:
                job.is_finished = True
                if job.is_abandoned:
                    return
                self.num_jobs -= 1
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                job.loop.call_soon_threadsafe(deliver, job.future, result, error)
            del job, result, error

    def check_deadline(self, job: Job, timeout_s: float) -> None:
        """Gives up a job that has run for timeout_s; time spent in the queue does not count."""
        ran_s = 0.0 if job.started_s is None else time.monotonic() - job.started_s
        with self.lock:
            if job.is_finished:
                return
            if ran_s < timeout_s:
                job.loop.call_later(max(timeout_s - ran_s, 0.001), self.check_deadline, job, timeout_s)
                return
            job.is_abandoned = True
            self.num_threads -= 1
            self.num_jobs -= 1
            self.add_thread_if_needed()
        deliver(job.future, None, Deadline())


def deliver(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if not future.done():
        future.set_result((result, error))
