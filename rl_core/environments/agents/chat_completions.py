"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence

from rl_core.environments.agents.requests import (
    Call,
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
    wanted,
)
from rl_core.types import AnyJSON, JSONObject, Message

PATH = "/v1/chat/completions"
MAX_REPLIES = 128  # Limit of `n`, the same as OpenAI's.
FIELDS = Fields(
    used="add_generation_prompt continue_final_message logprobs max_completion_tokens max_tokens "
    "messages model n response_format stop stream stream_options tool_choice tools",
    harmless="metadata moderation prediction prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier store user",
    decided="frequency_penalty logit_bias parallel_tool_calls presence_penalty reasoning_effort "
    "seed temperature top_logprobs top_p verbosity web_search_options",
    refused={"audio": "this model writes text alone", "function_call": "use tool_choice"},
)
REFUSED_OF_MESSAGES = {"audio": "send its transcript", "function_call": "use tool_calls"}
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


def read(body: JSONObject) -> Request:
    """Raises Refusal for what this engine cannot do."""
    overridden = FIELDS.overridden_in(body)
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        overridden.append("tool_choice")
    num_replies = limit_of(body, "n") or 1
    if num_replies > MAX_REPLIES:
        raise Refusal(f"n: {num_replies} must be at most {MAX_REPLIES}")
    messages = wanted(body, "messages", list, [])
    if not messages:
        raise Refusal("messages is empty")
    messages = [read_message(message) for message in messages]
    if wanted(body, "continue_final_message", bool, False):
        if body.get("add_generation_prompt"):
            raise Refusal("continue_final_message: set add_generation_prompt to false, or omit it")
        if not mark_prefix(messages):
            raise Refusal("continue_final_message: the last message must be the assistant's text")
    elif body.get("add_generation_prompt") is False:
        overridden.append("add_generation_prompt")
    return Request(
        model=wanted(body, "model", str, ""),
        messages=messages,
        tools=read_tools(wanted(body, "tools", list, [])),
        reads_calls=choice != "none",
        max_tokens=limit_of(body, "max_tokens", "max_completion_tokens"),
        stop=stops_of(body, "stop"),
        num_replies=num_replies,
        is_streamed=wanted(body, "stream", bool, False),
        wants_logprobs=wanted(body, "logprobs", bool, False),
        wants_usage=bool(wanted(body, "stream_options", dict, {}).get("include_usage")),
        schema=schema_of(wanted(body, "response_format", dict, {}), "response_format"),
        seed=body.get("seed"),
        overridden=overridden,
    )


def read_tools(tools: list[AnyJSON]) -> list[JSONObject] | None:
    functions = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise Refusal(f"tools: {str(tool)[:80]} must be a function with a name")
        fields = (function.get(key) for key in ("name", "description", "parameters"))
        functions.append(read_tool(*fields))
    return functions or None


def read_message(message: AnyJSON) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(f"messages: {str(message)[:80]} is no message with a role")
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise Refusal(f"messages: role {role!r} is not supported")
    for name, fix in REFUSED_OF_MESSAGES.items():
        if message.get(name):
            raise Refusal(f"messages: {name} of a message is not supported; {fix}")
    converted: Message = {"role": role, "content": content_of_parts(message.get("content"), role)}
    asked = wanted(message, "tool_calls", list, [])
    if asked:
        calls = []
        for call in asked:
            try:
                name, arguments = call["function"]["name"], call["function"]["arguments"]
            except (TypeError, KeyError):
                raise Refusal(f"tool_calls: {str(call)[:80]} is no call of a function") from None
            calls.append(called(call.get("id", ""), name, read_arguments(arguments)))
        converted["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if isinstance(message.get(key), str) and role == "tool":
            converted[key] = message[key]
    return converted


def write(replies: Sequence[Reply], request: Request) -> JSONObject:
    """The response's body."""
    choices = []
    for index, reply in enumerate(replies):
        message: JSONObject = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [written_call(call) for call in reply.calls]
        choice = {"index": index, "message": message, "finish_reason": FINISH[reply.finish_reason]}
        choices.append(choice | {"logprobs": choice_logprobs(reply, request)})
    head = header(replies[0], request, "chat.completion")
    return head | {"choices": choices, "usage": usage(replies)}


def stream(replies: Sequence[Reply], request: Request) -> Iterator[str]:
    """Server-sent events."""
    head = header(replies[0], request, "chat.completion.chunk")

    def chunk(index: int, delta: JSONObject, finish: str | None = None, **more: AnyJSON) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
        return event(head | {"choices": [choice | more]})

    for index, reply in enumerate(replies):
        yield chunk(index, {"role": "assistant", "content": ""})
        # The first delta has the logprobs of all tokens, including thoughts and calls.
        logprobs = choice_logprobs(reply, request)
        for delta in deltas(reply):
            yield chunk(index, delta, logprobs=logprobs)
            logprobs = None
        yield chunk(index, {}, FINISH[reply.finish_reason])
        reply.num_sent = math.inf
    if request.wants_usage:
        yield event(head | {"choices": [], "usage": usage(replies)})
    yield "data: [DONE]\n\n"


def deltas(reply: Reply) -> Iterator[JSONObject]:
    if reply.thoughts:
        for piece in reply.pieces("thoughts"):
            yield {"reasoning_content": piece}
    if reply.text or not reply.calls:
        for piece in reply.pieces("text"):
            yield {"content": piece}
    for number, call in enumerate(reply.calls):
        yield {"tool_calls": [{"index": number} | written_call(call)]}


def event(body: JSONObject) -> str:
    return f"data: {json.dumps(body)}\n\n"


def header(reply: Reply, request: Request, kind: str) -> JSONObject:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def written_call(call: Call) -> JSONObject:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def choice_logprobs(reply: Reply, request: Request) -> JSONObject | None:
    return {"content": logprobs_of(reply), "refusal": None} if request.wants_logprobs else None


def logprobs_of(reply: Reply) -> list[JSONObject]:
    """Each sampled token with its logprob; [] if the request did not ask for them."""
    content = []
    for token, logprob in reply.logprobs:
        text = token.decode(errors="replace")
        one = {"token": text, "logprob": logprob, "bytes": list(token)}
        content.append(one | {"top_logprobs": []})
    return content


def usage(replies: Sequence[Reply]) -> dict[str, int]:
    num_prompt = replies[0].num_prompt_tokens
    num_sampled = sum(reply.num_tokens for reply in replies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def write_error(refusal: Refusal) -> JSONObject:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    error = {"message": refusal.message, "type": kind, "param": None, "code": refusal.code}
    return {"error": error}
