"""What a program asks and is told, whatever its dialect."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rl_core.types import Message

# What a program may set, and the trainer decides: counted in a metric.
DECIDED_BY_TRAINER = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)


class Refusal(Exception):
    """A request that cannot be answered. The dialect writes it as an error of its own."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@dataclass(kw_only=True, slots=True)
class Request:
    """A request in the words of chat templates, such as messages=[{"role": "user", "content":
    "2+2?"}], tools=None, max_tokens=64."""

    model: str = ""
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    reads_calls: bool = True  # False: calls are left in the text (tool_choice "none")
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_replies: int = 1
    is_streamed: bool = False
    wants_logprobs: bool = False
    wants_usage: bool = False  # at the end of a stream
    is_retry: bool = False  # the client says so
    seed: Any = None  # not used to sample: another seed asks for another reply
    overridden: list[str] = field(default_factory=list)  # what the trainer decides instead


@dataclass(kw_only=True, slots=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(kw_only=True, slots=True)
class Reply:
    """An actor's turn, as a program reads it."""

    id: str  # unique in the run
    text: str  # without thoughts and calls
    thoughts: str
    calls: list[Call]
    finish_reason: str  # "stop", "length" or "calls"
    stop: str = ""  # which of the request's stops ended it
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    logprobs: list[tuple[str, float]] = field(default_factory=list)  # of each token, if wanted

    @property
    def message(self) -> Message:
        """As a program that keeps all of it echoes it."""
        calls = [called(call.id, call.name, call.arguments) for call in self.calls]
        message = {"role": "assistant", "content": self.text}
        return message | {"tool_calls": calls} if calls else message


def called(call_id: Any, name: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call in a message, as chat templates read it."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def overridden_in(body: dict[str, Any]) -> list[str]:
    """Names in a request that the trainer decides."""
    return [name for name in DECIDED_BY_TRAINER if body.get(name) is not None]


def wanted(
    body: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None
) -> Any:
    """A field of the request's body. Raises Refusal if it is of another kind."""
    value = body.get(name)
    if value is None:
        return default
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise Refusal(f"{name}: {str(value)[:80]!r} has the wrong type")
    return value


def limit_of(body: dict[str, Any], *names: str) -> int | None:
    """The smallest of the named limits of tokens. Raises Refusal unless each is at least 1."""
    limits = []
    for name in names:
        value = wanted(body, name, int)
        if value is not None and value < 1:
            raise Refusal(f"{name}: {value} must be at least 1")
        if value is not None:
            limits.append(value)
    return min(limits, default=None)


def stops_of(body: dict[str, Any], name: str) -> tuple[str, ...]:
    """Strings that end a reply."""
    value = wanted(body, name, (str, list), [])
    if isinstance(value, str):
        return (value,)
    if not all(isinstance(stop, str) and stop for stop in value):
        raise Refusal(f"{name} must be a list of texts")
    return tuple(value)


def text_of_parts(content: Any, where: str) -> str:
    """The text of a message's content. Raises Refusal for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{where}: content must be a text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refusal(f"{where}: a part of type {kind!r}: this model reads text alone")
    return "".join(texts)


def read_arguments(value: Any) -> dict[str, Any]:
    """A call's arguments, which clients write as JSON. Raises Refusal."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise Refusal(f"arguments of a call: {str(value)[:80]!r} is no JSON object")
    return arguments
