"""The episodes of one group, with deadlines and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rl_core.config import RolloutConfig
from rl_core.data.episodes import CUT_OFF, succeeded
from rl_core.data.image_parts import has_image_tokens
from rl_core.data.task_rows import row_variables
from rl_core.sampling.actor import EpisodeActors, Speaker, revived
from rl_core.sampling.deadlines import run_within, wait_for_all
from rl_core.sampling.engine import EngineDied
from rl_core.sampling.env import SESSION_CODES, Env
from rl_core.sampling.groups import Group
from rl_core.sampling.hooks import HookError
from rl_core.sampling.reward_parts import UnscoredError, refuse_unscored
from rl_core.types import Task, Trajectory, counter_seed

if TYPE_CHECKING:
    from rl_core.sampling.resumable_rollouts import Replays


SCORING = "group"  # Replaces the episode's number in sessions that score the group.


AfterGroup = Callable[["EpisodeRunner", Group, list[Trajectory]], Awaitable[None]]


class EpisodeRunner:
    """Runs the episodes of groups. An error in an episode gives a failed trajectory with its
    reason."""

    def __init__(
        self,
        envs: Mapping[str, Env],
        actors: Mapping[str, Speaker],
        config: RolloutConfig,
        after_group: AfterGroup | None = None,
        replays: Replays | None = None,
    ):
        """`after_group`: called with the runner, the group and its scored trajectories. `replays`:
        keep the turns of running groups for checkpoints."""
        self.envs = envs
        self.actors = actors
        self.config = config
        self.after_group = after_group
        self.replays = replays

    @property
    def max_episodes(self) -> int:
        """Limit of concurrent episodes on this rank; 0 if the engine is on another rank."""
        # Engines of frozen actors set no limit: requests beyond their capacity wait there.
        capacities = [actor.capacity for actor in self.actors.values() if actor.is_trainable]
        return min([self.config.max_concurrent, *capacities])

    async def play(self, group: Group) -> list[Trajectory]:
        """The trajectories of a group. If an engine dies, restarts it and the unfinished episodes.
        Raises RunError if the engine cannot restart or dies again and again."""
        play = partial(self.play_once, group)
        trajectories = await revived(play, self.actors.values(), f"one group of {group.batch}")
        if self.replays:
            self.replays.end(group)
        return trajectories

    async def play_once(self, group: Group) -> list[Trajectory]:
        """One attempt of play(). Raises EngineDied after all episodes have ended."""
        env = self.envs[group.task.env]
        # Once for all episodes, because turns() may be random.
        drawing = env.draw(group.task, list(self.actors), group.seed_of("schedule"))
        task = asyncio.ensure_future(drawing)
        missing = [index for index in range(group.size) if index not in group.ended]
        await wait_for_all([self.play_episode(env, group, index, task) for index in missing])
        trajectories = []
        for index in range(group.size):
            trajectories += group.ended[index]
        if env.group_rewards:
            await self.score(env, group, task, trajectories)
        if self.after_group:
            await self.after_group(self, group, trajectories)
        return trajectories

    async def play_episode(
        self, env: Env, group: Group, index: int, task: asyncio.Future[Task]
    ) -> None:
        """Runs one episode and stores its trajectories in group.ended. Errors become failed
        trajectories, except EngineDied, which is not the episode's fault."""
        players = self.players(env, group, index, group.seed_of(group.task.id, index))
        codes: list[str] = []
        SESSION_CODES.set(codes)
        try:
            playing = env.rollout(await task, players)
            trajectories = await run_within(playing, self.config.episode_timeout_s)
            for t in trajectories:
                if has_image_tokens(t):
                    from rl_core.sampling.image_checks import check_images

                    check_images(env, t, players[t.actor].chat)
            if not env.group_rewards:
                check_scored(env, trajectories)
        except Exception as error:
            is_truncated = any(talk.truncated for talk in players.conversations)
            note = truncation_note(env) if is_truncated else ""
            reason = self.reason_of(error, "the episode", note)
            trajectories = failures(players, group.task, reason)
        finally:
            players.close()
        for t in trajectories:
            t.task_id, t.env = group.task.id, group.task.env
            t.group_id, t.index = group.id, index
            t.env_code = codes[-1] if codes else env.code()
            t.columns = group.columns
        group.ended[index] = trajectories

    def players(self, env: Env, group: Group, name: int | str, seed: int) -> EpisodeActors:
        """The actors of one episode, or of the scoring of the group."""
        session = f"{group.batch}/{group.number:06d}/{name}"
        players = EpisodeActors(self.actors, group.params, seed, session, env.max_turns)
        variables = row_variables(group.task.row)
        replay = self.replays.start(group, name) if self.replays else None
        for speaker, actor in players.items():
            if actor.chat is not None:
                actor.chat = actor.chat.with_variables(variables)
            assert actor.params is not None
            actor.params = replace(actor.params, **group.own_params.get(speaker, {}))
            actor.replay = replay
            if group.label:  # Evaluations use the newest weights only.
                actor.stale_engine = None
        return players

    async def score(
        self, env: Env, group: Group, task: asyncio.Future[Task], trajectories: list[Trajectory]
    ) -> None:
        """Adds group rewards. If they raise, all trajectories of the group fail."""
        from rl_core.sampling.group_rewards import add_group_rewards, group_rewards

        seed = counter_seed(group.seed_of("schedule"), "group")
        players = self.players(env, group, SCORING, seed)
        try:
            scoring = group_rewards(env.group_rewards, await task, trajectories, players)
            rewards = await run_within(scoring, self.config.episode_timeout_s)
            # No await follows, so that no checkpoint holds a scored group that is still running.
            add_group_rewards(rewards)
            check_scored(env, trajectories)
        except Exception as error:
            is_truncated = any(t.status == "truncated" for t in trajectories)
            note = truncation_note(env) if is_truncated else ""
            reason = self.reason_of(error, "the scoring of the group", note)
            for t in succeeded(trajectories):
                t.status, t.error, t.reward = "failed", reason, None
        finally:
            players.close()

    def reason_of(self, error: Exception, timed: str, note: str) -> str:
        """Reason of a failed episode, with `note` about its truncation. Raises the EngineDied that
        caused the error, also where a hook that called an actor raised."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, EngineDied):
                raise cause
            cause = cause.__cause__
        if isinstance(error, asyncio.TimeoutError) and not str(error):
            limit = self.config.episode_timeout_s
            return f"{timed} took longer than --rollout.episode_timeout_s={limit}"
        reason = str(error) or type(error).__name__
        is_of_hook = isinstance(error, (HookError, ValueError))
        if is_of_hook and not isinstance(error, UnscoredError):
            reason += note
        return reason


def truncation_note(env: Env) -> str:
    """Text appended to the reason of an episode that failed and was truncated."""
    return CUT_OFF + ("; interact() was not called after it" if "interact" in env.hooks else "")


def check_scored(env: Env, trajectories: Iterable[Trajectory]) -> None:
    """Raises UnscoredError if every reward of an actor is None."""
    for t in succeeded(trajectories):
        refuse_unscored(env.path, t.actor, t.reward_parts, t.metrics)


def failures(players: EpisodeActors, task: Task, reason: str) -> list[Trajectory]:
    """Failed trajectories of all conversations, with at least one for each actor that would have
    learned from the episode."""
    failed = [talk.record() for talk in players.conversations if talk.num_replies]
    spoken = {t.actor for t in failed}
    for name in players.learners:
        if name not in spoken:
            failed.append(Trajectory(actor=name, messages=task.messages))
    for t in failed:
        t.status, t.error = "failed", reason
    return failed
