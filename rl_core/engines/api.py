"""An actor that is an OpenAI-compatible endpoint: a provider's, or what SGLang, vLLM and others
serve.

judge = ApiActor(name="judge", url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B",
api_key_env="") reply = await judge.in_episode(SamplingParams(max_tokens=256),
seed=0).respond(messages)

It cannot be trained: only the text of its replies is known. The key is read from the environment.
It is never printed or written, and is removed from an endpoint's answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from rl_core.config import Config
from rl_core.data.tasks import shorten
from rl_core.metrics import Metric, Sum
from rl_core.sampling.actor import Actor
from rl_core.types import Completion, Message, SamplingParams

PING_TIMEOUT_S = 10.0
# Keys of a message; endpoints refuse others.
SENT = ("role", "content", "name", "tool_calls", "tool_call_id")
COUNTS = ("requests", "retries", "failed", "prompt_tokens", "completion_tokens")


@dataclass(kw_only=True)
class ApiActor:
    """All its conversations in this process share its limits."""

    name: str
    url: str  # up to and with /v1
    model: str  # as the endpoint calls it
    # The environment variable that holds the key; "" for an endpoint without one.
    api_key_env: str = "OPENAI_API_KEY"
    max_tokens: int | None = None  # upper bound of one turn
    max_concurrent: int = 64  # requests in flight
    timeout_s: float = 120.0  # of one attempt
    max_retries: int = 8  # after 408, 409, 429, 5xx and broken connections; respects Retry-After
    # Added to every request; None leaves a key out.
    request: dict[str, Any] = field(default_factory=dict)
    is_trainable: bool = field(init=False, default=False)
    capacity: int = field(
        init=False, default=sys.maxsize
    )  # requests beyond max_concurrent wait here and block no engine
    counts: Counter[str] = field(init=False, default_factory=Counter)  # of COUNTS

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/@?]+[^@?]*", self.url):
            rule = "must be like http://127.0.0.1:8000/v1, without a password or a query"
            # Which may hold a secret, so it is not shown.
            raise ValueError(f"actor {self.name!r}: its url {rule}")
        self.key = read_key(self.name, self.api_key_env)
        self.client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self.key or "none",
            timeout=self.timeout_s,
            max_retries=self.max_retries,
        )
        self.slots = asyncio.Semaphore(self.max_concurrent)

    def ping(self) -> None:
        """Raises ValueError if nobody answers at the URL. Any answer will do: not every endpoint
        lists its models."""
        try:
            httpx.get(f"{self.url}/models", timeout=PING_TIMEOUT_S)
        except httpx.TransportError as error:
            cause = self._told(f"no answer to GET /models ({error})")
            raise ValueError(f"{cause}; start it, or correct --actors.{self.name}.api") from None

    def in_episode(
        self, params: SamplingParams, seed: int, session: str = "", max_turns: int = 0
    ) -> Actor:
        """This actor in one episode. Its conversations hold messages and no tokens: they are not
        trained, and only the endpoint knows how full its context is."""
        actor = Actor(
            name=self.name, engine=self, chat=None, max_tokens=self.max_tokens, is_trainable=False
        )
        return actor.in_episode(params, seed, session, max_turns)

    async def chat(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> tuple[Message, Completion]:
        """The next message, and a completion with its text. Raises ValueError if the endpoint
        refuses the request or its answer cannot be read, ConnectionError if it does not answer."""
        request = {"model": self.model, **request_of(messages, tools, params, seed), **self.request}
        request = {key: value for key, value in request.items() if value is not None}
        known = {key: request.pop(key) for key in ("model", "messages")}
        answer = ""
        async with self.slots:
            self.counts["requests"] += 1
            try:
                raw = await self.client.chat.completions.with_raw_response.create(
                    **known, extra_body=request
                )
                self.counts["retries"] += raw.retries_taken
                answer = raw.http_response.text
                return self._read(json.loads(answer))
            except openai.APIStatusError as found:
                status = found.status_code
                kind = ConnectionError if status == 429 or status >= 500 else ValueError
                told = f"{status}: {found.response.text or found.message}"
            except openai.APIConnectionError as found:
                kind, told = ConnectionError, f"no answer ({found.__cause__ or found}); is it up?"
            except (ValueError, LookupError, TypeError, AttributeError) as found:
                kind, told = ValueError, f"an answer that cannot be read ({found!r}): {answer}"
        self.counts["failed"] += 1
        # Raised here, it has no context whose request would hold the key.
        raise kind(self._told(told))

    def _read(self, answer: Any) -> tuple[Message, Completion]:
        choice = answer["choices"][0]
        said, usage = choice["message"], answer.get("usage") or {}
        message = {"role": "assistant", "content": said.get("content") or ""}
        if not isinstance(message["content"], str):
            raise TypeError("its content is no text")
        if said.get("tool_calls"):
            message["tool_calls"] = said["tool_calls"]
        for name in ("prompt_tokens", "completion_tokens"):
            self.counts[name] += usage.get(name) or 0
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return message, Completion(text=message["content"], finish_reason=reason)

    def _told(self, text: str) -> str:
        """One short line without the key, which an endpoint may repeat."""
        text = text.replace(self.key, "***") if self.key else text
        return f"actor {self.name!r}: {self.url} gave {shorten(' '.join(text.split()), 400)}"

    def end_session(self, session: str) -> None: ...

    def take_metrics(self) -> dict[str, Metric]:
        """Counts since the last call: requests, retries, replies that failed, and tokens as the
        endpoint counts them."""
        counts, self.counts = self.counts, Counter()
        return {name: Sum(counts[name]) for name in COUNTS}

    async def close(self) -> None:
        await self.client.close()


def request_of(
    messages: list[Message], tools: list | None, params: SamplingParams, seed: int
) -> dict[str, Any]:
    """Body of a request. A parameter that is off is None, since not every endpoint knows it."""
    return {
        "messages": [{key: message[key] for key in SENT if key in message} for message in messages],
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p if params.top_p < 1 else None,
        "top_k": params.top_k or None,
        "min_p": params.min_p or None,
        "stop": list(params.stop) or None,
        "tools": list(tools) if tools else None,
        "seed": seed >> 1,  # some endpoints read a signed 32-bit number
    }


def read_key(actor: str, variable: str) -> str:
    """The key in the environment variable, "" if none is named. An error never shows it."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        shown = variable if variable.isidentifier() else "it"  # it may be the key itself
        raise ValueError(
            f"actor {actor!r}: api_key_env must name an environment variable with a key, and "
            f"{shown} holds none; for an "
            "endpoint without a key give api_key_env=''"
        )
    return key


def make_api_actor(config: Config, name: str) -> ApiActor:
    actor = config.actors[name]
    return ApiActor(
        name=name,
        url=actor.api,
        model=actor.model,
        api_key_env=actor.api_key_env,
        max_tokens=actor.max_tokens,
        max_concurrent=config.rollout.max_concurrent,
        request={"chat_template_kwargs": actor.chat_template_kwargs or None},
    )
