"""What environments with tools share: schemas of tools, and the answers to what a model calls."""

import inspect
import json

MAX_SHOWN = 2000  # Characters of an answer.


def tool(name, description, **arguments):
    """The schema of a function whose arguments are texts: name -> what it is."""
    properties = {}
    for argument, meaning in arguments.items():
        properties[argument] = {"type": "string", "description": meaning}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def carry_out(call, tools):
    """What the function of a call gives, as text. `tools`: name -> function of texts. Raises
    ValueError for a call that does not fit, and where the function does."""
    function = call["function"]
    name, given = function["name"], function["arguments"]
    if isinstance(given, str):  # from an endpoint elsewhere
        given = json.loads(given)
    if name not in tools:
        raise ValueError(f"there is no tool {name!r}; there are {', '.join(tools)}")
    if not isinstance(given, dict):
        raise ValueError("arguments must be an object")
    try:
        bound = inspect.signature(tools[name]).bind(**given)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return str(tools[name](*map(str, bound.args)))


def answer(call, tools):
    """The message that answers a call: what its function gives, or why it refuses."""
    try:
        said = carry_out(call, tools)
    except ValueError as error:
        said = f"error: {error}"
    return {"role": "tool", "content": said[:MAX_SHOWN], "tool_call_id": call.get("id", "")}


def answers(message, tools):
    """Messages that answer all calls of a message."""
    return [answer(call, tools) for call in message.get("tool_calls") or []]
