"""Calls functions of a user's file by the names of their parameters, each with a deadline, and
reads what they return."""

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
from typing import Any

from rl_core.data.messages import canonical_messages, shorten
from rl_core.types import Message, Task

BEAT_S = 0.05  # The event loop wakes up at least so often.
# Few: hooks that compute share one interpreter lock with the engine. Those that wait can be async.
MAX_THREADS = 16
MAX_YIELDS = 10_000  # that a hook gives, as turns() does
SHARED = (
    "actors",
    "state",
    "llm",
    "result",
    "box",
)  # Hooks get these themselves, and copies of all other arguments.

# Metrics of a trajectory that the trainer records itself.
NOT_APPLIED = "reward_none/"  # Before a part of the reward that was None in an episode.
RECORDED = re.compile(
    rf"tool_parse_failed|agent_(requests|retries|branches|overridden.*)|{NOT_APPLIED}.*"
)

Outcome = tuple[Any, BaseException | None]  # what a function returned, or what it raised


class DeadlineError(Exception):
    """Ours. A hook may raise TimeoutError itself."""


class HookError(RuntimeError):
    """A hook of the user's file raised. The message names the hook and the line."""


@dataclass(kw_only=True)
class Hook:
    """A function of a user's file."""

    name: str
    function: Callable
    path: str  # of the user's file
    timeout_s: float | None  # None: the caller has a deadline
    ours: frozenset[str]  # arguments that the caller gives; all others are columns
    weight: float = 1.0  # of a reward; 0: only logged
    batched: bool = False  # a reward that is called once for a group
    required: set[str] = field(init=False)  # parameters without a default
    named: set[str] = field(init=False)  # all parameters but **kwargs
    takes_all: bool = field(init=False)  # has **kwargs
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
        """A reward that is called for each actor."""
        return self.takes_all or not self.named.isdisjoint(("actor", "trajectory"))

    def arguments(self, row: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Argument -> value. Copies: a hook changes neither the episode nor the row of the next
        one."""
        values = row | {name: given.get(name) for name in self.ours}
        names = self.named & values.keys()
        if self.takes_all:
            names |= values.keys() - {"actors"}
        shared = {name: values[name] for name in names.intersection(SHARED)}
        return shared | {name: copy.deepcopy(values[name]) for name in names.difference(SHARED)}

    async def __call__(self, task: Task, given: Mapping[str, Any]) -> Any:
        """What the function returns. Of our arguments, those that are not `given` are None. Raises
        HookError, or TimeoutError after timeout_s."""
        try:
            result, error = await self._outcome(task, given)
        except DeadlineError:
            raise TimeoutError(
                f"{self.path}: {self.name}() ran longer than {self.timeout_s:g} s for task "
                f"{task.id}; make it faster or raise --rollout.hook_timeout_s"
            ) from None
        if isinstance(error, HookError):
            raise error  # A hook that this one called: the message names it and its line.
        if error is not None:
            described = describe_error(error, self.path)
            raise HookError(f"{self.name}() failed for task {task.id}: {described}") from error
        return result

    async def _outcome(self, task: Task, given: Mapping[str, Any]) -> Outcome:
        def call() -> Any:
            result = self.function(**self.arguments(task.row, given))
            # A generator runs the file's code too, perhaps for ever.
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
                # Not wait_for, which waits for ever for a coroutine that ignores its cancellation.
                await asyncio.wait({running}, timeout=self.timeout_s)
                if not running.done():
                    raise DeadlineError
                return running.result()
            finally:
                running.cancel()


async def outcome(awaitable: Awaitable) -> Outcome:
    """A SystemExit that leaves a task would end the event loop."""
    try:
        return await awaitable, None
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return None, error


class LoopClock:
    """The clock of an event loop and of all its deadlines, and its threads for sync hooks. It
    stands still while something blocks the loop's thread, such as a save: nothing that waits could
    continue meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.real = loop.time
        self.held_s = 0.0
        self.last_s = loop.time()
        self.loop_thread = threading.get_ident()
        self.queue: SimpleQueue = SimpleQueue()  # of (function, its timeout, its future)
        self.until_s: dict[asyncio.Future[Outcome], float] = {}  # of those that run
        self.ended: deque[tuple[asyncio.Future[Outcome], Outcome]] = deque()
        self.num_threads = 0
        self.is_waking = False  # The loop will look at what has ended.
        self.num_running = 0  # hooks
        self.paths: set[str] = set()  # of files whose hooks were called
        self.watchdog: Any = None  # plugins/watchdog.py's, which looks when hooks begin or end
        # All that waits on this loop reads its clock, and its threads end with it.
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
        # The loop reads the clock at least every BEAT_S, unless its thread is blocked.
        self.held_s += max(0.0, now - self.last_s - 2 * BEAT_S)
        self.last_s = now
        return now - self.held_s

    def _beat(self) -> None:
        self.loop.call_later(BEAT_S, self._beat)
        now = self()
        for future, until_s in self.until_s.copy().items():
            if now > until_s and not future.done():
                future.set_exception(DeadlineError())
        # Short functions are cheapest in one thread. Behind a long one they do not wait.
        for _ in range(min(self.queue.qsize(), MAX_THREADS - self.num_threads)):
            self._add_thread()

    async def in_thread(self, function: Callable[[], Any], timeout_s: float | None) -> Outcome:
        """In a daemon thread: a function that hangs outlives its deadline, but blocks neither the
        event loop nor the interpreter's exit. Raises DeadlineError once it has run for
        timeout_s."""
        future = self.loop.create_future()
        self.queue.put((function, timeout_s or math.inf, future))
        if not self.num_threads:
            self._add_thread()
        try:
            return await future
        finally:
            if self.until_s.pop(future, None):  # Its thread ends once the function does.
                self.num_threads -= 1

    def _add_thread(self) -> None:
        self.num_threads += 1
        # A threading.Thread's start() waits for the new thread.
        _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs a function and tells its future. False if the thread ends."""
        job = self.queue.get()
        if job is None:
            self.queue.put(None)  # for the other threads
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
        if not self.is_waking:  # Once for all that end until the loop looks.
            self.is_waking = True
            with suppress(RuntimeError):  # The loop is closed.
                self.loop.call_soon_threadsafe(self._tell)
        return is_waited_for

    def _tell(self) -> None:
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
        """Inside, a hook of this file runs."""
        self.paths.add(path)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.num_running += change
        if self.watchdog is not None and self.num_running <= 1:
            self.watchdog.look()


async def wait_for_all(awaitables: Iterable[Awaitable]) -> list[Any]:
    """Their results. Raises the first error once all have ended, so that none runs on unseen."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def describe_error(error: BaseException, path: str) -> str:
    """`file:line: Type: message` of the innermost line in the user's file."""
    if described := getattr(error, "told_by_service", ""):
        return described  # by a service, where the file is
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    if error.__cause__ is not None:
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    inside = [frame for frame in frames if frame.filename == path] or frames[-1:]
    place = f"{inside[-1].filename}:{inside[-1].lineno}: " if inside else ""
    return f"{place}{type(error).__name__}: {' '.join(str(error).split())}"


def plain(value: Any) -> Any:
    """A scalar of numpy or torch as a number of Python, which JSON can hold; anything else as it
    is."""
    return value.item() if hasattr(value, "item") else value


def finite(value: Any, what: str) -> float:
    """A Python float of a bool, an int, a float, or a scalar of numpy or torch."""
    # An array of several numbers, or an int too large.
    with suppress(ValueError, RuntimeError, OverflowError):
        number = plain(value)
        if isinstance(number, numbers.Real) and math.isfinite(number):
            return float(number)
    raise ValueError(
        f"{what} is {shorten(value)}; a reward must be a finite number, or a dict of them"
    )


MAX_PARTS = 100  # Names in a dict of rewards; each becomes a metric of every step.


def finite_parts(value: Any, name: str, what: str) -> dict[str, float]:
    """The parts of a reward: a dict's entries, or one number under `name`."""
    if not isinstance(value, dict):
        return {name: finite(value, what)}
    if not value or not all(isinstance(part, str) for part in value):
        raise ValueError(
            f"{what} is {shorten(value)}; a dict must name each part, as 'format': 0.5"
        )
    if len(value) > MAX_PARTS:
        raise ValueError(f"{what} has {len(value)} names; give at most {MAX_PARTS}")
    return {part: finite(number, f"{what}: part {part!r}") for part, number in value.items()}


def reward_values(value: Any, name: str, source: str) -> dict[str, float | None]:
    """The parts of a reward as finite_parts() reads them. A part that is None does not apply to the
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
            f"{path}: every reward of {actor} is None ({', '.join(none)}); None leaves a reward "
            "out of the sum, so that one reward must be a number"
        )


def is_recorded(name: str) -> bool:
    """True if the trainer records a trajectory's metric of this name itself."""
    return RECORDED.fullmatch(name) is not None


def env_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's metrics, with `env_` in front of names that the trainer records itself."""
    return {f"env_{k}" if is_recorded(k) else k: value for k, value in metrics.items()}


def add_parts(
    rewards: MutableMapping,
    metrics: MutableMapping,
    hook: Hook,
    parts: Mapping[str, float | None],
    actors: Collection[str] = (),
) -> None:
    """Adds the parts of a reward to the sum's, or to the metrics if the weight is 0. A part that is
    None is noted among the metrics alone. Raises ValueError."""
    for part, value in parts.items():
        if len(actors) > 1 and part in actors:
            raise ValueError(
                f"{hook.path}: {hook.name}() returned a part named {part!r}, which is an actor; "
                "parts are summed. For a reward of each actor name `actor` among its arguments"
            )
        if value is None:
            metrics[NOT_APPLIED + part] = 1.0
        elif not hook.weight:
            metrics.update(env_metrics({part: value}))
        elif part in rewards:
            raise ValueError(
                f"{hook.path}: two hooks give the reward part {part!r}; rename it in one of them"
            )
        else:
            rewards[part] = hook.weight * value


def read_answer(answer: Any, path: str, ends: bool) -> tuple[list[Message], float | None, bool]:
    """(messages, reward, is_done) of what interact returned. `ends`: the episode ends without
    messages."""
    what = f"{path}: what interact() returned"
    if not isinstance(answer, dict):
        answer = {"messages": answer}
    for key in answer.keys() - {"messages", "reward", "done"}:
        raise ValueError(f"{what} has an unknown key {key!r}; known: messages, reward, done")
    reward = answer.get("reward")
    if reward is not None:
        reward = finite(reward, f"the reward in {what}")
    messages = answer.get("messages")
    if messages is None or messages in ([], ()):
        return [], reward, bool(answer.get("done")) or ends
    try:
        return canonical_messages(messages), reward, bool(answer.get("done"))
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def key_text(value: Any) -> str:
    """A state's key as text: itself, or its JSON; "" for None. Raises ValueError for what JSON
    cannot hold: two equal values could have two texts."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the state_key {shorten(value)} is neither text nor JSON: {error}"
        ) from None
