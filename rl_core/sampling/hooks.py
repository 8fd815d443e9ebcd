"""Hooks: functions of a user's file, called by the names of their parameters with a deadline, and
parsers of their results."""

from __future__ import annotations

import _thread
import asyncio
import copy
import inspect
import json
import math
import numbers
import re
import threading
import traceback
from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

from rl_core.data.messages import canonical_messages, shorten
from rl_core.types import JSON, Message, Row, Task

BEAT_S = 0.05  # Longest time between two looks of the event loop at deadlines.
# Few, because hooks that compute share the interpreter lock with the engine, and hooks that wait
# can be async.
MAX_THREADS = 16
MAX_YIELDS = 10_000  # Items that are read from a generator, such as turns().
# Hooks get these arguments themselves, and copies of all others.
SHARED = ("actors", "state", "llm", "result", "box")

# Metrics of a trajectory that the trainer records itself.
NOT_APPLIED = "reward_none/"  # Prefix of a reward part that was None in an episode.
RECORDED = re.compile(
    rf"tool_parse_failed|agent_(requests|retries|branches|overridden.*)|{NOT_APPLIED}.*"
)

T = TypeVar("T")
Outcome = tuple[object, BaseException | None]  # Result of a function, or its error.


class DeadlineError(Exception):
    """Raised at the deadline of a hook. Distinct from TimeoutError, which a hook may raise
    itself."""


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
        try:
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

        clock = LoopClock.of_running_loop()
        with clock.noting(self.path):
            if self.is_async:
                result, error = call(), None
            else:
                result, error = await clock.in_thread(call, self.timeout_s)
            if not inspect.isawaitable(result):
                return result, error
            running = asyncio.create_task(outcome(result), name=f"{self.name}() of {self.path}")
            try:
                # wait_for() would wait for ever for a coroutine that ignores its cancellation.
                await asyncio.wait({running}, timeout=self.timeout_s)
                if not running.done():
                    raise DeadlineError
                return running.result()
            finally:
                running.cancel()


async def outcome(awaitable: Awaitable) -> Outcome:
    """Awaits and catches all errors: a SystemExit that leaves a task would end the event loop."""
    try:
        return await awaitable, None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error


class LoopClock:
    """The clock of an event loop and its deadlines, with a thread pool for sync hooks. The clock
    stops while something blocks the loop's thread, such as a save, because no coroutine can
    continue meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.real = loop.time
        self.held_s = 0.0
        self.last_s = loop.time()
        self.loop_thread = threading.get_ident()
        self.queue: SimpleQueue = SimpleQueue()  # Items: (function, timeout, future).
        self.until_s: dict[asyncio.Future[Outcome], float] = {}  # Deadlines of running functions.
        self.ended: deque[tuple[asyncio.Future[Outcome], Outcome]] = deque()
        self.num_threads = 0
        self.is_waking = False  # True if the loop is scheduled to read `ended`.
        self.num_running = 0  # Running hooks.
        self.paths: set[str] = set()  # Files whose hooks were called.
        # Watchdog.look(), called when hooks begin or end.
        self.look: Callable[[], None] | None = None
        # All timers of this loop read its clock, and its threads end when the loop closes.
        self.close_loop = loop.close
        loop.time = self
        loop.close = self._close
        self._beat()

    @classmethod
    def of_running_loop(cls) -> LoopClock:
        loop = asyncio.get_running_loop()
        return loop.time if isinstance(loop.time, cls) else cls(loop)

    def __call__(self) -> float:
        now = self.real()
        # The loop reads the clock at least every BEAT_S unless its thread is blocked.
        self.held_s += max(0.0, now - self.last_s - 2 * BEAT_S)
        self.last_s = now
        return now - self.held_s

    def _beat(self) -> None:
        self.loop.call_later(BEAT_S, self._beat)
        now = self()
        for future, until_s in self.until_s.copy().items():
            if now > until_s and not future.done():
                future.set_exception(DeadlineError())
        # One thread is cheapest for short functions. Functions behind a long one get more threads.
        for _ in range(min(self.queue.qsize(), MAX_THREADS - self.num_threads)):
            self._add_thread()

    async def in_thread(self, function: Callable[[], object], timeout_s: float | None) -> Outcome:
        """Runs a function in a daemon thread. A function that hangs outlives its deadline, but
        blocks neither the event loop nor the interpreter's exit. Raises DeadlineError after
        timeout_s."""
        future = self.loop.create_future()
        self.queue.put((function, timeout_s or math.inf, future))
        if not self.num_threads:
            self._add_thread()
        try:
            return await future
        finally:
            if self.until_s.pop(future, None):  # Its thread ends with the function.
                self.num_threads -= 1

    def _add_thread(self) -> None:
        self.num_threads += 1
        # A threading.Thread's start() waits for the new thread.
        _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next function and sets its future. Returns False if the thread should end."""
        job = self.queue.get()
        if job is None:
            self.queue.put(None)  # Ends the other threads.
            return False
        function, timeout_s, future = job
        if future.cancelled():
            return True
        self.until_s[future] = self.real() - self.held_s + timeout_s
        try:
            done = function(), None
        except BaseException as error:
            done = None, error
        is_waited_for = self.until_s.pop(future, None) is not None
        self.ended.append((future, done))
        if not self.is_waking:  # One call for all functions that end before the loop reads `ended`.
            self.is_waking = True
            with suppress(RuntimeError):  # The loop is closed.
                self.loop.call_soon_threadsafe(self._set_results)
        return is_waited_for

    def _set_results(self) -> None:
        self.is_waking = False
        while self.ended:
            future, done = self.ended.popleft()
            if not future.done():
                future.set_result(done)

    def _close(self) -> None:
        self.queue.put(None)
        self.close_loop()

    @contextmanager
    def noting(self, path: str) -> Iterator[None]:
        """Counts a running hook of this file."""
        self.paths.add(path)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.num_running += change
        if self.look is not None and self.num_running <= 1:
            self.look()


async def wait_for_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Results of all. Raises the first error after all have ended, so that none continues
    unseen."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


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


def plain(value: JSON) -> JSON:
    """A scalar of numpy or torch as a Python number, for JSON; any other value unchanged."""
    return value.item() if hasattr(value, "item") else value


def finite(value: object, label: str) -> float:
    """The value, a number or a scalar of numpy or torch, as a finite float. Raises ValueError,
    which begins with `label`, for any other value."""
    # Errors of an array of several numbers, or of an int that is too large.
    with suppress(ValueError, RuntimeError, OverflowError):
        number = plain(value)
        if isinstance(number, numbers.Real) and math.isfinite(number):
            return float(number)
    raise ValueError(
        f"{label} is {shorten(value)}; a reward must be a finite number, or a dict of them"
    )


MAX_PARTS = 100  # Names in a dict of rewards; each becomes a metric of every step.


def finite_parts(value: object, name: str, label: str) -> dict[str, float]:
    """The parts of a reward: a dict's entries, or one number under `name`."""
    if not isinstance(value, dict):
        return {name: finite(value, label)}
    if not value or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{label} is {shorten(value)}; a dict must name each part, as 'format': 0.5"
        )
    if len(value) > MAX_PARTS:
        raise ValueError(f"{label} has {len(value)} names; give at most {MAX_PARTS}")
    return {key: finite(number, f"{label}: part {key!r}") for key, number in value.items()}


NO_RETURN = "returned None: is a `return` missing?"


def refuse_none(value: object, name: str, path: str) -> None:
    """Raises ValueError if a hook that must return something returned None."""
    if value is None:
        raise ValueError(f"{path}: {name} {NO_RETURN}")


def reward_values(value: object, name: str, source: str) -> dict[str, float | None]:
    """The parts of a reward, see finite_parts(). A part that is None does not apply to the
    episode."""
    if value is None:
        return {name: None}
    if not isinstance(value, dict):
        return dict(finite_parts(value, name, source))
    numbers = {name: number for name, number in value.items() if number is not None}
    known = finite_parts(numbers, name, source) if numbers or not value else {}
    return {name: known.get(name) for name in value}


def refuse_unscored(
    path: str, actor: str, parts: Mapping[str, float], metrics: Mapping[str, float]
) -> None:
    """Raises ValueError if every reward of an actor is None."""
    none = [name.removeprefix(NOT_APPLIED) for name in metrics if name.startswith(NOT_APPLIED)]
    if none and not parts:
        raise ValueError(
            f"{path}: {', '.join(none)} {NO_RETURN} None leaves a reward of {actor} "
            "out of the sum, so that one reward must be a number"
        )


def is_recorded(name: str) -> bool:
    """True if the trainer itself records a trajectory's metric of this name."""
    return RECORDED.fullmatch(name) is not None


def env_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """An environment's metrics; `env_` is prepended to names that the trainer records itself."""
    return {f"env_{k}" if is_recorded(k) else k: value for k, value in metrics.items()}


def add_parts(
    rewards: MutableMapping,
    metrics: MutableMapping,
    hook: Hook,
    parts: Mapping[str, float | None],
    actors: Collection[str] = (),
) -> None:
    """Adds the parts of a reward to `rewards`, or to `metrics` if the weight is 0. A part that is
    None adds a metric only. Raises ValueError for an actor's name or a repeated name."""
    for name, value in parts.items():
        if len(actors) > 1 and name in actors:
            raise ValueError(
                f"{hook.path}: {hook.name}() returned a part named {name!r}, which is an actor; "
                "parts are summed. For a reward of each actor name `actor` among its arguments"
            )
        if value is None:
            metrics[NOT_APPLIED + name] = 1.0
        elif not hook.weight:
            metrics.update(env_metrics({name: value}))
        elif name in rewards:
            raise ValueError(
                f"{hook.path}: two hooks give the reward part {name!r}; rename it in one of them"
            )
        else:
            rewards[name] = hook.weight * value


def read_answer(answer: object, path: str, ends: bool) -> tuple[list[Message], float | None, bool]:
    """(messages, reward, is_done) from the result of interact(). `ends`: True if the episode ends
    without messages."""
    source = f"{path}: what interact() returned"
    if not isinstance(answer, dict):
        answer = {"messages": answer}
    for key in answer.keys() - {"messages", "reward", "done"}:
        raise ValueError(f"{source} has an unknown key {key!r}; known: messages, reward, done")
    reward = answer.get("reward")
    if reward is not None:
        reward = finite(reward, f"the reward in {source}")
    messages = answer.get("messages")
    if messages is None or messages in ([], ()):
        return [], reward, bool(answer.get("done")) or ends
    try:
        return canonical_messages(messages), reward, bool(answer.get("done"))
    except ValueError as error:
        raise ValueError(f"{source} {error}") from None


def key_text(value: object) -> str:
    """A state's key as text: the text itself, JSON of any other value, or "" for None. Raises
    ValueError for values that are not JSON, because equal values could have different texts."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the state_key {shorten(value)} is neither text nor JSON: {error}"
        ) from None
