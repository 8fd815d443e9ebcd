"""Requests of programs and replies to them, in any dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from rl_core.data.image_parts import image_part, is_image_part
from rl_core.data.images import URL_FIX, image_of
from rl_core.errors import near_name
from rl_core.json_limits import check_value
from rl_core.types import AnyJSON, JSONObject, Message

# Values that ask for nothing.
NEUTRAL = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "truncation": "disabled",
}
# Fields of one dialect or another that change the conversation -> the fix, in an error.
REFUSED = {
    "background": "ask without it",
    "compaction": "ask for the summary by messages",
    "container": "run the code in the program",
    "context_management": "shorten the messages in the program",
    "conversation": "send its messages",
    "functions": "use tools",
    "mcp_servers": "call them in the program, and offer their tools as tools",
    "modalities": "this model writes text alone",
    "previous_response_id": "send the earlier messages",
    "prompt": "send its text",
    "thread": "send the earlier messages",
    "truncation": "shorten the messages in the program",
}
# Limit on a request's images together. A program may send them again with each turn.
MAX_PIXELS = 500_000_000
# Pixels that the images of the request which is read may still have.
PIXELS_LEFT = ContextVar("PIXELS_LEFT", default=MAX_PIXELS)
PIECE_CHARS = 4096  # Length of a piece of a stream.
NEAR = 0.9  # Similarity of a misspelt field to the field that was meant.
FIELD_NAME = re.compile(r"[A-Za-z_][\w.-]{0,39}")

# Keywords of a JSON schema that hold schemas -> by name, in a list, or (None) one or a list.
SUBSCHEMAS = {
    "properties": dict,
    "patternProperties": dict,
    "$defs": dict,
    "definitions": dict,
    "anyOf": list,
    "oneOf": list,
    "allOf": list,
    "prefixItems": list,
    "items": None,
    "additionalProperties": None,
    "not": None,
}


class Refusal(Exception):
    """A request that cannot be answered. Each dialect has its format of the error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request_error",
        retry_after_s: int = 0,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s  # Header Retry-After; 0: none.


@dataclass(kw_only=True, frozen=True, slots=True)
class Fields:
    """Top-level fields of a dialect's requests, sorted by their effect. A field that is not listed
    counts as decided, since clients send extras of many vendors, unless it is spelled almost like
    a listed one."""

    used: str
    harmless: str  # Fields on which no reply depends: billing, caches, labels, a vendor's tools.
    decided: str  # Fields that the run overrides. Counted in a metric.
    refused: Mapping[str, str] = field(default_factory=dict)  # more than REFUSED

    def overridden_in(self, body: JSONObject) -> list[str]:
        """Fields of a request that the run decides. Raises Refusal for a refused or misspelt
        field."""
        ignored = {*self.used.split(), *self.harmless.split()}
        known, overridden = ignored.union(self.decided.split()), []
        for name, value in body.items():
            if name in ignored or value is None or value == NEUTRAL.get(name):
                continue
            fix = self.refused.get(name) or REFUSED.get(name)
            if fix is None:
                near = near_name(name, known, NEAR) if name not in known else None
                if near and len(name) >= 7:
                    raise Refusal(f"{name!r} is not a field; did you mean {near!r}?")
                overridden.append(checked_name(name))
            elif value:
                raise Refusal(f"{name} is not supported; {fix}")
        return overridden


def checked_name(name: str) -> str:
    """Returns a field's name if it can end a metric's name, else raises Refusal."""
    if not FIELD_NAME.fullmatch(name):
        raise Refusal(f"{name[:80]!r} is not the name of a field")
    return name


@dataclass(kw_only=True, slots=True)
class Request:
    """A request in the format of chat templates, such as messages=[{"role": "user", "content":
    "2+2?"}], tools=None, max_tokens=64."""

    model: str = ""
    messages: list[Message]
    tools: list[JSONObject] | None = None
    reads_calls: bool = True  # False leaves calls in the text (tool_choice "none").
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_instructions: int = 0  # First messages that a later request does not inherit.
    num_replies: int = 1
    is_streamed: bool = False
    wants_logprobs: bool = False
    wants_usage: bool = False  # Usage at the end of a stream.
    is_retry: bool = False  # The client marks it as a retry.
    # JSON schema of the reply; None: text.
    schema: JSONObject | None = None
    is_enforced: bool = False  # Sampling is constrained to the schema.
    is_long: bool = False  # Work that takes time with its size leaves the event loop.
    continues: str | None = None  # Id of the kept reply whose conversation comes first.
    is_kept: bool = False  # Later requests may continue the reply.
    seed: AnyJSON = None  # Only distinguishes requests; sampling does not use it.
    overridden: list[str] = field(default_factory=list)  # Fields that the run overrides.


@dataclass(kw_only=True, slots=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: JSONObject


@dataclass(kw_only=True, slots=True)
class Reply:
    """An actor's turn, as the program receives it."""

    id: str  # Unique in the run.
    text: str  # Excludes thoughts and calls.
    thoughts: str
    calls: list[Call]
    finish_reason: str  # "stop", "length" (also after calls) or "calls".
    stop: str = ""  # The stop string that ended it.
    prefix: str = ""  # Text of the request's last message, which the reply continues.
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    # (bytes, logprob) of each token, if wanted.
    logprobs: list[tuple[bytes, float]] = field(default_factory=list)
    is_stored: bool = False  # Endpoint.store() had it; else no program can have it.
    # Characters of thoughts and text that a connection took; inf: the whole reply.
    num_sent: float = 0

    def pieces(self, name: str) -> Iterator[str]:
        """Pieces of the `text` or the `thoughts` for a stream. Counts each as sent when the next
        one is asked for."""
        text = getattr(self, name)
        before = len(self.thoughts) if name == "text" else 0
        for start in range(0, max(1, len(text)), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            yield piece
            self.num_sent = max(self.num_sent, before + start + len(piece))

    def end_of_sent(self, sampled: str) -> int:
        """Index of the first character of the sampled text that was not sent."""
        num = int(self.num_sent)
        if num <= len(self.thoughts):
            return max(sampled.find(self.thoughts), 0) + num
        end = sampled.rfind("</think>") + 1
        return max(sampled.find(self.text, end), end) + num - len(self.thoughts)

    @property
    def message(self) -> Message:
        """The reply as a chat message, with the prefix."""
        calls = [called(call.id, call.name, call.arguments) for call in self.calls]
        message = {"role": "assistant", "content": self.prefix + self.text}
        return message | {"tool_calls": calls} if calls else message


def mark_prefix(messages: list[Message]) -> bool:
    """Marks the last message as one that the reply continues. Returns False if it is no text of the
    assistant."""
    last = messages[-1]
    is_text = isinstance(last["content"], str) and last["content"] and not last.get("tool_calls")
    if last["role"] != "assistant" or not is_text:
        return False
    last["prefix"] = True
    return True


def called(call_id: AnyJSON, name: AnyJSON, arguments: JSONObject) -> JSONObject:
    """A call in a message, in the format of chat templates. Raises Refusal if the name is not a
    non-empty string."""
    if not isinstance(name, str) or not name:
        raise Refusal(f"a call: the name {str(name)[:80]!r} must be a text")
    function = {"name": name, "arguments": arguments}
    call_id = call_id if isinstance(call_id, str) else ""
    return {"id": call_id, "type": "function", "function": function}


def wanted(
    body: JSONObject, name: str, kind: type | tuple[type, ...], default: AnyJSON = None
) -> AnyJSON:
    """A field of the request's body. Raises Refusal if it is of another kind."""
    value = body.get(name)
    if value is None:
        return default
    is_bool = isinstance(value, bool)
    if not isinstance(value, kind) or (is_bool and kind is not bool):
        raise Refusal(f"{name}: {str(value)[:80]!r} has the wrong type")
    return value


def limit_of(body: JSONObject, *names: str) -> int | None:
    """The smallest of the named limits of tokens. Raises Refusal unless each is at least 1."""
    limits = []
    for name in names:
        value = wanted(body, name, int)
        if value is not None and value < 1:
            raise Refusal(f"{name}: {value} must be at least 1")
        if value is not None:
            limits.append(value)
    return min(limits, default=None)


def schema_of(form: JSONObject, where: str) -> JSONObject | None:
    """The JSON schema of a `response_format`, None for text. Raises Refusal for another type."""
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise Refusal(f"{where}: the type {kind!r} must be text, json_object or json_schema")
    # Chat completions nest the schema once more.
    schema = wanted(wanted(form, "json_schema", dict, form), "schema", dict, {})
    fault = schema_fault(schema)
    if fault:
        raise Refusal(f"{where}: the schema is not a JSON schema: {fault}")
    return schema


def stops_of(body: JSONObject, name: str) -> tuple[str, ...]:
    """Strings that end a reply."""
    value = wanted(body, name, (str, list), [])
    stops = [value] if isinstance(value, str) else value
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise Refusal(f"{name} must be a text or a list of texts, none of them empty")
    return tuple(stops)


def read_tool(name: AnyJSON, description: AnyJSON, parameters: AnyJSON) -> JSONObject:
    """A function in the form of chat templates; a value of None is left out. Raises Refusal unless
    the parameters are a JSON schema of an object."""
    if not isinstance(name, str) or not name:
        raise Refusal(f"tools: the name {str(name)[:80]!r} must be a text")
    function: JSONObject = {"name": name}
    if description is not None:
        if not isinstance(description, str):
            raise Refusal(f"tools: {name}: the description must be a text")
        function["description"] = description
    if parameters is not None:
        if not isinstance(parameters, dict):
            raise Refusal(f"tools: {name}: the parameters must be a JSON schema of an object")
        fault = schema_fault(parameters)
        if fault:
            raise Refusal(f"tools: {name}: the parameters are not a JSON schema: {fault}")
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def schema_fault(schema: AnyJSON) -> str:
    """Returns the first keyword of a JSON schema whose value has the wrong form; "" if there is
    none."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"{str(schema)[:80]!r} is not a schema"
    kinds = schema.get("type", [])
    if schema.get("type") == [] or not all(isinstance(kind, str) for kind in as_list(kinds)):
        return f"type: {str(kinds)[:80]!r} is not a type"
    for key in ("required", "enum"):
        if not isinstance(schema.get(key, []), list):
            return f"{key}: {str(schema[key])[:80]!r} is not a list"
    inner: list[tuple[str, AnyJSON]] = []
    for key, form in SUBSCHEMAS.items():
        if key not in schema:
            continue
        value = schema[key]
        if form is not None and (not isinstance(value, form) or value == []):
            kind = "an object" if form is dict else "a list of schemas"
            return f"{key}: {str(value)[:80]!r} is not {kind}"
        if form is dict:
            inner += [(f"{key}.{name}", each) for name, each in value.items()]
        else:
            inner += [(key, each) for each in as_list(value)]
    faults = (f"{key}: {fault}" for key, each in inner if (fault := schema_fault(each)))
    return next(faults, "")


def as_list(value: AnyJSON) -> list[AnyJSON]:
    return value if isinstance(value, list) else [value]


def text_of_parts(content: AnyJSON, where: str) -> str:
    """The text of a message's content. Raises Refusal for parts of other kinds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{where}: content must be a text or a list of parts")
    texts = []
    for piece in content:
        if isinstance(piece, str):
            texts.append(piece)
        elif isinstance(piece, dict) and isinstance(piece.get("text"), str):
            texts.append(piece["text"])
        elif isinstance(piece, dict) and isinstance(piece.get("refusal"), str):
            texts.append(piece["refusal"])
        else:
            kind = piece.get("type") if isinstance(piece, dict) else type(piece).__name__
            raise Refusal(f"{where}: a part of type {kind!r} is not supported; send its text")
    return "".join(texts)


def has_image_parts(value: AnyJSON) -> bool:
    """True if the value has a part of an image at any depth."""
    values = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, (dict, list))
    return is_image_part(value) or (is_nested and any(map(has_image_parts, values)))


def content_of_parts(content: AnyJSON, where: str) -> str | list[JSONObject]:
    """The text of a message's content; if the content has images, its canonical parts. Raises
    Refusal for an image that cannot be read, and as text_of_parts()."""
    if not isinstance(content, list) or not any(map(is_image_part, content)):
        return text_of_parts(content, where)
    parts = []
    for piece in content:
        if not is_image_part(piece):
            parts.append({"type": "text", "text": text_of_parts([piece], where)})
            continue
        try:
            image = image_part(piece)
        except ValueError as error:
            raise Refusal(f"{where}: {error}") from None
        if "image" not in image:
            raise Refusal(f"{where}: a part of type {piece['type']!r} has no image; {URL_FIX}")
        size = image_of(image["image"])
        PIXELS_LEFT.set(PIXELS_LEFT.get() - size.width * size.height)
        if PIXELS_LEFT.get() < 0:
            raise Refusal(
                f"{where}: images of a request have more than {MAX_PIXELS:,} pixels together; send "
                "fewer or smaller ones"
            )
        parts.append(image)
    return parts


def read_arguments(value: AnyJSON) -> JSONObject:
    """A call's arguments, which clients write as JSON. Raises Refusal."""
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
        check_value(arguments)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"arguments of a call: {str(value)[:80]!r} is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise Refusal(f"arguments of a call: {str(value)[:80]!r} is not a JSON object")
    return arguments
