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
import itertools
import json
import os
import time
import urllib.request
from urllib.error import HTTPError, URLError
from urllib.parse import quote

import aiohttp
from programs.openenv_session import Full, Session, fields_of, shown

URL, TOKEN = (
    os.environ.get("OPENENV_URL", "http://127.0.0.1:8000").rstrip("/"),
    os.environ.get("OPENENV_TOKEN"),
)
ILLEGAL, STEP_S, ROOM_S, MAX_BYTES, max_turns = -0.05, 60.0, 600.0, 100 << 20, 8
HEADERS = {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
PROMPT = "Reply with your next action alone."


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
                session = Session(socket, schema, STEP_S, ILLEGAL)
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
