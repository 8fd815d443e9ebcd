"""A named actor, and its conversation in one episode, which hooks hold as its reply."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast
from zlib import crc32

from rl_core.data.chat import Chat, TokenStream, without_prefix
from rl_core.data.messages import canonical_messages, canonical_tools, shorten
from rl_core.data.thoughts import unclosed_mark, without_thoughts
from rl_core.errors import nearest
from rl_core.sampling.engine import Engine, EngineDied
from rl_core.sampling.hooks import wait_for_all
from rl_core.sampling.reward_parts import NOT_APPLIED, env_metrics, reward_values
from rl_core.types import (
    JSON,
    Completion,
    InputImage,
    JSONObject,
    Message,
    RunError,
    SamplingParams,
    Trajectory,
    counter_seed,
)

T = TypeVar("T")

# The learner assumes the sampling parameters of a trainable actor: a reply that overrides one of
# these is not trained.
DRAWING = ("temperature", "top_p", "top_k", "min_p")
SAMPLING = ("max_tokens", "stop", *DRAWING)  # Arguments of respond() that override the defaults.
MAX_REVIVALS = 3  # Attempts at a task whose engine dies.


class ChatEngine(Protocol):
    """An engine that takes messages, such as an API."""

    async def chat(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> tuple[Message, Completion]: ...


class Lease(Protocol):
    """See engines/lease.py."""

    def of(self, engine: Engine) -> AbstractAsyncContextManager[None]: ...


class AgentEndpoint(Protocol):
    """An HTTP endpoint for programs; see environments/agents/endpoint.py."""

    api_key: str

    @property
    def base_url(self) -> str: ...
    def trajectories(self, reward: float) -> list[Trajectory]: ...


OpenEndpoint = Callable[["Actor"], AbstractAsyncContextManager[AgentEndpoint]]


class Speaker(Protocol):
    """An actor that hooks address: Actor, ApiActor or ScriptedActor."""

    name: str
    is_trainable: bool

    @property
    def capacity(self) -> int: ...
    def bind_episode(
        self, params: SamplingParams, seed: int, session: str, max_turns: int = 0
    ) -> Actor: ...


class Conversation:
    """Messages, and the tokens that the actor saw and sampled. Tokens only grow, except where the
    chat template rewrites history. A conversation without a returned trajectory is not trained."""

    def __init__(
        self,
        speaker: Actor,
        messages: list[Message],
        tools: list | None,
        sampling: JSONObject,
        session: str,
    ):
        self.speaker = speaker
        self.session = session
        self.tools = tools
        assert speaker.params is not None
        self.params = replace(speaker.params, **sampling) if sampling else speaker.params
        self.turn_params = self.params
        self.overridden = [name for name in DRAWING if name in sampling]
        self.state_key = ""  # Key of the current turn.
        self.history = list(messages)
        self.turns = []
        self.marks: list[tuple[int, TokenStream | None]] = []  # One entry after each reply.
        self.text = ""  # Text of the actor's last turn; "" if the context was full.
        self.prefix = ""  # Text of the message that the last turn continued.
        self.opening = ""  # Mark of the thoughts, opened by the prompt, in which the turn was cut.
        if tools and speaker.chat:
            speaker.chat.tool_calls.check(tools, f"actor {speaker.name}")
        self.is_full = False  # True after messages that cannot fit; they were not encoded.
        if speaker.chat:
            least = speaker.chat.least_tokens(self.history)
            check_room(least, speaker.max_context_tokens, "at least ")
        self.stream = TokenStream(speaker.chat, self.history, tools) if speaker.chat else None
        self.calls: Message | None = None  # The last turn as a message, if it called tools.
        self.metrics: dict[str, float] = {"tool_parse_failed": 0.0} if tools and self.stream else {}
        self.truncated = self.room < 1  # True if a turn hit max_tokens, or the context is full.
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
        return without_thoughts(self.opening + self.text)

    @property
    def last_text(self) -> str:
        """Text of the actor's last turn, also if the context is full and `text` is ""."""
        return next((m["content"] for m in reversed(self.history) if m["role"] == "assistant"), "")

    @property
    def room(self) -> float:
        """Number of tokens that still fit into the context."""
        if self.stream is None:
            return math.inf
        if self.is_full:
            return 0
        return self.speaker.max_context_tokens - len(self.stream.prompt_ids)

    @property
    def next_turn(self) -> str:
        """Name of the next turn, unique in the run."""
        return f"{self.session}#{self.num_replies}"

    async def respond(
        self, messages: str | Sequence[Message] = (), state_key: JSON = None, **limits: JSON
    ) -> Conversation:
        """Continues this conversation with `messages` and the actor's next turn, and returns it.
        If the context is full, the text is "" and the conversation is truncated. Raises ValueError
        if the first prompt fills the context. `state_key`: a value that the hook state_key could
        return. `limits`: max_tokens and stop of this turn."""
        self._check_idle()
        self.state_key = key_text(state_key)
        self.turn_params = replace(self.params, **limits) if limits else self.params
        messages = as_messages(messages) if messages else []
        # Stays True after an error, because tokens and messages may differ then.
        self.is_busy = True
        if self.num_replies:
            self.history += messages
            if self.stream:
                await self._hear(messages)
        if self.num_replies and self.room < 1:
            self.text = ""
            self.truncated = True
        else:
            await self._speak()
        self.is_busy = False
        return self

    async def _hear(self, messages: list[Message]) -> None:
        """Appends messages to the tokens, unless they cannot fit."""
        assert self.stream and self.speaker.chat
        self.is_full = self.is_full or self.speaker.chat.least_tokens(messages) >= self.room
        if not self.is_full:
            last = self.turns[-1].completion
            await self.stream.append_soon(last.token_ids, last.text, messages, self.calls)

    async def _speak(self) -> None:
        seed = counter_seed(self.speaker.seed, self.session, self.num_replies)
        if self.stream is None:
            reply, completion = await self._chat(seed)
        else:
            completion = await self._sample(seed)
            reply = self._read(completion)
            turn = self.stream.turn(completion, self.next_turn, self.state_key)
            turn.max_tokens = self.turn_params.max_tokens
            self.turns.append(turn)
        self.history.append(reply)
        self.text = completion.text
        self.truncated = completion.finish_reason == "length"
        self.num_replies += 1
        self.marks.append((len(self.history), copy.copy(self.stream)))

    async def _chat(self, seed: int) -> tuple[Message, Completion]:
        engine = cast(ChatEngine, self.speaker.engine)
        return await engine.chat(self.history, self.tools, self.turn_params, seed)

    async def _sample(self, seed: int) -> Completion:
        actor = self.speaker
        assert self.stream
        if self.room < 1:
            check_room(len(self.stream.prompt_ids), actor.max_context_tokens)
        limit = min(self.room, self.turn_params.max_tokens)
        stops = actor.stop_token_ids
        params = replace(self.turn_params, max_tokens=limit, stop_token_ids=stops)
        return await self._generate(params, seed)

    async def _generate(self, params: SamplingParams, seed: int, **begun: Completion) -> Completion:
        # The engine keeps no KV cache after the last turn.
        is_last = len(self.turns) + 1 == self.speaker.max_turns
        session = "" if is_last else self.session
        assert self.stream
        ids, images = self.stream.prompt_ids, self.stream.images
        return await self.speaker.generate(ids, params, seed, session, images, **begun)

    def _read(self, completion: Completion) -> Message:
        """The turn as a message, with the text of a message that it continues."""
        self.history, self.prefix = without_prefix(self.history)
        assert self.stream and self.speaker.chat
        if self.tools:
            read = self.speaker.chat.tool_calls.read
            self.calls, has_failed = read(
                completion, self.num_replies, self.tools, self.stream.rendered
            )
            self.metrics["tool_parse_failed"] += has_failed
        if self.calls and self.prefix:
            # read() strips the text before the calls.
            space = completion.text[: -len(completion.text.lstrip())]
            self.calls["content"] = self.prefix + space + self.calls["content"]
        self.opening = ""
        if completion.finish_reason == "length":
            self.opening = unclosed_mark(self.stream.rendered, completion.text)
        text = self.prefix + self.opening + completion.text
        return self.calls or {"role": "assistant", "content": text}

    def take_back(self) -> None:
        """Drops messages after the last reply, such as those that the chat template refused."""
        num_messages, stream = self.marks[-1]
        del self.history[num_messages:], self.turns[self.num_replies :]
        self.stream = copy.copy(stream)
        self.is_full = False
        self.truncated = bool(self.turns) and self.turns[-1].completion.finish_reason == "length"
        self.is_busy = False

    def accepts(self, messages: Sequence[Message]) -> bool:
        """True if the chat template renders the conversation with these messages at its end."""
        if self.stream is None:
            return True
        assert self.speaker.chat
        with suppress(ValueError):
            self.speaker.chat.render([*self.history, *messages], self.tools)
            return True
        return False

    def fork(self) -> Conversation:
        """A second conversation with the same tokens so far, which continues with its own seeds."""
        self._check_idle()
        return self._branch()

    def at(self, num_replies: int) -> Conversation:
        """A branch with the tokens and messages up to reply `num_replies`. Also works during a
        turn."""
        branch = self._branch()
        num_messages, stream = self.marks[num_replies - 1]
        del branch.history[num_messages:], branch.turns[num_replies:], branch.marks[num_replies:]
        branch.stream = copy.copy(stream)
        branch.is_full = False
        last = branch.history[-1]
        branch.calls = last if last.get("tool_calls") else None
        branch.text = last.get("content") or ""
        if branch.turns:
            branch.text = branch.turns[-1].completion.text
            branch.truncated = branch.turns[-1].completion.finish_reason == "length"
        if num_replies < self.num_replies:
            branch.opening = ""
        branch.num_replies = num_replies
        branch.is_busy = False
        return branch

    def _branch(self) -> Conversation:
        branch = copy.copy(self)
        branch.history = list(self.history)
        branch.turns = list(self.turns)
        branch.marks = list(self.marks)
        branch.stream = copy.copy(self.stream)
        branch.metrics = dict(self.metrics)
        branch.session = f"{self.session}.{self.num_forks}"
        branch.num_forks = 0
        self.num_forks += 1
        self.speaker.conversations.append(branch)
        return branch

    def trajectory(
        self,
        reward: float | Mapping[str, float | None] | None,
        *,
        seat: str = "",
        metrics: dict[str, float] | None = None,
    ) -> Trajectory:
        """The scored trajectory of the conversation. A dict is summed and each part is logged. In a
        group, trajectories of one actor and seat share a baseline."""
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
            seat=seat,
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


@dataclass(kw_only=True, slots=True)
class Actor:
    """A model under a name. Hooks get the copy that bind_episode() makes, with a seed and its
    conversations."""

    name: str
    engine: Engine | None  # None if another rank samples with this rank's device.
    chat: Chat | None  # None if the engine takes messages, and its tokens are unknown.
    stop_token_ids: tuple[int, ...] = ()  # Tokens that end a turn.
    max_context_tokens: int = 0  # Limit of one conversation.
    max_tokens: int | None = None  # Limit of one turn.
    is_trainable: bool = True  # True if the actor has a learner.
    adapter: str = ""  # LoRA adapter for sampling.
    lease: Lease | None = None  # None if engines share no device.
    stale_engine: Engine | None = None  # Samples a fraction of the turns with stale weights.
    stale_frac: float = 0.0
    open_endpoint: OpenEndpoint | None = None
    # bind_episode() sets the fields from here to max_turns.
    params: SamplingParams | None = None
    seed: int = 0
    session: str = ""
    max_turns: int = 0  # 0 if unknown.
    make_conversation: Callable[..., Conversation] = Conversation
    # Hash of the arguments of respond() -> number of replies. Empty in a copy, like conversations.
    num_replies: Counter[str] = field(init=False, default_factory=Counter)
    conversations: list[Conversation] = field(init=False, default_factory=list)

    @property
    def capacity(self) -> int:
        return self.engine.capacity if self.engine else 0

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (self.engine, self.stale_engine) if engine is not None]

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
        session: str = "",
        images: Sequence[InputImage] = (),
        **begun: Completion,
    ) -> Completion:
        """One completion. The seed chooses between engine and stale_engine. Raises ValueError for
        images if the engine takes none."""
        engine = self.engine
        if self.stale_engine is not None and counter_seed("lagged", seed) < self.stale_frac * 2**32:
            engine = self.stale_engine
        assert engine is not None
        seen: dict = {"images": images} if images else {}
        if images and not engine.sees:
            raise ValueError(f"{type(engine).__name__} of actor {self.name} takes no images")
        async with self.device(engine):
            return await engine.generate(
                prompt_ids,
                params,
                seed=seed,
                session=session,
                adapter=self.adapter,
                **begun,
                **seen,
            )

    async def wake(self) -> None:
        """Restarts engines that died."""
        for engine in self.engines:
            async with self.device(engine):
                await engine.wake()

    def device(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        return self.lease.of(engine) if self.lease else nullcontext()

    def bind_episode(
        self, params: SamplingParams, seed: int, session: str, max_turns: int = 0
    ) -> Actor:
        if self.max_tokens and self.max_tokens < params.max_tokens:
            params = replace(params, max_tokens=self.max_tokens)
        return replace(self, params=params, seed=seed, session=session, max_turns=max_turns)

    def endpoint(self) -> AbstractAsyncContextManager[AgentEndpoint]:
        """An HTTP endpoint for programs that use this actor: `async with actor.endpoint() as llm`,
        then llm.base_url, llm.api_key and llm.trajectories(reward)."""
        assert self.open_endpoint is not None
        return self.open_endpoint(self)

    def converse(
        self, messages: list[Message], tools: list | None = None, label: str = "", **sampling
    ) -> Conversation:
        """A conversation that begins with these messages. Its seeds depend on `label`, by default
        its number. Raises ValueError if the chat template refuses the messages."""
        session = f"{self.session}/{label or len(self.conversations)}"
        made = self.make_conversation(self, messages, tools, sampling, session)
        self.conversations.append(made)
        return made

    async def respond(
        self,
        messages: str | Sequence[Message],
        n: int | None = None,
        tools: list | None = None,
        state_key: JSON = None,
        **sampling,
    ) -> Conversation | list[Conversation]:
        """One reply, or a list of `n` that are sampled concurrently. A string is one user message.
        `state_key`: a value that the hook state_key could return. `sampling`: max_tokens and stop;
        temperature, top_p, top_k and min_p too, but then the reply cannot be trained."""
        for name in sampling.keys() - set(SAMPLING):
            hint = nearest(name, ("n", "tools", "state_key", *SAMPLING))
            raise ValueError(f"respond({name}=...) is unknown; {hint}")
        if "stop" in sampling:
            stop = sampling["stop"]
            sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        messages, tools = as_messages(messages), canonical_tools(tools)
        if self.chat is not None and self.chat.least_tokens(messages) < self.max_context_tokens:
            await self.chat.prepare(messages, tools)
        # A hash, because the order of concurrent calls may depend on timing.
        prompt_hash = f"{crc32(json.dumps([messages, tools], default=str).encode()):08x}"
        replies = []
        for _ in range(1 if n is None else n):
            label = f"{prompt_hash}-{self.num_replies[prompt_hash]}"
            replies.append(self.converse(messages, tools, label, **sampling))
            self.num_replies[prompt_hash] += 1
        await wait_for_all([reply.respond(state_key=state_key) for reply in replies])
        return replies[0] if n is None else replies


async def revived(work: Callable[[], Awaitable[T]], actors: Iterable[Speaker], where: str) -> T:
    """The result of work(). If an engine dies meanwhile, restarts it and calls work() again. Raises
    RunError, which names `where`, if an engine cannot restart or dies again and again."""
    last: EngineDied | None = None
    for _ in range(MAX_REVIVALS):
        try:
            return await work()
        except EngineDied as error:
            last = error
        try:
            for actor in actors:
                if isinstance(actor, Actor):  # An API actor has no engine.
                    await actor.wake()
        except EngineDied as error:
            raise RunError(f"an engine died and cannot be started again: {error}") from error
    raise RunError(f"an engine died {MAX_REVIVALS} times in {where}: {last}") from last


class EpisodeActors(dict[str, Actor]):
    """The actors of one episode by name, as hooks get them."""

    def __init__(
        self,
        actors: Mapping[str, Speaker],
        params: SamplingParams | None,
        seed: int,
        session: str,
        max_turns: int = 0,
    ):
        self.max_turns = max_turns
        for name, actor in actors.items():
            assert params is not None
            self[name] = actor.bind_episode(params, seed, f"{session}/{name}", max_turns)

    def __missing__(self, name: str) -> Actor:
        known = nearest(str(name), sorted(self))
        raise KeyError(f"{name!r} is not an actor; {known} (--actors.{name}.model PATH adds one)")

    @property
    def learners(self) -> list[str]:
        """Names of the trainable actors, or of all actors if none is trainable."""
        return [name for name, actor in self.items() if actor.is_trainable] or list(self)

    @property
    def conversations(self) -> list[Conversation]:
        return [conversation for actor in self.values() for conversation in actor.conversations]

    def close(self) -> None:
        """Frees the KV cache and other state of the episode in all engines."""
        for conversation in self.conversations:
            for engine in conversation.speaker.engines:
                engine.end_session(conversation.session)


def check_room(num_tokens: int, max_context_tokens: int, bound: str = "") -> None:
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
