"""A named speaker. An Actor lasts for the run, a Speaker for one episode, a Conversation is what a Speaker sees of it."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from rl_core.data.chat import Chat, TokenStream
from rl_core.sampling.engine import DeviceLease, Engine
from rl_core.types import Completion, Message, SamplingParams, Task, Trajectory, Turn, counter_seed


@dataclass(kw_only=True, slots=True)
class Actor:
    name: str
    engine: Engine | None  # None: another rank samples with this one's device
    chat: Chat
    stop_token_ids: tuple[int, ...]  # end its turn
    max_turns: int  # of one episode
    max_context_tokens: int  # of one conversation
    max_tokens: int | None = None  # of one turn, where more are asked for
    is_trainable: bool = True  # it has a learner
    adapter: str = ""  # LoRA adapter that it speaks with
    lease: DeviceLease | None = None  # where engines share a device
    older: Engine | None = None  # an engine with older weights, which answers a part of the turns
    older_frac: float = 0.0

    @property
    def capacity(self) -> int:
        return self.engine.capacity if self.engine else 0

    @property
    def engines(self) -> list[Engine]:
        return [engine for engine in (self.engine, self.older) if engine is not None]

    async def generate(self, prompt_ids: list[int], params: SamplingParams, seed: int, session: str = "") -> Completion:
        """One completion. Which engine gives it depends on the seed alone."""
        is_older = self.older is not None and counter_seed("lagged", seed) < self.older_frac * 2**32
        engine = self.older if is_older else self.engine
        async with self.device(engine):
            return await engine.generate(prompt_ids, params, seed=seed, session=session, adapter=self.adapter)

    async def wake(self) -> None:
        """Engines that died start again."""
        for engine in self.engines:
            async with self.device(engine):
                await engine.wake()

    def device(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        return self.lease.of(engine) if self.lease else nullcontext()

    def end_session(self, session: str) -> None:
        for engine in self.engines:
            engine.end_session(session)

    def speaker(self, params: SamplingParams, seed: int, session: str) -> Speaker:
        """This actor in one episode."""
        return Speaker(self, at_most(params, self.max_tokens), seed, session)


def at_most(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    limit = params.max_tokens if max_tokens is None else min(params.max_tokens, max_tokens)
    return dataclasses.replace(params, max_tokens=limit)


class Speaker:
    """An actor in one episode. The same seed gives the same replies."""

    def __init__(self, actor: Actor, params: SamplingParams, seed: int, session: str):
        self.actor, self.params, self.seed, self.session = actor, params, seed, session
        self.name, self.max_turns, self.is_trainable = actor.name, actor.max_turns, actor.is_trainable
        self.sessions: list[str] = []

    def converse(
        self, messages: list[Message], tools: list | None = None, params: SamplingParams | None = None, label: str = ""
    ) -> Conversation:
        """A conversation that begins with these messages. Its seeds hang on its label, by default how many came before it.
        Raises ValueError if the chat template refuses the messages."""
        self.sessions.append(f"{self.session}/{label or len(self.sessions)}")
        return Conversation(self, messages, tools, params or self.params, self.sessions[-1])

    def close(self) -> None:
        for session in self.sessions:
            self.actor.end_session(session)


class Conversation:
    """Messages and, beside them, the tokens that the actor saw and sampled. The tokens only grow, but where the chat
    template rewrites history."""

    def __init__(
        self, speaker: Speaker, messages: list[Message], tools: list | None, params: SamplingParams, session: str
    ):
        self.speaker, self.params, self.session = speaker, params, session
        self.messages = list(messages)
        self.turns: list[Turn] = []
        self.num_forks = 0
        self.stream = TokenStream(speaker.actor.chat, self.messages, tools)
        self.truncated = self.is_full  # a turn hit max_tokens, or the context is full

    @property
    def is_full(self) -> bool:
        return len(self.stream.prompt_ids) >= self.speaker.actor.max_context_tokens

    async def respond(self) -> Completion:
        """The actor's next message. It is appended to `messages`. Raises ValueError if no token fits in the context."""
        speaker, prompt_ids = self.speaker, self.stream.prompt_ids
        room = speaker.actor.max_context_tokens - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens fills the context of {speaker.actor.max_context_tokens}; "
                "raise --max_prompt_tokens"
            )
        params = dataclasses.replace(
            self.params,
            max_tokens=min(room, self.params.max_tokens),
            stop_token_ids=speaker.actor.stop_token_ids,
        )
        seed = counter_seed(speaker.seed, self.session, len(self.turns))
        is_last = len(self.turns) + 1 == speaker.max_turns  # nothing is kept for a turn that will not come
        session = "" if is_last else self.session
        completion = await speaker.actor.generate(prompt_ids, params, seed, session)
        self.turns.append(self.stream.turn(completion))
        self.messages.append({"role": "assistant", "content": completion.text})
        self.truncated = completion.finish_reason == "length"
        return completion

    def add(self, messages: list[Message]) -> bool:
        """What others say to the actor. False if the next turn has no room left in the context."""
        last = self.turns[-1].completion
        self.messages.extend(messages)
        self.stream.append(last.token_ids, last.text, messages)
        self.truncated = self.is_full
        return not self.truncated

    def fork(self) -> Conversation:
        """Another conversation that goes on from here by itself, with the same tokens so far and seeds of its own."""
        other = copy.copy(self)
        other.messages, other.turns, other.stream = list(self.messages), list(self.turns), copy.copy(self.stream)
        other.session, other.num_forks = f"{self.session}.{self.num_forks}", 0
        self.num_forks += 1
        self.speaker.sessions.append(other.session)
        return other

    def trajectory(
        self, task: Task, *, reward: float, reward_parts: dict[str, float], metrics: dict[str, float]
    ) -> Trajectory:
        """This conversation as it stands, scored; who asked for it fills in group and index."""
        return Trajectory(
            task_id=task.id,
            env=task.env,
            group_id="",
            actor=self.speaker.name,
            messages=list(self.messages),
            turns=list(self.turns),
            reward=reward,
            reward_parts=reward_parts,
            metrics=metrics,
            status="truncated" if self.truncated else "ok",
        )
