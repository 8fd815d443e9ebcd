"""Concurrent groups of episodes. Training and evaluation get their trajectories here."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.groups import Group
from rl_core.types import RunError, Trajectory

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.sampling.deterministic_rollouts import Window

POLL_S = 0.05  # Interval of polling other ranks.
WINDOW_POLL_S = 0.002  # Interval of polling this rank's groups.
# Key of a group in a worker: (label, number among the groups submitted with that label).
Key = tuple[str, int]


class Meeting(Protocol):
    """Collective that a rank may need during RolloutWorker.collect()."""

    @property
    def is_wanted(self) -> bool: ...
    async def meet(self) -> bool: ...


class Interrupted(Exception):
    """Raised by RolloutWorker.collect() on all ranks once one of them is interrupted."""


class RolloutWorker:
    """Runs submitted groups in the background, evaluations first, then the oldest.

        submit() -> pending -> _fill() -> running -> _run() -> done -> collect()

    _fill() starts pending groups while this rank has room; submit() and the end of a group call it.
    Ranks draw group numbers from a shared counter per label, so that fast ranks run more groups.
    collect() waits for the groups of one step on all ranks; the end of a group, on any rank, wakes
    it.

    Training submits `1 + max_staleness` steps ahead and collects one step. max_staleness 0 is the
    synchronous loop; larger values are the bound of AReaL (Fu et al. 2025, arXiv:2505.24298,
    section 5.1). An evaluation submits its groups and collects all of them."""

    def __init__(self, player: EpisodeRunner, ranks: Ranks, timeout_s: float):
        self.player = player
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.version = 0  # Policy version of groups that start.
        self.num_submitted: Counter[str] = Counter()  # Label -> submitted groups.
        self.pending: dict[Key, Group] = {}  # Groups of all ranks that are not collected yet.
        self.running: dict[Key, asyncio.Task] = {}  # This rank's running groups.
        self.done: list[Key] = []  # This rank's complete groups.
        # Label -> number of this rank's next group, which starts once it is submitted and fits.
        self.next_number: dict[str, int] = {}
        self.num_collects = 0
        self.meeting: Meeting | None = None  # See set_meeting().
        self.num_collected: Counter[str] = Counter()  # Label -> collected groups.
        self.num_awaited: Counter[str] = Counter()  # Label -> groups that collect() has asked for.
        # Groups of an earlier process, see resume_groups().
        self.restored_numbers: Iterator[int] = iter(())
        self.num_restored = 0
        self.restore: Callable[[Group], Group] = lambda group: group

    def resume_groups(self, positions: Sequence[int], restore: Callable[[Group], Group]) -> None:
        """Starts with the groups at these positions, as `restore` returns them. The positions are
        assigned to ranks round-robin."""
        self.restored_numbers = iter([n for n, pos in enumerate(positions) if self.is_own(pos)])
        self.num_restored = len(positions)
        self.restore = restore

    def is_own(self, position: int) -> bool:
        return position % self.ranks.size == self.ranks.rank

    @property
    def window(self) -> Window | None:
        """See deterministic_rollouts.py."""
        return self.player.replays.window if self.player.replays else None

    def set_meeting(self, meeting: Meeting) -> None:
        """Makes all ranks call meeting.meet() during collect() once one has meeting.is_wanted."""
        self.meeting = meeting

    def submit(self, groups: Iterable[Group]) -> None:
        """Queues groups. Every rank must submit the same groups."""
        for group in groups:
            self.pending[group.label, self.num_submitted[group.label]] = group
            self.num_submitted[group.label] += 1
        self._fill()

    def _fill(self) -> None:
        if self.window:
            for key, group in self.pending.items():
                is_new = key not in self.running and key not in self.done
                if is_new and self.is_own(group.position):
                    self._start(key)
            return
        # Evaluations first: training groups have the label "".
        for label in sorted({label for label, _ in self.pending}, reverse=True):
            while self._has_room(label):
                if label not in self.next_number:
                    self.next_number[label] = self._draw(label)
                key = (label, self.next_number[label])
                if key not in self.pending:
                    break
                self._start(key)
                del self.next_number[label]

    def _has_room(self, label: str) -> bool:
        """True if a group of this label can start. A rank runs at most an even share of a label, so
        that no rank takes all groups before the others begin."""
        num_running = num_pending = 0
        for key in self.pending:
            if key[0] == label:
                num_pending += 1
                num_running += key in self.running
        if num_running * self.ranks.size >= num_pending:
            return False
        playing = sum(self.pending[key].size for key in self.running)
        largest = max(group.size for group in self.pending.values())
        needed = largest if playing else 1
        return playing + needed <= self.player.max_episodes

    def _draw(self, label: str) -> int:
        """The number of the next group with this label."""
        restored = next(self.restored_numbers, None) if not label else None
        if restored is not None:
            return restored
        num_restored = 0 if label else self.num_restored
        return num_restored + self._count(f"drawn/{label}", 1) - 1

    def _start(self, key: Key) -> None:
        group = self.pending[key] = self.restore(self.pending[key])
        if group.version < 0:  # Not started by a previous run.
            group.version = self.version
        self.running[key] = asyncio.create_task(self._run(key, group))

    async def _run(self, key: Key, group: Group) -> None:
        if not group.trajectories:  # Not completed by a previous run.
            group.trajectories = await self.player.play(group)
        del self.running[key]
        self.done.append(key)
        self._count(f"finished/{group.label}", 1)
        self._fill()

    async def collect(
        self,
        num_groups: int,
        oldest: int = -1,
        label: str = "",
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Group]:
        """This rank's share of the `num_groups` oldest complete groups with this label over all
        ranks. Also waits for each group of policy version `oldest` or older, which would be too
        stale for the next step. A collective: every rank must call it. Raises RunError if an engine
        fails for good or other ranks hang. If is_interrupted() before num_groups are complete,
        cancels all groups of this label and raises Interrupted on all ranks. is_interrupted() must
        become true on all ranks, and stay true."""
        # Imported here because it imports torch, which rl-core check does not need.
        from rl_core.distributed import all_gather_json

        self.num_awaited[label] += num_groups
        while True:
            await self._wait_for_due(num_groups, oldest, label, is_interrupted)
            await self._wait_for_ranks(num_groups, label, is_interrupted)
            if self.meeting is None or not await self.meeting.meet():
                break
        of_label = [key for key in self.done if key[0] == label]
        complete = [(self.pending[key].version, key[1]) for key in of_label]
        oldest_first = []
        for complete_on_rank in all_gather_json(complete, self.ranks):
            oldest_first += map(tuple, complete_on_rank)
        if len(oldest_first) < num_groups:
            await self._cancel(label)
            raise Interrupted(label)
        oldest_first.sort()
        keys = [(label, number) for _, number in oldest_first[:num_groups]]
        collected = {key: self.pending.pop(key) for key in keys}
        self.num_collected[label] += num_groups
        groups = [collected[key] for key in of_label if key in collected]
        self.done = [key for key in self.done if key not in collected]
        return groups

    async def _wait_for_due(
        self, num_groups: int, oldest: int, label: str, is_interrupted: Callable[[], bool]
    ) -> None:
        """Waits for this rank's groups that would be too stale for the next step; in windows, for
        the oldest ones."""
        if self.window:
            await self._sample_window(self.window, num_groups, label, is_interrupted)
            return
        while any(self.pending[key].version <= oldest for key in self.running):
            if self._is_called():
                return
            await self._wait(POLL_S)

    async def _sample_window(
        self, window: Window, num_groups: int, label: str, is_interrupted: Callable[[], bool]
    ) -> None:
        """Waits until the oldest groups are done, and all others of this rank wait, or until a rank
        is interrupted."""
        due = [key for key in self.pending if key[0] == label][:num_groups]
        window.open({self.pending[key].id for key in due}, has_parts=not label)
        while not is_interrupted() and any(
            key in due or not self._is_waiting(key) for key in self.running
        ):
            await self._wait(WINDOW_POLL_S)
        window.open((), has_parts=False)

    def _is_waiting(self, key: Key) -> bool:
        """True if all unfinished episodes of a group wait for the next window."""
        group, replays = self.pending[key], self.player.replays
        assert replays and replays.window
        ended = {str(index) for index in group.ended}
        live = [(group.id, name) for name in replays.groups[group.id].keys() - ended]
        return bool(live) and all(map(replays.window.is_waiting, live))

    def _is_called(self) -> bool:
        return self.meeting is not None and self.meeting.is_wanted

    async def _cancel(self, label: str) -> None:
        """Cancels all groups of this label."""
        self.pending = {key: group for key, group in self.pending.items() if key[0] != label}
        self.done = [key for key in self.done if key[0] != label]
        tasks = [task for key, task in self.running.items() if key[0] == label]
        self.running = {key: task for key, task in self.running.items() if key[0] != label}
        await cancelled(tasks)

    async def _wait_for_ranks(
        self, num_groups: int, label: str, is_interrupted: Callable[[], bool]
    ) -> None:
        """Waits until all ranks are here and num_groups are complete, or until a rank calls for the
        meeting or is interrupted."""
        here = f"collect/{self.num_collects}"
        self.num_collects += 1
        num_here, num_ready = self._count(here, 1), self.num_ready(label)
        until = time.monotonic() + self.timeout_s
        while num_here < self.ranks.size or (
            num_ready < num_groups and not self._is_called() and not is_interrupted()
        ):
            # One store answers all ranks.
            await self._wait(POLL_S * max(1, self.ranks.size // 32))
            before = num_ready
            num_here, num_ready = self._count(here, 0), self.num_ready(label)
            # Episodes of this rank have their own deadlines.
            if self.running or num_ready > before:
                until = time.monotonic() + self.timeout_s
            elif time.monotonic() > until:
                raise RunError(
                    f"rank {self.ranks.rank} waited in the phase 'generate' for {num_groups} "
                    f"groups of episodes, of which {num_ready} are complete: other ranks finished "
                    f"none within --timeout_s={self.timeout_s:g}"
                )

    async def _wait(self, timeout_s: float) -> None:
        """Waits for the end of a group of this rank, at most timeout_s. Raises the group's
        error."""
        if not self.running:
            await asyncio.sleep(timeout_s)
            return
        tasks = self.running.values()
        ended, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    def num_ready(self, label: str = "") -> int:
        """Number of complete groups on all ranks that are not collected."""
        return self._count(f"finished/{label}", 0) - self.num_collected[label]

    def progress(self, label: str = "") -> tuple[int, int]:
        """(complete, awaited) groups on all ranks since the start of the run."""
        collected, awaited = self.num_collected[label], self.num_awaited[label]
        return min(collected + self.num_ready(label), awaited), awaited

    def _count(self, name: str, n: int) -> int:
        return self.ranks.add(f"rollout/{name}", n)

    async def close(self) -> None:
        await cancelled(list(self.running.values()))


async def cancelled(tasks: Sequence[asyncio.Task]) -> None:
    """Cancels tasks, and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def sorted_trajectories(groups: Iterable[Group]) -> list[Trajectory]:
    trajectories: list[Trajectory] = []
    for group in groups:
        trajectories += group.trajectories
    return sorted(trajectories, key=lambda t: (t.group_id, t.index, t.actor))
