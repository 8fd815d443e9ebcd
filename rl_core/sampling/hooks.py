"""Hooks: functions of a user's file, called by the names of their parameters with a deadline."""

from __future__ import annotations

import asyncio
import copy
import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice

from rl_core.sampling.deadlines import (
    DeadlineError,
    Outcome,
    call_in_thread,
    is_done_within,
    outcome,
)
from rl_core.sampling.watchdog import WATCHDOG
from rl_core.types import Row, Task

# Few, because hooks that compute share the interpreter lock with the engine, and hooks that wait
# can be async.
MAX_THREADS = 16
MAX_YIELDS = 10_000  # Items that are read from a generator, such as turns().
NO_RETURN = "returned None: is a `return` missing?"
# Hooks get these arguments themselves, and copies of all others.
SHARED = ("actors", "state", "llm", "result", "box")


class HookError(RuntimeError):
    """Raised if a hook of the user's file raised. The message names the hook and the line."""


@dataclass(kw_only=True)
class Hook:
    """A function of a user's file."""

    name: str
    function: Callable
    path: str  # Path of the user's file.
    timeout_s: float | None  # None if the caller has a deadline.
    ours: frozenset[str]  # Arguments from the caller; all others are columns.
    weight: float = 1.0  # Weight of a reward; a reward with weight 0 is only logged.
    batched: bool = False  # True for a reward that is called once per group.
    required: set[str] = field(init=False)  # Parameters without a default.
    named: set[str] = field(init=False)  # All parameters but **kwargs.
    takes_all: bool = field(init=False)  # True if the function has **kwargs.
    is_async: bool = field(init=False)
    # Threads for a sync function, and the event loop that has them.
    threads: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = field(
        init=False, default=None
    )

    def __post_init__(self) -> None:
        call = getattr(self.function, "__call__", None)  # noqa: B004  (an object's async __call__)
        self.is_async = any(map(inspect.iscoroutinefunction, (self.function, call)))
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.named = {p.name for p in named}
        self.required = {p.name for p in named if p.default is p.empty}
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)

    @property
    def is_per_actor(self) -> bool:
        """True for a reward that is called once per actor."""
        return self.takes_all or not self.named.isdisjoint(("actor", "trajectory"))

    def arguments(self, row: Row, context: Mapping[str, object]) -> dict[str, object]:
        """Argument -> value. Values are copies, so that a hook changes neither the episode nor the
        row for the next episode."""
        values = row | {name: context.get(name) for name in self.ours}
        names = self.named & values.keys()
        if self.takes_all:
            names |= values.keys() - {"actors"}
        shared = {name: values[name] for name in names.intersection(SHARED)}
        return shared | {name: copy.deepcopy(values[name]) for name in names.difference(SHARED)}

    async def __call__(self, task: Task, context: Mapping[str, object]) -> object:
        """The function's result. Arguments of `ours` that are missing in `context` are None. Raises
        HookError, or TimeoutError after timeout_s."""
        watchdog = WATCHDOG.get(None)
        try:
            with watchdog.hook_runs() if watchdog else nullcontext():
                result, error = await self._outcome(task, context)
        except DeadlineError:
            raise TimeoutError(
                f"{self.path}: {self.name}() ran longer than {self.timeout_s:g} s for task "
                f"{task.id}; make it faster or raise --rollout.hook_timeout_s"
            ) from None
        if isinstance(error, HookError):
            raise error  # The inner hook raised; its message names the hook and the line.
        if error is not None:
            described = describe_error(error, self.path)
            raise HookError(f"{self.name}() failed for task {task.id}: {described}") from error
        return result

    async def _outcome(self, task: Task, context: Mapping[str, object]) -> Outcome:
        def call() -> object:
            result = self.function(**self.arguments(task.row, context))
            # Reading a generator runs the file's code too, perhaps for ever.
            return list(islice(result, MAX_YIELDS)) if inspect.isgenerator(result) else result

        if self.is_async:
            result, error = call(), None
        else:
            async with self._thread():
                result, error = await call_in_thread(call, self.timeout_s)
        if not inspect.isawaitable(result):
            return result, error
        running = asyncio.create_task(outcome(result), name=f"{self.name}() of {self.path}")
        try:
            # asyncio.wait_for() would wait for ever for a coroutine that ignores its cancellation.
            if not await is_done_within(running, self.timeout_s):
                raise DeadlineError
            return running.result()
        finally:
            running.cancel()

    def _thread(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self.threads is None or self.threads[0] is not loop:
            self.threads = loop, asyncio.Semaphore(MAX_THREADS)
        return self.threads[1]


def describe_error(error: BaseException, path: str) -> str:
    """`file:line: Type: message` of the innermost line in the user's file."""
    if described := getattr(error, "service_message", ""):
        return described  # The service has the file and described the error.
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    if error.__cause__ is not None:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    inside = [frame for frame in frames if frame.filename == path] or frames[-1:]
    line = f"{inside[-1].filename}:{inside[-1].lineno}: " if inside else ""
    return f"{line}{type(error).__name__}: {' '.join(str(error).split())}"


def refuse_none(value: object, name: str, path: str) -> None:
    """Raises ValueError if a hook that must return something returned None."""
    if value is None:
        raise ValueError(f"{path}: {name} {NO_RETURN}")
