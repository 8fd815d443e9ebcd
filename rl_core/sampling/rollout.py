"""Groups of episodes with their deadlines and failures, run side by side: training and evaluation
get trajectories here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_core.config import Config, RolloutConfig
from rl_core.data.episodes import succeeded
from rl_core.sampling.actor import Actor, Conversation, EpisodeActors, revived
from rl_core.sampling.engine import EngineDied
from rl_core.sampling.env import SESSION_CODES, Env
from rl_core.sampling.hooks import HookError, LoopClock, wait_for_all
from rl_core.types import RunError, SamplingParams, Task, Trajectory, counter_seed

if TYPE_CHECKING:
    from rl_core.distributed import Ranks

POLL_S = 0.05  # between looks at other ranks, while groups of this rank are running
SCORING = "group"  # in the place of an episode's number: what scores the whole group
TRUNCATED = (
    "; the episode was truncated: a turn was cut off, as by --max_tokens, and interact() not "
    "called after it"
)


@dataclass(kw_only=True, slots=True)
class Group:
    """All episodes of one task, for example number 3 of the batch "train/000012"."""

    task: Task
    batch: str  # with `number` it makes seeds
    number: int  # place in the batch
    size: int
    params: SamplingParams
    seed: int  # of the run
    # Begins its id instead of `batch`, which all evaluations have in common, and so their seeds.
    label: str = ""
    position: int = 0  # of the task in the order of the training data
    version: int = -1  # of the weights by which it began
    under_way: Any = None  # a plugins.under_way.GroupUnderWay, for checkpoints
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Unique in the run."""
        return f"{self.label or self.batch}/{self.number:06d}"

    def seed_of(self, *parts: int | str) -> int:
        return counter_seed(self.seed, self.batch, self.number, *parts)

    def actors(
        self, env: Env, actors: Mapping[str, Actor], seed: int, name: int | str
    ) -> EpisodeActors:
        """The actors in one episode, or in what scores the group."""
        session = f"{self.batch}/{self.number:06d}/{name}"
        episode = self.under_way and self.under_way.episode(name)
        if episode:
            episode.begin()
        return EpisodeActors(actors, self.params, seed, session, env.max_turns, episode)


def make_group(config: Config, task: Task, drawn: dict[str, float], **place) -> Group:
    """`drawn`: how tokens are. `place`: size of the group, and its place in a batch."""
    max_tokens = config.env(task.env).max_tokens or config.max_tokens
    params = SamplingParams(max_tokens=max_tokens, stop=tuple(config.sampling.stop), **drawn)
    return Group(task=task, params=params, seed=config.seed, **place)


async def run_group(
    envs: Mapping[str, Env], actors: Mapping[str, Actor], config: RolloutConfig, group: Group
) -> list[Trajectory]:
    """The trajectories of one group. If an engine dies it is started again, and the group is done
    again. Raises RunError if that does not help."""
    play = partial(play_group, envs[group.task.env], actors, config, group)
    return await revived(play, actors.values(), f"one group of {group.batch}")


async def play_group(
    env: Env, actors: Mapping[str, Actor], config: RolloutConfig, group: Group
) -> list[Trajectory]:
    """The trajectories of one group. The order of speakers is drawn once. Group rewards come last;
    if they raise, the whole group has failed. Raises EngineDied once all its episodes have
    ended."""
    seed = group.seed_of("schedule")
    trajectories = []
    try:
        task = await env.draw(group.task, list(actors), seed)
        episodes = [
            play_episode(env, actors, config, group, task, index) for index in range(group.size)
        ]
        for episode in await wait_for_all(episodes):
            trajectories += episode
        if env.group_rewards:
            players = group.actors(env, actors, counter_seed(seed, "group"), SCORING)
            try:
                scoring = env.score_group(task, trajectories, players)
                await asyncio.wait_for(scoring, config.episode_timeout_s)
            finally:
                players.close()
    except Exception as error:
        is_truncated = any(t.status == "truncated" for t in trajectories)
        reason = reason_of(error, "what scores the group", config, is_truncated)
        for index in range(0 if trajectories else group.size):
            trajectories += failures(actors, [], group, index, reason)
        for t in succeeded(trajectories):
            t.status, t.error, t.reward = "failed", reason, None
        for t in trajectories:
            t.env_code = t.env_code or env.code()
    return trajectories


async def play_episode(
    env: Env,
    actors: Mapping[str, Actor],
    config: RolloutConfig,
    group: Group,
    task: Task,
    index: int,
) -> list[Trajectory]:
    """One attempt at one task. What goes wrong in it ends here, as a failed trajectory of every
    actor, with its reason, but for the death of an engine, which is no fault of the episode:
    EngineDied."""
    if group.under_way and (ended := group.under_way.episode(index).ended()):
        return ended
    players = group.actors(env, actors, group.seed_of(task.id, index), index)
    codes: list[str] = []
    SESSION_CODES.set(codes)
    LoopClock.of_running_loop()  # a save or an update of the weights is not the episode's time
    try:
        playing = env.rollout(task, players)
        trajectories = await asyncio.wait_for(playing, config.episode_timeout_s)
    except Exception as error:
        is_truncated = any(talk.truncated for talk in players.conversations)
        reason = reason_of(error, "the episode", config, is_truncated)
        trajectories = failures(actors, players.conversations, group, index, reason)
    finally:
        players.close()
    for t in placed(trajectories, group, index):
        t.env_code = codes[-1] if codes else env.code()
    if group.under_way:
        group.under_way.episode(index).end(trajectories)
    return trajectories


def reason_of(error: Exception, timed: str, config: RolloutConfig, is_truncated: bool) -> str:
    """Why an episode failed. Raises the EngineDied that caused the error, also where a hook that
    called an actor raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, EngineDied):
            raise cause
        cause = cause.__cause__
    if isinstance(error, asyncio.TimeoutError) and not str(error):
        return f"{timed} took longer than --rollout.episode_timeout_s={config.episode_timeout_s}"
    reason = str(error) or type(error).__name__
    if is_truncated and isinstance(error, (HookError, ValueError)):
        reason += TRUNCATED
    return reason


def failures(
    actors: Mapping[str, Actor],
    conversations: Iterable[Conversation],
    group: Group,
    index: int,
    reason: str,
) -> list[Trajectory]:
    """An episode that failed: all conversations so far, and at least one trajectory of each actor
    that would have learned from it, or of all if none has a learner."""
    failed = [talk.record() for talk in conversations if talk.num_replies]
    spoken = {t.actor for t in failed}
    learners = [name for name, actor in actors.items() if actor.is_trainable]
    for name in learners or actors:
        if name not in spoken:
            failed.append(Trajectory(actor=name, messages=group.task.messages))
    for t in failed:
        t.status, t.error = "failed", reason
    return placed(failed, group, index)


def placed(trajectories: list[Trajectory], group: Group, index: int) -> list[Trajectory]:
    """The trajectories of an episode, which say so."""
    for t in trajectories:
        t.task_id, t.env = group.task.id, group.task.env
        t.group_id, t.index = group.id, index
    return trajectories


class RolloutWorker:
    """Runs submitted groups in the background, oldest first, at most `width` at once on this rank.
    Ranks draw groups from a shared counter, so that fast ranks run more.

    Training submits the groups of `1 + max_staleness` steps ahead and collects one step's. With
    max_staleness 0 that is the synchronous loop; above it is the bound of AReaL (Fu et al. 2025,
    arXiv:2505.24298, section 5.1). An evaluation submits its groups and collects all of them.
    """

    def __init__(
        self,
        play: Callable[[Group], Awaitable[list[Trajectory]]],
        ranks: Ranks,
        width: int,
        name: str,
        timeout_s: float,
    ):
        self.play = play
        self.ranks = ranks
        self.width = width
        self.name = name
        self.timeout_s = timeout_s
        self.version = 0  # of the weights by which groups begin
        self.pending: dict[int, Group] = {}  # submitted and not collected, on any rank
        self.running: dict[int, asyncio.Task] = {}  # on this rank
        self.done: list[int] = []  # on this rank
        # This rank's next group, which begins once it is submitted and a slot is free.
        self.next_number: int | None = None
        self.num_collects = 0
        self.go_on(0, 0)

    def go_on(self, num_collected: int, num_begun: int) -> None:
        """Numbers groups as the run before did, which collected so many and had begun so many
        others. Ranks take these in turn: each has read what was under way in its own. Groups after
        them are drawn."""
        self.first = self.num_submitted = self.num_collected = num_collected
        self.first_drawn = num_collected + num_begun
        assigned = range(num_collected, self.first_drawn)
        self.assigned = iter([number for number in assigned if self.is_own(number)])

    def is_own(self, number: int) -> bool:
        """Whether this rank takes the group, if it was under way when a run ended."""
        return number % self.ranks.size == self.ranks.rank

    def submit(self, groups: Iterable[Group]) -> None:
        """Every rank must submit the same groups."""
        for group in groups:
            self.pending[self.num_submitted] = group
            self.num_submitted += 1
        self._fill()

    def _fill(self) -> None:
        while len(self.running) < self.width:
            if self.next_number is None:
                self.next_number = self._take_number()
            if self.next_number >= self.num_submitted:
                return
            self._begin(self.next_number)
            self.next_number = None

    def _take_number(self) -> int:
        number = next(self.assigned, None)
        return self.first_drawn + self._count("drawn", 1) - 1 if number is None else number

    def _begin(self, number: int) -> None:
        group = self.pending[number]
        if group.version < 0:  # no run before this one has begun it
            group.version = self.version
        self.running[number] = asyncio.create_task(self._run(number))

    async def _run(self, number: int) -> None:
        group = self.pending[number]
        if not group.trajectories:  # a run before this one may have played it
            group.trajectories = await self.play(group)
        group.under_way = None
        del self.running[number]
        self.done.append(number)
        self._count("finished", 1)
        self._fill()

    async def collect(self, num_groups: int, oldest: int | None = None) -> list[Group]:
        """This rank's part of the `num_groups` oldest complete groups, on all ranks together. Waits
        too for each group that began by the weights of version `oldest` or before, because it would
        be too stale for the next step. Every rank must call it. Raises RunError if an engine cannot
        go on, or other ranks do not."""
        # Imports torch, which rl-core check does without.
        from rl_core.distributed import all_gather_json

        await self._wait_for_due(num_groups, self.version if oldest is None else oldest)
        await self._meet(num_groups)
        by_rank = all_gather_json([(self._age(n), n) for n in self.done], self.ranks)
        oldest_first = sorted(tuple(pair) for pairs in by_rank for pair in pairs)
        self.num_collected += num_groups
        groups = {n: self.pending.pop(n) for _, n in oldest_first[:num_groups]}
        collected_here = [groups[n] for n in self.done if n in groups]
        self.done = [n for n in self.done if n not in groups]
        return collected_here

    def _age(self, number: int) -> int:
        """Groups of the lowest come first."""
        return self.pending[number].version

    async def _wait_for_due(self, num_groups: int, oldest: int) -> None:
        """Waits for this rank's groups that the next step may not take."""
        while any(self.pending[n].version <= oldest for n in self.running):
            await self._has_finished(None)

    async def _meet(self, num_groups: int) -> None:
        """Waits until all ranks are here and have finished so many groups that are not
        collected."""
        here = f"collect/{self.num_collects}"
        met = f"{self.name}/{here}/met"
        self.num_collects += 1
        self._count(here, 1)
        num_ready = self.num_ready()
        until = time.monotonic() + self.timeout_s
        poll_s = POLL_S if self.ranks.size > 1 else self.timeout_s
        is_new = True  # only the last rank to arrive, or to finish a group, can find that all have
        while not (
            is_new and self._count(here, 0) == self.ranks.size and self.num_ready() >= num_groups
        ):
            if self.ranks.has_flag(met):
                return
            is_new = await self._has_finished(poll_s)
            # Episodes of this rank have deadlines of their own.
            if not is_new and not self.running and time.monotonic() > until:
                before, num_ready = num_ready, self.num_ready()
                until = time.monotonic() + self.timeout_s
                if num_ready == before:
                    raise RunError(
                        f"rank {self.ranks.rank} waited in the phase 'generate' for {num_groups} "
                        f"groups of episodes, of which {num_ready} are complete: other ranks "
                        f"finished none within --timeout_s={self.timeout_s:g}"
                    )
        self.ranks.set_flag(met)

    async def _has_finished(self, timeout_s: float | None) -> bool:
        """Whether a group of this rank was finished in time. Raises what a group raised."""
        if not self.running:
            await asyncio.sleep(timeout_s)
            return False
        ended, _ = await asyncio.wait(
            self.running.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in ended:
            task.result()
        return bool(ended)

    def num_ready(self) -> int:
        """Groups that are complete, on all ranks, and not collected."""
        return self._count("finished", 0) - (self.num_collected - self.first)

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
    """The trajectories of the groups that this rank drew, failed ones included, sorted by group and
    index. Every rank must call it."""
    width = groups_at_once(actors, config, len(groups), groups[0].size, ranks)
    name = groups[0].id.rpartition("/")[0]
    worker = RolloutWorker(partial(run_group, envs, actors, config), ranks, width, name, timeout_s)
    try:
        worker.submit(groups)
        return in_order(await worker.collect(len(groups)))
    finally:
        await worker.close()


def groups_at_once(
    actors: Mapping[str, Actor],
    config: RolloutConfig,
    num_groups: int,
    group_size: int,
    ranks: Ranks,
) -> int:
    """Groups that one rank runs at once: at most an even share, so that no rank takes all before
    the others begin."""
    # Engines of actors that learn; requests beyond the capacity of the others wait there.
    capacities = [actor.capacity for actor in actors.values() if actor.is_trainable]
    episodes = min([config.max_concurrent, *capacities])
    if not episodes:
        return 0  # the engine is on another rank
    return max(1, min(-(-num_groups // ranks.size), episodes // group_size))


def in_order(groups: Iterable[Group]) -> list[Trajectory]:
    trajectories = [t for group in groups for t in group.trajectories]
    return sorted(trajectories, key=lambda t: (t.group_id, t.index, t.actor))
