"""An actor that is a remote chat-completions endpoint: a provider's, or what SGLang, vLLM and others serve.

judge = ApiActor(name="judge", url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B", api_key_env="")
reply = await judge.speaker(SamplingParams(max_tokens=256), seed=0).converse(messages).respond()

It speaks and is never trained: no tokens are known of what it says. The key is read from the environment, is no field of
anything that is written or printed, and is taken out of what an endpoint answers.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import re
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from rl_core.data.tasks import shorten
from rl_core.metrics import Metric, Sum
from rl_core.sampling.actor import Conversation, at_most
from rl_core.types import Completion, Message, SamplingParams, Turn, counter_seed

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # between two attempts
SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # keys of a message; endpoints refuse others


@dataclass(kw_only=True)
class ApiActor:
    """Limits and counts are shared by all its conversations in this process, which must be of one event loop."""

    name: str
    url: str  # up to and with /v1
    model: str  # as the endpoint calls it
    api_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the key; "" for an endpoint without one
    max_turns: int = 1  # of one episode
    max_tokens: int | None = None  # of one turn, where more are asked for
    max_concurrent: int = 64  # requests in flight
    requests_per_minute: float = 0.0  # 0 is no limit
    timeout_s: float = 120.0  # of one request
    deadline_s: float = 300.0  # of one reply, with every wait and retry
    max_retries: int = 8
    request: dict[str, Any] = field(default_factory=dict)  # added to every request; None leaves a key out
    is_trainable: bool = field(init=False, default=False)
    counts: dict[str, float] = field(init=False, default_factory=dict)  # since they were last taken

    def __post_init__(self) -> None:
        self.check()
        self.key = read_key(self.name, self.api_key_env)
        try:
            import openai  # an optional library
        except ImportError:
            raise ValueError(f"actor {self.name!r} needs openai, which is not installed: pip install .[api]") from None
        # Retries are ours, so that they are counted, keep to the limits, and free their place while they wait.
        self.client = openai.AsyncOpenAI(base_url=self.url, api_key=self.key or "none", timeout=None, max_retries=0)
        self.places = asyncio.Semaphore(self.max_concurrent)
        self.next_s = self.held_until_s = 0.0  # of the event loop's clock: the next request's turn; the server's wish

    def check(self) -> None:
        at = f"actor {self.name!r}: url="
        parts = urlsplit(self.url)
        # Before anything may print it: a name and password in it are secrets, and so may a query be.
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                f"{at}... must hold no password and no query; put the key into a variable of the environment"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{at}{self.url!r} must begin with http:// or https://, such as http://127.0.0.1:8000/v1")
        for name, lowest in (("max_turns", 1), ("max_concurrent", 1), ("requests_per_minute", 0), ("max_retries", 0)):
            if getattr(self, name) < lowest:
                raise ValueError(f"actor {self.name!r}: {name}={getattr(self, name)} must be at least {lowest}")
        if not 0 < self.timeout_s <= self.deadline_s:
            limits = f"timeout_s={self.timeout_s:g} (of a request) and deadline_s={self.deadline_s:g} (of a reply)"
            raise ValueError(f"actor {self.name!r}: {limits} must be above 0, and the second no shorter")

    @property
    def capacity(self) -> int:
        return sys.maxsize  # what is more than max_concurrent waits here, and holds no engine up

    def speaker(self, params: SamplingParams, seed: int, session: str = "") -> ApiSpeaker:
        """This actor in one episode."""
        return ApiSpeaker(self, at_most(params, self.max_tokens), seed, session)

    def take_metrics(self) -> dict[str, Metric]:
        """What was asked since the last call: requests, retries, replies that failed, tokens as the endpoint counts them,
        and seconds that replies waited for their turn or for the next attempt."""
        names = ("requests", "retries", "failed", "prompt_tokens", "completion_tokens", "waited_s")
        taken, self.counts = self.counts, {}
        return {name: Sum(taken.get(name, 0.0)) for name in names}

    def count(self, name: str, number: float = 1.0) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + number

    async def close(self) -> None:
        await self.client.close()

    async def ask(self, request: dict[str, Any], seed: int) -> dict[str, Any]:
        """The endpoint's answer as it came, with at least one choice. Raises ValueError for what it refuses,
        ConnectionError if there is no answer after deadline_s or max_retries."""
        loop, call = asyncio.get_running_loop(), Call()
        began_s, error = loop.time(), None
        request = {k: v for k, v in {"model": self.model, **request, **self.request}.items() if v is not None}
        try:
            return await asyncio.wait_for(self.attempts(request, seed, call), self.deadline_s)
        except asyncio.TimeoutError:
            error = self.no_answer(call, f"within deadline_s={self.deadline_s:g}, while it waited for {call.waits_for}")
        finally:
            self.count("waited_s", loop.time() - began_s - call.asked_s)
            self.count("failed", not call.is_answered)
        raise error  # out here it drags along no other error, whose request would hold the key

    async def attempts(self, request: dict[str, Any], seed: int, call: Call) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self.deadline_s
        for number in range(self.max_retries + 1):
            answer = await self.attempt(request, call)
            if isinstance(answer, dict):
                call.is_answered = True
                return answer
            call.reason = answer.reason
            if not answer.is_passing:
                raise ValueError(f"actor {self.name!r}: {self.url} refused the request with {call.reason}")
            jitter = random.Random(counter_seed(seed, "pause", number)).uniform(0.5, 1.0)
            pause_s = max(min(FIRST_PAUSE_S * 2**number, MAX_PAUSE_S) * jitter, answer.retry_after_s)
            if number < self.max_retries and loop.time() + pause_s >= deadline_s:
                why = f"within deadline_s={self.deadline_s:g}, which the next attempt in {pause_s:.3g} s would miss"
                raise self.no_answer(call, why)
            call.waits_for = "its next attempt"
            if number < self.max_retries:
                await asyncio.sleep(pause_s)
        raise self.no_answer(call, f"with max_retries={self.max_retries}")

    def no_answer(self, call: Call, why: str) -> ConnectionError:
        last = f" the last: {call.reason};" if call.reason else ""
        return ConnectionError(
            f"actor {self.name!r}: no answer from {self.url} {why}; requests: {call.num_requests};{last} is the server up?"
        )

    async def attempt(self, request: dict[str, Any], call: Call) -> dict[str, Any] | Fault:
        loop = asyncio.get_running_loop()
        call.waits_for = f"a place among max_concurrent={self.max_concurrent}"
        async with self.places:
            call.waits_for = f"its turn with requests_per_minute={self.requests_per_minute:g}"
            start_s = max(loop.time(), self.next_s)
            self.next_s = start_s + (60 / self.requests_per_minute if self.requests_per_minute else 0.0)
            await asyncio.sleep(start_s - loop.time())
            while (pause_s := self.held_until_s - loop.time()) > 0:
                call.waits_for = "the pause that the server asked for"
                await asyncio.sleep(pause_s)
            call.waits_for = "the server"
            self.count("requests")
            self.count("retries", call.num_requests > 0)
            call.num_requests += 1
            began_s = loop.time()
            try:
                found = await self.send(request)
            finally:
                call.asked_s += loop.time() - began_s
        if isinstance(found, dict):
            for name in ("prompt_tokens", "completion_tokens"):
                number = (found.get("usage") or {}).get(name)
                self.count(name, number if isinstance(number, (int, float)) else 0.0)
        else:
            self.held_until_s = max(self.held_until_s, loop.time() + found.retry_after_s)
        return found

    async def send(self, request: dict[str, Any]) -> dict[str, Any] | Fault:
        """One request: the answer, or why there is none."""
        import openai

        create = self.client.chat.completions.with_raw_response.create
        known = {name: request[name] for name in ("model", "messages")}
        try:
            raw = await asyncio.wait_for(create(**known, extra_body=request), self.timeout_s)
            answer = raw.http_response.json()
            check_answer(answer)
            return answer
        except asyncio.TimeoutError:
            return Fault(reason=f"no answer within timeout_s={self.timeout_s:g}")
        except openai.APIStatusError as error:
            status = error.status_code
            return Fault(
                reason=f"{status}: {self.without_key(error.response.text or error.message)}",
                is_passing=status == 429 or status >= 500,
                retry_after_s=retry_after_s(error.response.headers.get("retry-after")),
            )
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            return Fault(reason=self.without_key(f"{type(cause).__name__}: {cause}"))
        except (ValueError, openai.APIError) as error:
            return Fault(reason=f"an answer that cannot be read: {self.without_key(str(error))}")

    def without_key(self, text: str) -> str:
        """The text in one line of bearable length. An endpoint may repeat the key that it refuses."""
        text = text.replace(self.key, "***") if self.key else text
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 400 else f"{text[:400]} ..."


@dataclass(kw_only=True, slots=True)
class Call:
    """How far one reply has come."""

    num_requests: int = 0
    asked_s: float = 0.0  # in requests
    waits_for: str = ""
    reason: str = ""  # why there is no answer yet
    is_answered: bool = False


@dataclass(kw_only=True, slots=True)
class Fault:
    reason: str
    is_passing: bool = True  # it is worth another attempt
    retry_after_s: float = 0.0


def read_key(actor: str, variable: str) -> str:
    """The key in the environment variable, "" if none is named. Raises ValueError, without it, for one that is unfit."""
    if not variable:
        return ""
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise ValueError(
            f"actor {actor!r}: api_key_env must be the name of an environment variable, not the key itself"
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"actor {actor!r}: the environment variable {variable} holds no key; set it, or name none (api_key_env='') for "
            "an endpoint that wants none"
        )
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"actor {actor!r}: the key in {variable} must be one line of ASCII without spaces")
    return key


def check_answer(answer: Any) -> None:
    """Raises ValueError unless it has at least one choice, each with a message."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError(f"no choices in {shorten(answer)}")
    for choice in choices:
        message = choice.get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("content") or "", str):
            raise ValueError(f"no message in {shorten(choice)}")


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After asks for, which gives them or a date; 0 if it does not."""
    if not header:
        return 0.0
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", header):
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    until = until if until.tzinfo else until.replace(tzinfo=timezone.utc)
    return max(0.0, (until - datetime.now(timezone.utc)).total_seconds())


class ApiSpeaker:
    """An ApiActor in one episode, as Speaker is of an Actor."""

    def __init__(self, actor: ApiActor, params: SamplingParams, seed: int, session: str):
        self.actor, self.params, self.seed, self.session = actor, params, seed, session
        self.name, self.max_turns, self.is_trainable = actor.name, actor.max_turns, actor.is_trainable
        self.num_conversations = 0

    def converse(
        self, messages: list[Message], tools: list | None = None, params: SamplingParams | None = None, label: str = ""
    ) -> ApiConversation:
        """A conversation that begins with these messages. Its seeds hang on its label, by default how many came before it."""
        label = label or str(self.num_conversations)
        self.num_conversations += 1
        return ApiConversation(self, messages, tools, params or self.params, f"{self.session}/{label}")

    def close(self) -> None: ...


class ApiConversation:
    """Messages alone: what is not known as tokens can be neither trained nor counted against a context."""

    def __init__(
        self, speaker: ApiSpeaker, messages: list[Message], tools: list | None, params: SamplingParams, session: str
    ):
        self.speaker, self.tools, self.params, self.session = speaker, tools, params, session
        self.messages = list(messages)
        self.turns: list[Turn] = []  # stays empty
        self.num_replies = self.num_forks = 0
        self.truncated = False  # the last reply was cut off

    async def respond(self) -> Completion:
        """The actor's next message, without tokens. It is appended to `messages`. Raises as ApiActor.ask."""
        speaker = self.speaker
        seed = counter_seed(speaker.seed, self.session, self.num_replies)
        answer = await speaker.actor.ask(request_of(self.messages, self.tools, self.params, seed), seed)
        choice = answer["choices"][0]
        self.num_replies += 1
        self.messages.append(message_of(choice))
        completion = completion_of(choice)
        self.truncated = completion.finish_reason == "length"
        return completion

    def add(self, messages: list[Message]) -> bool:
        """What others say to the actor. True: only the endpoint knows whether there is room for the next turn."""
        self.messages.extend(messages)
        return True

    def fork(self) -> ApiConversation:
        """Another conversation that goes on from here by itself, with seeds of its own."""
        other = copy.copy(self)
        other.messages, other.turns = list(self.messages), []
        other.session, other.num_forks = f"{self.session}.{self.num_forks}", 0
        self.num_forks += 1
        return other

    trajectory = Conversation.trajectory  # of no turns, so that there is nothing to train on


def request_of(messages: list[Message], tools: list | None, params: SamplingParams, seed: int) -> dict[str, Any]:
    """Body of a request; what is off is left out, since not every endpoint knows it."""
    return {
        "messages": [{key: message[key] for key in SENT if key in message} for message in messages],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p if params.top_p < 1 else None,
        "top_k": params.top_k or None,
        "min_p": params.min_p or None,
        "stop": list(params.stop) or None,
        "tools": list(tools) if tools else None,
        "seed": seed >> 1,  # some read 32 bits with a sign
    }


def message_of(choice: dict[str, Any]) -> Message:
    said = choice["message"]
    calls = {"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}
    return {"role": "assistant", "content": said.get("content") or "", **calls}


def completion_of(choice: dict[str, Any]) -> Completion:
    """What was said, with no tokens, as by no version of a policy."""
    return Completion(
        token_ids=[],
        logprobs=[],
        text=message_of(choice)["content"],
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        policy_version=-1,
    )
