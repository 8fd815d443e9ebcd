"""The run's actors, asked by a service. Tokens, seeds and records equal those of an environment
file in the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from grpc import StatusCode

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.actors import plain_turn, read_images, read_turn
from rl_core.environments.service.wire import ServiceError, from_json, to_json
from rl_core.sampling.actor import Actor, Conversation
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


@dataclass(kw_only=True, eq=False)
class Voice:
    """A conversation, or the exception that opening it raised, and its past turns for replays."""

    conversation: Conversation | Exception
    # (messages before the turn as JSON, the reply, its Turn) for each turn.
    past: list[tuple[str, pb.Spoken, Turn | None]] = field(default_factory=list)
    num_heard: int = 0  # Turns that this session has got.


class Speakers:
    def __init__(self, actors: Mapping[str, Actor] | None, is_replaying: bool):
        self.actors = actors
        self.is_replaying = is_replaying
        # (key of the opening, its voice) pairs.
        self.known: list[tuple[tuple[object, ...], Voice]] = []
        self.begin()

    def begin(self) -> None:
        """Prepares for a new session."""
        # Voices by conversation number; turns by ask number.
        self.unheard, self.voices, self.turns = list(self.known), {}, {}
        for _, voice in self.known:
            voice.num_heard = 0

    def described(self) -> str:
        """The `cast` of a StartRequest."""
        actors = self.actors.values()
        cast = []
        for actor in actors:
            fields = {name: getattr(actor, name) for name in FIELDS}
            cast.append(fields | {"params": asdict(actor.params)})
        return to_json(cast, "the actors")

    def open(self, opening: pb.Opening) -> None:
        parent = self.voices.get(opening.fork_of)
        number = opening.conversation
        num_heard = opening.replies or (parent.num_heard if parent else 0)
        opening.conversation = opening.fork_of = 0
        key = (
            opening.SerializeToString(deterministic=True),
            parent and (id(parent), num_heard),
        )
        voice = next((voice for known, voice in self.unheard if known == key), None)
        if voice:
            self.unheard.remove((key, voice))
        elif parent and not opening.replies and parent.num_heard < len(parent.past):
            raise differs()  # The conversation is ahead of this session.
        else:
            try:
                voice = Voice(conversation=self.begun(opening, parent))
            except Exception as error:  # Raised in the hook at the first turn.
                voice = Voice(conversation=error)
            voice.past = parent.past[:num_heard] if parent else []
            self.known += [(key, voice)] if self.is_replaying else []
        voice.num_heard = num_heard
        self.voices[number] = voice

    def begun(self, opening: pb.Opening, parent: Voice | None) -> Conversation:
        """Opens a new, branched or forked conversation."""
        if parent is None:
            return self.converse(opening)
        if opening.replies:
            return parent.conversation.at(opening.replies)
        return parent.conversation.fork()

    def converse(self, opening: pb.Opening) -> Conversation:
        sampling = read_sampling(opening.sampling)
        messages = from_json(opening.messages, list, "messages")
        tools = from_json(opening.tools, list, "tools") if opening.tools else None
        return self.actors[opening.actor].converse(messages, tools, opening.label, **sampling)

    async def speak(self, ask: pb.Ask) -> pb.Spoken:
        """The actor's next turn, or its error. Raises EngineDied, which hooks do not see: the run
        repeats the group."""
        voice = self.voices[ask.conversation]
        number = voice.num_heard
        voice.num_heard = voice.num_heard + 1
        if number < len(voice.past):
            messages, spoken, turn = voice.past[number]
            if messages != ask.messages:
                raise differs()
        else:
            spoken, turn = await self.respond(voice.conversation, ask)
            voice.past += [(ask.messages, spoken, turn)] if self.is_replaying else []
        answer = pb.Spoken(ask=ask.id)
        answer.MergeFrom(spoken)
        if turn:
            self.turns[ask.id] = turn
        return answer

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

    def check_replay(self) -> None:
        """Raises ServiceError if the session has not repeated all asks of the lost one."""
        if any(voice.num_heard < len(voice.past) for _, voice in self.known):
            raise differs()

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


def differs() -> ServiceError:
    return ServiceError(
        StatusCode.ABORTED,
        "the session was lost, and its replay differs: it asked its actors something else",
    )
