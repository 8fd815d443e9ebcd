"""Rewards of stored episodes, computed as a run computes them. Who asks: rl-core rescore."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from rl_core.config import Config
from rl_core.data.episodes import grouped, succeeded
from rl_core.data.messages import text_of
from rl_core.environments.agents.endpoint import Endpoint
from rl_core.environments.agents.rollout import AgentRollout, Endpoints
from rl_core.sampling.actor import Actor, EpisodeActors, Speaker
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.deadlines import run_within
from rl_core.sampling.engine import Engine
from rl_core.sampling.env import Env
from rl_core.sampling.episode import Episode
from rl_core.sampling.episode_runner import EpisodeRunner, check_scored, truncation_note
from rl_core.sampling.groups import Group
from rl_core.sampling.hooks import Hook
from rl_core.sampling.reward_parts import NOT_APPLIED, is_recorded
from rl_core.types import Message, SamplingParams, Task, Trajectory

IN_PLAY = "gave a reward while the episode was played"
UNKNOWN = "reads turns of other actors, or messages of interact() to several actors, not stored"
FORCE = "; --force scores the rest, and keeps and names the stored parts"


@dataclass(kw_only=True)
class AbsentActor:
    """An actor without an engine, which hooks may name but not ask."""

    name: str
    is_trainable: bool
    capacity: int = sys.maxsize

    def bind_episode(
        self, params: SamplingParams, seed: int, session: str, max_turns: int = 0
    ) -> Actor:
        engine = cast(Engine, self)  # Without a chat, Actor calls the methods below alone.
        actor = Actor(name=self.name, engine=engine, chat=None, is_trainable=self.is_trainable)
        return actor.bind_episode(params, seed, session, max_turns)

    async def chat(self, *_: object) -> None:
        raise ValueError(
            f"a reward asks {self.name}, whose weights at that step are not loaded; only actors "
            "that are not trained can be asked again"
        )

    def end_session(self, session: str) -> None:
        """No engine holds anything."""


@dataclass(kw_only=True)
class StoredBranches:
    """The branches of an agent's episode, as AgentRollout reads them from an endpoint."""

    branches: dict[str, list[Trajectory]]

    def trajectories(self, reward: float, name: str) -> list[Trajectory]:
        for t in self.branches[name]:
            t.reward, t.reward_parts = reward, {"rollout": reward}
        return self.branches[name]


def reads(hook: Hook, name: str) -> bool:
    return hook.takes_all or name in hook.named


class Rescorer(EpisodeRunner):
    """Scores stored trajectories, which change in place, by the hooks of one environment."""

    def __init__(
        self,
        env: Env,
        actors: Mapping[str, Speaker],
        config: Config,
        agent_rewards: Sequence[Hook] | None,
        is_forced: bool,
    ):
        """`agent_rewards`: rewards of a file with an `agent`; None for other files."""
        self.env, self.agent_rewards, self.is_forced = env, agent_rewards, is_forced
        self.is_dialogue = agent_rewards is None and "rollout" not in env.hooks
        # Actors whose trajectories are stored if they spoke.
        self.recorded = config.trained or list(config.actors)
        self.num_actors = len(config.actors)
        turns = env.turn_loop.turns
        names = list(config.actors)
        # A function of the file may choose anybody.
        self.speakers = set((turns.speakers(names) or names) if turns else self.recorded[:1])
        super().__init__({env.name: env}, actors, config.rollout)
        self.stored: dict[str, list[Trajectory]] = {}  # Running group -> its trajectories.
        # Name of a hook that cannot be called, or gave its reward while it was played -> reason.
        self.left_out: dict[str, str] = {}
        if agent_rewards is None and "rollout" in env.hooks:
            self.leave_out("rollout", "scores its episodes itself, also by a box or a verifier")
        elif self.is_dialogue and not env.rewards:
            self.leave_out("interact", IN_PLAY)
        lost = ["state"] if "interact" in env.hooks else []  # Else start() makes it again.
        for hook in self.rewards:
            for name in lost if self.is_dialogue else ("result", "box"):
                if not hook.batched and name in hook.ours and reads(hook, name):
                    self.leave_out(hook.name, f"reads `{name}`, which is not stored")

    @property
    def rewards(self) -> list[Hook]:
        """The hooks that are called."""
        rewards = [*(self.agent_rewards or ()), *self.env.rewards]
        return [hook for hook in rewards if hook.name not in self.left_out]

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        kept = [hook for hook in self.env.rewards if hook.name not in self.left_out]
        self.env = replace(self.env, turn_loop=replace(self.env.turn_loop, rewards=kept))
        self.envs = {self.env.name: self.env}

    def check(self, group: Group, stored: list[Trajectory]) -> None:
        """Raises ValueError if the rewards of these trajectories cannot be computed, and for other
        rows than those of the run. With --force, notes the hooks that are left out."""
        stored = succeeded(stored)
        if any("interact" in t.reward_parts for t in stored):
            self.leave_out("interact", IN_PLAY)
        if self.is_dialogue:
            prompt = text_behind_system(group.task.messages)
            for t in stored:
                if len(t.message_indices) < len(t.turns):
                    raise ValueError(
                        f"{t.group_id}: no turns of hooks (`message_indices` is missing)"
                    )
                if not text_behind_system(t.messages).startswith(prompt):
                    raise ValueError(
                        f"{group.task.place}: its prompt is not the one of {t.task_id} in "
                        f"{t.group_id}; give the run's rows by --data.train or --data.eval, or "
                        "keep the order of load_tasks()"
                    )
            lost = [hook.name for hook in self.rewards if reads_transcript(hook)]
            episodes = grouped(stored, "index") if lost else []
            if not all(self.transcript(group.task, episode)[1] for episode in episodes):
                for name in lost:
                    self.leave_out(name, UNKNOWN)
        if self.left_out and not self.is_forced:
            reasons = [f"{name}() {reason}" for name, reason in self.left_out.items()]
            raise ValueError(f"{self.env.path}: {'; '.join(reasons)}{FORCE}")

    async def rescore(self, group: Group, stored: list[Trajectory]) -> list[list[str]]:
        """For each trajectory, the names of the stored parts that stay. Those that failed stay as
        they are."""
        before = [(t.status, dict(t.reward_parts)) for t in stored]
        self.stored[group.id] = stored
        await self.play(group)
        del self.stored[group.id]
        kept: list[list[str]] = []
        scored = [hook.name for hook in self.rewards]
        for t, (status, parts) in zip(stored, before, strict=True):
            old = {n: v for n, v in parts.items() if n not in scored} if self.left_out else {}
            kept.append(sorted(old) if t.status != "failed" else [])
            if t.status != "failed":
                missing = {n: v for n, v in old.items() if n not in t.reward_parts}
                t.reward_parts |= missing
                add_to_reward(t, math.fsum(missing.values()))
            elif status != "failed":
                t.reward_parts, t.turn_rewards = {}, []
        return kept

    async def play_episode(self, env, group, index, task) -> None:
        stored = [t for t in self.stored[group.id] if t.index == index]
        group.ended[index] = stored
        live = succeeded(stored)
        if not live:
            return
        players = self.players(env, group, index, group.seed_of(group.task.id, index))
        try:
            work = self.score_episode(await task, players, live, group)
            await run_within(work, self.config.episode_timeout_s)
            if not env.group_rewards:
                check_scored(env, live)
        except Exception as error:
            is_truncated = any(t.status == "truncated" for t in live)
            note = truncation_note(env) if is_truncated else ""
            reason = self.reason_of(error, "the scoring of the episode", note)
            for t in live:
                t.status, t.error, t.reward = "failed", reason, None
        finally:
            players.close()

    async def score_episode(
        self, task: Task, players: EpisodeActors, stored: list[Trajectory], group: Group
    ) -> None:
        for t in stored:
            t.columns, t.env_code = group.columns, self.env.code()
            if self.is_dialogue or self.agent_rewards is not None:
                reset(t)
            else:
                old = [t.reward_parts.pop(hook.name, 0.0) for hook in self.env.group_rewards]
                add_to_reward(t, -math.fsum(old))
        if self.agent_rewards is not None:
            await self.score_agent(task, players, stored)
        elif self.is_dialogue:
            await self.score_dialogue(task, players, stored)

    async def score_dialogue(
        self, task: Task, players: EpisodeActors, stored: list[Trajectory]
    ) -> None:
        loop = self.env.turn_loop
        episode = Episode(loop, task, players)
        if "start" in loop.hooks and any(reads(hook, "state") for hook in loop.rewards):
            only = next(iter(players)) if len(players) == 1 else ""
            episode.state = await episode.call(loop.hooks["start"], only)
        episode.messages = self.transcript(task, stored)[0]
        episode.truncated = any(t.status == "truncated" for t in stored)
        for t in sorted(stored, key=lambda t: t.message_indices):
            talk = Conversation(players[t.actor], t.messages, None, {}, "")
            episode.conversations[t.actor], episode.trajectories[t.actor] = talk, t
        episode.speaker = max(stored, key=lambda t: t.message_indices[-1:]).actor
        if loop.rewards:
            await episode.score([*episode.trajectories])
        for t in () if loop.rewards else stored:
            t.reward = math.fsum(t.reward_parts.values())

    def transcript(self, task: Task, stored: Sequence[Trajectory]) -> tuple[list[Message], bool]:
        """(messages of an episode as hooks get them, True if all are known) from the views of its
        actors. Not known are turns of actors that are not trained, and messages of interact()
        if several actors spoke."""
        messages, last = dict(enumerate(task.messages)), max(t.message_indices[-1] for t in stored)
        # An actor that did not speak is not stored.
        is_known = self.speakers <= {*self.recorded, *(t.actor for t in stored)}
        is_alone = is_known and len(stored) == 1
        for t in stored:
            turns = [n for n, message in enumerate(t.messages) if message["role"] == "assistant"]
            turns = [*turns[-len(t.message_indices) :], len(t.messages)]
            for n, end in enumerate(t.message_indices):  # The number of messages after the turn.
                reply, heard = t.messages[turns[n]], t.messages[turns[n] + 1 : turns[n + 1]]
                messages[end - 1] = reply | ({"name": t.actor} if self.num_actors > 1 else {})
                if is_alone and (end == last or t.message_indices[n + 1] - end == len(heard) + 1):
                    messages |= dict(enumerate(heard, end))
                is_known = is_known and (is_alone or end < last or not heard)
        is_known = is_known and sorted(messages) == list(range(len(messages)))
        return [messages[n] for n in sorted(messages)], is_known

    async def score_agent(
        self, task: Task, players: EpisodeActors, stored: list[Trajectory]
    ) -> None:
        branches: dict[str, list[Trajectory]] = {}
        for t in stored:
            branches.setdefault(t.actor, []).append(t)
        rewards = [hook for hook in self.rewards if not hook.batched]
        agent = AgentRollout(path=self.env.path, agent=(), rewards=rewards, endpoints=Endpoints())
        arguments = {"actors": players, "result": None, "box": None}
        endpoint = cast(Endpoint, StoredBranches(branches=branches))
        await agent.score(task, arguments, endpoint, [n for n in players if n in branches])


def text_behind_system(messages: Sequence[Message]) -> str:
    return "\n\n".join(text_of(message) for message in messages if message["role"] != "system")


def reads_transcript(hook: Hook) -> bool:
    """True for a reward of messages of all actors, or of the last turn, whoever had it."""
    needs = reads(hook, "messages") or (not hook.is_per_actor and reads(hook, "completion"))
    return needs and not hook.batched


def add_to_reward(t: Trajectory, value: float) -> None:
    assert t.reward is not None
    t.reward += value
    if t.turn_rewards:
        t.turn_rewards[-1] += value


def reset(t: Trajectory) -> None:
    """Removes all rewards but the one of interact()."""
    assert t.reward is not None
    in_play = t.reward_parts.get("interact")
    if in_play is None or not t.turn_rewards:
        t.turn_rewards = [0.0] * len(t.message_indices)
    else:
        t.turn_rewards[-1] -= t.reward - in_play
    t.reward, t.reward_parts = None, {} if in_play is None else {"interact": in_play}
    kept = [n for n in t.metrics if is_recorded(n) and not n.startswith(NOT_APPLIED)]
    t.metrics = {name: t.metrics[name] for name in kept}
