"""Anthropic's /v1/messages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from rl_core.environments.agents.requests import (
    REFUSED,
    Fields,
    Refusal,
    Reply,
    Request,
    called,
    content_of_parts,
    limit_of,
    mark_prefix,
    read_arguments,
    read_tool,
    schema_of,
    stops_of,
    text_of_parts,
    wanted,
)
from rl_core.types import AnyJSON, JSONObject, Message

PATH = "/v1/messages"
FIELDS = Fields(
    used="context_management max_tokens messages model output_config output_format "
    "stop_sequences stream system thread tool_choice tools",
    harmless="billing_policy cache_control diagnostics fallback_credit_token fallbacks "
    "inference_geo metadata service_tier speed",
    decided="temperature thinking top_k top_p",
)
# The client answers this error by the whole conversation.
NOT_KEPT = {"status": 404, "code": "thread_not_found"}
ERRORS = {401: "authentication_error", 404: "not_found_error"}
FINISH = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}


def read(body: JSONObject) -> Request:
    """Raises Refusal for what this engine cannot do."""
    overridden = FIELDS.overridden_in(body)
    for name in ("effort", "task_budget"):
        if wanted(body, "output_config", dict, {}).get(name):
            overridden.append(name)
    chosen = wanted(body, "tool_choice", dict, {})
    choice = chosen.get("type", "auto")
    if choice not in ("auto", "none"):
        overridden.append("tool_choice")
    if chosen.get("disable_parallel_tool_use"):
        overridden.append("parallel_tool_calls")
    overridden += edits_in(body)
    thread = read_thread(body)
    # Older clients call output_config.format output_format.
    form = wanted(body, "output_format", dict, {})
    form = wanted(wanted(body, "output_config", dict, {}), "format", dict, form)
    messages: list[Message] = []
    system = text_of_parts(body.get("system"), "system")
    if system:
        messages.append({"role": "system", "content": system})
    for message in wanted(body, "messages", list, []):
        messages += read_message(message)
    if not messages:
        raise Refusal("messages is empty")
    mark_prefix(messages)
    tools = []
    for tool in wanted(body, "tools", list, []):
        if not isinstance(tool, dict) or "input_schema" not in tool:
            # The model knows no tools that a server runs, such as a web search.
            overridden.append("tools")
            continue
        description = tool.get("description", "")
        tools.append(read_tool(tool.get("name"), description, tool["input_schema"]))
    return Request(
        model=wanted(body, "model", str, ""),
        messages=messages,
        tools=tools or None,
        reads_calls=choice != "none",
        max_tokens=limit_of(body, "max_tokens"),
        stop=stops_of(body, "stop_sequences"),
        is_streamed=wanted(body, "stream", bool, False),
        schema=schema_of(form, "output_config.format"),
        continues=thread.get("previous_message_id"),
        is_kept=bool(thread),
        overridden=overridden,
    )


def edits_in(body: JSONObject) -> list[str]:
    """["context_management"] if the request wants earlier thinking cleared, which the chat template
    decides. Raises Refusal for edits of other kinds."""
    edits = wanted(wanted(body, "context_management", dict, {}), "edits", list, [])
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith("clear_thinking_"):
            fix = REFUSED["context_management"]
            raise Refusal(f"context_management: an edit of type {kind!r} is not supported; {fix}")
    return ["context_management"] if any(edit.get("keep") != "all" for edit in edits) else []


def read_thread(body: JSONObject) -> JSONObject:
    """The field `thread`: {} or of type create or continue. Raises Refusal."""
    thread = wanted(body, "thread", dict, {})
    if not thread:
        return {}
    kind = thread.get("type")
    if kind == "create":
        return {"type": kind}
    if kind != "continue" or not isinstance(thread.get("previous_message_id"), str):
        raise Refusal(
            f"thread: {str(thread)[:80]} must be of type create, or of type continue with a "
            "previous_message_id"
        )
    for name in ("system", "tools"):
        if body.get(name):
            raise Refusal(
                f"{name} is the thread's when it continues; leave it out, or begin a thread",
                code="thread_fingerprint_mismatch",
            )
    return thread


def continued(request: Request, earlier: Request) -> None:
    """Puts the earlier conversation of the thread, with its tools, before the request's."""
    request.messages = [*earlier.messages, *request.messages]
    request.tools = earlier.tools


def read_message(message: AnyJSON) -> list[Message]:
    """A message's blocks as messages: results of tools each one, then texts and images."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise Refusal(f"messages: {str(message)[:80]} is no message of user or assistant")
    if message.get("clear_at") == "next_user_message":
        raise Refusal("messages: clear_at is not supported; leave the message out in the program")
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content_of_parts(content, role)}]
    converted: list[Message] = []
    blocks, calls = [], []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            arguments = read_arguments(block.get("input") or {})
            calls.append(called(block.get("id", ""), block.get("name"), arguments))
        elif kind == "tool_result":
            result = content_of_parts(block.get("content"), kind)
            call_id = block.get("tool_use_id", "")
            converted.append({"role": "tool", "content": result, "tool_call_id": call_id})
        elif kind not in ("thinking", "redacted_thinking"):
            blocks.append(block)
    if blocks or calls or not converted:
        message = {"role": role, "content": content_of_parts(blocks, role)}
        converted.append(message | {"tool_calls": calls} if calls else message)
    return converted


def write(replies: Sequence[Reply], request: Request) -> JSONObject:
    """The response's body."""
    (reply,) = replies
    return {
        "id": reply_id(reply),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks(reply),
        "stop_reason": "stop_sequence" if reply.stop else FINISH[reply.finish_reason],
        "stop_sequence": reply.stop or None,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
    }


def reply_id(reply: Reply) -> str:
    return f"msg_{reply.id}"


def blocks(reply: Reply) -> list[JSONObject]:
    content: list[JSONObject] = []
    if reply.thoughts:
        # Clients send thinking without a signature back as text.
        block = {"type": "thinking", "thinking": reply.thoughts, "signature": reply_id(reply)}
        content.append(block)
    if reply.text or not reply.calls:
        content.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        one = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        content.append(one)
    return content


def stream(replies: Sequence[Reply], request: Request) -> Iterator[str]:
    """Server-sent events."""
    for body in events(replies[0], write(replies, request)):
        yield f"event: {body['type']}\ndata: {json.dumps(body)}\n\n"
    replies[0].num_sent = math.inf


def events(reply: Reply, body: JSONObject) -> Iterator[JSONObject]:
    usage = body["usage"]
    opened = body | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": opened | {"usage": usage | {"output_tokens": 0}}}
    for index, block in enumerate(body["content"]):
        position = {"index": index}
        if block["type"] == "text":
            start = {"type": "text", "text": ""}
            pieces = reply.pieces("text")
            deltas = ({"type": "text_delta", "text": piece} for piece in pieces)
        elif block["type"] == "thinking":
            start = block | {"thinking": "", "signature": ""}
            pieces = reply.pieces("thoughts")
            deltas = ({"type": "thinking_delta", "thinking": piece} for piece in pieces)
        else:
            start = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield {"type": "content_block_start", "content_block": start} | position
        for delta in deltas:
            yield {"type": "content_block_delta", "delta": delta} | position
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "delta": delta} | position
        yield {"type": "content_block_stop"} | position
    ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    counted = {"output_tokens": usage["output_tokens"]}
    yield {"type": "message_delta", "delta": ended, "usage": counted}
    yield {"type": "message_stop"}


def write_error(refusal: Refusal) -> JSONObject:
    kind = "invalid_request_error" if refusal.status < 500 else "api_error"
    error: JSONObject = {"type": ERRORS.get(refusal.status, kind), "message": refusal.message}
    if refusal.code.startswith("thread_"):
        error["details"] = {"error_code": refusal.code}
    return {"type": "error", "error": error}
