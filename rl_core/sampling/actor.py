"""Named actors, and those of one episode as hooks get them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar
from zlib import crc32

from rl_core.data.canonical_messages import canonical_tools
from rl_core.data.chat import Chat
from rl_core.errors import nearest
from rl_core.sampling.conversation import (
    SAMPLING_FLAGS,
    Conversation,
    Replay,
    TokenConversation,
    as_messages,
)
from rl_core.sampling.deadlines import wait_for_all
from rl_core.sampling.engine import Engine, EngineDied
from rl_core.types import (
    JSON,
    Completion,
    InputImage,
    Message,
    RunError,
    SamplingParams,
    Trajectory,
    counter_seed,
)

T = TypeVar("T")

# Arguments of respond() that override the defaults.
SAMPLING = ("max_tokens", "stop", *SAMPLING_FLAGS)
MAX_REVIVALS = 3  # Attempts at a task whose engine dies.


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
    replay: Replay | None = None  # Saved turns of the episode.
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
        unfinished: Completion | None = None,
    ) -> Completion:
        """One completion. The seed chooses between engine and stale_engine. Raises ValueError for
        images if the engine takes none."""
        engine = self.engine
        if self.stale_engine is not None and counter_seed("lagged", seed) < self.stale_frac * 2**32:
            engine = self.stale_engine
        assert engine is not None
        options: dict = {"images": images} if images else {}
        if unfinished is not None:
            options["unfinished"] = unfinished
        if images and not engine.sees:
            raise ValueError(f"{type(engine).__name__} of actor {self.name} takes no images")
        async with self.device(engine):
            return await engine.generate(
                prompt_ids,
                params,
                seed=seed,
                session=session,
                adapter=self.adapter,
                **options,
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
        kind = Conversation if self.chat is None else TokenConversation
        made = kind(self, messages, tools, sampling, session)
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
            from rl_core.data.chat_threads import prepare

            await prepare(self.chat, messages, tools)
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
