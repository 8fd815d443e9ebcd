"""Groups of training tasks under way. A step takes groups that are complete; with a staleness S above 0 the others go on by
newer weights.

The groups of a run are numbered in the order of its data. Those of a step and of S further steps may have begun (the bound
of AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1), the oldest are taken first, and a step waits for every group that
would be older than S versions in the next one: nothing is ever trained on that is staler. S = 0 waits for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rl_core.distributed import Ranks, all_gather_json
from rl_core.types import RunError, Trajectory

POLL_S, ALONE_S = 0.02, 1.0  # between looks at what other ranks have done, or at nothing but a clock
FINISHED, ALLOWED, DRAWN = "groups/finished", "groups/allowed", "groups/drawn"  # counters that ranks share


@dataclass(kw_only=True, slots=True)
class Group:
    number: int
    version: int  # of the weights by which it began
    trajectories: list[Trajectory]


class GroupStream:
    """What one rank has under way: at most `width` groups at once."""

    def __init__(self, roll_out: Callable[[int], Awaitable[list[Trajectory]]], ranks: Ranks, width: int):
        self.roll_out, self.ranks, self.width = roll_out, ranks, width
        self.allowed = 0  # groups of all ranks that may have begun
        self.version = 0  # of the weights by which groups begin
        self.ready: list[Group] = []
        self.open: dict[int, tuple[asyncio.Task, int]] = {}  # number -> (its task, its version)
        self.drawn: int | None = None  # this rank's next, once it is allowed
        self.changed = asyncio.Event()
        self.error: Exception | None = None

    def fill(self) -> None:
        while len(self.open) < self.width and (number := self.next_number()) is not None:
            self.ranks.add(f"groups/begun/{self.version}", 1)
            self.open[number] = asyncio.create_task(self.finish(number, self.version)), self.version

    def next_number(self) -> int | None:
        if self.drawn is None:
            self.drawn = self.ranks.add(DRAWN, 1) - 1
        if self.drawn >= self.allowed:
            return None
        number, self.drawn = self.drawn, None
        return number

    async def finish(self, number: int, version: int) -> None:
        try:
            self.add(Group(number=number, version=version, trajectories=await self.roll_out(number)))
            del self.open[number]
            self.ranks.add(f"groups/done/{version}", 1)
            self.ranks.add(FINISHED, 1)
            self.fill()
        except Exception as error:
            self.error = error
        self.changed.set()

    def add(self, group: Group) -> None:
        self.ready.append(group)

    async def close(self) -> None:
        tasks = [task for task, _ in self.open.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Intake:
    """Which groups a step trains on: the same choice on every rank. Every rank must make each call."""

    def __init__(
        self,
        ranks: Ranks,
        stream: GroupStream | None,
        *,
        per_step: int,
        total: int,  # groups of the whole run, but for what replaces others
        max_staleness: int,
        patience_s: float,
        limits: str,  # the flags that patience_s is of
    ):
        self.ranks, self.stream, self.per_step, self.left = ranks, stream, per_step, total
        self.max_staleness, self.patience_s, self.limits = max_staleness, patience_s, limits
        self.version, self.allowed, self.num_taken = 0, 0, 0
        self.taken: set[int] = set()  # numbers from `lowest` on
        self.lowest = 0

    def advance(self, version: int) -> None:
        """The weights are of this version now; the groups of one more step may begin."""
        ahead = self.max_staleness if self.allowed == 0 else 0
        n = min(self.per_step * (1 + ahead), self.left)
        self.left -= n
        self.version = version
        self.allow(n)

    def allow(self, n: int) -> None:
        """n more groups may begin."""
        self.allowed += n
        self.stream.allowed, self.stream.version = self.allowed, self.version
        self.stream.fill()

    async def take(self, needed: int) -> list[Group]:
        """This rank's part of the oldest `needed` groups that are complete, once so many are and none is open that a later
        step could not train on. Raises RunError when others have finished nothing for patience_s seconds."""
        complete: list[tuple[int, int]] = []
        while len(complete) < needed:
            await self.wait(needed)
            complete = self.complete()
        numbers = [number for _, number in sorted(complete)[:needed]]
        self.note_taken(numbers)
        return self.fetch(numbers)

    def note_taken(self, numbers: list[int]) -> None:
        self.num_taken += len(numbers)
        self.taken.update(numbers)
        while self.lowest in self.taken:
            self.taken.remove(self.lowest)
            self.lowest += 1

    async def wait(self, needed: int) -> None:
        finished, since = -1, time.monotonic()
        while not self.is_enough(needed):
            now = self.ranks.add(FINISHED, 0)
            if now != finished or (self.stream and self.stream.open):  # its own episodes have deadlines
                finished, since = now, time.monotonic()
            if time.monotonic() - since > self.patience_s:
                raise RunError(
                    f"rank {self.ranks.rank} waited in the phase 'generate' for {needed} groups of episodes, of which "
                    f"{finished - self.num_taken} are complete: others finished none within {self.limits}={self.patience_s:g}"
                )
            await self.look_again()

    def is_enough(self, needed: int) -> bool:
        oldest = self.version - self.max_staleness
        begun, done = (self.ranks.add(f"groups/{what}/{oldest}", 0) for what in ("begun", "done"))
        return begun == done and self.ranks.add(FINISHED, 0) - self.num_taken >= needed

    async def look_again(self) -> None:
        if self.stream.error is not None:
            raise self.stream.error
        self.stream.changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.stream.changed.wait(), POLL_S if self.ranks.size > 1 else ALONE_S)

    def complete(self) -> list[tuple[int, int]]:
        """(version, number) of all groups that are complete and not taken yet, on all ranks."""
        parts = all_gather_json([(g.version, g.number) for g in self.stream.ready], self.ranks)
        return [tuple(fact) for part in parts for fact in part]

    def fetch(self, numbers: list[int]) -> list[Group]:
        found = [g for g in self.stream.ready if g.number in numbers]
        self.stream.ready = [g for g in self.stream.ready if g.number not in numbers]
        return found

    def unfinished(self) -> list[int]:
        """Numbers below `allowed` that no step has trained on."""
        return [n for n in range(self.lowest, self.allowed) if n not in self.taken]

    async def close(self) -> None:
        await self.stream.close()


class HeldClock:
    """The time of the running event loop, which stands still while its thread does something else: no deadline of what is
    under way passes meanwhile."""

    def __init__(self):
        loop = asyncio.get_running_loop()
        self.running, self.held = loop.time, 0.0
        loop.time = self

    def __call__(self) -> float:
        return self.running() - self.held

    @contextlib.contextmanager
    def stopped(self):
        began = time.monotonic()
        try:
            yield
        finally:
            self.held += time.monotonic() - began
