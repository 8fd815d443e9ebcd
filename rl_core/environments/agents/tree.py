"""The requests of one episode to one actor, as a tree of turns.

A program sends its whole history with each request. The request continues the turn with the longest
equal history, even if the program changed its echo of the turns. Sampled tokens stay as they were
sampled. A rewritten history (compaction, another attempt, a sub-agent) is a branch, which shares
the tokens before the first difference.

A turn counts if the program received it: its connection took the reply, or a later request
continues it. Other turns are in no trajectory.
"""

from __future__ import annotations

import asyncio
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from zlib import crc32

from rl_core.data.chat import TooLongError
from rl_core.data.chat_threads import prepare
from rl_core.data.images import key_of as image_key
from rl_core.data.thoughts import without_thoughts
from rl_core.environments.agents.requests import Call, Refusal, Reply, Request
from rl_core.sampling.actor import Actor
from rl_core.sampling.conversation import Conversation
from rl_core.sampling.deadlines import wait_for_all
from rl_core.sampling.engine import EngineDied
from rl_core.types import Completion, Message, Trajectory, Turn

MAX_OVERRIDDEN = 64  # Names of fields in one episode; each is a metric.
Key = tuple  # A message's key, equal for the message and its echo.


@dataclass(kw_only=True, slots=True)
class Digest:
    """Keys of a request, whose computation takes time with its size."""

    request: str  # Equal for a request and its retry.
    prompt: str  # Seeds depend on it, since concurrent requests come in any order.
    keys: list[Key]  # Keys of the messages.
    tools: str  # Equal for equal lists of tools.


@dataclass(eq=False)
class Node:
    """An actor's turn and the history up to it."""

    conversation: Conversation
    snapshot: Conversation  # The conversation as of this turn.
    reply: Reply
    keys: list[Key]  # Keys of the non-empty messages up to this turn.
    tools: str  # Digest.tools of the conversation.
    parent: Node | None
    is_continued: bool = False  # The conversation itself has a later turn.

    @property
    def is_read(self) -> bool:
        return self.reply.num_sent > 0

    @property
    def path(self) -> list[Node]:
        """The turns from the first of the conversation to this one."""
        turns, node = [], self
        while node is not None:
            turns.append(node)
            node = node.parent
        return turns[::-1]

    def continued(self) -> Conversation:
        """The conversation as of this turn. The first request that continues it extends the object;
        each later request gets a branch."""
        self.reply.num_sent = math.inf  # The program has it.
        if not self.is_continued:
            self.is_continued = True
            return self.conversation
        return self.conversation.fork(self.snapshot)

    def trajectory(self, reward: float | dict[str, float]) -> Trajectory:
        """The branch that ends here. The end of a stream that the program did not read is left
        out."""
        trajectory = self.conversation.fork(self.snapshot).trajectory(reward)
        chat = self.conversation.speaker.chat
        if trajectory.turns and chat and self.reply.num_sent < math.inf:
            turn = trajectory.turns[-1]
            ids, end = turn.completion.token_ids, self.reply.end_of_sent(turn.completion.text)
            lengths = range(len(ids) + 1)
            num = bisect_right(lengths, end, key=lambda n: len(chat.decode(ids[:n]))) - 1
            completion = beginning(turn.completion, num, chat.decode(ids[:num]))
            trajectory.turns[-1] = replace(turn, completion=completion)
            trajectory.messages[-1] = {"role": "assistant", "content": completion.text}
        return trajectory


@dataclass(eq=False)
class Attempt:
    """The replies to a request, which its retries share."""

    nodes: asyncio.Future[list[Node]]
    num_replies: int
    num_waiting: int = 0  # Connections that wait for the replies, or are sent them.

    @property
    def is_lost(self) -> bool:
        """True if no connection waits for the replies, and no program has read any."""
        return not self.num_waiting and not (self.is_done and self.is_read)

    @property
    def is_done(self) -> bool:
        return self.nodes.done() and not self.nodes.cancelled() and not self.nodes.exception()

    @property
    def is_read(self) -> bool:
        return any(node.is_read for node in self.nodes.result())

    @contextmanager
    def waited(self) -> Iterator[None]:
        """Counts a connection that waits for the replies until they are sent."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def replies(self) -> list[Reply]:
        # Shielded, so that the turn survives a client that disconnects.
        return [node.reply for node in await asyncio.shield(self.nodes)]


@dataclass(eq=False)
class Tree:
    """The turns of one actor in one episode."""

    actor: Actor
    max_turns: int = 0  # Largest number of answered turns; 0: unlimited.
    nodes: list[Node] = field(default_factory=list)
    # Request's key -> attempts, in the order of the requests.
    attempts: defaultdict[str, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    num_begun: Counter[str] = field(default_factory=Counter)  # First request -> conversations.
    num_retries: int = 0
    overridden: Counter[str] = field(default_factory=Counter)  # Field's name -> number of requests.
    # The episode's context: a task of the server has the context of the server's starter.
    context: Context = field(default_factory=copy_context)
    is_truncated: bool = False  # A request did not fit into the context or max_turns.
    note_truncated: Callable[[], None] | None = None  # Called before the first refusal.
    failure: EngineDied | None = None

    @property
    def num_turns(self) -> int:
        """Number of turns that were read or are under way."""
        attempts = [each for attempts in self.attempts.values() for each in attempts]
        return sum(each.num_replies for each in attempts if not (each.is_done and each.is_lost))

    @property
    def is_asked(self) -> bool:
        """True while a turn is sampled."""
        attempts = [each for attempts in self.attempts.values() for each in attempts]
        return any(not each.nodes.done() for each in attempts)

    @property
    def num_read(self) -> int:
        return sum(node.is_read for node in self.nodes)

    @property
    def ends(self) -> list[Node]:
        """The last turn of each branch that was read."""
        read = [node for node in self.nodes if node.is_read]
        continued = {node.parent for node in read}
        return [node for node in read if node not in continued]

    def attempt(self, request: Request, digest: Digest) -> Attempt:
        """The attempt that answers a request: a retry has that of the first request, and every
        other request a new one. Raises Refusal."""
        self.count_overridden(request)
        repeated = self.repeated(self.attempts[digest.request], request.is_retry)
        if repeated is None or (repeated.is_done and repeated.is_lost):
            self.check_turns(request.num_replies)
        if repeated is not None:
            self.num_retries += 1
            return repeated
        return self.begin(request, digest)

    def count_overridden(self, request: Request) -> None:
        """Counts the fields of a request that the run overrides. Raises Refusal if there are too
        many."""
        self.overridden.update(request.overridden)
        if len(self.overridden) > MAX_OVERRIDDEN:
            raise Refusal(f"the requests set more than {MAX_OVERRIDDEN} fields that are not read")

    def truncate(self) -> None:
        """Notes that a request did not fit into the context or max_turns."""
        if not self.is_truncated and self.note_truncated is not None:
            self.note_truncated()
        self.is_truncated = True

    def begin(self, request: Request, digest: Digest) -> Attempt:
        """A new attempt, also for a request that was asked before."""
        nodes = self.context.run(asyncio.ensure_future, self.play(request, digest))
        attempt, attempts = Attempt(nodes, request.num_replies), self.attempts[digest.request]
        attempts.append(attempt)

        def drop_failed(_: object) -> None:
            if not attempt.is_done:
                attempts.remove(attempt)
                error = None if nodes.cancelled() else nodes.exception()
                self.failure = error if isinstance(error, EngineDied) else self.failure

        nodes.add_done_callback(drop_failed)
        return attempt

    def repeated(self, attempts: Sequence[Attempt], is_retry: bool) -> Attempt | None:
        """The attempt that an equal request repeats. Without the client's mark it repeats one whose
        client has gone without the replies; with it, it repeats any."""
        lost = [attempt for attempt in attempts if attempt.is_lost]
        if lost or not is_retry:
            return next(iter(lost), None)
        running = [attempt for attempt in attempts if not attempt.nodes.done()]
        return next(iter([*running, *reversed(attempts)]), None)

    async def play(self, request: Request, digest: Digest) -> list[Node]:
        if self.actor.chat is None and request.messages[-1].get("prefix"):
            raise Refusal(
                "a model behind an API cannot continue the last message; end with a user's"
            )
        if self.actor.chat and self.longest(digest)[0] is None:
            limit = self.actor.max_context_tokens - 1
            try:
                await prepare(self.actor.chat, request.messages, request.tools, limit)
            except TooLongError as error:
                self.truncate()
                text = f"{error}, which cannot fit into the context of {limit + 1} tokens"
                raise Refusal(text, code="context_length_exceeded") from None
            except ValueError as error:
                raise Refusal(str(error)) from error
        parent, num_known = self.longest(digest)
        new = request.messages[num_known:] if parent else []
        talks: list[Conversation] = []
        try:
            for _ in range(request.num_replies):
                talks.append(self.talk(parent, request, digest))
            speaking = [self.speak(talk, parent, new, request, digest) for talk in talks]
            nodes = await wait_for_all(speaking)
        except Exception:
            self.forget(talks, parent)
            raise
        self.nodes += nodes
        return nodes

    def forget(self, talks: list[Conversation], parent: Node | None) -> None:
        """Removes the conversations of a failed request."""
        for talk in talks:
            if parent is not None and talk is parent.conversation:
                # Drops messages such as those that the chat template refused.
                vars(talk).update(vars(parent.snapshot.snapshot()), num_forks=talk.num_forks)
                parent.is_continued = False
            else:
                self.actor.conversations.remove(talk)

    def check_turns(self, num_replies: int) -> None:
        if self.max_turns and self.num_turns + num_replies > self.max_turns:
            self.truncate()
            raise Refusal(
                f"the episode has had its {self.max_turns} turns; raise max_turns in the "
                "environment's file, or --rollout.max_turns",
                code="max_turns_exceeded",
            )

    def longest(self, digest: Digest) -> tuple[Node | None, int]:
        """(the turn whose history is the longest prefix of these messages or None, the number of
        messages in that prefix)."""
        asked = [key for key in digest.keys if key]
        parent: Node | None = None
        length = 0
        for node in self.nodes:
            if node.tools != digest.tools or not node.reply.is_stored:
                continue
            num = len(node.keys)
            if length < num < len(asked) and asked[:num] == node.keys:
                parent, length = node, num
        num_known = 0
        while length:
            length -= bool(digest.keys[num_known])
            num_known += 1
        return parent, num_known

    def talk(self, parent: Node | None, request: Request, digest: Digest) -> Conversation:
        if parent is not None:
            return parent.continued()
        self.num_begun[digest.prompt] += 1
        label = f"{digest.prompt}-{self.num_begun[digest.prompt]}"
        try:
            talk = self.actor.converse(request.messages, request.tools, label)
        except ValueError as error:
            raise Refusal(str(error)) from error
        chat = self.actor.chat
        if chat is not None and chat.unread_tools(request.messages, request.tools):
            self.overridden["tools"] += 1
        return talk

    async def speak(
        self,
        talk: Conversation,
        parent: Node | None,
        new: Sequence[Message],
        request: Request,
        digest: Digest,
    ) -> Node:
        """Samples the actor's turn after `new`. Raises Refusal if the context is full or the chat
        template refuses the messages."""
        limits: dict[str, object] = {}
        if request.max_tokens is not None:
            limits["max_tokens"] = min(request.max_tokens, talk.params.max_tokens)
        if request.stop:
            limits["stop"] = request.stop
        if request.is_enforced:
            limits["json_schema"] = json.dumps(request.schema)
        num_replies = talk.num_replies
        try:
            await talk.respond(new, **limits)
        except ValueError as error:
            if talk.tokens_left < 1:
                self.truncate()
            raise Refusal(str(error), code=code_of(talk)) from error
        if talk.num_replies == num_replies:
            self.truncate()
            raise Refusal(
                f"the conversation fills the context of {self.actor.max_context_tokens} tokens",
                code=code_of(talk),
            )
        reply = reply_of(talk, request)
        keys = digest.keys[:-1] if reply.prefix else digest.keys
        spoken = [key for key in [*keys, key_of(reply.message)] if key]
        return Node(talk, talk.snapshot(), reply, spoken, digest.tools, parent)

    def cancel(self) -> None:
        """Cancels the running turns."""
        for attempts in list(self.attempts.values()):
            for attempt in list(attempts):
                attempt.nodes.cancel()

    def trajectories(self, reward: float | dict[str, float]) -> list[Trajectory]:
        """One trajectory per branch that was read, each with this reward."""
        return [node.trajectory(reward) for node in self.ends]


def beginning(completion: Completion, num: int, text: str) -> Completion:
    """The first `num` tokens of a completion; `text`: their text."""
    experts = completion.experts
    if experts is not None:
        experts = experts[: len(experts) - len(completion.token_ids) + num]
    return replace(
        completion,
        token_ids=completion.token_ids[:num],
        logprobs=completion.logprobs[:num],
        text=text,
        newer_versions=[each for each in completion.newer_versions if each[0] < num],
        kept_ids=completion.kept_ids[:num],
        experts=experts,
    )


def code_of(talk: Conversation) -> str:
    return "context_length_exceeded" if talk.tokens_left < 1 else "invalid_request_error"


def digest_of(request: Request) -> Digest:
    asked = replace(request, model="", is_retry=False, continues=None, is_kept=False, is_long=False)
    values = {each.name: getattr(asked, each.name) for each in fields(asked)}
    return Digest(
        request=sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest(),
        prompt=f"{crc32(json.dumps([request.messages, request.tools]).encode()):08x}",
        keys=[key_of(message) for message in request.messages],
        tools=json.dumps(request.tools or None, sort_keys=True),
    )


def key_of(message: Message) -> Key:
    """A message's content without details that clients change in the echo: formatting of arguments,
    thoughts, ids, spaces at both ends. () if the message is empty."""
    role, content = message["role"], message.get("content") or ""
    if role == "assistant":
        content = without_thoughts(content)
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        calls.append((function["name"], json.dumps(function["arguments"], sort_keys=True)))
    if isinstance(content, str):
        content = content.strip()
    else:  # A hash is compared faster than an image, and takes less memory.
        content = tuple(
            image_key(item["image"]) if item["type"] == "image" else item["text"].strip()
            for item in content
        )
    if not content and not calls and role != "tool":
        return ()
    return role, content, tuple(calls)


def reply_of(talk: Conversation, request: Request) -> Reply:
    """The conversation's last turn as a reply to the program."""
    message = talk.history[-1]
    reply_id = f"{talk.session}.{talk.num_replies}".replace("/", "-")
    for number, call in enumerate(message.get("tool_calls") or []):
        # Unique in the episode, for programs with several conversations. Mistral's templates want
        # nine characters.
        call["id"] = sha256(f"{reply_id}.{number}".encode()).hexdigest()[:9]
    calls = message.get("tool_calls") or [] if request.reads_calls else []
    text = message["content"].removeprefix(talk.prefix) if calls else talk.text
    text, stop = cut_at_stop(text, request.stop)
    thoughts, ended, answer = text.rpartition("</think>")
    if ended:
        text = answer.lstrip("\n")
        thoughts = thoughts.strip().removeprefix("<think>").strip()
    finish_reason = "calls" if calls else "stop"
    reply = Reply(
        id=reply_id,
        text=text,
        thoughts=thoughts,
        calls=[Call(id=call["id"], **call["function"]) for call in calls],
        finish_reason="length" if talk.truncated else finish_reason,
        stop=stop,
        prefix=talk.prefix,
    )
    if talk.turns:
        completion = talk.turns[-1].completion
        reply.num_prompt_tokens = num_prompt_tokens(talk.turns)
        reply.num_tokens = len(completion.token_ids)
        chat = talk.speaker.chat
        if request.wants_logprobs and chat is not None:
            tokens = [chat.facts.token_bytes(token) for token in completion.token_ids]
            reply.logprobs = list(zip(tokens, completion.logprobs, strict=True))
    return reply


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Returns (text before the first stop string, that stop string). Clients expect neither the
    stop string nor the rest of a token in which it ended; the tokens stay in the conversation."""
    positions = [(text.find(stop), stop) for stop in stops if stop in text]
    if not positions:
        return text, ""
    end, stop = min(positions)
    return text[:end], stop


def num_prompt_tokens(turns: Sequence[Turn]) -> int:
    """Number of prompt tokens of the last turn."""
    length = 0
    for turn in turns:
        if turn.is_fresh:
            length = 0
        length += len(turn.new_ids) + len(turn.completion.token_ids)
    return length - len(turns[-1].completion.token_ids)
