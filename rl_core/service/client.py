"""`--env_path grpc://host:port/name`: a served environment as a module with hooks, so that a run treats it as any other."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import grpc

from rl_core.sampling.env import OF_GROUP
from rl_core.service import environments_pb2 as pb
from rl_core.service.security import Access, read_token
from rl_core.service.wire import CHANNEL_OPTIONS, CODES, ENVIRONMENTS, ServiceError, from_json, to_json
from rl_core.types import Task

RECONNECT_S = 120.0  # a service that cannot be reached for so long fails what waits for it
START_S = 600.0  # how long a start may wait for room
SETTINGS = {"token_file", "ca", "start_s", "reconnect_s"}


class Connection:
    """One stream to a service, shared by all environments and sessions of this process. It is opened again when it breaks, and
    what was not answered is sent again: a numbered request is never done twice."""

    def __init__(self, address: str, access: Access, reconnect_s: float = RECONNECT_S):
        self.address, self.access, self.reconnect_s = address, access, reconnect_s
        self.channel = access.channel(address, CHANNEL_OPTIONS)
        self.ids, self.lock = itertools.count(1), threading.Lock()
        self.pending: dict[int, tuple[pb.Request, Future]] = {}
        self.out: queue.SimpleQueue[pb.Request | None] = queue.SimpleQueue()
        self.sessions: dict[str, float] = {}  # name -> idle_s
        self.renewed_s = time.monotonic()
        threading.Thread(target=self._run, name=f"service {address}", daemon=True).start()

    def send(self, timeout_s: float = 0.0, **verb: Any) -> Future:
        """A future of the verb's reply. It raises ServiceError."""
        request, future = pb.Request(id=next(self.ids), timeout_s=timeout_s, **verb), Future()
        with self.lock:
            self.pending[request.id] = request, future
        self.out.put(request)
        return future

    async def ask(self, timeout_s: float = 0.0, **verb: Any) -> Any:
        return await asyncio.wrap_future(self.send(timeout_s, **verb))

    def _run(self) -> None:
        """The thread that reads replies, over one stream after the other."""
        down_s = None
        stream = self.channel.stream_stream(
            f"/{ENVIRONMENTS}/Stream",
            request_serializer=pb.Requests.SerializeToString,
            response_deserializer=pb.Replies.FromString,
        )
        while True:
            out = self.out = queue.SimpleQueue()
            with self.lock:
                again = [request for _, (request, _) in sorted(self.pending.items())]
            for request in again:
                out.put(request)
            try:
                for batch in stream(self._requests(out), metadata=self.access.metadata()):
                    down_s = None
                    for reply in batch.replies:
                        self._settle(reply)
                error = "the server ended the stream"
            except grpc.RpcError as e:
                error = e.details()
                if e.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
                    self._fail(ServiceError(e.code(), f"{self.address}: {error}"))
            out.put(None)
            down_s = down_s or time.monotonic()
            if time.monotonic() - down_s > self.reconnect_s:
                message = f"{self.address} could not be reached for {self.reconnect_s:g} s: {error}"
                self._fail(ServiceError(grpc.StatusCode.UNAVAILABLE, message))
            time.sleep(0.2)

    def _requests(self, out: queue.SimpleQueue) -> Iterator[pb.Requests]:
        while (request := out.get()) is not None:
            batch = [request]
            while not out.empty() and len(batch) < 256:
                if (request := out.get()) is None:
                    break
                batch.append(request)
            yield pb.Requests(requests=batch)
            if request is None:
                return

    def _settle(self, reply: pb.Reply) -> None:
        with self.lock:
            _, future = self.pending.pop(reply.id, (None, None))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if reply.code:
            code = CODES.get(reply.code, grpc.StatusCode.UNKNOWN)
            future.set_exception(ServiceError(code, reply.error))
        else:
            future.set_result(getattr(reply, reply.WhichOneof("verb")))

    def _fail(self, error: ServiceError) -> None:
        with self.lock:
            failed, self.pending = self.pending, {}
        for _, future in failed.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


class Session:
    """The trainer's side of an episode: the `state` that hooks share."""

    def __init__(self, connection: Connection, name: str, messages: list[dict]):
        self.connection, self.name, self.messages = connection, name, messages
        self.numbers = itertools.count(1)
        weakref.finalize(self, end, connection, name)

    def said(self, given: dict[str, Any], wants_trajectory: bool) -> pb.Said:
        """What the server has not heard."""
        messages, keep = given["messages"], 0
        for known, now in zip(self.messages, messages, strict=False):
            if known != now:
                break
            keep += 1
        self.messages = messages
        said = pb.Said(keep=keep, actor=given.get("actor") or "", completion=given.get("completion") or "")
        said.messages = to_json(messages[keep:], "messages")
        if wants_trajectory:
            said.trajectory = to_json(asdict(given["trajectory"]), "the trajectory")
        return said


def end(connection: Connection, session: str) -> None:
    connection.send(cancel=pb.CancelRequest(session=session, status=pb.COMPLETED))


@cache
def connect(address: str, token_file: str, ca: str, tls: bool, reconnect_s: float) -> Connection:
    access = Access(token=read_token(token_file), ca=Path(ca).read_bytes() if ca else None, tls=tls)
    return Connection(address, access, reconnect_s)


def parse(url: str) -> tuple[str, str, bool, dict[str, str]]:
    """(address, environment, whether TLS, settings). Raises ValueError."""
    parts = urlsplit(url)
    settings = dict(parse_qsl(parts.query))
    name = parts.path.strip("/")
    if parts.username or parts.password:
        raise ValueError(
            "a URL of an environment holds no password: it would be written to config.yaml; use a token file"
        )
    if not parts.hostname or not parts.port or not name:
        raise ValueError(f"{url} must be grpc://HOST:PORT/NAME")
    for key in settings.keys() - SETTINGS:
        raise ValueError(f"{url}: unknown setting {key!r}; known: {', '.join(sorted(SETTINGS))}")
    return f"{parts.hostname}:{parts.port}", name, parts.scheme == "grpcs", settings


def load_module(url: str) -> ModuleType:
    """The served environment as a module. Raises ValueError if it is not there."""
    address, name, tls, settings = parse(url)
    reconnect_s = float(settings.get("reconnect_s", RECONNECT_S))
    connection = connect(address, settings.get("token_file", ""), settings.get("ca", ""), tls, reconnect_s)
    try:
        described = connection.send(30.0, describe=pb.DescribeRequest(env=name)).result(reconnect_s + 30.0).envs[0]
    except ServiceError as error:
        raise ValueError(f"{url}: {error}") from None
    module = ModuleType(f"rl_core_env_{name}")
    module.max_turns, module.name_prefix = described.max_turns, described.name_prefix
    if described.tools:
        module.tools = from_json(described.tools, list, "tools")
    if described.turns:
        module.turns = described.turns
    if described.system_prompts:
        module.system_prompts = from_json(described.system_prompts, dict, "system_prompts")
    if described.HasField("truncated_reward"):
        module.truncated_reward = described.truncated_reward
    start_s = float(settings.get("start_s", START_S))
    hooks = {hook.name: hook for hook in described.hooks}
    module.start = start_hook(connection, described, hooks.get("start"), start_s)
    for hook in described.hooks:
        if hook.name in PROXIES:
            setattr(module, hook.name, PROXIES[hook.name](connection, described, hook))
        elif hook.is_reward:
            reward = (group_hook if hook.batched else reward_hook)(connection, described, hook)
            reward.reward_mark = 1.0 if hook.weight else 0.0, hook.batched
            setattr(module, hook.name, reward)
    for value in vars(module).values():
        if callable(value):
            value.__module__ = module.__name__
    return module


def signed(function: Any, hook: pb.Hook, more: set[str]) -> Any:
    """With the parameters of the served function, so that columns are checked as for a file, and some of ours."""
    names = dict.fromkeys({*hook.required, *more}, inspect.Parameter.empty) | {
        name: None for name in hook.optional if name not in more
    }
    parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in sorted(names.items())]
    if hook.takes_all:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    function.__signature__, function.__name__ = inspect.Signature(parameters), hook.name
    return function


def start_hook(connection: Connection, described: pb.Environment, hook: pb.Hook | None, start_s: float) -> Any:
    async def start(task: Task, **_: Any) -> Session:
        request = pb.StartRequest(env=described.name, key=secrets.token_hex(8), task_id=task.id)
        request.row = to_json(task.row, f"the row of {task.id}")
        request.messages = to_json(task.messages, f"the messages of {task.id}")
        reply = await connection.ask(start_s, start=request)
        return Session(connection, reply.session, from_json(reply.messages, list, "messages"))

    return signed(start, hook or pb.Hook(name="start"), {"task"})


def interact_hook(connection: Connection, described: pb.Environment, hook: pb.Hook) -> Any:
    wants = "trajectory" in {*hook.required, *hook.optional}

    async def interact(state: Session, **given: Any) -> dict[str, Any]:
        request = pb.InteractRequest(session=state.name, number=next(state.numbers), said=state.said(given, wants))
        reply = await connection.ask(interact=request)
        messages = from_json(reply.messages, list, "messages")
        state.messages = state.messages + messages
        return {"messages": messages, "reward": reply.reward if reply.HasField("reward") else None, "done": reply.done}

    return signed(interact, hook, {"state", "messages", "completion", "actor"})


def reward_hook(connection: Connection, described: pb.Environment, hook: pb.Hook) -> Any:
    names = {*hook.required, *hook.optional}

    async def score(state: Session, actor: str = "", **given: Any) -> dict[str, float]:
        said = state.said(given | {"actor": actor}, "trajectory" in names)
        request = pb.ScoreRequest(session=state.name, number=next(state.numbers), said=said, hooks=[hook.name])
        reply = await connection.ask(score=request)
        return dict(reply.scores[0].parts or reply.scores[0].metrics)

    return signed(score, hook, {"state", "messages", "completion"})


def group_hook(connection: Connection, described: pb.Environment, hook: pb.Hook) -> Any:
    async def score(**given: Any) -> list[float]:
        task = given.pop("task")
        given = {name: value for name, value in given.items() if name in OF_GROUP}
        given["trajectories"] = [asdict(t) for t in given["trajectories"]]
        given["task"] = {"id": task.id, "row": task.row, "messages": task.messages}
        text = to_json(given, "the group")
        reply = await connection.ask(call=pb.CallRequest(env=described.name, hook=hook.name, given=text))
        return from_json(reply.value, list, "the rewards of a group")

    return signed(score, hook, {"task", "trajectories"})


def tasks_hook(connection: Connection, described: pb.Environment, hook: pb.Hook) -> Any:
    def load_tasks(split: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while True:
            request = pb.TasksRequest(env=described.name, split=split, first=len(rows))
            reply = connection.send(60.0, tasks=request).result(300.0)
            rows += [from_json(row, dict, "a row") for row in reply.rows]
            if not reply.rows or len(rows) >= reply.total:
                return rows

    return load_tasks


def call_hook(connection: Connection, described: pb.Environment, hook: pb.Hook) -> Any:
    """A function without a session that is not async: advantage_fn, turns, task_weight."""

    def call(*args: Any, **given: Any) -> Any:
        if hook.name == "advantage_fn":
            given = {"rewards": args[0]}
        if "task" in given:
            task = given["task"]
            given["task"] = {"id": task.id, "row": task.row, "messages": task.messages}
        request = pb.CallRequest(env=described.name, hook=hook.name, given=to_json(given, "what the hook is given"))
        return from_json(connection.send(60.0, call=request).result(300.0).value, object, "a value")

    return call if hook.name == "advantage_fn" else signed(call, hook, set())


PROXIES = {
    "interact": interact_hook,
    "load_tasks": tasks_hook,
    "advantage_fn": call_hook,
    "turns": call_hook,
    "task_weight": call_hook,
}
