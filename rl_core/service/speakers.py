"""The actors of an episode as a service asks them: the run's own, so that tokens, seeds and records
are those of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grpc import StatusCode

from rl_core.sampling.actor import Actor, Conversation
from rl_core.sampling.engine import EngineDied
from rl_core.service import environments_pb2 as pb
from rl_core.service.actors import read_turn
from rl_core.service.wire import ServiceError, from_json, to_json
from rl_core.types import Trajectory, Turn

TOLD = ("name", "is_trainable", "max_turns", "max_context_tokens", "max_tokens", "seed", "session")


@dataclass(kw_only=True, eq=False)
class Voice:
    """A conversation, or what it raised; and what was said in it, which a session that takes the
    place of a lost one hears again."""

    conversation: Conversation | Exception
    # Messages of others, the actor's turn.
    said: list[tuple[str, pb.Spoken, Turn | None]] = field(default_factory=list)
    num_heard: int = 0  # turns, by this session


class Speakers:
    def __init__(self, actors: Mapping[str, Actor] | None, is_replaying: bool):
        self.actors = actors
        self.is_replaying = is_replaying
        self.known: list[tuple[Any, Voice]] = []  # by what each was opened with
        self.begin()

    def begin(self) -> None:
        """A new session asks."""
        self.unheard, self.voices, self.turns = list(self.known), {}, {}  # by conversation; by ask
        for _, voice in self.known:
            voice.num_heard = 0

    def described(self) -> str:
        """The `cast` of a StartRequest."""
        actors = self.actors.values()
        told = [{k: getattr(a, k) for k in TOLD} | {"params": asdict(a.params)} for a in actors]
        return to_json(told, "the actors")

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
        elif parent and not opening.replies and parent.num_heard < len(parent.said):
            raise differs()  # its conversation is further than this session
        else:
            try:
                voice = Voice(conversation=self.begun(opening, parent))
            except Exception as error:  # the hook hears it where it waits for the first turn
                voice = Voice(conversation=error)
            voice.said = parent.said[:num_heard] if parent else []
            self.known += [(key, voice)] if self.is_replaying else []
        voice.num_heard = num_heard
        self.voices[number] = voice

    def begun(self, opening: pb.Opening, parent: Voice | None) -> Conversation:
        """The conversation that an opening asks for."""
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
        """The actor's next turn, or why there is none. Raises EngineDied, which hooks do not hear:
        the group is done again."""
        voice = self.voices[ask.conversation]
        number = voice.num_heard
        voice.num_heard = voice.num_heard + 1
        if number < len(voice.said):
            messages, spoken, turn = voice.said[number]
            if messages != ask.messages:
                raise differs()
        else:
            spoken, turn = await self.respond(voice.conversation, ask)
            voice.said += [(ask.messages, spoken, turn)] if self.is_replaying else []
        told = pb.Spoken(ask=ask.id)
        told.MergeFrom(spoken)
        if turn:
            self.turns[ask.id] = turn
        return told

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
            said = conversation.history[-1:] if conversation.num_replies > num_replies else []
            spoken = pb.Spoken(messages=to_json(said, "the reply"), text=conversation.text)
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
        """Raises ServiceError unless the session asked again what a lost one had asked."""
        if any(voice.num_heard < len(voice.said) for _, voice in self.known):
            raise differs()

    def trajectories(self, value: str) -> list[Trajectory]:
        """What rollout() returned, with the tokens of this side."""
        found = from_json(value, list, "what rollout() returned")
        for one in found:
            one["turns"] = [
                self.turns[turn] if isinstance(turn, int) else read_turn(turn)
                for turn in one["turns"]
            ]
        return [Trajectory(**one) for one in found]


def read_sampling(value: str) -> dict[str, Any]:
    """What a hook gave for the sampling of an actor, of JSON."""
    sampling = from_json(value or "{}", dict, "sampling")
    for name, given in sampling.items():
        if isinstance(given, list):
            sampling[name] = tuple(given)
    return sampling


def plain_turn(turn: Turn) -> dict[str, Any]:
    """For JSON, without the routes of experts."""
    return asdict(replace(turn, completion=replace(turn.completion, experts=None)))


def differs() -> ServiceError:
    return ServiceError(
        StatusCode.ABORTED,
        "the session was lost, and its replay differs: it asked actors otherwise",
    )
