"""Several engines on one device, one of them awake at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_core.metrics import Metric, Sum
from rl_core.sampling.engine import Engine


class DeviceLease:
    """One device for several engines; one of them is awake at a time.

    Callers of the engine that holds the device run concurrently; callers of other engines queue.
    Once the holder is idle, the engine that waited longest takes over. After `max_slice_s` the
    holder admits no new caller while others queue.
    """

    def __init__(self, max_slice_s: float = 30.0):
        self.max_slice_s = max_slice_s
        self.holder: Engine | None = None
        self.inside: set[asyncio.Future[None]] = set()  # Callers of the holder.
        # Engine -> callers that wait, longest wait first.
        self.queue: dict[Engine, list[asyncio.Future[None]]] = {}
        self.since = 0.0  # Time when the holder took over.
        self.switch: asyncio.Task[None] | None = None  # Runs while the device changes hands.
        self.num_switches, self.switch_s = 0, 0.0

    @asynccontextmanager
    async def of(self, engine: Engine) -> AsyncIterator[None]:
        """Inside, `engine` is awake and holds the device. Raises what wake() or the other engine's
        sleep() raised."""
        turn = asyncio.get_running_loop().create_future()
        self.queue.setdefault(engine, []).append(turn)
        self._admit()
        try:
            await turn
            yield
        finally:
            self.inside.discard(turn)
            self._admit()

    def take_metrics(self) -> dict[str, Metric]:
        """Number and seconds of switches since the last call."""
        metrics: dict[str, Metric] = {
            "engine_switches": Sum(self.num_switches),
            "engine_switch_s": Sum(self.switch_s),
        }
        self.num_switches, self.switch_s = 0, 0.0
        return metrics

    def _admit(self) -> None:
        """Admits callers of the holder, or starts to hand the device over."""
        for engine, turns in list(self.queue.items()):
            self.queue[engine] = [turn for turn in turns if not turn.done()]  # Done: cancelled.
            if not self.queue[engine]:
                del self.queue[engine]
        if self.switch is not None:
            return
        others = [engine for engine in self.queue if engine is not self.holder]
        if not others or time.monotonic() - self.since < self.max_slice_s:
            self._let_in()
        if others and not self.inside:
            self.switch = asyncio.create_task(self._hand_over(others[0]))

    def _let_in(self) -> None:
        turns = self.queue.pop(self.holder, []) if self.holder else []
        for turn in turns:
            if not turn.done():
                self.inside.add(turn)
                turn.set_result(None)

    async def _hand_over(self, engine: Engine) -> None:
        began = time.monotonic()
        try:
            if self.holder is not None:
                await self.holder.sleep()
            self.holder = None  # Nobody holds the device if wake() fails.
            await engine.wake()
            self.holder, self.since = engine, time.monotonic()
            self.num_switches += 1
            self.switch_s += self.since - began
            self._let_in()
        except Exception as error:
            for turn in self.queue.pop(engine, ()):
                if not turn.done():
                    turn.set_exception(error)
        finally:
            self.switch = None
            self._admit()
