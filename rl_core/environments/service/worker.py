"""A worker: one process that hosts sessions of environments. Dials out to a hub and answers the
requests that the hub forwards.

python -m rl_core.environments.service.worker envs/a.py envs/b.py --join host:port
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from google.protobuf.message import Message as ProtoMessage
from grpc import StatusCode

from rl_core import __version__
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.containers import (
    ContainedEnv,
    ContainedSession,
    container_settings,
    find_runtime,
)
from rl_core.environments.service.flags import add_flags
from rl_core.environments.service.hosted import LocalEnv
from rl_core.environments.service.security import Access
from rl_core.environments.service.session import ENDED, Session, has_ended
from rl_core.environments.service.uplink import Uplink
from rl_core.environments.service.wire import (
    REPLACED,
    UNUSABLE,
    Numbered,
    ServiceError,
    collect_rarely,
    failed,
    wrong,
)
from rl_core.sampling.watchdog import Watchdog
from rl_core.sandbox import boxes
from rl_core.sandbox.remote_driver import box_flags

KEPT_ENDED = 20_000  # Number of remembered ended sessions and keys of their starts.
SWEEP_S = 1.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(kw_only=True, slots=True)
class HeldSession:
    """A session that has not been closed and can still get requests."""

    session: Session | ContainedSession
    env: str
    key: tuple[str, str] | None  # (environment, client's key of the start).
    used_s: float
    started: asyncio.Future  # Result: pb.StartReply or ServiceError.
    owner: str = ""
    task_id: str = ""
    began_s: float = field(default_factory=time.monotonic)
    running: set[asyncio.Task] = field(default_factory=set)  # Requests in progress.

    @property
    def has_failed(self) -> bool:
        return self.session.status == pb.ENVIRONMENT_ERROR


class Worker:
    def __init__(
        self,
        envs: Iterable[LocalEnv | ContainedEnv],
        *,
        capacity: int,
        idle_s: float,
        name: str = "",
    ):
        self.name = name or secrets.token_hex(6)
        self.replaces = ""
        self.idle_s = idle_s
        self.envs: dict[str, LocalEnv | ContainedEnv] = {}
        for env in envs:
            if env.name in self.envs:
                raise ValueError(
                    f"{env.path} and {self.envs[env.name].path} are both named {env.name!r}; "
                    "rename one"
                )
            self.envs[env.name] = env
            env.capacity = env.capacity or capacity
        self.held: dict[str, HeldSession] = {}
        self.by_key: dict[tuple[str, str], HeldSession] = {}
        # Ended session's name, or key of its start -> (name, status, reason).
        self.gone: OrderedDict[str | tuple[str, str], tuple[str, int, str]] = OrderedDict()
        self.num_held: Counter = Counter()  # Environment -> number of open sessions.
        self.ended: Counter = Counter()  # (environment, status) -> number of ended sessions.
        self.answering: set[asyncio.Task] = set()  # Requests in progress.
        self.uplink: Uplink | None = None
        self.draining = False
        self.is_replaced = False  # True if another worker starts after this one exits.
        verbs = ("describe", "tasks", "start", "renew", "cancel", "call", "list_sessions")
        self.verbs = {verb: getattr(self, verb) for verb in (*verbs, "cancel_all")}
        self.verbs["drain"] = self.leave
        self.verbs |= dict.fromkeys(("interact", "score", "run", "answer"), self.in_session)

    # --- requests

    async def answer(self, request: pb.Request) -> pb.Reply:
        """Returns the reply to any request; errors are replies too."""
        verb = request.WhichOneof("verb")
        try:
            if verb not in self.verbs:
                message = f"a worker does not answer {verb}" if verb else "the request has no verb"
                raise wrong(message)
            return pb.Reply(id=request.id, **{verb: await self.verbs[verb](getattr(request, verb))})
        except ServiceError as error:
            return failed(request.id, error)
        except Exception as error:  # A bug in rl_core must not end the worker.
            text = f"{type(error).__name__}: {error}"
            print(f"worker {self.name}: {verb}: {text}", file=sys.stderr, flush=True)
            return failed(request.id, ServiceError(StatusCode.INTERNAL, text))

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        return pb.DescribeReply(
            envs=[e.described for e in self.envs.values() if request.env in ("", e.name)]
        )

    async def tasks(self, request: pb.TasksRequest) -> pb.TasksReply:
        return await self.env_of(request.env).tasks(request)

    async def call(self, request: pb.CallRequest) -> pb.CallReply:
        return await self.env_of(request.env).call(request)

    async def start(self, request: pb.StartRequest) -> pb.StartReply:
        env = self.env_of(request.env)
        key = (request.env, request.key) if request.key else None
        if request.again:
            if key in self.by_key or key in self.gone:
                return pb.StartReply()
            raise ServiceError(
                StatusCode.NOT_FOUND, f"worker {self.name} has no session of this key"
            )
        if key in self.gone:
            raise has_ended(*self.gone[key])
        if (held := self.by_key.get(key)) is None:
            held = await self.begin(env, request, key)
        result = await asyncio.shield(held.started)
        if isinstance(result, ServiceError):
            raise result
        return result

    async def begin(
        self, env: LocalEnv | ContainedEnv, request: pb.StartRequest, key: tuple[str, str] | None
    ) -> HeldSession:
        """Starts a session. The result of `started` is the reply, or the error of a failed
        start."""
        if self.draining or self.num_held[env.name] >= env.capacity:
            raise ServiceError(
                StatusCode.RESOURCE_EXHAUSTED, f"worker {self.name} has no room for {env.name}"
            )
        name = f"{self.name}.{secrets.token_hex(8)}"
        loop = asyncio.get_running_loop()
        held = HeldSession(
            session=None,
            env=env.name,
            key=key,
            used_s=time.monotonic(),
            started=loop.create_future(),
            owner=request.owner,
            task_id=request.task_id,
        )
        self.num_held[env.name] += 1
        if key:
            self.by_key[key] = held
        try:
            held.session = await env.session(name, request)
            result = await held.session.start()
            result.session = name
            result.idle_s = self.idle_s
            held.used_s = time.monotonic()
            self.held[name] = held
        except Exception as error:
            known = isinstance(error, ServiceError)
            result = (
                error
                if known
                else ServiceError(StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            )
            self.num_held[env.name] -= 1
            if key:
                del self.by_key[key]
            if held.session:
                held.session.end(pb.ENVIRONMENT_ERROR, str(error))
                self.ended[env.name, held.session.status] += 1
                held.session.close()
        held.started.set_result(result)
        self.note_change()
        return held

    async def in_session(self, request: Numbered) -> ProtoMessage:
        held = self.held_of(request.session)
        task = asyncio.current_task()
        held.used_s = time.monotonic()
        held.running.add(task)
        try:
            return await held.session.answer(request)
        except asyncio.CancelledError:
            if held.session.name in self.held:
                raise
            raise has_ended(*self.gone[held.session.name]) from None
        finally:
            held.running.discard(task)
            held.used_s = time.monotonic()
            if held.has_failed and not held.running:
                self.close(held)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        gone = []
        now = time.monotonic()
        for name in request.sessions:
            held = self.held.get(name)
            if held is None or held.has_failed:
                gone.append(name)
            else:
                held.used_s = now
        return pb.RenewReply(gone=gone)

    async def cancel(self, request: pb.CancelRequest) -> pb.CancelReply:
        if request.session in self.gone:
            return pb.CancelReply(status=self.gone[request.session][1])
        held = self.held_of(request.session)
        self.give_up(held, request.status, "the client ended it")
        return pb.CancelReply(status=held.session.status)

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
        reply = pb.ListSessionsReply()
        now = time.monotonic()
        for held in self.chosen(request):
            reply.sessions.add(
                session=held.session.name,
                env=held.env,
                worker=self.name,
                owner=held.owner,
                task_id=held.task_id,
                age_s=now - held.began_s,
                idle_s=0.0 if held.running else now - held.used_s,
                turns=held.session.interactions,
                status=held.session.status,
            )
        return reply

    async def cancel_all(self, request: pb.CancelAllRequest) -> pb.CancelAllReply:
        chosen = self.chosen(request)
        for held in chosen:
            self.give_up(held, request.status, "all sessions of its kind were ended")
        return pb.CancelAllReply(ended=len(chosen))

    async def leave(self, request: pb.DrainRequest) -> pb.DrainReply:
        self.drain(replaced=request.replace)
        return pb.DrainReply(sessions=self.num_held.total())

    # --- state

    def chosen(self, request: pb.ListSessionsRequest | pb.CancelAllRequest) -> list[HeldSession]:
        """The sessions of an environment and an owner; "" matches any."""
        return [
            held
            for held in self.held.values()
            if request.env in ("", held.env) and request.owner in ("", held.owner)
        ]

    def give_up(self, held: HeldSession, status: int, reason: str) -> None:
        allowed = (pb.COMPLETED, pb.CANCELLED, pb.LIMIT, pb.AGENT_ERROR)
        held.session.end(status if status in allowed else pb.CANCELLED, reason)
        self.close(held)

    def env_of(self, name: str) -> LocalEnv | ContainedEnv:
        if name not in self.envs:
            known = ", ".join(sorted(self.envs))
            raise ServiceError(
                StatusCode.NOT_FOUND, f"unknown environment {name[:80]!r}; known: {known}"
            )
        return self.envs[name]

    def held_of(self, name: str) -> HeldSession:
        if name in self.held:
            return self.held[name]
        if name in self.gone:
            raise has_ended(*self.gone[name])
        raise ServiceError(
            StatusCode.NOT_FOUND, f"there is no session {name[:80]!r}, or it ended long ago"
        )

    def close(self, held: HeldSession) -> None:
        """Cancels a session's hooks and frees its state. Its final status stays known for a
        while."""
        session = held.session
        if self.held.pop(session.name, None) is None:
            return
        self.num_held[held.env] -= 1
        self.ended[held.env, session.status] += 1
        self.gone[session.name] = session.name, session.status, session.reason[:300]
        if held.key:
            del self.by_key[held.key]
            self.gone[held.key] = self.gone[session.name]
        while len(self.gone) > KEPT_ENDED:
            self.gone.popitem(last=False)
        for task in held.running:
            if task is not asyncio.current_task():
                task.cancel()
        session.close()
        self.note_change()

    async def sweep(self) -> None:
        """Closes idle sessions and sessions whose container ended. Returns once a draining worker
        has no sessions left."""
        Watchdog(asyncio.get_running_loop())
        while not (self.draining and not self.num_held.total() and not self.answering):
            await asyncio.sleep(min(SWEEP_S, self.idle_s / 4))
            now = time.monotonic()
            for held in [h for h in self.held.values() if not h.running]:
                if now - held.used_s > self.idle_s and held.session.status not in ENDED:
                    held.session.end(pb.EXPIRED, f"it had no request for {self.idle_s:g} s")
                if now - held.used_s > self.idle_s or held.has_failed:
                    self.close(held)

    def drain(self, replaced: bool = False) -> None:
        """Refuses new sessions; open ones may finish. replaced: another worker starts then."""
        self.draining = True
        self.is_replaced = self.is_replaced or replaced
        self.note_change()

    # --- messages to the hub, also called from the uplink's threads

    def note_change(self) -> None:
        if self.uplink:
            self.uplink.change()

    def hello(self) -> pb.Hello:
        envs = [env.described for env in self.envs.values()]
        return pb.Hello(worker=self.name, replaces=self.replaces, envs=envs, version=__version__)

    def heartbeat(self) -> pb.Worker:
        beat = pb.Worker(
            name=self.name, host=socket.gethostname(), pid=os.getpid(), draining=self.draining
        )
        ended = list(self.ended.items())
        for env in self.envs.values():
            load = beat.loads.add(env=env.name, sessions=self.num_held[env.name])
            load.capacity = 0 if self.draining else env.capacity
            load.interactions = env.interactions
            for (name, status), n in ended:
                if name == env.name:
                    load.ended[pb.Status.Name(status).lower()] = n
        beat.memory_bytes = memory_bytes()
        return beat


def memory_bytes() -> int:
    """Resident memory of this process; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def make_worker(envs: list[LocalEnv | ContainedEnv], name: str, args: argparse.Namespace) -> Worker:
    """A Worker that drains on SIGTERM, and on SIGHUP also asks the server for a replacement."""
    worker = Worker(envs, name=name, capacity=args.capacity, idle_s=args.idle_s)
    worker.replaces = args.replaces
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, worker.drain)
    loop.add_signal_handler(signal.SIGHUP, worker.drain, True)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # The server handles Ctrl-C.
    return worker


async def run(args: argparse.Namespace, access: Access) -> int:
    """Runs a worker and returns its exit status. Raises ValueError for files that cannot be served,
    and if the hub refuses the worker."""
    name = args.name or secrets.token_hex(6)
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    settings = {path: container_settings(path) for path in args.envs}
    images = [f"{path} says image = {item.image!r}" for path, item in settings.items() if item]
    runtime = find_runtime(name, images[0]) if images else None
    envs = []
    try:
        for path, container in settings.items():
            limits = {"hook_timeout_s": args.hook_timeout_s, "idle_s": args.idle_s}
            contained = container and await ContainedEnv.open(path, container, runtime, **limits)
            envs.append(contained or LocalEnv(path, **limits))
        worker = make_worker(envs, name, args)
        collect_rarely()

        def refused(message: str) -> None:
            over.set_exception(ValueError(message))

        if not args.join.startswith("unix:"):  # A local server prints its address instead.
            print(f"worker {worker.name}", flush=True)

        worker.uplink = Uplink(worker, args.join, access, refused, args.parent)
        sweep = asyncio.ensure_future(worker.sweep())
        done, _ = await asyncio.wait({over, sweep}, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
        await asyncio.sleep(0.2)  # Time to send the last replies.
        return REPLACED if worker.is_replaced else 0
    finally:
        if runtime:
            for env in envs:
                env.close()
            await runtime.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl_core.environments.service.worker",
        description=__doc__,
        allow_abbrev=False,
    )
    add_flags(parser)
    parser.add_argument("--replaces", default="", help="name of a dead worker to replace")
    parser.add_argument("--name", default="", help="12 hex digits; default: random")
    parser.add_argument(
        "--parent", type=int, default=0, help="PID; the worker exits with this process; 0: none"
    )
    args = parser.parse_args(argv)
    try:
        boxes.configure(**box_flags(args))
        return asyncio.run(run(args, Access.of(args)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
