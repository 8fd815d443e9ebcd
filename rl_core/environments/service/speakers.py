"""The run's actors, asked by a service. Tokens, seeds and records equal those of an environment
file in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.actors import plain_turn, read_images, read_turn
from rl_core.environments.service.wire import from_json, to_json
from rl_core.sampling.actor import Actor
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.engine import EngineDied
from rl_core.types import JSONObject, Trajectory, Turn

FIELDS = (
    "name",
    "is_trainable",
    "max_turns",
    "max_context_tokens",
    "max_tokens",
    "seed",
    "session",
)


class ActorRegistry:
    def __init__(self, actors: Mapping[str, Actor] | None):
        self.actors = actors
        # By number: conversations, or the exceptions that opening them raised.
        self.conversations: dict[int, Conversation | Exception] = {}
        # By number of the conversation and of its replies: the conversation as of that reply.
        self.snapshots: dict[int, dict[int, Conversation]] = {}
        self.turns: dict[int, Turn] = {}  # By number of the ask.

    def described(self) -> str:
        """The `cast` of a StartRequest."""
        actors = self.actors.values()
        cast = []
        for actor in actors:
            fields = {name: getattr(actor, name) for name in FIELDS}
            cast.append(fields | {"params": asdict(actor.params)})
        return to_json(cast, "the actors")

    def open(self, opening: pb.Opening) -> None:
        """Opens a new, branched or forked conversation. Its error is raised in the hook, at the
        first turn."""
        try:
            snapshots = self.snapshots.get(opening.fork_of, {})
            if parent := self.conversations.get(opening.fork_of):
                replies = opening.replies
                conversation = parent.fork(snapshots[replies] if replies else None)
            else:
                conversation = self.converse(opening)
        except Exception as error:
            conversation = error
        self.conversations[opening.conversation] = conversation
        self.snapshots[opening.conversation] = dict(snapshots)

    def converse(self, opening: pb.Opening) -> Conversation:
        sampling = read_sampling(opening.sampling)
        messages = from_json(opening.messages, list, "messages")
        tools = from_json(opening.tools, list, "tools") if opening.tools else None
        return self.actors[opening.actor].converse(messages, tools, opening.label, **sampling)

    async def speak(self, ask: pb.Ask) -> pb.Spoken:
        """The actor's next turn, or its error. Raises EngineDied, which hooks do not see: the run
        repeats the group."""
        conversation = self.conversations[ask.conversation]
        spoken, turn = await self.respond(conversation, ask)
        if isinstance(conversation, Conversation) and not spoken.error:
            snapshots = self.snapshots[ask.conversation]
            snapshots[conversation.num_replies] = conversation.snapshot()
        spoken.ask = ask.id
        if turn:
            self.turns[ask.id] = turn
        return spoken

    async def respond(
        self, conversation: Conversation | Exception, ask: pb.Ask
    ) -> tuple[pb.Spoken, Turn | None]:
        try:
            if isinstance(conversation, Exception):
                raise conversation
            num_replies = conversation.num_replies
            num_turns = len(conversation.turns)
            limits = read_sampling(ask.limits)
            await conversation.respond(from_json(ask.messages, list, "messages"), **limits)
            reply = conversation.history[-1:] if conversation.num_replies > num_replies else []
            spoken = pb.Spoken(messages=to_json(reply, "the reply"), text=conversation.text)
            spoken.truncated = conversation.truncated
            turn = None
            spoken.metrics.update(conversation.metrics)
            if len(conversation.turns) > num_turns:
                turn = conversation.turns[-1]
                spoken.turn = to_json(plain_turn(turn), "a turn")
            return spoken, turn
        except EngineDied:
            raise
        except Exception as error:
            return pb.Spoken(error=f"{type(error).__name__}: {error}"), None

    def trajectories(self, value: str) -> list[Trajectory]:
        """Trajectories from the result of rollout(). Numbers of asks become this side's turns."""
        trajectories = []
        for one in from_json(value, list, "what rollout() returned"):
            of_peer = {
                n: read_turn(t) for n, t in enumerate(one["turns"]) if not isinstance(t, int)
            }
            trajectory = Trajectory(**one | {"turns": [*of_peer.values()]})
            read_images(trajectory)
            trajectory.turns = [
                of_peer[n] if n in of_peer else self.turns[turn]
                for n, turn in enumerate(one["turns"])
            ]
            trajectories.append(trajectory)
        return trajectories


def read_sampling(value: str) -> JSONObject:
    """Sampling parameters from JSON, with lists as tuples."""
    sampling = from_json(value or "{}", dict, "sampling")
    for name, setting in sampling.items():
        if isinstance(setting, list):
            sampling[name] = tuple(setting)
    return sampling
