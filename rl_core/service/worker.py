"""A worker: one process that holds sessions of environments. It dials out to hubs and answers what they pass on.

python -m rl_core.service.worker envs/a.py envs/b.py --join host:port
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any

import grpc

from rl_core import __version__
from rl_core.data.tasks import check_messages, make_task
from rl_core.sampling.env import Env, execute_file, load_env
from rl_core.sampling.hooks import HookError
from rl_core.service import environments_pb2 as pb
from rl_core.service.security import Access, add_access
from rl_core.service.session import ENDED, Session, trajectory_of
from rl_core.service.wire import CHANNEL_OPTIONS, HUB, UNUSABLE, ServiceError, failed, from_json, to_json, wrong
from rl_core.types import Task

KEPT_ENDED = 20_000  # how many ended sessions are remembered
SWEEP_S = 1.0
ROWS = 1_000  # of one reply with tasks
STATELESS = ("turns", "advantage_fn", "task_weight")


class Worker:
    def __init__(
        self,
        paths: list[str],
        *,
        capacity: int,
        idle_s: float,
        hook_timeout_s: float,
        replaces: str = "",
        name: str = "",
    ):
        self.name = name or secrets.token_hex(6)
        self.capacity, self.idle_s, self.replaces = capacity, idle_s, replaces
        self.envs: dict[str, Env] = {}
        self.described: dict[str, pb.Environment] = {}
        for path in paths:
            env, described = load(path, hook_timeout_s, idle_s)
            if env.name in self.envs:
                raise ValueError(f"{path} and {self.envs[env.name].path} are both named {env.name!r}; rename one")
            self.envs[env.name], self.described[env.name] = env, described
        self.sessions: dict[str, Session] = {}
        self.keys: dict[tuple[str, str], asyncio.Future] = {}
        self.ended: Counter = Counter()  # (env, status)
        self.interactions: Counter = Counter()
        self.rows: dict[tuple[str, str], Any] = {}
        self.draining = False
        self.changed = asyncio.Event()  # loads: told to the hubs

    # --- what it answers

    async def answer(self, request: pb.Request) -> pb.Reply:
        verb = request.WhichOneof("verb")
        try:
            if verb is None:
                raise wrong("the request has no verb")
            reply = await getattr(self, verb)(getattr(request, verb))
            return pb.Reply(id=request.id, **{verb: reply})
        except ServiceError as error:
            return failed(request.id, error)
        except Exception as error:  # a fault of ours ends no worker
            text = f"{type(error).__name__}: {error}"
            print(f"worker {self.name}: {verb}: {text}", file=sys.stderr, flush=True)
            return failed(request.id, ServiceError(grpc.StatusCode.INTERNAL, text))

    async def start(self, request: pb.StartRequest) -> pb.StartReply:
        env = self.env_of(request.env)
        if not request.key:
            return await self.begin(env, request)
        key = (request.env, request.key)
        if key not in self.keys:
            self.keys[key] = asyncio.ensure_future(self.begin(env, request))
            self.keys[key].add_done_callback(lambda f: self.keys.pop(key, None) if f.exception() else None)
        return await asyncio.shield(self.keys[key])

    async def begin(self, env: Env, request: pb.StartRequest) -> pb.StartReply:
        if self.draining or self.num_open(env.name) >= self.capacity:
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"worker {self.name} is full")
        task = self.task_of(env, request)
        session = Session(f"{self.name}.{secrets.token_hex(8)}", env, task, list(request.actors))
        session.key = (request.env, request.key)
        self.sessions[session.name] = session
        try:
            await session.start()
        finally:
            self.note_end(session)
        self.changed.set()
        tools = to_json(env.tools, "tools") if env.tools else ""
        messages = to_json(task.messages, "the task's messages")
        return pb.StartReply(session=session.name, messages=messages, tools=tools, idle_s=self.idle_s)

    async def interact(self, request: pb.InteractRequest) -> pb.InteractReply:
        session = self.session_of(request.session)
        self.interactions[session.env.name] += 1
        return await self.in_session(session, request, session.interact)

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreReply:
        session = self.session_of(request.session)
        return await self.in_session(session, request, session.score)

    async def in_session(self, session: Session, request: Any, answer: Any) -> Any:
        try:
            return await session.once(request, lambda: answer(request))
        finally:
            self.note_end(session)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        gone, now = [], time.monotonic()
        for name in request.sessions:
            session = self.sessions.get(name)
            if session is None or session.status in ENDED - {pb.COMPLETED, pb.LIMIT}:
                gone.append(name)
            else:
                session.used_s = now
        return pb.RenewReply(gone=gone)

    async def cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        session = self.session_of(request.session)
        session.end(request.status if request.status in ENDED else pb.CANCELLED, "the client ended it")
        self.note_end(session)
        self.forget(session)
        return pb.CancelReply(status=session.status)

    async def tasks(self, request: pb.TasksRequest) -> pb.TasksReply:
        rows = await self.rows_of(self.env_of(request.env), request.split)
        count = min(request.count or ROWS, ROWS)
        found = [rows[i] for i in range(request.first, min(request.first + count, len(rows)))]
        return pb.TasksReply(rows=[to_json(row, "a row") for row in found], total=len(rows))

    async def call(self, request: pb.CallRequest) -> pb.CallReply:
        """A function that belongs to no session."""
        env = self.env_of(request.env)
        given = from_json(request.given, dict, "given")
        if request.hook == "advantage_fn" and env.advantage_fn:
            value = env.advantage_fn(given.get("rewards", []))
            return pb.CallReply(value=to_json(value, "advantages"))
        hook = env.hooks.get(request.hook)
        if hook is None or not (hook.batched or hook.name in STATELESS):
            raise wrong(f"{env.name} has no {request.hook!r} that belongs to no session")
        task = given.get("task") or {}
        task = Task(id=task.get("id", ""), env=env.name, row=task.get("row", {}), messages=task.get("messages", []))
        given |= {"task": task, "prompt": task.messages, "messages": task.messages}
        if "trajectories" in given:
            given["trajectories"] = [trajectory_of(to_json(t, "trajectories")) for t in given["trajectories"]]
        try:
            value = await hook(task, dict.fromkeys(hook.ours) | given)
        except HookError as error:
            raise ServiceError(grpc.StatusCode.UNKNOWN, str(error)) from None
        except TimeoutError as error:
            raise ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error)) from None
        value = value.tolist() if hasattr(value, "tolist") else value
        return pb.CallReply(value=to_json(value, f"{env.path}: what {hook.name}() returned"))

    # --- its state

    def env_of(self, name: str) -> Env:
        if name not in self.envs:
            known = ", ".join(sorted(self.envs))
            raise ServiceError(grpc.StatusCode.NOT_FOUND, f"there is no environment {name!r}; there are {known}")
        return self.envs[name]

    def session_of(self, name: str) -> Session:
        if name not in self.sessions:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, f"there is no session {name!r}, or it ended long ago")
        return self.sessions[name]

    def task_of(self, env: Env, request: pb.StartRequest) -> Task:
        if request.row:
            row = from_json(request.row, dict, "row")
            try:
                if request.messages:
                    messages = check_messages(from_json(request.messages, list, "messages"))
                    return Task(id=request.task_id, env=env.name, row=row, messages=messages)
                task = make_task(row, 0, env.name, "row")
            except ValueError as error:
                raise wrong(str(error)) from None
            task.id = request.task_id or task.id
            return task
        split, _, index = request.task_id.rpartition("/")
        rows = self.rows.get((env.name, split)) if index.isdecimal() else None
        if rows is None or int(index) >= len(rows):
            hint = "ask Tasks for them first, or send a row"
            raise ServiceError(grpc.StatusCode.NOT_FOUND, f"{env.name} has no task {request.task_id!r}; {hint}")
        return make_task(rows[int(index)], int(index), env.name, split)

    async def rows_of(self, env: Env, split: str) -> Any:
        if env.load_tasks is None:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, f"{env.name} brings no tasks (no load_tasks); send rows")
        if (env.name, split) not in self.rows:
            try:
                self.rows[env.name, split] = await asyncio.to_thread(env.load_tasks, split)
            except ValueError as error:
                raise ServiceError(grpc.StatusCode.UNKNOWN, str(error)) from None
        return self.rows[env.name, split]

    def num_open(self, env: str) -> int:
        return sum(s.env.name == env and s.status not in ENDED for s in self.sessions.values())

    def note_end(self, session: Session) -> None:
        """Counts a session that has just ended."""
        if session.status in ENDED and not getattr(session, "counted", False):
            session.counted = True
            self.ended[session.env.name, session.status] += 1
            self.changed.set()

    def forget(self, session: Session) -> None:
        """Frees what it holds; its name stays for a while, so that late requests hear how it ended."""
        self.keys.pop(session.key, None)
        session.state, session.replies, session.messages = None, type(session.replies)(), []

    async def sweep(self) -> None:
        """Expires idle sessions."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for session in list(self.sessions.values()):
                if now - session.used_s > self.idle_s and not session.is_busy:
                    session.end(pb.EXPIRED, f"nothing was heard of it for {self.idle_s:g} s")
                    self.note_end(session)
                    self.forget(session)
            ended = [name for name, s in self.sessions.items() if s.status in ENDED and now - s.used_s > self.idle_s]
            for name in ended[: max(0, len(ended) - KEPT_ENDED)]:
                del self.sessions[name]

    # --- the hubs

    def heartbeat(self) -> pb.Worker:
        open_now = Counter(s.env.name for s in self.sessions.values() if s.status not in ENDED)
        loads = []
        for name in self.envs:
            ended = {pb.Status.Name(status).lower(): n for (env, status), n in self.ended.items() if env == name}
            capacity = 0 if self.draining else self.capacity
            load = pb.Load(env=name, sessions=open_now[name], capacity=capacity, ended=ended)
            load.interactions = self.interactions[name]
            loads.append(load)
        return pb.Worker(
            name=self.name, host=socket.gethostname(), pid=os.getpid(), loads=loads, draining=self.draining
        )

    async def join(self, address: str, access: Access) -> None:
        """Serves one hub for ever, through broken connections."""
        wait_s = 0.1
        while True:
            began = time.monotonic()
            try:
                async with access.channel_aio(address, CHANNEL_OPTIONS) as channel:
                    await self.serve(channel, access)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT):
                    raise ValueError(f"{address} refused this worker: {error.details()}") from None
                print(f"worker {self.name}: {address}: {error.details()}; again soon", file=sys.stderr, flush=True)
            wait_s = 0.1 if time.monotonic() - began > 5 else min(2 * wait_s, 2.0)
            await asyncio.sleep(wait_s)

    async def serve(self, channel: grpc.aio.Channel, access: Access) -> None:
        """One connection to a hub, until it breaks."""
        join = channel.stream_stream(
            f"/{HUB}/Join",
            request_serializer=pb.FromWorker.SerializeToString,
            response_deserializer=pb.ToWorker.FromString,
        )
        stream, replies, wake = join(metadata=access.metadata()), [], asyncio.Event()
        hello = pb.Hello(worker=self.name, replaces=self.replaces, envs=self.described.values(), version=__version__)
        await stream.write(pb.FromWorker(hello=hello, heartbeat=self.heartbeat()))
        first = await stream.read()
        if first is grpc.aio.EOF:
            return
        tasks: set[asyncio.Task] = set()

        async def answer(request: pb.Request) -> None:
            replies.append(await self.answer(request))
            wake.set()

        async def write() -> None:
            beat_s = 0.0
            while True:
                if not wake.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), first.heartbeat_s / 2)
                wake.clear()
                batch = pb.FromWorker(replies=replies)
                replies.clear()
                now = time.monotonic()
                if (self.changed.is_set() and now - beat_s > 0.05) or now - beat_s > first.heartbeat_s / 2:
                    self.changed.clear()
                    batch.heartbeat.CopyFrom(self.heartbeat())
                    beat_s = now
                if batch.replies or batch.HasField("heartbeat"):
                    await stream.write(batch)

        writer = asyncio.ensure_future(write())
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                for request in message.requests:
                    task = asyncio.ensure_future(answer(request))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        finally:
            writer.cancel()


def load(path: str, hook_timeout_s: float, idle_s: float) -> tuple[Env, pb.Environment]:
    """An environment's file, and what a client must know of it. Raises ValueError for one that cannot be served."""
    module = execute_file(path)
    env, has = load_env(path, hook_timeout_s=hook_timeout_s, module=module), vars(module)
    for hook in env.hooks.values():
        if hook.name == "rollout" or ("actors" in hook.named and hook.name != "turns"):
            raise ValueError(
                f"{path}: {hook.name}() speaks with actors, who live in the trainer; a served environment needs interact() "
                "and rewards that do not name 'actors'"
            )
    described = pb.Environment(name=env.name, max_turns=env.max_turns, name_prefix=env.name_prefix, idle_s=idle_s)
    described.hook_timeout_s = hook_timeout_s
    described.tools = to_json(env.tools, f"{path}: tools") if env.tools else ""
    described.turns = env.turns if isinstance(env.turns, str) else ""
    if has.get("system_prompts"):
        described.system_prompts = to_json(has["system_prompts"], f"{path}: system_prompts")
    if env.truncated_reward is not None:
        described.truncated_reward = env.truncated_reward
    rewards = {hook.name for hook in env.rewards}
    for hook in env.hooks.values():
        described.hooks.add(
            name=hook.name,
            required=sorted(hook.required),
            optional=sorted(hook.named - hook.required),
            takes_all=hook.takes_all,
            is_reward=hook.name in rewards,
            weight=hook.weight,
            batched=hook.batched,
        )
    for name in ("load_tasks", "advantage_fn"):
        if getattr(env, name):
            described.hooks.add(name=name)
    return env, described


async def run(args: argparse.Namespace, access: Access) -> None:
    worker = Worker(
        args.envs,
        capacity=args.capacity,
        idle_s=args.idle_s,
        hook_timeout_s=args.hook_timeout_s,
        replaces=args.replaces,
        name=args.name,
    )
    loop = asyncio.get_running_loop()

    def drain() -> None:
        worker.draining = True
        worker.changed.set()

    loop.add_signal_handler(signal.SIGTERM, drain)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the server's to handle
    print(f"worker {worker.name}", flush=True)
    await asyncio.gather(worker.sweep(), *(worker.join(address, access) for address in args.join.split(",")))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("envs", nargs="*", metavar="ENV.py", help="environment files")
    parser.add_argument("--capacity", type=int, default=1_000, help="sessions of each environment in one worker")
    parser.add_argument("--idle_s", type=float, default=600.0, help="a session expires after so long without a request")
    parser.add_argument("--hook_timeout_s", type=float, default=60.0, help="deadline of each call of a hook")
    parser.add_argument("--join", default="", help="HOST:PORT of a controller, or several with commas")
    add_access(parser)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rl_core.service.worker", description=__doc__, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("--replaces", default="", help="name of a worker that is known to be dead")
    parser.add_argument("--name", default="", help="12 hex digits; default: chosen by chance")
    parser.add_argument("--parent", type=int, default=0, help="process that the worker does not outlive; 0: none")
    args = parser.parse_args(argv)
    try:
        asyncio.run(run(args, Access.of(args)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
