"""Rewards of sessions: from clients, from an environment's file, and from feedback in words."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from rl_core.environments.agents.endpoint import Endpoint
from rl_core.environments.agents.rollout import AgentRollout, Endpoints, rewards_of
from rl_core.environments.agents.tree import Node
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.env import Env
from rl_core.sampling.reward_parts import reward_values
from rl_core.types import JSON, JSONObject, Message, Task, Trajectory

Parts = dict[str, float]
# (actors, conversation up to the reply, the user's feedback on it) -> the reply's score, if any.
Judge = Callable[[EpisodeActors, list[Message], str], Awaitable[float | None]]


@dataclass(eq=False, kw_only=True)
class RatedEndpoint(Endpoint):
    """An endpoint whose client rates its replies."""

    number: int
    task_id: str
    players: EpisodeActors
    nodes: dict[str, Node] = field(default_factory=dict)  # Id of a reply -> its turn, in order.
    rewards: dict[str, Parts] = field(default_factory=dict)  # Id of a reply -> its parts.
    texts: list[tuple[str, str]] = field(default_factory=list)  # (id of a reply, feedback on it)
    is_named: bool = False  # A reward has named its reply.
    info: JSON = None  # Sent by the client with the end.

    @property
    def id(self) -> str:
        return f"session-{self.number:06d}"

    def keep(self, event: JSONObject) -> None:
        """Keeps a reward or a text, from a client or the file."""
        reply_id = event["reply"]
        if "text" in event:
            self.texts.append((reply_id, event["text"]))
        else:
            self.rewards[reply_id] = event["parts"]
        self.is_named |= event["named"]
        self.nodes[reply_id].reply.num_sent = math.inf  # Who rates a reply has it.


@dataclass(kw_only=True)
class Scorer:
    """Turns a session that has ended into trajectories with rewards."""

    env: Env
    judge: Judge | None = None
    rollout: AgentRollout = field(init=False)  # Calls the rewards of the environment's file.

    def __post_init__(self) -> None:
        rewards = rewards_of(self.env.hooks)
        self.rollout = AgentRollout(
            path=self.env.path, agent=(), rewards=rewards, endpoints=Endpoints()
        )

    @property
    def reads_text(self) -> bool:
        return "feedback_fn" in self.env.hooks or self.judge is not None

    async def trajectories(self, session: RatedEndpoint) -> list[Trajectory]:
        """[] if nobody has rated the session."""
        parts_of = dict(session.rewards)
        task = Task(id=session.task_id, env=self.env.name, row={"info": session.info}, messages=[])
        for reply, text in session.texts:
            parts = await self.parts_of_text(task, session, reply, text)
            parts_of[reply] = summed([parts_of.get(reply, {}), parts])
        if not any(parts_of.values()) and not self.rollout.rewards:
            return []
        branches = {name: branches_of(session, name, parts_of) for name in session.trees}
        branches = {name: made for name, made in branches.items() if made}
        arguments = {"actors": session.players, "result": session.info, "box": None}
        scored = await self.rollout.score_branches(task, arguments, branches)
        for t in scored:
            if not t.reward_parts:
                return []  # Every reward is None.
            if t.turn_rewards:  # What a hook gives counts for the last turn.
                assert t.reward is not None
                t.turn_rewards[-1] += t.reward - math.fsum(t.turn_rewards)
            t.task_id, t.env, t.env_code = session.task_id, self.env.name, self.env.code()
            t.columns = {"session": session.id}
        return scored

    async def parts_of_text(
        self, task: Task, session: RatedEndpoint, reply: str, text: str
    ) -> Parts:
        """Parts that feedback_fn or the judge makes of a text; {} if none does."""
        messages = session.nodes[reply].snapshot.messages
        value: object = None
        if feedback := self.env.hooks.get("feedback_fn"):
            value = await feedback(task, {"text": text, "messages": messages})
        if value is None and self.judge is not None:
            value = await self.judge(session.players, messages, text)
        return known_parts(value, "feedback", "what feedback_fn() returned")


def branches_of(session: RatedEndpoint, actor: str, parts_of: dict[str, Parts]) -> list[Trajectory]:
    """One trajectory for each branch. Its reward is that of its rated replies. A branch without one
    has the sum of the session, unless the client named the replies that it rated: then it is left
    out."""
    total = summed(parts_of.values())
    branches = []
    for node, t in zip(
        session.trees[actor].ends, Endpoint.trajectories(session, 0.0, actor), strict=True
    ):
        of_turns = [parts_of.get(each.reply.id, {}) for each in node.path]
        is_rated = any(of_turns)
        t.reward_parts = summed(of_turns) if is_rated else dict(total)
        if is_rated and len(t.turns) == len(of_turns):
            t.turn_rewards = [math.fsum(parts.values()) for parts in of_turns]
        if is_rated or not (session.is_named and total):
            branches.append(t)
    return branches


def summed(each: Iterable[Parts]) -> Parts:
    total: Parts = {}
    for parts in each:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value
    return total


def known_parts(value: object, name: str, source: str) -> Parts:
    """The parts of a reward that are not None. Raises ValueError if `value` is no reward."""
    parts = reward_values(value, name, source)
    return {key: number for key, number in parts.items() if number is not None}
