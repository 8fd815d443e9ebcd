"""The requests of one episode to one actor, as a tree of turns.

A program sends its whole history with each request. The request continues the turn with the longest
equal history, even if the program changed its echo of the turns. Sampled tokens stay as they were
sampled. A rewritten history (compaction, another attempt, a sub-agent) is a branch, which shares
the tokens before the first difference.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from zlib import crc32

from rl_core.data.images import key_of as image_key
from rl_core.environments.agents.requests import Call, Refusal, Reply, Request
from rl_core.sampling.actor import Actor, Conversation, without_thoughts
from rl_core.sampling.hooks import wait_for_all
from rl_core.types import JSONObject, Message, Trajectory, Turn

MAX_OVERRIDDEN = 64  # Names of fields in one episode; each is a metric.
Key = tuple  # A message's key, equal for the message and its echo.


@dataclass(eq=False)
class Node:
    """An actor's turn and the history up to it."""

    conversation: Conversation
    num_replies: int  # Replies of the conversation, including this one.
    reply: Reply
    keys: list[Key]  # Keys of the non-empty messages up to this turn.
    tools: str  # tools_key() of the conversation.
    num_children: int = 0
    is_continued: bool = False  # The conversation itself has a later turn.

    def continued(self) -> Conversation:
        """The conversation as of this turn. The first request that continues it extends the object;
        each later request gets a branch."""
        self.num_children += 1
        if not self.is_continued:
            self.is_continued = True
            return self.conversation
        return self.conversation.at(self.num_replies)


@dataclass(eq=False)
class Tree:
    """The turns of one actor in one episode."""

    actor: Actor
    max_turns: int = 0  # Largest number of answered turns; 0: unlimited.
    nodes: list[Node] = field(default_factory=list)
    # Request's key -> replies, so that a retry gets the same.
    answered: dict[str, asyncio.Future[list[Node]]] = field(default_factory=dict)
    num_turns: int = 0
    num_begun: Counter[str] = field(default_factory=Counter)  # First request -> conversations.
    num_retries: int = 0
    overridden: Counter[str] = field(default_factory=Counter)  # Field's name -> number of requests.
    # The episode's context: a task of the server has the context of the server's starter.
    context: Context = field(default_factory=copy_context)
    is_truncated: bool = False  # A request did not fit into the context or max_turns.

    async def answer(self, request: Request) -> list[Reply]:
        """The actor's replies. A repeated request gets the same replies; while the first is still
        running, only if the client marks it as a retry. Raises Refusal."""
        self.overridden.update(request.overridden)
        if len(self.overridden) > MAX_OVERRIDDEN:
            raise Refusal(f"the requests set more than {MAX_OVERRIDDEN} fields that are not read")
        key = request_key(request)
        nodes = self.answered.get(key)
        if nodes is not None and (nodes.done() or request.is_retry):
            self.num_retries += 1
        else:
            nodes = self.answered[key] = self.context.run(asyncio.ensure_future, self.play(request))
            nodes.add_done_callback(partial(self.drop_failed, key))
        # Shielded, so that the turn survives a client that disconnects.
        return [node.reply for node in await asyncio.shield(nodes)]

    def drop_failed(self, key: str, nodes: asyncio.Future[list[Node]]) -> None:
        """Forgets a failed request, so that its repetition is sampled again."""
        has_failed = nodes.cancelled() or nodes.exception() is not None
        if has_failed and self.answered.get(key) is nodes:
            del self.answered[key]

    async def play(self, request: Request) -> list[Node]:
        self.count_turns(request.num_replies)
        keys = [key_of(message) for message in request.messages]
        tools = tools_key(request.tools)
        if self.actor.chat and self.longest(keys, tools)[0] is None:
            with suppress(ValueError):  # talk() refuses the same messages.
                await self.actor.chat.prepare(request.messages, request.tools)
        parent, num_known = self.longest(keys, tools)
        new = request.messages[num_known:] if parent else []
        talks: list[Conversation] = []
        try:
            for _ in range(request.num_replies):
                talks.append(self.talk(parent, request))
            nodes = await wait_for_all([self.speak(talk, new, request, keys) for talk in talks])
        except Exception:
            self.num_turns -= request.num_replies
            self.forget(talks, parent)
            raise
        self.nodes += nodes
        return nodes

    def forget(self, talks: list[Conversation], parent: Node | None) -> None:
        """Removes the conversations of a failed request."""
        for talk in talks:
            if parent is not None:
                parent.num_children -= 1
            if parent is not None and talk is parent.conversation:
                talk.take_back()
                parent.is_continued = False
            else:
                self.actor.conversations.remove(talk)

    def count_turns(self, num_replies: int) -> None:
        if self.max_turns and self.num_turns + num_replies > self.max_turns:
            self.is_truncated = True
            raise Refusal(
                f"the episode has had its {self.max_turns} turns; raise max_turns in the "
                "environment's file, or --rollout.max_turns",
                code="max_turns_exceeded",
            )
        self.num_turns += num_replies

    def longest(self, keys: list[Key], tools: str) -> tuple[Node | None, int]:
        """(the turn whose history is the longest prefix of these messages or None, the number of
        messages in that prefix)."""
        asked = [key for key in keys if key]
        parent: Node | None = None
        length = 0
        for node in self.nodes:
            num = len(node.keys)
            if length < num < len(asked) and node.tools == tools and asked[:num] == node.keys:
                parent, length = node, num
        num_known = 0
        while length:
            length -= bool(keys[num_known])
            num_known += 1
        return parent, num_known

    def talk(self, parent: Node | None, request: Request) -> Conversation:
        if parent is not None:
            return parent.continued()
        # Seeds depend on the messages only, since concurrent requests come in any order.
        asked = f"{crc32(json.dumps([request.messages, request.tools]).encode()):08x}"
        self.num_begun[asked] += 1
        label = f"{asked}-{self.num_begun[asked]}"
        try:
            talk = self.actor.converse(request.messages, request.tools, label)
        except ValueError as error:
            raise Refusal(str(error)) from error
        chat = self.actor.chat
        if chat is not None and chat.unread_tools(request.messages, request.tools):
            self.overridden["tools"] += 1
        return talk

    async def speak(
        self, talk: Conversation, new: Sequence[Message], request: Request, keys: list[Key]
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
            self.is_truncated = self.is_truncated or talk.room < 1
            raise Refusal(str(error), code=code_of(talk)) from error
        if talk.num_replies == num_replies:
            self.is_truncated = True
            raise Refusal(
                f"the conversation fills the context of {self.actor.max_context_tokens} tokens",
                code=code_of(talk),
            )
        reply = reply_of(talk, request)
        spoken = [key for key in [*keys, key_of(reply.message)] if key]
        return Node(talk, talk.num_replies, reply, spoken, tools_key(talk.tools))

    def cancel(self) -> None:
        """Cancels the running turns."""
        for nodes in list(self.answered.values()):
            nodes.cancel()

    def trajectories(self, reward: float | dict[str, float]) -> list[Trajectory]:
        """One trajectory per branch, each with this reward."""
        trajectories = []
        for node in self.nodes:
            if not node.num_children:
                talk = node.conversation.at(node.num_replies)
                trajectories.append(talk.trajectory(reward))
        return trajectories


def tools_key(tools: list[JSONObject] | None) -> str:
    return json.dumps(tools or None, sort_keys=True)


def code_of(talk: Conversation) -> str:
    return "context_length_exceeded" if talk.room < 1 else "invalid_request_error"


def request_key(request: Request) -> str:
    """A digest, equal for a request and its retry."""
    asked = replace(request, model="", is_retry=False, continues=None, is_kept=False)
    values = {each.name: getattr(asked, each.name) for each in fields(asked)}
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


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
    text = message.get("content") or "" if calls else talk.text
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
    )
    if talk.turns:
        completion = talk.turns[-1].completion
        reply.num_prompt_tokens = num_prompt_tokens(talk.turns)
        reply.num_tokens = len(completion.token_ids)
        chat = talk.speaker.chat
        if request.wants_logprobs and chat is not None:
            tokens = [chat.token_bytes(token) for token in completion.token_ids]
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
