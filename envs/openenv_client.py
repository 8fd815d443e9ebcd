"""An environment behind an OpenEnv server: https://github.com/meta-pytorch/OpenEnv, by its
WebSocket protocol.

    OPENENV_URL=http://127.0.0.1:8000 rl-core train --env_path envs/openenv_client.py --model
    Qwen/Qwen3-0.6B --out runs/openenv \
        --max_prompt_tokens 1024 --max_tokens 256 --rollout.max_concurrent 8

Each episode is a session: a reset with the row's `reset` (such as {"seed": 3}), then a step for
each reply. A reply is the action as a JSON object; where actions have one field, its value alone
will do. The actor sees observations as JSON, or the text of their only field. A reply that is no
action costs ILLEGAL. The reward is the sum of the server's, each for its turn. Metrics: `illegal`,
and `steps`, the `step_count` of the server's state.

Rows: a prompt, and optionally `reset`. Without --data.train: seeds 100 to 1,099, and 0 to 99 to
evaluate. A server holds a few sessions (its max_concurrent_envs). An episode waits up to ROOM_S for
a free one; --rollout.max_concurrent within them spares the wait. If the server cannot be reached,
stays full, raises, or takes longer than STEP_S, the episode fails with the cause. $OPENENV_TOKEN is
sent as a bearer token. Tried with openenv 0.10 (formerly
openenv-core). Needs a GPU, not run.
"""

import asyncio
import itertools
import json
import os
import time

import aiohttp

URL, TOKEN = (
    os.environ.get("OPENENV_URL", "http://127.0.0.1:8000").rstrip("/"),
    os.environ.get("OPENENV_TOKEN"),
)
ILLEGAL, STEP_S, ROOM_S, MAX_BYTES, max_turns = -0.05, 60.0, 600.0, 100 << 20, 8


def load_tasks(split):
    seeds = range(100, 1100) if split == "train" else range(100)
    return [
        {"prompt": "Reply with your next action alone.", "reset": {"seed": seed}} for seed in seeds
    ]


class Refused(Exception):
    """The server says that this is no action."""


class Full(Exception):
    """The server has no session left."""


async def ask(socket, kind, data=None):
    """The data of the server's answer."""
    await socket.send_json({"type": kind} | ({} if data is None else {"data": data}))
    try:
        message = await socket.receive(STEP_S)
    except asyncio.TimeoutError:
        raise TimeoutError(
            f"the OpenEnv server did not answer to {kind!r} within {STEP_S:g} s"
        ) from None
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise ConnectionError(f"the OpenEnv server closed the connection after {kind!r}")
    answer = message.json()
    if answer["type"] == "error":
        error = answer["data"]
        why = RuntimeError
        if error.get("code") == "CAPACITY_REACHED":
            why = Full
        elif error.get("code") == "VALIDATION_ERROR" and kind == "step":
            why = Refused
        raise why(
            f"the OpenEnv server failed at {kind!r}: {error.get('message')} ({error.get('code')})"
        )
    return answer["data"]


def fields_of(schema):
    """Name -> type of an action's fields, without those that every action has."""
    matches = {
        name: about.get("type")
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


def shown(observation):
    empty = (None, {})  # such as the metadata of openenv 0.10
    values = [value for value in observation.values() if value not in empty]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(observation)


async def rollout(task, actors):
    [actor] = actors.values()
    headers = {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
    limit = aiohttp.ClientTimeout(total=None, connect=STEP_S, sock_read=STEP_S)
    async with aiohttp.ClientSession(
        headers=headers, raise_for_status=True, timeout=limit
    ) as session:
        try:
            async with session.get(f"{URL}/schema") as reply:
                fields = fields_of((await reply.json())["action"])
        except aiohttp.ClientConnectorError as error:
            raise ConnectionError(
                f"no OpenEnv server answers at OPENENV_URL={URL} ({error}); start one (pip install "
                "openenv), and give its address"
            ) from None
        give_up = time.monotonic() + ROOM_S
        for pause_s in itertools.chain((0.1, 0.2, 0.5, 1.0, 2.0), itertools.repeat(5.0)):
            async with session.ws_connect(f"{URL}/ws", max_msg_size=MAX_BYTES) as socket:
                try:
                    data = await ask(socket, "reset", task.row.get("reset") or {})
                    return [await play(socket, data, fields, task, actor)]
                except Full as error:
                    if time.monotonic() + pause_s > give_up:
                        raise TimeoutError(f"{error}; it stayed full for {ROOM_S:g} s") from None
            await asyncio.sleep(pause_s)


async def play(socket, data, fields, task, actor):
    last = task.messages[-1]
    note = "" if len(fields) == 1 else f"Actions are JSON objects with {json.dumps(fields)}.\n\n"
    text = [
        *task.messages[:-1],
        last | {"content": f"{last['content']}\n\n{note}{shown(data['observation'])}"},
    ]
    reply, rewards, illegal = None, [], 0
    while len(rewards) < actor.max_turns and not data.get("done"):
        reply = await (reply or actor).respond(text)
        if reply.truncated:
            # Without text the context was full before it spoke.
            rewards += [ILLEGAL] if reply.text else []
            break
        try:
            data = await ask(socket, "step", action_of(reply.answer, fields))
        except (ValueError, Refused) as error:
            text, illegal, rewards = f"That is no action: {error}", illegal + 1, [*rewards, ILLEGAL]
            continue
        rewards.append(float(data.get("reward") or 0.0))
        text = shown(data["observation"])
    if reply is None:
        raise ValueError("the OpenEnv server said that the episode ended when it began")
    steps = (await ask(socket, "state")).get("step_count") or 0
    await socket.send_json({"type": "close"})
    trajectory = reply.trajectory(
        sum(rewards), metrics={"steps": float(steps), "illegal": float(illegal)}
    )
    # None for an actor without tokens.
    trajectory.turn_rewards = [*rewards, 0.0][: len(trajectory.turns)]
    return trajectory
