"""Schemas of tools and answers to calls, shared by environments with tools."""

import inspect
import json

MAX_SHOWN = 2000  # Characters of an answer.


def tool(name, description, **arguments):
    """The schema of a function whose arguments are texts: name -> description."""
    properties = {}
    for argument, meaning in arguments.items():
        properties[argument] = {"type": "string", "description": meaning}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def carry_out(call, tools):
    """Result of a call as text. `tools`: name -> function of texts. Raises
    ValueError for a call that does not fit, and where the function does."""
    function = call["function"]
    name, arguments = function["name"], function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if name not in tools:
        raise ValueError(f"there is no tool {name!r}; there are {', '.join(tools)}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    try:
        bound = inspect.signature(tools[name]).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return str(tools[name](*map(str, bound.args)))


def answer(call, tools):
    """The message that answers a call: what its function gives, or why it refuses."""
    try:
        result = carry_out(call, tools)
    except ValueError as error:
        result = f"error: {error}"
    return {"role": "tool", "content": result[:MAX_SHOWN], "tool_call_id": call.get("id", "")}


def answers(message, tools):
    """Messages that answer all calls of a message."""
    return [answer(call, tools) for call in message.get("tool_calls") or []]
