"""OpenAI's /v1/responses."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence

from rl_core.environments.agents.chat_completions import logprobs_of, write_error
from rl_core.environments.agents.requests import (
    Fields,
    Refusal,
    Reply,
    Request,
    called,
    content_of_parts,
    limit_of,
    read_arguments,
    read_tool,
    schema_of,
    wanted,
)
from rl_core.types import AnyJSON, JSONObject, Message

PATH = "/v1/responses"
FIELDS = Fields(
    used="include input instructions max_output_tokens model previous_response_id stream text "
    "tool_choice tools",
    harmless="access_programs background_options client_metadata image max_tool_calls metadata "
    "moderation prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
    "service_tier store stream_options user",
    decided="parallel_tool_calls reasoning temperature top_logprobs top_p",
)
NOT_KEPT = {"code": "previous_response_not_found"}
LOGPROBS = "message.output_text.logprobs"
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
__all__ = ["NOT_KEPT", "PATH", "continued", "read", "reply_id", "stream", "write", "write_error"]


def read(body: JSONObject) -> Request:
    """Raises Refusal for what this engine cannot do."""
    overridden = FIELDS.overridden_in(body)
    if wanted(body, "text", dict, {}).get("verbosity"):
        overridden.append("verbosity")
    form = wanted(wanted(body, "text", dict, {}), "format", dict, {})
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        overridden.append("tool_choice")
    tools = []
    for tool in wanted(body, "tools", list, []):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            # The model knows no tools that a server runs, such as a web search.
            overridden.append("tools")
            continue
        fields = (tool.get(key) or None for key in ("name", "description", "parameters"))
        tools.append(read_tool(*fields))
    messages = read_items(body.get("input"))
    instructions = wanted(body, "instructions", str)
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise Refusal("input is empty")
    return Request(
        model=wanted(body, "model", str, ""),
        messages=messages,
        num_instructions=1 if instructions else 0,
        tools=tools or None,
        reads_calls=choice != "none",
        max_tokens=limit_of(body, "max_output_tokens"),
        is_streamed=wanted(body, "stream", bool, False),
        schema=schema_of(form, "text.format"),
        continues=wanted(body, "previous_response_id", str),
        wants_logprobs=LOGPROBS in wanted(body, "include", list, []),
        is_kept=True,
        overridden=overridden,
    )


def continued(request: Request, earlier: Request) -> None:
    """Puts the earlier conversation, without its instructions, behind those of the request."""
    num, new = request.num_instructions, request.messages
    request.messages = [*new[:num], *earlier.messages[earlier.num_instructions :], *new[num:]]


def read_items(items: AnyJSON) -> list[Message]:
    """Input items as messages. A text and the calls that follow it are one message, as the model
    said them."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise Refusal("input must be a text or a list of items")
    messages: list[Message] = []
    for item in items:
        if not isinstance(item, dict):
            raise Refusal(f"input: {str(item)[:80]!r} is no item")
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ("system", "user", "assistant"):
                raise Refusal(f"input: role {role!r} is not supported")
            content = content_of_parts(item.get("content"), role)
            messages.append({"role": role, "content": content})
        elif kind in CALLS:
            arguments = arguments_of(item)
            call = called(item.get("call_id", ""), str(item.get("name")), arguments)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in OUTPUTS:
            content = content_of_parts(item.get("output"), kind)
            call_id = item.get("call_id", "")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind != "reasoning":
            raise Refusal(f"input: an item of type {kind!r} is not supported")
    return messages


def arguments_of(item: JSONObject) -> JSONObject:
    """Arguments of a call. The call of a custom tool has one text instead."""
    if item["type"] == "custom_tool_call":
        return {"input": wanted(item, "input", str, "")}
    return read_arguments(item.get("arguments"))


def put_in(items: AnyJSON, known: dict[str, JSONObject]) -> AnyJSON:
    """Input items, with references replaced by the items of earlier responses. Raises Refusal for
    an unknown reference."""
    if not isinstance(items, list):
        return items
    resolved = []
    for item in items:
        if is_reference(item):
            name = str(item.get("id"))
            if name not in known:
                raise Refusal(f"input: item_reference {name!r} is no item of this episode")
            item = known[name]
        resolved.append(item)
    return resolved


def is_reference(item: AnyJSON) -> bool:
    """Clients may leave out or empty its type."""
    if not isinstance(item, dict):
        return False
    is_bare = item.get("type") is None and "role" not in item
    return item.get("type") == "item_reference" or (is_bare and "id" in item)


def write(replies: Sequence[Reply], request: Request) -> JSONObject:
    """The response's body."""
    (reply,) = replies
    is_cut = reply.finish_reason == "length"
    return header(reply, request) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output(reply),
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        },
    }


def header(reply: Reply, request: Request) -> JSONObject:
    return {
        "id": reply_id(reply),
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "status": "in_progress",
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def reply_id(reply: Reply) -> str:
    return f"resp_{reply.id}"


def output(reply: Reply) -> list[JSONObject]:
    items: list[JSONObject] = []
    if reply.thoughts:
        content = [{"type": "reasoning_text", "text": reply.thoughts}]
        item = {"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content}
        items.append(item)
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    if reply.text or not reply.calls:
        item = {"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "status": status}
        items.append(item | {"content": [text_part(reply.text, logprobs_of(reply))]})
    for number, call in enumerate(reply.calls):
        item = {"type": "function_call", "id": f"fc_{reply.id}-{number}", "call_id": call.id}
        item |= {"name": call.name, "arguments": json.dumps(call.arguments)}
        items.append(item | {"status": "completed"})
    return items


def text_part(text: str, logprobs: list[JSONObject]) -> JSONObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def stream(replies: Sequence[Reply], request: Request) -> Iterator[str]:
    """Numbered server-sent events."""
    response = write(replies, request)
    for number, (kind, fields) in enumerate(events(replies[0], request, response)):
        body = {"type": kind, "sequence_number": number} | fields
        yield f"event: {kind}\ndata: {json.dumps(body)}\n\n"
    replies[0].num_sent = math.inf


def events(
    reply: Reply, request: Request, response: JSONObject
) -> Iterator[tuple[str, JSONObject]]:
    opening = {"response": header(reply, request)}
    yield "response.created", opening
    yield "response.in_progress", opening
    for index, item in enumerate(response["output"]):
        position = {"output_index": index, "item_id": item["id"]}
        opened = item | {"status": "in_progress"}
        if item["type"] == "function_call":
            opened["arguments"] = ""
        else:
            opened["content"] = []
        yield "response.output_item.added", {"output_index": index, "item": opened}
        if item["type"] == "message":
            yield from text_events(position | {"content_index": 0}, reply)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            done = {"arguments": arguments, "name": item["name"]}
            yield "response.function_call_arguments.delta", position | {"delta": arguments}
            yield "response.function_call_arguments.done", position | done
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def text_events(position: JSONObject, reply: Reply) -> Iterator[tuple[str, JSONObject]]:
    yield "response.content_part.added", position | {"part": text_part("", [])}
    # The first delta has the logprobs of all tokens, including thoughts and calls.
    logprobs = every = logprobs_of(reply)
    for piece in reply.pieces("text"):
        yield "response.output_text.delta", position | {"delta": piece, "logprobs": logprobs}
        logprobs = []
    yield "response.output_text.done", position | {"text": reply.text, "logprobs": every}
    yield "response.content_part.done", position | {"part": text_part(reply.text, every)}
