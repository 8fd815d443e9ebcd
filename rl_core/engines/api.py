"""An actor behind an API: a provider's, or an endpoint that SGLang, vLLM and others serve. The
URL's end names the dialect (engines/api_dialects.py).

judge = ApiActor(name="judge", url="http://127.0.0.1:8000/v1", model="Qwen/Qwen3-8B",
api_key_env="") reply = await judge.bind_episode(SamplingParams(max_tokens=256),
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
from importlib import import_module
from typing import cast

import httpx

from rl_core.config import Config
from rl_core.data.messages import without_prefix
from rl_core.engines.api_dialects import dialect_of
from rl_core.errors import keep_ends
from rl_core.metrics import Metric, Sum
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import Engine
from rl_core.types import JSON, Completion, JSONObject, Message, SamplingParams

PING_TIMEOUT_S = 10.0
COUNTS = ("requests", "retries", "failed", "prompt_tokens", "completion_tokens")


@dataclass(kw_only=True)
class ApiActor:
    """All its conversations in this process share its limits."""

    name: str
    # Up to and with /v1, or with the path of a dialect, such as /v1/messages.
    url: str
    model: str  # The endpoint's name of the model.
    # The environment variable that holds the key; "" for an endpoint without one.
    # None: the variable of the dialect's official client.
    api_key_env: str | None = None
    max_tokens: int | None = None  # upper bound of one turn
    max_concurrent: int = 64  # requests in flight
    timeout_s: float = 120.0  # Limit of one attempt.
    # Retries after 408, 409, 429, 5xx and broken connections. Retry-After is respected.
    max_retries: int = 8
    # Added to every request; None leaves a key out.
    request: JSONObject = field(default_factory=dict)
    is_trainable: bool = field(init=False, default=False)
    # Requests beyond max_concurrent wait here and block no engine.
    capacity: int = field(init=False, default=sys.maxsize)
    counts: Counter[str] = field(init=False, default_factory=Counter)  # Keys: COUNTS.

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/@?]+[^@?]*", self.url):
            rule = "must be like http://127.0.0.1:8000/v1, without a password or a query"
            # The URL may hold a secret, so the error does not show it.
            raise ValueError(f"actor {self.name!r}: its url {rule}")
        self.dialect, self.url = dialect_of(self.url)
        if self.api_key_env is None:
            self.api_key_env = self.dialect.key_variable
        self.key = read_key(self.name, self.api_key_env)
        self.client = self.dialect.client(self.url, self.key, self.timeout_s, self.max_retries)
        library = import_module(self.dialect.package)
        self.status_error = library.APIStatusError
        self.connection_error = library.APIConnectionError
        if "chat_template_kwargs" in self.request and self.dialect.suffix != "/chat/completions":
            raise ValueError(
                f"actor {self.name!r}: {self.dialect.suffix} has no chat_template_kwargs; leave "
                "them out"
            )
        self.slots = asyncio.Semaphore(self.max_concurrent)

    def ping(self) -> None:
        """Raises ValueError if nobody answers at the URL. Every answer will do: not all endpoints
        list its models."""
        try:
            httpx.get(f"{self.url}/models", timeout=PING_TIMEOUT_S)
        except httpx.TransportError as error:
            cause = self._failure(f"no answer to GET /models ({error})")
            raise ValueError(f"{cause}; start it, or correct --actors.{self.name}.api") from None

    def bind_episode(
        self, params: SamplingParams, seed: int, session: str = "", max_turns: int = 0
    ) -> Actor:
        """This actor in one episode. Its conversations hold messages and no tokens: they are not
        trained, and only the endpoint knows how full its context is."""
        engine = cast(Engine, self)  # Without a chat, Actor calls the method chat() alone.
        actor = Actor(
            name=self.name,
            engine=engine,
            chat=None,
            max_tokens=self.max_tokens,
            is_trainable=False,
        )
        return actor.bind_episode(params, seed, session, max_turns)

    async def chat(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> tuple[Message, Completion]:
        """The next message, and a completion with its text. Raises ValueError if the endpoint
        refuses the request or its answer cannot be read, and for a last message to be continued;
        ConnectionError if it does not answer."""
        if without_prefix(messages)[1]:
            raise ValueError(f"{self.name}: an API cannot continue the last message; leave it out")
        body = {"model": self.model, **self.dialect.body(messages, tools, params, seed)}
        body |= self.request
        body = {key: value for key, value in body.items() if value is not None}
        answer = ""
        async with self.slots:
            self.counts["requests"] += 1
            try:
                raw = await self.dialect.send(self.client, body)
                self.counts["retries"] += raw.retries_taken
                answer = raw.http_response.text
                return self._read(json.loads(answer))
            except self.status_error as error:
                status = error.status_code
                kind = ConnectionError if status == 429 or status >= 500 else ValueError
                reason = f"{status}: {error.response.text or error.message}"
            except self.connection_error as error:
                kind, reason = ConnectionError, f"no answer ({error.__cause__ or error}); is it up?"
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                kind, reason = ValueError, f"an answer that cannot be read ({error!r}): {answer}"
        self.counts["failed"] += 1
        # Raised outside of `except`, the error has no context whose request would hold the key.
        raise kind(self._failure(reason))

    def _read(self, answer: JSON) -> tuple[Message, Completion]:
        message, reason, usage = self.dialect.read(answer)
        self.counts.update(usage)
        return message, Completion(text=message["content"], finish_reason=reason)

    def _failure(self, text: str) -> str:
        """The text as one short line without the key, which an endpoint may repeat."""
        text = text.replace(self.key, "***") if self.key else text
        return f"actor {self.name!r}: {self.url} gave {keep_ends(' '.join(text.split()), 400)!r}"

    def end_session(self, session: str) -> None: ...

    def take_metrics(self) -> dict[str, Metric]:
        """Counts since the last call: requests, retries, replies that failed, and tokens as the
        endpoint counts them."""
        counts, self.counts = self.counts, Counter()
        return {name: Sum(counts[name]) for name in COUNTS}

    async def close(self) -> None:
        await self.client.close()


def read_key(actor: str, variable: str) -> str:
    """The key in the environment variable, "" if none is named. An error never shows it."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):
        shown = variable if variable.isidentifier() else "it"  # The value may be the key itself.
        raise ValueError(
            f"actor {actor!r}: api_key_env must name an environment variable with a key, and "
            f"{shown} holds none; for an "
            "endpoint without a key give api_key_env=''"
        )
    return key


def make_api_actor(config: Config, name: str) -> ApiActor:
    actor = config.actors[name]
    assert actor.api and actor.model
    variables = actor.chat_template_kwargs
    request = {"chat_template_kwargs": variables} if variables else {}
    return ApiActor(
        name=name,
        url=actor.api,
        model=actor.model,
        api_key_env=actor.api_key_env,
        max_tokens=actor.max_tokens,
        max_concurrent=config.rollout.max_concurrent,
        request=request,
    )
