"""Several actors' engines on a device that has no room for all of them: one is awake at a time, the others sleep."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_core.metrics import Metric, Sum
from rl_core.sampling.engine import Engine
from rl_core.types import Completion, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class Visit:
    """One use of an engine, for which it has to have the device."""

    future: asyncio.Future[None]
    wakes: bool  # new weights come to an engine that sleeps, too
    stops: bool  # while the engine is paused, as requests do


class TimeSlice:
    """Who has the device now. Requests to the engine that has it run, others wait. Once it is idle the engine with the
    longest queue comes next; after max_slice_s it takes no further request while others wait, so that it becomes idle. An
    engine that was passed over as often as there are engines comes first, so that nobody waits for ever."""

    def __init__(self, max_slice_s: float = 30.0, clock: Callable[[], float] = time.monotonic):
        self.max_slice_s, self.clock = max_slice_s, clock
        self.engines: list[SlicedEngine] = []
        self.present: list[SlicedEngine] = []  # not known to be asleep
        self.holder: SlicedEngine | None = None  # of the device
        self.is_awake = False  # the holder, ready for requests
        self.began = 0.0  # the holder's slice
        self.switching: asyncio.Task[None] | None = None
        self.num_switches, self.switch_s = 0, 0.0

    def engine(self, engine: Engine) -> SlicedEngine:
        """The same engine, which takes its turn."""
        sliced = SlicedEngine(engine, self)
        self.engines.append(sliced)
        self.present.append(sliced)
        return sliced

    @property
    def num_running(self) -> int:
        """For which the holder keeps the device; a pause lets others have it."""
        return sum(not (v.stops and self.holder.is_paused) for v in self.holder.inside) if self.holder else 0

    def take_metrics(self) -> dict[str, Metric]:
        """Since the last call: how often the device went to another engine, and how long that took."""
        found = {"engine_switches": Sum(self.num_switches), "engine_switch_s": Sum(self.switch_s)}
        self.num_switches, self.switch_s = 0, 0.0
        return found

    @asynccontextmanager
    async def turn(self, engine: SlicedEngine, wakes: bool = True, stops: bool = False) -> AsyncIterator[None]:
        """A context in which the engine has the device. Raises what its waking up, or another's going to sleep, raised."""
        visit = Visit(future=asyncio.get_running_loop().create_future(), wakes=wakes, stops=stops)
        engine.waiting.append(visit)
        self._next()
        try:
            await visit.future
            yield
        finally:
            if visit in engine.waiting:  # cancelled
                engine.waiting.remove(visit)
            engine.inside.discard(visit)
            self._next()

    async def rest(self, engine: SlicedEngine) -> None:
        """Puts an engine to sleep, unless it sleeps. Raises what its engine does if requests are running."""
        while self.switching is not None:
            await asyncio.wait([self.switching])
        if engine in self.present:
            await asyncio.shield(self._start(self._sleep([engine]), []))

    def _is_over(self) -> bool:
        others_wait = any(e.waiting for e in self.engines if e is not self.holder)
        return others_wait and self.clock() - self.began >= self.max_slice_s

    def _is_ready(self, engine: SlicedEngine) -> bool:
        return engine is self.holder and (self.is_awake or not any(v.wakes for v in engine.waiting))

    def _next(self) -> None:
        """Lets in whom there is room for now."""
        waiting = [e for e in self.engines if e.waiting]
        if self.switching is not None or not waiting:
            return
        if self.num_running:
            if self._is_ready(self.holder) and not self._is_over():
                self._admit(self.holder)
            return
        # What it had no room for in its own slice comes after the others.
        others = [e for e in waiting if e is not self.holder] or waiting
        chosen = max(others, key=lambda e: (e.times_passed >= len(self.engines), len(e.waiting)))
        for engine in others:
            engine.times_passed = 0 if engine is chosen else engine.times_passed + 1
        self.began = self.clock()
        if self._is_ready(chosen):
            self._admit(chosen)
        else:
            self._start(self._switch(chosen), [chosen])

    def _admit(self, engine: SlicedEngine) -> None:
        for visit in engine.waiting:
            if not visit.future.done():
                visit.future.set_result(None)
                engine.inside.add(visit)
        engine.waiting.clear()

    def _start(self, change: Coroutine[Any, Any, None], waited_for: list[SlicedEngine]) -> asyncio.Task[None]:
        self.switching = asyncio.create_task(change)
        self.switching.add_done_callback(partial(self._switched, waited_for))
        return self.switching

    async def _switch(self, engine: SlicedEngine) -> None:
        began = self.clock()
        await self._sleep(e for e in list(self.present) if e is not engine)
        if engine is not self.holder:
            self.holder, self.is_awake = engine, False
            self.num_switches += 1
        if engine not in self.present:
            self.present.append(engine)
        if not self._is_ready(engine):
            await engine.engine.wake()
            self.is_awake = True
        self.switch_s += self.clock() - began
        self.began = self.clock()

    async def _sleep(self, engines: Iterable[SlicedEngine]) -> None:
        for engine in engines:
            if engine is self.holder:
                self.is_awake = False
            await engine.engine.sleep()
            self.present.remove(engine)
            if engine is self.holder:
                self.holder = None

    def _switched(self, waited_for: list[SlicedEngine], task: asyncio.Task[None]) -> None:
        """Nobody waits for ever: what went wrong is raised in every request that the switch was for."""
        self.switching = None
        error = None if task.cancelled() else task.exception()
        for engine in waited_for:
            if error is not None or task.cancelled():
                self._refuse(engine, error)
            elif self._is_ready(engine):
                self._admit(engine)
        self._next()

    def _refuse(self, engine: SlicedEngine, error: BaseException | None) -> None:
        for visit in engine.waiting:
            if not visit.future.done():
                visit.future.cancel() if error is None else visit.future.set_exception(error)
        engine.waiting.clear()


class SlicedEngine:
    """An engine whose requests wait until it has the device."""

    def __init__(self, engine: Engine, time_slice: TimeSlice):
        self.engine, self.time_slice = engine, time_slice
        self.waiting: deque[Visit] = deque()
        self.inside: set[Visit] = set()
        self.times_passed = 0  # that another was chosen while requests waited here
        self.is_paused = False

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    @property
    def capacity(self) -> int:
        return self.engine.capacity

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = "", **adapter: str
    ) -> Completion:
        async with self.time_slice.turn(self, stops=True):
            return await self.engine.generate(prompt_ids, params, seed=seed, session=session, **adapter)

    def end_session(self, session: str) -> None:
        self.engine.end_session(session)

    async def update_weights(self, named_weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """See Engine. An engine that slept sleeps again: a learner may be on the device beside it."""
        await self._update(self.engine.update_weights, named_weights, version)

    async def update_adapter(
        self, name: str, named_weights: Iterable[tuple[str, Tensor]], config: dict[str, Any], version: int
    ) -> None:
        """See SharedEngine."""
        await self._update(self.engine.update_adapter, name, named_weights, config, version)

    async def _update(self, update: Callable[..., Coroutine[Any, Any, None]], *what: Any) -> None:
        now = self.time_slice
        async with now.turn(self, wakes=False):
            await update(*what)
        if now.holder is self and not now.is_awake and now.switching is None:
            await self.sleep()

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.engine.named_weights() if hasattr(self.engine, "named_weights") else ()

    async def sleep(self) -> None:
        await self.time_slice.rest(self)

    async def wake(self) -> None:
        async with self.time_slice.turn(self):
            pass

    async def pause(self) -> None:
        """See Engine. The device is free for others."""
        await self.engine.pause()
        self.is_paused = True
        self.time_slice._next()

    async def resume(self) -> None:
        """See Engine; once it has the device."""
        async with self.time_slice.turn(self):
            self.is_paused = False
            await self.engine.resume()

    async def revive(self) -> None:
        await self.engine.revive()

    async def close(self) -> None:
        """Cancels what waits."""
        for visit in self.waiting:
            visit.future.cancel()
        await self.engine.close()
