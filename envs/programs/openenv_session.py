"""A session at an OpenEnv server: its messages, its actions, and its tools."""

import asyncio
import contextlib
import json

import aiohttp

# Kinds of failed tool calls that the actor causes, and those that the server causes.
ACTORS, SERVERS = ("tool_not_found", "invalid_args"), ("timeout", "transport_error")


class Refused(Exception):
    """The server says that this is no action. `fields`: where its values are wrong."""

    def __init__(self, errors):
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in errors]
        super().__init__("; ".join(lines) or "VALIDATION_ERROR")
        self.fields = {each["loc"][0] for each in errors if each["loc"]}


class Full(Exception):
    """The server has no session left."""


class Session:
    """One episode at the server. A task reads the connection also while the actor thinks, because a
    server closes a connection on which its pings stay without an answer."""

    def __init__(self, socket, schema, step_s, illegal_reward):
        self.socket, self.schema, self.messages = socket, schema, asyncio.Queue()
        self.step_s, self.illegal_reward = step_s, illegal_reward
        self.is_paid, self.illegal = False, 0
        self.reader = asyncio.create_task(self.read())

    async def read(self):
        message = None
        while message is None or message.type is aiohttp.WSMsgType.TEXT:
            message = await self.socket.receive()
            self.messages.put_nowait(message)

    async def send(self, kind, data=None):
        with contextlib.suppress(ConnectionError):  # A last message may say why it is closed.
            await self.socket.send_json({"type": kind} | ({} if data is None else {"data": data}))

    async def ask(self, kind, data=None):
        """The data of the server's answer."""
        await self.send(kind, data)
        try:
            message = await asyncio.wait_for(self.messages.get(), self.step_s)
        except TimeoutError:
            raise TimeoutError(
                f"the OpenEnv server did not answer to {kind!r} within {self.step_s:g} s"
            ) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the OpenEnv server closed the connection after {kind!r}")
        answer = message.json()
        if answer["type"] != "error":
            return answer["data"]
        error = answer["data"]
        if error.get("code") == "VALIDATION_ERROR" and kind == "step":
            raise Refused(error.get("errors", ()))
        why = Full if error.get("code") == "CAPACITY_REACHED" else RuntimeError
        raise why(
            f"the OpenEnv server failed at {kind!r}: {error.get('message')} ({error.get('code')})"
        )

    async def tools(self):
        """The server's tools if its actions call tools, else None."""
        names = self.schema["properties"].keys() - {"metadata"}
        if names and not names >= {"tool_name", "arguments"}:
            return None
        answer = await self.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        tools = answer.get("result", {}).get("tools")
        if not tools:
            raise RuntimeError(
                "the OpenEnv server takes calls of tools and lists none: "
                f"{answer.get('error', {}).get('message', answer)}"
            )
        return [
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or {},
            }
            for tool in tools
        ]

    async def turn(self, reply, tools, fields):
        """(messages for the actor, reward, True if the episode ended) of one reply."""
        if not tools:
            return await self.step(action_of, reply.answer, fields)
        messages, total, is_done = [], 0.0, False
        for call in reply.messages[-1].get("tool_calls") or ():
            text, reward, is_done = await self.step(called, call["function"])
            messages.append({"role": "tool", "content": text, "tool_call_id": call["id"]})
            total += reward
            if is_done:
                break
        return messages, total, is_done or not messages

    async def step(self, make_action, *args):
        """(text for the actor, reward, True if the episode ended) of action make_action(*args)."""
        action = {}
        try:
            action = make_action(*args)
            data = await self.ask("step", action)
        except (ValueError, Refused) as error:
            known = {*self.schema["properties"], *action}
            if isinstance(error, Refused) and not error.fields <= known:
                raise RuntimeError(f"the OpenEnv server failed at 'step': {error}") from None
            self.illegal += 1
            return f"That is no action: {error}", self.illegal_reward, False
        self.is_paid |= data.get("reward") is not None
        if data.get("done") and not self.is_paid:
            raise RuntimeError(
                "the OpenEnv server ended the episode and gave no reward: it was None in each step"
            )
        observation = data["observation"]
        is_illegal = tool_error(observation) in ACTORS
        self.illegal += is_illegal
        reward = float(data.get("reward") or 0.0) + self.illegal_reward * is_illegal
        return shown(observation), reward, bool(data.get("done"))


def tool_error(observation):
    """Kind of a failed tool call, or None. Raises RuntimeError if the server caused the failure."""
    error = observation.get("error") if "tool_name" in observation else None
    if error and error["error_type"] in SERVERS:
        raise RuntimeError(f"the OpenEnv server failed at 'step': {shown(observation)}")
    return error and error["error_type"]


def type_of(field, schema):
    """JSON type of a field: "string" if that is one of several."""
    if "$ref" in field:
        field = schema["$defs"][field["$ref"].rsplit("/", 1)[-1]]
    kinds = [type_of(each, schema) for each in field.get("anyOf", ())]
    return "string" if "string" in kinds else field.get("type")


def fields_of(schema):
    """Name -> type of an action's fields, without those that every action has."""
    matches = {
        name: type_of(about, schema)
        for name, about in schema["properties"].items()
        if name != "metadata"
    }
    required = [name for name in schema.get("required", ()) if name in matches]
    return {name: matches[name] for name in required or matches}


def action_of(text, fields):
    """The action that a reply means. Raises ValueError if it is none."""
    [(name, kind), *more] = fields.items()
    if kind == "string" and not more and not text.lstrip().startswith("{"):
        return {name: text}
    value = json.loads(text)
    if isinstance(value, dict):
        return value
    if more:
        raise ValueError("it must be a JSON object")
    return {name: value}


def called(function):
    """The action of a tool call. Raises ValueError if its arguments are not a JSON object."""
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}


def shown(observation):
    """Text of an observation: of a tool's result, of its only field, or its JSON."""
    if observation.get("tool_name") and "result" in observation:
        error, result = observation.get("error"), observation["result"]
        if error:
            return f"{error['error_type']}: {error['message']}"
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            blocks = result["content"]
            return "\n".join(each.get("text") or f"[{each['type']}, not shown]" for each in blocks)
        return result if isinstance(result, str) else json.dumps(result)
    empty = (None, {})  # such as the metadata of openenv 0.10
    values = [value for value in observation.values() if value not in empty]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)
