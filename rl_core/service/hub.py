"""The server that clients and workers dial: it passes requests to the worker of their session, and starts sessions where there
is most room. It keeps no state that its death loses: a session's name begins with its worker's, and workers tell their loads."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from rl_core.service import environments_pb2 as pb
from rl_core.service.security import Access
from rl_core.service.wire import ENVIRONMENTS, HUB, REPLIES, REQUESTS, VERBS, ServiceError, failed, wrong

SESSION = re.compile(r"([0-9a-f]{12})\.[0-9a-f]{16}")
OF_SESSION = frozenset({"interact", "score", "cancel"})
MAX_TIMEOUT_S = 600.0
PENDING = 20_000  # requests of one client that are not answered; more are refused


class WorkerLink:
    """A worker that has dialled in."""

    def __init__(self, hello: pb.Hello, heartbeat: pb.Worker):
        self.name, self.hello = hello.worker, hello
        self.heard_s, self.beat = time.monotonic(), heartbeat
        self.started: dict[str, int] = {}  # environment -> sessions that were sent since the last heartbeat
        self.waiting: dict[int, asyncio.Future] = {}
        self.out: list[pb.Request] = []
        self.wake = asyncio.Event()
        self.next_id = 0

    def hear(self, beat: pb.Worker) -> None:
        self.beat, self.started = beat, {}

    def room(self, env: str) -> int:
        """Sessions that it can still take."""
        load = next((load for load in self.beat.loads if load.env == env), None)
        return load.capacity - load.sessions - self.started.get(env, 0) if load and not self.beat.draining else 0

    async def ask(self, request: pb.Request) -> pb.Reply:
        self.next_id += 1
        id, future = self.next_id, asyncio.get_running_loop().create_future()
        self.waiting[id] = future
        passed = pb.Request()
        passed.CopyFrom(request)
        passed.id = id
        self.out.append(passed)
        self.wake.set()
        try:
            reply = await future
        finally:
            self.waiting.pop(id, None)
        reply.id = request.id
        return reply


class Gone(Exception):
    """The worker went away while it was asked."""


class Hub:
    def __init__(self, access: Access, *, heartbeat_s: float = 2.0, max_queue: int = 10_000):
        self.access, self.heartbeat_s, self.max_queue = access, heartbeat_s, max_queue
        self.links: dict[str, WorkerLink] = {}
        self.lost: dict[str, float] = {}  # worker -> when it was last seen; 0: known to be dead
        self.envs: dict[str, pb.Environment] = {}
        self.queues: dict[str, deque[asyncio.Future]] = {}
        self.began_s = time.monotonic()
        self.changed = asyncio.Condition()

    @property
    def grace_s(self) -> float:
        """How long a worker that is not here may take to come (back)."""
        return 3 * self.heartbeat_s

    # --- requests

    async def answer(self, request: pb.Request) -> pb.Reply:
        """The reply to any request; errors are replies too."""
        timeout_s = min(request.timeout_s, MAX_TIMEOUT_S) if request.timeout_s > 0 else MAX_TIMEOUT_S
        try:
            return await asyncio.wait_for(self.route(request), timeout_s)
        except ServiceError as error:
            return failed(request.id, error)
        except TimeoutError:
            return failed(request.id, ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in {timeout_s:g} s"))

    async def route(self, request: pb.Request) -> pb.Reply:
        verb = request.WhichOneof("verb")
        if verb is None:
            raise wrong("the request has no verb")
        if verb in OF_SESSION:
            return await self.in_session(request, getattr(request, verb).session)
        if verb == "start":
            return await self.start(request)
        if verb == "describe":
            return pb.Reply(id=request.id, describe=await self.describe(request.describe.env))
        if verb == "workers":
            return pb.Reply(id=request.id, workers=self.workers())
        if verb == "renew":
            return await self.renew(request)
        link = await self.any_link(getattr(request, verb).env)  # tasks, call
        return await self.ask(link, request)

    async def in_session(self, request: pb.Request, session: str) -> pb.Reply:
        found = SESSION.fullmatch(session)
        if not found:
            raise ServiceError(grpc.StatusCode.NOT_FOUND, f"{session[:40]!r} is no session's name")
        return await self.ask(await self.link_of(found[1], session), request)

    async def link_of(self, name: str, session: str) -> WorkerLink:
        """A worker; one that is not here may come back within the grace. Raises ServiceError (DATA_LOSS) if it does not."""
        while name not in self.links:
            seen_s = self.lost.get(name, self.began_s)
            left_s = self.grace_s - (time.monotonic() - seen_s) if seen_s else 0.0
            if left_s <= 0:
                message = f"session {session} is lost: its worker {name} is gone"
                raise ServiceError(grpc.StatusCode.DATA_LOSS, message)
            await self.wait_for_change(left_s)
        return self.links[name]

    async def ask(self, link: WorkerLink, request: pb.Request) -> pb.Reply:
        """Again if the connection broke and the worker came back: it does nothing twice that has a number."""
        while True:
            try:
                return await link.ask(request)
            except Gone:
                link = await self.link_of(link.name, "of a request")

    async def start(self, request: pb.Request) -> pb.Reply:
        env = request.start.env
        await self.any_link(env)
        while True:
            link = max(self.links.values(), key=lambda link: link.room(env), default=None)
            if link is None or link.room(env) <= 0:
                await self.queue(env)
                continue
            link.started[env] = link.started.get(env, 0) + 1
            try:
                reply = await link.ask(request)
            except Gone:
                continue  # nothing was said to it yet: another worker begins it
            if reply.code != grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]:
                return reply
            await self.queue(env)

    async def queue(self, env: str) -> None:
        """Waits until a worker may have room."""
        queue = self.queues.setdefault(env, deque())
        if len(queue) >= self.max_queue:
            message = f"all workers of {env} are full and {len(queue)} starts wait; try again later, or add workers"
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        future = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            await future
        finally:
            if future in queue:
                queue.remove(future)

    def release(self) -> None:
        """Lets as many starts go on as there is room for."""
        for env, queue in self.queues.items():
            room = sum(max(0, link.room(env)) for link in self.links.values())
            while queue and room > 0:
                future = queue.popleft()
                if not future.done():
                    future.set_result(None)
                    room -= 1

    async def any_link(self, env: str) -> WorkerLink:
        while True:
            links = [link for link in self.links.values() if any(load.env == env for load in link.beat.loads)]
            if links:
                return min(links, key=lambda link: len(link.waiting))
            left_s = self.grace_s - (time.monotonic() - self.began_s)
            if left_s <= 0:
                known = ", ".join(sorted(self.envs)) or "none yet: no worker has joined"
                raise ServiceError(grpc.StatusCode.NOT_FOUND, f"there is no environment {env!r}; there are {known}")
            await self.wait_for_change(left_s)

    async def describe(self, env: str) -> pb.DescribeReply:
        if env:
            await self.any_link(env)
        return pb.DescribeReply(envs=[self.envs[name] for name in sorted(self.envs) if env in ("", name)])

    def workers(self) -> pb.WorkersReply:
        reply, now = pb.WorkersReply(uptime_s=time.monotonic() - self.began_s), time.monotonic()
        for link in self.links.values():
            worker = reply.workers.add()
            worker.CopyFrom(link.beat)
            worker.silent_s = now - link.heard_s
        for env, queue in self.queues.items():
            reply.queued[env] = len(queue)
        return reply

    async def renew(self, request: pb.Request) -> pb.Reply:
        by_worker: dict[str, list[str]] = {}
        for name in request.renew.sessions:
            by_worker.setdefault(name.partition(".")[0], []).append(name)
        gone: list[str] = []
        for worker, names in by_worker.items():
            link = self.links.get(worker)
            if link is None:
                if time.monotonic() - self.lost.get(worker, self.began_s) > self.grace_s:
                    gone += names
                continue
            reply = await self.ask(link, pb.Request(renew=pb.RenewRequest(sessions=names)))
            gone += reply.renew.gone
        return pb.Reply(id=request.id, renew=pb.RenewReply(gone=gone))

    # --- workers

    async def wait_for_change(self, timeout_s: float) -> None:
        async with self.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), timeout_s)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()
        self.release()

    async def join(self, requests: AsyncIterator[pb.FromWorker], context: grpc.aio.ServicerContext) -> None:
        await self.must_admit(context)
        first = await asyncio.wait_for(context.read(), self.grace_s)
        if first is grpc.aio.EOF or not re.fullmatch(r"[0-9a-f]{12}", first.hello.worker):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a worker begins with its hello")
        link = WorkerLink(first.hello, first.heartbeat)
        if (old := self.links.get(link.name)) is not None:
            self.drop(old)
        if link.hello.replaces:
            self.lost[link.hello.replaces] = 0.0
        self.links[link.name] = link
        self.lost.pop(link.name, None)
        self.envs |= {env.name: env for env in link.hello.envs}
        await context.write(pb.ToWorker(heartbeat_s=self.heartbeat_s))
        await self.tell()
        writer = asyncio.ensure_future(self.write_to(link, context))
        try:
            while True:
                message = await asyncio.wait_for(context.read(), self.grace_s)
                if message is grpc.aio.EOF:
                    break
                link.heard_s = time.monotonic()
                for reply in message.replies:
                    future = link.waiting.get(reply.id)
                    if future and not future.done():
                        future.set_result(reply)
                if message.HasField("heartbeat"):
                    link.hear(message.heartbeat)
                    self.release()
        except TimeoutError:
            pass  # silent: removed
        finally:
            writer.cancel()
            self.drop(link)
            await self.tell()

    def drop(self, link: WorkerLink) -> None:
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self.lost.setdefault(link.name, time.monotonic())
        for future in link.waiting.values():
            if not future.done():
                future.set_exception(Gone())

    async def write_to(self, link: WorkerLink, context: grpc.aio.ServicerContext) -> None:
        while True:
            await link.wake.wait()
            link.wake.clear()
            batch, link.out = pb.ToWorker(requests=link.out), []
            await context.write(batch)

    # --- gRPC

    async def must_admit(self, context: grpc.aio.ServicerContext) -> None:
        if not self.access.admits(context.invocation_metadata()):
            message = "the bearer token is missing or wrong: authorization: Bearer TOKEN"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, message)

    def unary(self, verb: str) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
        async def handle(message: Any, context: grpc.aio.ServicerContext) -> Any:
            await self.must_admit(context)
            timeout_s = min(context.time_remaining() or MAX_TIMEOUT_S, MAX_TIMEOUT_S)
            reply = await self.answer(pb.Request(timeout_s=timeout_s, **{verb: message}))
            if reply.code:
                from rl_core.service.wire import CODES

                await context.abort(CODES.get(reply.code, grpc.StatusCode.UNKNOWN), reply.error)
            return getattr(reply, verb)

        return handle

    async def stream(self, requests: AsyncIterator[pb.Requests], context: grpc.aio.ServicerContext) -> None:
        """Many requests at a time; replies as they come. A client that reads slowly holds up nobody else."""
        await self.must_admit(context)
        replies: list[pb.Reply] = []
        wake, tasks = asyncio.Event(), set()

        async def answer(request: pb.Request) -> None:
            replies.append(await self.answer(request))
            wake.set()

        async def write() -> None:
            while True:
                await wake.wait()
                wake.clear()
                batch = pb.Replies(replies=replies)
                replies.clear()
                await context.write(batch)

        writer = asyncio.ensure_future(write())
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for request in message.requests:
                    if len(tasks) + len(replies) >= PENDING:
                        error = ServiceError(
                            grpc.StatusCode.RESOURCE_EXHAUSTED, f"{PENDING} requests are not answered yet"
                        )
                        replies.append(failed(request.id, error))
                        wake.set()
                        continue
                    task = asyncio.ensure_future(answer(request))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
            if replies:
                await context.write(pb.Replies(replies=replies))
        finally:
            writer.cancel()
            for task in tasks:
                task.cancel()

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            verb.title(): grpc.unary_unary_rpc_method_handler(
                self.unary(verb), REQUESTS[verb].FromString, REPLIES[verb].SerializeToString
            )
            for verb in VERBS
        }
        handlers["Stream"] = grpc.stream_stream_rpc_method_handler(
            self.stream, pb.Requests.FromString, pb.Replies.SerializeToString
        )
        join = grpc.stream_stream_rpc_method_handler(self.join, pb.FromWorker.FromString, pb.ToWorker.SerializeToString)
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(ENVIRONMENTS, handlers),
                grpc.method_handlers_generic_handler(HUB, {"Join": join}),
            ]
        )
