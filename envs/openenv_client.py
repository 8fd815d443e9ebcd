"""An environment behind an OpenEnv server: https://github.com/meta-pytorch/OpenEnv, by its
WebSocket protocol.

    OPENENV_URL=http://127.0.0.1:8000 rl-core train --env_path envs/openenv_client.py --model
    Qwen/Qwen3-0.6B --out runs/openenv \
        --max_prompt_tokens 1024 --max_tokens 256 --rollout.max_concurrent 8

Each episode is a session: a reset with the row's `reset` (such as {"seed": 3}), then a step for
each reply. A reply is the action as a JSON object; where actions have one field, its value alone
will do. The actor sees observations as JSON, or the text of their only field. A server whose
actions call MCP tools gives its tools to the actor: each call is a step, and a reply without a call
ends the episode. A reply that is no action, or a call that the server cannot match to a tool, costs
ILLEGAL. The reward is the sum of the server's, each for its turn. Metrics: `illegal`, and `steps`,
the `step_count` of the server's state.

Rows: a prompt, and optionally `reset`. Without --data.train: the server's tasks by split and index,
where it lists any, else seeds 100 to 1,099, and 0 to 99 to evaluate. A server holds a few sessions
(its max_concurrent_envs). An episode waits up to ROOM_S for a free one; --rollout.max_concurrent
within them spares the wait. An episode fails with the cause if the server cannot be reached, stays
full, raises, takes longer than STEP_S, or ends an episode without any reward. $OPENENV_TOKEN is
sent as a bearer token. An image runs by `docker run -p 8000:8000 IMAGE`. Tried with openenv 0.10,
and with openenv-core 0.3, which lists no tasks. Needs a GPU, not run.
"""

import asyncio
import contextlib
import itertools
import json
import os
import time
import urllib.request
from urllib.error import HTTPError, URLError
from urllib.parse import quote

import aiohttp

URL, TOKEN = (
    os.environ.get("OPENENV_URL", "http://127.0.0.1:8000").rstrip("/"),
    os.environ.get("OPENENV_TOKEN"),
)
ILLEGAL, STEP_S, ROOM_S, MAX_BYTES, max_turns = -0.05, 60.0, 600.0, 100 << 20, 8
HEADERS = {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
PROMPT = "Reply with your next action alone."
# Kinds of failed tool calls that the actor causes, and those that the server causes.
ACTORS, SERVERS = ("tool_not_found", "invalid_args"), ("timeout", "transport_error")


def fetch(path, body=None):
    """JSON of a route. None if the server has no such route, or no tasks."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        URL + path, data, HEADERS | {"Content-Type": "application/json"}
    )
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with without_proxy.open(request, timeout=STEP_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        if error.code in (404, 501):
            return None
        raise
    except URLError as error:
        raise unreachable(error) from None


def unreachable(error):
    return ConnectionError(
        f"no OpenEnv server answers at OPENENV_URL={URL} ({error}); start one (pip install "
        "openenv), and give its address"
    )


def load_tasks(split):
    names = fetch("/list_environments")  # None: openenv-core 0.3
    path = f"/{quote(names[0])}" if names else None
    splits = fetch(f"{path}/splits") if path else None
    if not splits:
        seeds = range(100, 1100) if split == "train" else range(100)
        return [{"prompt": PROMPT, "reset": {"seed": seed}} for seed in seeds]
    kinds = ("train",) if split == "train" else ("validation", "test")
    names = [each["name"] for kind in kinds for each in splits if each["type"] == kind]
    num_tasks = fetch(f"{path}/num_tasks", {"split": names[0]})["num_tasks"] if names else 0
    return [
        {"prompt": PROMPT, "reset": {"split": names[0], "index": index}}
        for index in range(num_tasks)
    ]


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

    def __init__(self, socket, schema):
        self.socket, self.schema, self.messages = socket, schema, asyncio.Queue()
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
            message = await asyncio.wait_for(self.messages.get(), STEP_S)
        except TimeoutError:
            raise TimeoutError(
                f"the OpenEnv server did not answer to {kind!r} within {STEP_S:g} s"
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
            return f"That is no action: {error}", ILLEGAL, False
        self.is_paid |= data.get("reward") is not None
        if data.get("done") and not self.is_paid:
            raise RuntimeError(
                "the OpenEnv server ended the episode and gave no reward: it was None in each step"
            )
        observation = data["observation"]
        is_illegal = tool_error(observation) in ACTORS
        self.illegal += is_illegal
        reward = float(data.get("reward") or 0.0) + ILLEGAL * is_illegal
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


async def rollout(task, actors):
    [actor] = actors.values()
    limit = aiohttp.ClientTimeout(total=None, connect=STEP_S, sock_read=STEP_S)
    async with aiohttp.ClientSession(
        headers=HEADERS, raise_for_status=True, timeout=limit
    ) as client:
        try:
            async with client.get(f"{URL}/schema") as reply:
                schema = (await reply.json())["action"]
        except aiohttp.ClientConnectorError as error:
            raise unreachable(error) from None
        give_up = time.monotonic() + ROOM_S
        for pause_s in itertools.chain((0.1, 0.2, 0.5, 1.0, 2.0), itertools.repeat(5.0)):
            async with client.ws_connect(f"{URL}/ws", max_msg_size=MAX_BYTES) as socket:
                session = Session(socket, schema)
                try:
                    data = await session.ask("reset", task.row.get("reset") or {})
                    return [await play(session, data, task, actor)]
                except Full as error:
                    if time.monotonic() + pause_s > give_up:
                        raise TimeoutError(f"{error}; it stayed full for {ROOM_S:g} s") from None
                finally:
                    session.reader.cancel()
            await asyncio.sleep(pause_s)


async def play(session, data, task, actor):
    if data.get("done"):
        raise ValueError("the OpenEnv server said that the episode ended when it began")
    tools = await session.tools()
    fields = None if tools else fields_of(session.schema)
    note = ""
    if fields and len(fields) > 1:
        note = f"Actions are JSON objects with {json.dumps(fields)}.\n\n"
    last = task.messages[-1]
    first = last | {"content": f"{last['content']}\n\n{note}{shown(data['observation'])}"}
    reply = await actor.respond([*task.messages[:-1], first], tools=tools)
    rewards, is_done = [], False
    while not reply.truncated:
        messages, reward, is_done = await session.turn(reply, tools, fields)
        rewards.append(reward)
        if is_done or len(rewards) == actor.max_turns:
            break
        await reply.respond(messages)
    if reply.truncated and reply.text:  # Without text the context was full before it spoke.
        rewards.append(ILLEGAL)
    steps = (await session.ask("state")).get("step_count") or 0
    await session.send("close")
    metrics = {"steps": float(steps), "illegal": float(session.illegal)}
    trajectory = reply.trajectory(sum(rewards), metrics=metrics)
    # None for an actor without tokens.
    trajectory.turn_rewards = [*rewards, 0.0][: len(trajectory.turns)]
    return trajectory
