"""Functions and coroutines of a user's file, run within a deadline."""

from __future__ import annotations

import _thread
import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

NUM_WAITS = 32  # Parts of a deadline; a block of the event loop uses up at most one.


Outcome = tuple[object, BaseException | None]  # Result of a function, or its error.


class DeadlineError(Exception):
    """Raised at the deadline of a hook. Distinct from TimeoutError, which a hook may raise
    itself."""


async def outcome(awaitable: Awaitable) -> Outcome:
    """Awaits and catches all errors: a SystemExit that leaves a task would end the event loop."""
    try:
        return await awaitable, None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error


async def call_in_thread(function: Callable[[], object], timeout_s: float | None) -> Outcome:
    """Runs a function in a separate thread. A function that hangs outlives its deadline, but
    blocks neither the event loop nor the interpreter's exit. Raises DeadlineError after
    timeout_s."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def work() -> None:
        try:
            done = function(), None
        except BaseException as error:
            done = None, error
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(lambda: future.done() or future.set_result(done))

    # A threading.Thread's start() would wait for the new thread.
    _thread.start_new_thread(work, ())
    if not await is_done_within(future, timeout_s):
        raise DeadlineError
    return future.result()


async def is_done_within(future: asyncio.Future, timeout_s: float | None) -> bool:
    """Waits for a future, and returns False if it is not done after timeout_s. Time in which
    something blocks the event loop, such as a save, counts as one of NUM_WAITS waits at most: no
    coroutine can continue meanwhile."""
    part_s = None if timeout_s is None else timeout_s / NUM_WAITS
    for _ in range(NUM_WAITS):
        if not future.done():
            await asyncio.wait({future}, timeout=part_s)
    return future.done()


async def run_within(work: Awaitable[T], timeout_s: float) -> T:
    """asyncio.wait_for() with the deadline of is_done_within()."""
    running = asyncio.ensure_future(work)
    try:
        if not await is_done_within(running, timeout_s):
            raise TimeoutError
    finally:
        running.cancel()
        await asyncio.wait({running})
    return running.result()


async def wait_for_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Results of all. Raises the first error after all have ended, so that none continues
    unseen."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
