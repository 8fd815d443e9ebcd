"""Groups of episodes, run side by side: the one way in which training and evaluation get their trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from rl_core.config import RolloutConfig
from rl_core.distributed import Ranks, all_gather_json
from rl_core.sampling.actor import Actor
from rl_core.sampling.env import Env
from rl_core.sampling.group import Group, run_group
from rl_core.types import RunError, Trajectory

POLL_S = 0.05  # between looks at other ranks, while groups of this rank are running


class RolloutWorker:
    """Runs submitted groups in the background, oldest first, at most `width` at once on this rank. Ranks draw groups from a
    shared counter, so that fast ranks run more.

    Training submits the groups of `1 + max_staleness` steps ahead and collects one step's. With max_staleness 0 that is the
    synchronous loop; above it is the bound of AReaL (Fu et al. 2025, arXiv:2505.24298, section 5.1). An evaluation submits
    its groups and collects all of them.
    """

    def __init__(
        self, run: Callable[[Group], Awaitable[list[Trajectory]]], ranks: Ranks, width: int, name: str, timeout_s: float
    ):
        self.run, self.ranks, self.width, self.name, self.timeout_s = run, ranks, width, name, timeout_s
        self.version = 0  # of the weights by which groups begin
        self.pending: dict[int, Group] = {}  # submitted and not collected, on any rank
        self.running: dict[int, asyncio.Task] = {}  # on this rank
        self.done: list[int] = []  # on this rank
        self.next_number: int | None = (
            None  # of the next group of this rank; it begins once it is submitted and a slot is free
        )
        self.num_submitted = self.num_collected = self.num_collects = 0
        self.changed, self.error = asyncio.Event(), None

    def submit(self, groups: Iterable[Group]) -> None:
        """Every rank must submit the same groups."""
        for group in groups:
            self.pending[self.num_submitted] = group
            self.num_submitted += 1
        self._fill()

    def _fill(self) -> None:
        while len(self.running) < self.width:
            if self.next_number is None:
                self.next_number = self._count("drawn", 1) - 1
            if self.next_number >= self.num_submitted:
                return
            self.pending[self.next_number].version = self.version
            self.running[self.next_number] = asyncio.create_task(self._run(self.next_number))
            self.next_number = None

    async def _run(self, number: int) -> None:
        try:
            group = self.pending[number]
            group.trajectories = await self.run(group)
            del self.running[number]
            self.done.append(number)
            self._count("finished", 1)
            self._fill()
        except Exception as error:
            self.error = error
        self.changed.set()

    async def collect(self, num_groups: int, oldest: int | None = None) -> list[Group]:
        """This rank's part of the `num_groups` oldest complete groups, on all ranks together. Waits too for each group that
        began by the weights of version `oldest` or before, because it would be too stale for the next step. Every rank
        must call it. Raises RunError if an engine cannot go on, or other ranks do not."""
        while any(self.pending[n].version <= (self.version if oldest is None else oldest) for n in self.running):
            await self._change(None)
        await self._meet(self.num_collected + num_groups)
        by_rank = all_gather_json([(self.pending[n].version, n) for n in self.done], self.ranks)
        numbers = [n for _, n in sorted(tuple(pair) for pairs in by_rank for pair in pairs)[:num_groups]]
        self.num_collected += num_groups
        groups = {n: self.pending.pop(n) for n in numbers}
        collected_here = [groups[n] for n in self.done if n in groups]
        self.done = [n for n in self.done if n not in groups]
        return collected_here

    async def _meet(self, num_finished: int) -> None:
        """Waits until all ranks are here and have finished so many groups since the start."""
        here, met = f"collect/{self.num_collects}", f"{self.name}/collect/{self.num_collects}/met"
        self.num_collects += 1
        self._count(here, 1)
        known, until = self._count("finished", 0), time.monotonic() + self.timeout_s
        is_new = True  # only the last rank to arrive, or to finish a group, can find that all have
        while not (is_new and self._count(here, 0) == self.ranks.size and self._count("finished", 0) >= num_finished):
            if self.ranks.was_said(met):
                return
            is_new = await self._change(POLL_S if self.ranks.size > 1 else self.timeout_s)
            if not is_new and time.monotonic() > until and not self.running:  # its own episodes have deadlines
                if (finished := self._count("finished", 0)) == known:
                    raise RunError(
                        f"rank {self.ranks.rank} waited in the phase 'generate' for {num_finished - self.num_collected} groups "
                        f"of episodes, of which {finished - self.num_collected} are complete: other ranks finished none within "
                        f"--timeout_s={self.timeout_s:g}"
                    )
                known, until = finished, time.monotonic() + self.timeout_s
        self.ranks.say(met)

    async def _change(self, timeout_s: float | None) -> bool:
        """Whether a group of this rank was finished in time. Raises what a group raised."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), timeout_s)
        is_new = self.changed.is_set()
        self.changed.clear()
        if self.error is not None:
            raise self.error
        return is_new

    def _count(self, name: str, n: int) -> int:
        return self.ranks.add(f"{self.name}/{name}", n)

    async def close(self) -> None:
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)


async def rollout(
    envs: Mapping[str, Env],
    actors: Mapping[str, Actor],
    groups: Sequence[Group],
    config: RolloutConfig,
    ranks: Ranks,
    timeout_s: float = 600,
) -> list[Trajectory]:
    """The trajectories of the groups that this rank drew, failed ones included, sorted by group and index. Every rank
    must call it."""
    width = groups_at_once(actors, config, len(groups), groups[0].size, ranks)
    worker = RolloutWorker(partial(run_group, envs, actors, config), ranks, width, groups[0].batch, timeout_s)
    try:
        worker.submit(groups)
        return in_order(await worker.collect(len(groups)))
    finally:
        await worker.close()


def groups_at_once(
    actors: Mapping[str, Actor], config: RolloutConfig, num_groups: int, group_size: int, ranks: Ranks
) -> int:
    """Groups that one rank runs at once: at most an even share, so that no rank takes all before the others begin."""
    # Engines of actors that learn; requests beyond the capacity of the others wait there.
    capacities = [actor.capacity for actor in actors.values() if actor.is_trainable]
    episodes = min([config.max_concurrent, *capacities])
    if not episodes:
        return 0  # the engine is on another rank
    return max(1, min(-(-num_groups // ranks.size), episodes // group_size))


def in_order(groups: Iterable[Group]) -> list[Trajectory]:
    return sorted((t for group in groups for t in group.trajectories), key=lambda t: (t.group_id, t.index, t.actor))
