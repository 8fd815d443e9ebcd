"""An actor's conversation in one episode, which hooks hold as its reply."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, cast

from rl_core.data.canonical_messages import canonical_messages
from rl_core.data.chat import Chat
from rl_core.data.messages import shorten, without_prefix
from rl_core.data.thought_marks import unclosed_mark
from rl_core.data.token_stream import TokenStream
from rl_core.sampling.engine import Engine
from rl_core.sampling.reward_parts import NOT_APPLIED, env_metrics, reward_values
from rl_core.types import (
    AnyJSON,
    Completion,
    InputImage,
    JSONObject,
    Message,
    SamplingParams,
    Trajectory,
    Turn,
    counter_seed,
)

# The learner assumes the sampling parameters of a trainable actor: a reply that overrides one of
# these is not trained.
SAMPLING_FLAGS = ("temperature", "top_p", "top_k", "min_p")


class ChatEngine(Protocol):
    """An engine that takes messages, such as an API."""

    async def chat(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> tuple[Message, Completion]: ...


class Replay(Protocol):
    """Turns of an episode that an earlier process sampled; see resumable_rollouts.py."""

    async def chat(self, talk: Conversation, seed: int, /) -> tuple[Message, Completion]: ...
    async def generate(
        self, talk: TokenConversation, params: SamplingParams, seed: int, /
    ) -> Completion: ...


class EpisodeActor(Protocol):
    """An actor in one episode; see Actor."""

    name: str
    engine: Engine | None
    chat: Chat | None
    stop_token_ids: tuple[int, ...]
    max_context_tokens: int
    is_trainable: bool
    params: SamplingParams | None
    seed: int
    max_turns: int
    replay: Replay | None
    conversations: list[Conversation]

    @property
    def engines(self) -> list[Engine]: ...
    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        session: str = "",
        images: Sequence[InputImage] = (),
        unfinished: Completion | None = None,
    ) -> Completion: ...


class Conversation:
    """Messages of an actor whose engine takes messages. A conversation without a returned
    trajectory is not trained."""

    def __init__(
        self,
        speaker: EpisodeActor,
        messages: list[Message],
        tools: list | None,
        sampling: JSONObject,
        session: str,
    ):
        assert speaker.params is not None
        self.speaker = speaker
        self.session = session
        self.tools = tools
        self.params = replace(speaker.params, **sampling)
        self.turn_params = self.params
        self.overridden = [name for name in SAMPLING_FLAGS if name in sampling]
        self.state_key = ""  # Key of the current turn.
        self.history = list(messages)
        self.turns: list[Turn] = []
        self.text = ""  # Text of the actor's last turn; "" if the context was full.
        self.prefix = ""  # Text of the message that the last turn continued.
        self.opening = ""  # Mark of the thoughts, opened by the prompt, in which the turn was cut.
        self.metrics: dict[str, float] = {}
        self.truncated = False  # True if a turn hit max_tokens, or the context is full.
        self.num_replies = 0
        self.num_forks = 0
        self.is_busy = False

    @property
    def actor(self) -> str:
        return self.speaker.name

    @property
    def messages(self) -> list[Message]:
        """A copy of the messages up to the last reply."""
        return copy.deepcopy(self.history)

    @property
    def answer(self) -> str:
        """The text without thoughts."""
        from rl_core.data.thoughts import without_thoughts

        return without_thoughts(self.opening + self.text)

    @property
    def last_text(self) -> str:
        """Text of the actor's last turn, also if the context is full and `text` is ""."""
        return next((m["content"] for m in reversed(self.history) if m["role"] == "assistant"), "")

    @property
    def tokens_left(self) -> float:
        """Number of tokens that still fit into the context."""
        return math.inf

    @property
    def next_turn(self) -> str:
        """Name of the next turn, unique in the run."""
        return f"{self.session}#{self.num_replies}"

    async def respond(
        self, messages: str | Sequence[Message] = (), state_key: AnyJSON = None, **limits: AnyJSON
    ) -> Conversation:
        """Continues this conversation with `messages` and the actor's next turn, and returns it.
        If the context is full, the text is "" and the conversation is truncated. Raises ValueError
        if the first prompt fills the context. `state_key`: a value that the hook state_key could
        return. `limits`: max_tokens and stop of this turn."""
        self._check_idle()
        self.state_key = key_text(state_key)
        self.turn_params = replace(self.params, **limits)
        heard = as_messages(messages) if messages else []
        # Stays True after an error, because tokens and messages may differ then.
        self.is_busy = True
        if self.num_replies:
            self.history += heard
            await self.hear(heard)
        if self.num_replies and self.tokens_left < 1:
            self.text = ""
            self.truncated = True
        else:
            await self.take_turn(counter_seed(self.speaker.seed, self.session, self.num_replies))
        self.is_busy = False
        return self

    async def hear(self, messages: list[Message]) -> None:
        """Called with the messages between two turns."""

    async def take_turn(self, seed: int) -> None:
        """Adds the actor's next turn."""
        replay = self.speaker.replay
        reply, completion = await (replay.chat(self, seed) if replay else self.chat(seed))
        self.add_reply(reply, completion)

    async def chat(self, seed: int) -> tuple[Message, Completion]:
        engine = cast(ChatEngine, self.speaker.engine)
        return await engine.chat(self.history, self.tools, self.turn_params, seed)

    def add_reply(self, reply: Message, completion: Completion) -> None:
        self.history.append(reply)
        self.text = completion.text
        self.truncated = completion.finish_reason == "length"
        self.num_replies += 1

    def accepts(self, messages: Sequence[Message]) -> bool:
        """True if the chat template renders the conversation with these messages at its end."""
        return True

    def snapshot(self) -> Conversation:
        """A copy as of now, for fork()."""
        same = copy.copy(self)
        same.history = list(self.history)
        same.turns = list(self.turns)
        same.metrics = dict(self.metrics)
        return same

    def fork(self, snapshot: Conversation | None = None) -> Conversation:
        """A second conversation with the same tokens so far, or up to an earlier snapshot(), which
        continues with its own seeds."""
        if snapshot is None:
            self._check_idle()
        branch = (snapshot or self).snapshot()
        branch.session = f"{self.session}.{self.num_forks}"
        branch.num_forks = 0
        self.num_forks += 1
        self.speaker.conversations.append(branch)
        return branch

    def trajectory(
        self,
        reward: float | Mapping[str, float | None] | None,
        *,
        player: str = "",
        metrics: dict[str, float] | None = None,
    ) -> Trajectory:
        """The scored trajectory of the conversation. A dict is summed and each part is logged. In a
        group, trajectories of one actor and player share a baseline."""
        self._check_idle()
        if self.overridden and self.speaker.is_trainable:
            name = self.overridden[0]
            raise ValueError(
                f"a reply of {self.actor} with another {name} cannot be trained: the learner "
                f"assumes --sampling.*; leave {name} out, or return no trajectory of the reply"
            )
        source = f"trajectory(reward=...) of {self.actor}"
        values = reward_values(reward, "rollout", source)
        parts = {name: value for name, value in values.items() if value is not None}
        if not parts:
            raise ValueError(f"{source} is {shorten(reward)}; one reward must be a number")
        not_applied = {NOT_APPLIED + name: 1.0 for name in values.keys() - parts.keys()}
        return self.record(
            reward=math.fsum(parts.values()),
            reward_parts=parts,
            player=player,
            metrics=self.metrics | env_metrics(metrics or {}) | not_applied,
        )

    def record(self, **more) -> Trajectory:
        """The trajectory of the conversation. The EpisodeRunner adds task, group and index."""
        return Trajectory(
            actor=self.actor,
            messages=self.messages,
            turns=list(self.turns),
            status="truncated" if self.truncated else "ok",
            **more,
        )

    def _check_idle(self) -> None:
        if self.is_busy:
            raise ValueError(
                f"this reply of {self.actor} is still being continued, or its continuation failed; "
                "call fork() before each branch"
            )


class TokenConversation(Conversation):
    """Messages, and the tokens that the actor saw and sampled. Tokens only grow, except where the
    chat template rewrites history."""

    def __init__(
        self,
        speaker: EpisodeActor,
        messages: list[Message],
        tools: list | None,
        sampling: JSONObject,
        session: str,
    ):
        super().__init__(speaker, messages, tools, sampling, session)
        chat = speaker.chat
        assert chat is not None
        if tools:
            chat.tool_calls.check(tools, f"actor {speaker.name}")
            self.metrics["tool_parse_failed"] = 0.0
        least = chat.least_tokens(self.history)
        check_prompt_fits(least, speaker.max_context_tokens, "at least ")
        self.stream = TokenStream(chat, self.history, tools)
        self.is_full = False  # True after messages that cannot fit; they were not encoded.
        self.calls: Message | None = None  # The last turn as a message, if it called tools.
        self.truncated = self.tokens_left < 1

    @property
    def chat_format(self) -> Chat:
        assert self.speaker.chat is not None
        return self.speaker.chat

    @property
    def tokens_left(self) -> int:
        if self.is_full:
            return 0
        return self.speaker.max_context_tokens - len(self.stream.prompt_ids)

    async def hear(self, messages: list[Message]) -> None:
        """Appends messages to the tokens, unless they cannot fit."""
        least = self.chat_format.least_tokens(messages)
        self.is_full = self.is_full or least >= self.tokens_left
        if not self.is_full:
            last = self.turns[-1].completion
            await self.stream.append_soon(last.token_ids, last.text, messages, self.calls)

    async def take_turn(self, seed: int) -> None:
        if self.tokens_left < 1:
            check_prompt_fits(len(self.stream.prompt_ids), self.speaker.max_context_tokens)
        limit = min(self.tokens_left, self.turn_params.max_tokens)
        stops = self.speaker.stop_token_ids
        params = replace(self.turn_params, max_tokens=limit, stop_token_ids=stops)
        replay = self.speaker.replay
        sampling = replay.generate(self, params, seed) if replay else self.generate(params, seed)
        completion = await sampling
        reply = self._read(completion)
        turn = self.stream.turn(completion, self.next_turn, self.state_key)
        turn.max_tokens = self.turn_params.max_tokens
        self.turns.append(turn)
        self.add_reply(reply, completion)

    async def generate(
        self, params: SamplingParams, seed: int, unfinished: Completion | None = None
    ) -> Completion:
        """The next completion. `unfinished`: see Engine.generate()."""
        # The engine keeps no KV cache after the last turn.
        is_last = len(self.turns) + 1 == self.speaker.max_turns
        session = "" if is_last else self.session
        ids, images = self.stream.prompt_ids, self.stream.images
        return await self.speaker.generate(ids, params, seed, session, images, unfinished)

    def _read(self, completion: Completion) -> Message:
        """The turn as a message, with the text of a message that it continues."""
        self.history, self.prefix = without_prefix(self.history)
        if self.tools:
            self._read_calls(completion, self.tools)
        self.opening = ""
        if completion.finish_reason == "length":
            self.opening = unclosed_mark(self.stream.rendered, completion.text)
        text = self.prefix + self.opening + completion.text
        return self.calls or {"role": "assistant", "content": text}

    def _read_calls(self, completion: Completion, tools: list) -> None:
        read = self.chat_format.tool_calls.read
        self.calls, has_failed = read(completion, self.num_replies, tools, self.stream.rendered)
        self.metrics["tool_parse_failed"] += has_failed
        if self.calls and self.prefix:
            # read() strips the text before the calls.
            space = completion.text[: -len(completion.text.lstrip())]
            self.calls["content"] = self.prefix + space + self.calls["content"]

    def accepts(self, messages: Sequence[Message]) -> bool:
        with suppress(ValueError):
            self.chat_format.render([*self.history, *messages], self.tools)
            return True
        return False

    def snapshot(self) -> Conversation:
        same = super().snapshot()
        assert isinstance(same, TokenConversation)
        same.stream = copy.copy(self.stream)
        return same


def check_prompt_fits(num_tokens: int, max_context_tokens: int, bound: str = "") -> None:
    """Raises ValueError if a prompt of num_tokens leaves no room for a reply."""
    if num_tokens >= max_context_tokens:
        raise ValueError(
            f"a prompt of {bound}{num_tokens} tokens fills the context of {max_context_tokens}; "
            "raise --max_prompt_tokens"
        )


def as_messages(messages: str | Sequence[Message]) -> list[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return canonical_messages(messages)


def key_text(value: object) -> str:
    """A state's key as text: the text itself, JSON of any other value, or "" for None. Raises
    ValueError for values that are not JSON, because equal values could have different texts."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the state_key {shorten(value)} is neither text nor JSON: {error}"
        ) from None
