"""Requests and responses of model APIs: OpenAI's chat completions and Responses, and Anthropic's
Messages, each with the official client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.data.image_parts import has_image
from rl_core.data.messages import text_of, with_text_arguments
from rl_core.types import AnyJSON, JSONObject, Message, SamplingParams

if TYPE_CHECKING:
    import httpx
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

# Keys of a chat-completions message; endpoints refuse other keys.
SENT = ("role", "content", "name", "tool_calls", "tool_call_id")
COUNTED = ("prompt_tokens", "completion_tokens")


class RawResponse(Protocol):
    """A raw response of both clients."""

    retries_taken: int

    @property
    def http_response(self) -> httpx.Response: ...


class Dialect(Protocol):
    """One API of a provider."""

    suffix: str  # End of the URLs that select this dialect.
    key_variable: str  # Environment variable with the API key.
    package: str  # Python package of the official client.

    def client(
        self, url: str, key: str, timeout_s: float, max_retries: int
    ) -> AsyncOpenAI | AsyncAnthropic:
        """The official client. `url`: without the suffix."""
        ...

    async def send(self, client: Any, body: JSONObject) -> RawResponse: ...

    def body(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> JSONObject:
        """The body of a request. Parameters that are off are None, because some endpoints do not
        know them. Raises ValueError for a parameter that the API lacks."""
        ...

    def read(self, answer: AnyJSON) -> tuple[Message, str, dict[str, int]]:
        """(message, finish reason, number of tokens for each name in COUNTED). Raises LookupError,
        TypeError, ValueError or AttributeError for a malformed response."""
        ...


class ChatCompletions:
    """OpenAI's /v1/chat/completions, which SGLang, vLLM and others serve too."""

    suffix = "/chat/completions"
    key_variable = "OPENAI_API_KEY"
    package = "openai"

    def client(self, url: str, key: str, timeout_s: float, max_retries: int) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(
            base_url=url, api_key=key or "none", timeout=timeout_s, max_retries=max_retries
        )

    async def send(self, client: AsyncOpenAI, body: JSONObject) -> RawResponse:
        known = {key: body.pop(key) for key in ("model", "messages")}
        return await client.chat.completions.with_raw_response.create(**known, extra_body=body)

    def body(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> JSONObject:
        return {
            "messages": [sent_message(message) for message in messages],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p if params.top_p < 1 else None,
            "top_k": params.top_k or None,
            "min_p": params.min_p or None,
            "stop": list(params.stop) or None,
            "tools": list(tools) if tools else None,
            "seed": seed >> 1,  # Some endpoints read a signed 32-bit number.
        }

    def read(self, answer: AnyJSON) -> tuple[Message, str, dict[str, int]]:
        choice = answer["choices"][0]
        message = spoken(choice["message"].get("content") or "")
        if choice["message"].get("tool_calls"):
            message["tool_calls"] = choice["message"]["tool_calls"]
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        usage = answer.get("usage") or {}
        return message, reason, {name: usage.get(name) or 0 for name in COUNTED}


class Responses(ChatCompletions):
    """OpenAI's /v1/responses, with `store` off."""

    suffix = "/responses"

    async def send(self, client: AsyncOpenAI, body: JSONObject) -> RawResponse:
        known = {key: body.pop(key) for key in ("model", "input")}
        return await client.responses.with_raw_response.create(**known, extra_body=body)

    def body(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> JSONObject:
        refuse_unknown(self.suffix, stop=params.stop, top_k=params.top_k, min_p=params.min_p)
        items: list[JSONObject] = []
        for message in messages:
            if message["role"] == "tool":
                output = {"call_id": message.get("tool_call_id", ""), "output": inputs_of(message)}
                items.append({"type": "function_call_output"} | output)
                continue
            if inputs_of(message) or not message.get("tool_calls"):
                items.append({"role": message["role"], "content": inputs_of(message)})
            for call in message.get("tool_calls") or []:
                function = with_text_arguments(call)["function"]
                item = {"type": "function_call", "call_id": call.get("id", "")}
                items.append(item | {key: function[key] for key in ("name", "arguments")})
        return {
            "input": items,
            "max_output_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p if params.top_p < 1 else None,
            "tools": [{"type": "function", "strict": False} | t["function"] for t in tools or []]
            or None,
            "store": False,
        }

    def read(self, answer: AnyJSON) -> tuple[Message, str, dict[str, int]]:
        texts, calls = [], []
        for item in answer["output"]:
            if item["type"] == "message":
                texts += [each.get("text") or each.get("refusal") or "" for each in item["content"]]
            elif item["type"] == "function_call":
                calls.append(called(item["call_id"], item["name"], item["arguments"]))
        details = answer.get("incomplete_details") or {}
        reason = "length" if details.get("reason") == "max_output_tokens" else "stop"
        return spoken("".join(texts), calls), reason, counted(answer)


class Messages:
    """Anthropic's /v1/messages."""

    suffix = "/v1/messages"
    key_variable = "ANTHROPIC_API_KEY"
    package = "anthropic"

    def client(self, url: str, key: str, timeout_s: float, max_retries: int) -> AsyncAnthropic:
        from anthropic import AsyncAnthropic

        client = AsyncAnthropic(
            base_url=url, api_key=key or "none", timeout=timeout_s, max_retries=max_retries
        )
        client.auth_token = None  # The client also takes a token from the environment.
        return client

    async def send(self, client: AsyncAnthropic, body: JSONObject) -> RawResponse:
        known = {key: body.pop(key) for key in ("model", "messages", "max_tokens")}
        return await client.messages.with_raw_response.create(**known, extra_body=body)

    def body(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> JSONObject:
        refuse_unknown(self.suffix, min_p=params.min_p)
        system = [text_of(message) for message in messages if message["role"] == "system"]
        if any(m["role"] == "system" and has_image(m) for m in messages):
            raise ValueError(
                f"a system message has an image: {self.suffix} takes text alone there; move the "
                "image to a user's message"
            )
        turns: list[JSONObject] = []
        for message in messages:
            if message["role"] == "system":
                continue
            role = "assistant" if message["role"] == "assistant" else "user"
            if (
                turns and turns[-1]["role"] == role
            ):  # The API wants a turn's results in one message.
                turns[-1]["content"] += blocks_of(message)
            else:
                turns.append({"role": role, "content": blocks_of(message)})
        functions = [tool["function"] for tool in tools or []]
        return {
            "messages": turns,
            "system": "\n\n".join(system) or None,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p if params.top_p < 1 else None,
            "top_k": params.top_k or None,
            "stop_sequences": list(params.stop) or None,
            "tools": [tool_of(function) for function in functions] or None,
        }

    def read(self, answer: AnyJSON) -> tuple[Message, str, dict[str, int]]:
        texts, calls = [], []
        for block in answer["content"]:
            if block["type"] == "text":
                texts.append(block["text"])
            elif block["type"] == "tool_use":
                calls.append(called(block["id"], block["name"], json.dumps(block["input"])))
        reason = "length" if answer.get("stop_reason") == "max_tokens" else "stop"
        return spoken("".join(texts), calls), reason, counted(answer)


DIALECTS: tuple[Dialect, ...] = (Messages(), Responses(), ChatCompletions())


def dialect_of(url: str) -> tuple[Dialect, str]:
    """(dialect of a URL by its suffix, URL without the suffix). The default is chat completions."""
    url = url.rstrip("/")
    for dialect in DIALECTS:
        if url.endswith(dialect.suffix):
            return dialect, url.removesuffix(dialect.suffix)
    return DIALECTS[-1], url


def refuse_unknown(api: str, **values: object) -> None:
    for name, value in values.items():
        if value:
            raise ValueError(f"{name}={value!r}: {api} has no such parameter; leave it out")


def spoken(text: object, calls: list[JSONObject] | None = None) -> Message:
    if not isinstance(text, str):
        raise TypeError("its content is not a text")
    message: Message = {"role": "assistant", "content": text}
    return message | {"tool_calls": calls} if calls else message


def called(call_id: str, name: str, arguments: str) -> JSONObject:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def counted(answer: AnyJSON) -> dict[str, int]:
    usage = answer.get("usage") or {}
    numbers = (usage.get("input_tokens") or 0, usage.get("output_tokens") or 0)
    return dict(zip(COUNTED, numbers, strict=True))


def sent_message(message: Message) -> JSONObject:
    sent = {key: message[key] for key in SENT if key in message}
    if has_image(message):
        sent["content"] = list(map(image_url_of, message["content"]))
    if sent.get("tool_calls"):
        sent["tool_calls"] = [with_text_arguments(call) for call in sent["tool_calls"]]
    return sent


def image_url_of(item: JSONObject) -> JSONObject:
    """A canonical part of a message for chat completions."""
    return {"type": "image_url", "image_url": {"url": item["image"]}} if "image" in item else item


def inputs_of(message: Message) -> str | list[JSONObject]:
    """The content of a message for the Responses API: a text, or parts if it has images."""
    if not has_image(message):
        return text_of(message)
    return [
        {"type": "input_image", "image_url": item["image"], "detail": "auto"}
        if item["type"] == "image"
        else {"type": "input_text", "text": item["text"]}
        for item in message["content"]
    ]


def source_of(url: str) -> JSONObject:
    """A data: URL as Anthropic's block."""
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def tool_of(function: JSONObject) -> JSONObject:
    """A function in Anthropic's format."""
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    tool = {"name": function["name"], "input_schema": schema}
    description = function.get("description")
    return tool | ({"description": description} if description else {})


def blocks_of(message: Message) -> list[JSONObject]:
    """A message as Anthropic's blocks, without empty texts, which the API refuses."""
    text = text_of(message)
    blocks: list[JSONObject] = [{"type": "text", "text": text}] if text.strip() else []
    if has_image(message):
        blocks = [
            source_of(item["image"]) if item["type"] == "image" else item
            for item in message["content"]
            if item["type"] == "image" or item["text"].strip()
        ]
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message.get("tool_call_id", "")}
        return [result | {"content": blocks if has_image(message) else text}]
    for call in message.get("tool_calls") or []:
        function = with_text_arguments(call)["function"]
        block = {"type": "tool_use", "id": call.get("id", ""), "name": function["name"]}
        blocks.append(block | {"input": json.loads(function["arguments"] or "{}")})
    return blocks
