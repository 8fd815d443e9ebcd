"""Remote actors for the hooks of a served environment: the client holds the models and sends their
replies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from google.protobuf.message import Message as ProtoMessage
from grpc import StatusCode

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.image_parts import loaded_messages, set_images
from rl_core.environments.agents.rollout import Endpoints
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.wire import ServiceError, from_json, to_json, wrong
from rl_core.sampling.actor import Actor, EpisodeActors
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.hooks import Hook
from rl_core.types import (
    Completion,
    JSONObject,
    Message,
    SamplingParams,
    Task,
    Trajectory,
    Turn,
)

LISTEN_S = 20.0  # A long-polling request gets an empty reply after this time.
LOOK_S = 0.05  # Shortest interval between checks of a hook's deadline.
# Exceptions of actors that hooks see by their own class.
ERRORS = {kind.__name__: kind for kind in (ValueError, ConnectionError, TimeoutError)}
CALL: ContextVar[HookCall] = ContextVar("CALL")  # The call whose hook runs.
# The hooks of a request; the result is the reply.
Work: TypeAlias = Coroutine[object, None, ProtoMessage]
ActorReply = tuple[pb.Spoken, list[Message], "Turn | None"]


class RemoteConversation(Conversation):
    """A conversation whose tokens are at the client. Only the client knows how full the context
    is."""

    id: int
    num_told: int  # Messages of the history that the client knows.

    async def take_turn(self, seed: int) -> None:
        calls = self.speaker.pending_calls
        limits = {}
        if self.turn_params is not self.params:
            limits = {"max_tokens": self.turn_params.max_tokens, "stop": self.turn_params.stop}
        if self.state_key:
            limits["state_key"] = self.state_key
        spoken, messages, turn = await calls.ask(self.id, self.history[self.num_told :], limits)
        self.history += messages
        self.num_told = len(self.history)
        self.text = spoken.text if spoken.HasField("text") else self.last_text if messages else ""
        self.truncated = spoken.truncated
        self.num_replies = self.num_replies + len(messages)
        self.metrics |= spoken.metrics
        self.turns += [turn] if turn else []

    def fork(self, snapshot: Conversation | None = None) -> Conversation:
        fork = super().fork(snapshot)
        num_replies = snapshot.num_replies if snapshot else 0  # 0: all.
        fork.id = self.speaker.pending_calls.open(fork_of=self.id, replies=num_replies)
        return fork


@dataclass(kw_only=True, slots=True)
class RemoteActor(Actor):
    pending_calls: PendingCalls

    def converse(
        self, messages: list[Message], tools: list | None = None, label: str = "", **sampling
    ) -> Conversation:
        session = f"{self.session}/{label or len(self.conversations)}"
        made = RemoteConversation(self, messages, tools, sampling, session)
        fields = {"tools": tools, "sampling": sampling}
        fields = {name: to_json(value, name) for name, value in fields.items() if value} | {
            "label": label
        }
        made.id = self.pending_calls.open(
            actor=self.name, messages=to_json(messages, "messages"), **fields
        )
        made.num_told = len(messages)
        self.conversations.append(made)
        return made


class PendingCalls:
    """The asks of one session's hooks, and the client's answers."""

    def __init__(self, cast: str):
        """`cast`: field of a StartRequest. Raises ServiceError if `cast` is malformed."""
        self.cast = EpisodeActors({}, None, 0, "")
        self.openings: list[pb.Opening] = []  # Not sent to the client yet.
        self.waiting: dict[int, asyncio.Future[ActorReply]] = {}  # Ask number -> its answer.
        self.turns: dict[int, tuple[int, Turn]] = {}  # id(turn) -> (ask number, turn).
        self.num_asks = self.num_conversations = 0
        for one in from_json(cast, list, "cast"):
            try:
                fields = {"max_tokens": 0} | one.pop("params", {})
                params = SamplingParams(
                    **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
                )
                actor = RemoteActor(
                    pending_calls=self,
                    params=params,
                    engine=None,
                    chat=None,
                    open_endpoint=Endpoints(),
                    **one,
                )
            except (TypeError, AttributeError) as error:
                raise wrong(f"cast: each item must describe an actor: {error}") from None
            self.cast[str(actor.name)] = actor

    def open(self, **opening: str | int) -> int:
        """Opens a conversation and returns its number."""
        self.num_conversations += 1
        self.openings.append(pb.Opening(conversation=self.num_conversations, **opening))
        return self.num_conversations

    async def ask(
        self, conversation: int, messages: list[Message], limits: JSONObject
    ) -> ActorReply:
        """Returns the client's answer. Raises the actor's exception from the client."""
        call = CALL.get(None)
        future = asyncio.get_running_loop().create_future()
        if call is None or call.task.done():
            raise RuntimeError(
                "the hook of this actor has returned: ask actors only while the hook runs"
            )
        self.num_asks += 1
        self.waiting[self.num_asks] = future
        ask = pb.Ask(id=self.num_asks, conversation=conversation)
        ask.messages = to_json(messages, "messages")
        ask.limits = to_json(limits, "limits") if limits else ""
        call.put(ask)
        try:
            spoken, replies, turn = await future
        finally:
            call.count_waiting(-1)
        if spoken.error:
            kind, _, message = spoken.error.partition(": ")
            error = ERRORS.get(kind) or type(
                kind if kind.isidentifier() else "Error", (RuntimeError,), {}
            )
            raise error(message or kind)
        if turn:
            self.turns[id(turn)] = spoken.ask, turn
        return spoken, replies, turn

    def hear(self, answers: Iterable[pb.Spoken]) -> None:
        """Delivers answers to the hooks that wait. Raises ServiceError, before any is delivered, if
        an answer is malformed."""
        heard = {}
        for spoken in answers:
            if not 0 < spoken.ask <= self.num_asks:
                raise ServiceError(StatusCode.NOT_FOUND, f"answers: there is no ask {spoken.ask}")
            if spoken.ask not in self.waiting or spoken.ask in heard:
                raise ServiceError(
                    StatusCode.ALREADY_EXISTS, f"answers: ask {spoken.ask} has been answered"
                )
            heard[spoken.ask] = read_spoken(spoken)
        for ask, reply in heard.items():
            future = self.waiting.pop(ask)
            if not future.done():  # A cancelled ask is done already.
                future.set_result(reply)

    def packed(self, trajectory: Trajectory) -> JSONObject:
        """A trajectory as JSON values. Each turn of the client is the number of its ask."""
        turns = [
            self.turns[id(turn)][0] if id(turn) in self.turns else plain_turn(turn)
            for turn in trajectory.turns
        ]
        return asdict(replace(trajectory, turns=[])) | {"turns": turns}


class HookCall:
    """The hooks of one request while they run, and the next reply to the client: asks, or the
    result."""

    def __init__(self, work: Work, pending_calls: PendingCalls):
        self.pending_calls = pending_calls
        self.loop = asyncio.get_running_loop()
        self.unsent: list[pb.Ask] = []
        # The request that waits for the next reply.
        self.listener: asyncio.Future[None] | None = None
        # Unanswered asks; total seconds with such asks; start of the current wait.
        self.num_waiting, self.waited_s, self.since_s = 0, 0.0, 0.0
        self.task = asyncio.ensure_future(self._run(work))
        self.task.add_done_callback(self._ended)

    async def _run(self, work: Work) -> ProtoMessage:
        CALL.set(self)
        return await work

    def _ended(self, task: asyncio.Task) -> None:
        if not task.cancelled():
            task.exception()  # Marks the exception as retrieved; news() raises it.
        self._tell()

    def _tell(self) -> None:
        if self.listener and not self.listener.done():
            self.listener.set_result(None)

    def put(self, ask: pb.Ask) -> None:
        self.unsent.append(ask)
        self.count_waiting(1)
        self._tell()

    def count_waiting(self, change: int) -> None:
        if not self.num_waiting:
            self.since_s = self.loop.time()
        self.num_waiting += change
        if not self.num_waiting:
            self.waited_s += self.loop.time() - self.since_s

    async def news(self) -> ProtoMessage | None:
        """The result, or pb.Asked, for the latest request that waits. Returns None to earlier
        requests, and after LISTEN_S. Raises the exceptions of the work."""
        self._tell()
        self.listener = mine = self.loop.create_future()
        if self.unsent or self.task.done():
            self._tell()
        await asyncio.wait({mine}, timeout=LISTEN_S)
        if self.task.done():
            return self.task.result()
        if mine is not self.listener or not self.unsent:
            return None
        asked = pb.Asked(openings=self.pending_calls.openings, asks=self.unsent)
        self.pending_calls.openings = []
        self.unsent = []
        return asked

    async def in_time(self, hook: Hook, task: Task, arguments: dict[str, object]) -> object:
        """Runs a hook and returns its result. Raises as Hook does. The deadline excludes the time
        in which the hook waits for actors."""
        running = asyncio.ensure_future(replace(hook, timeout_s=None)(task, arguments))
        began_s = self._own_s()
        try:
            while not running.done():
                left_s = (
                    None if hook.timeout_s is None else hook.timeout_s - (self._own_s() - began_s)
                )
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(
                        f"{hook.path}: {hook.name}() ran longer than {hook.timeout_s:g} s for task "
                        f"{task.id}, without its waits for actors; make it faster or raise "
                        "--rollout.hook_timeout_s"
                    )
                await asyncio.wait({running}, timeout=left_s and max(left_s, LOOK_S))
        finally:
            running.cancel()
        return running.result()

    def _own_s(self) -> float:
        now = self.loop.time()
        return now - self.waited_s - (now - self.since_s if self.num_waiting else 0.0)


def read_spoken(spoken: pb.Spoken) -> ActorReply:
    """Parses an answer: an error, or an actor's reply. Raises ServiceError if it is malformed."""
    if spoken.error:
        return spoken, [], None
    messages = from_json(spoken.messages, list, "answers: messages")
    turn = None
    try:
        messages = canonical_messages(messages) if messages else []
    except ValueError as error:
        raise wrong(f"answers: messages {error}") from None
    if len(messages) > 1 or any(message["role"] != "assistant" for message in messages):
        raise wrong("answers: messages must be one assistant message, or empty")
    if spoken.turn:
        turn = read_turn(from_json(spoken.turn, dict, "answers: turn"))
    return spoken, messages, turn


def plain_turn(turn: Turn) -> JSONObject:
    """A turn as JSON values, without expert routing and images, which the messages have."""
    plain = asdict(replace(turn, completion=replace(turn.completion, experts=None), images=()))
    del plain["images"]
    return plain


def read_turn(value: JSONObject) -> Turn:
    """A Turn from JSON values, without images. Raises ServiceError if the value is not a turn."""
    try:
        completion = Completion(**value["completion"])
        return Turn(**value | {"completion": completion, "images": ()})
    except (TypeError, KeyError, AttributeError) as error:
        raise wrong(f"not a turn: {error}") from None


def read_images(trajectory: Trajectory) -> None:
    """Decodes the images of a peer's messages and sets the turns' images, whose keys follow from
    the content. Raises ServiceError."""
    try:
        loaded = loaded_messages(trajectory.messages, None)
        trajectory.messages = trajectory.messages if loaded is None else loaded
        set_images(trajectory)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise wrong(f"not a trajectory: {error}") from None
