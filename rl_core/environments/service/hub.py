"""The hub, a server that clients and workers dial. Routes requests to the worker of their session
and starts sessions on workers with room. A restart loses no state: session names begin with the
worker's name, and workers report their loads."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from google.protobuf.message import Message
from grpc import StatusCode

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.links import ClientStream, WorkerLink
from rl_core.environments.service.starts import SessionStarts
from rl_core.environments.service.wire import (
    CODES,
    ENVIRONMENTS,
    HUB,
    MAX_REQUEST,
    METHODS,
    REPLIES,
    REQUESTS,
    VERBS,
    ServiceError,
    failed,
    parse,
    wrong,
)

SESSION = re.compile(r"([0-9a-f]{12})\.[0-9a-f]{16}")
WORKER = re.compile(r"[0-9a-f]{12}")
NUMBERED = frozenset({"interact", "score", "run", "answer"})
OF_SESSION = NUMBERED | {"cancel"}
ADMIN = frozenset({"list_sessions", "cancel_all", "drain"})
MAX_TIMEOUT_S = 600.0
FIRST_S = 60.0  # Time for the first worker to join.
PENDING = 20_000  # Unanswered requests per client; further ones are refused.
MAX_DETAILS = 2_000  # Largest error of a unary call in bytes.
NOT_FOUND = StatusCode.NOT_FOUND.value[0]
# Backpressure: with more unread bytes of replies, no further requests of the client start.
UNREAD = 16 << 20


class Hub:
    def __init__(self, *, heartbeat_s: float = 2.0, max_queue: int = 10_000):
        self.heartbeat_s = heartbeat_s
        # Called with (verb, seconds) after each request.
        self.observe: Callable[[str, float], None] = lambda verb, seconds: None
        self.links: dict[str, WorkerLink] = {}
        self.lost: dict[str, float] = {}  # Worker -> time of its last message; 0: known to be dead.
        self.past: dict[str, pb.Worker] = {}  # Lost worker -> its last heartbeat, for totals.
        self.envs: dict[str, pb.Environment] = {}
        self.starts = SessionStarts(self.links, max_queue, self.link_of)
        self.began_s = time.monotonic()
        self.changed = asyncio.Event()  # Set on a change of workers and by watch(), then replaced.

    @property
    def grace_s(self) -> float:
        """Time without messages after which a worker counts as lost."""
        return 3 * self.heartbeat_s

    # --- requests

    def submit(self, request: pb.Request, client: ClientStream) -> None:
        """Answers a request of a stream. The common case, a session whose worker is connected,
        needs no asyncio task."""
        client.num_open += 1
        id = request.id
        verb = request.WhichOneof("verb")
        began_s = time.perf_counter()
        link = self.links.get(getattr(request, verb).session[:12]) if verb in OF_SESSION else None

        async def answer(again: bool) -> None:
            reply = await self.answer(request, again)
            reply.id = id
            client.put(reply)

        def begin(again: bool = False) -> None:
            task = asyncio.ensure_future(answer(again))
            client.tasks.add(task)
            task.add_done_callback(client.tasks.discard)

        def done(reply: pb.Reply | None) -> None:
            timer.cancel()
            if client.is_over:
                return
            if reply is None:
                return begin(again=True)
            self.observe(verb, time.perf_counter() - began_s)
            reply.id = id
            client.put(reply)

        def late() -> None:
            link.waiting.pop(number, None)
            client.put(failed(id, too_late(timeout_s)))

        if link is None or request.ByteSize() > MAX_REQUEST:
            return begin()
        timeout_s = limit(request.timeout_s)
        number = link.ask(request, verb, done)
        timer = asyncio.get_running_loop().call_later(timeout_s, late)

    async def answer(self, request: pb.Request, again: bool = False) -> pb.Reply:
        """Returns the reply to any request; errors are replies too. again: a worker may have got
        the request already."""
        timeout_s = limit(request.timeout_s)
        verb = request.WhichOneof("verb")
        began_s = time.perf_counter()
        try:
            if verb is None:
                raise wrong("the request has no verb")
            if request.ByteSize() > MAX_REQUEST:
                raise ServiceError(
                    StatusCode.RESOURCE_EXHAUSTED, f"a request may have at most {MAX_REQUEST} bytes"
                )
            return await asyncio.wait_for(self.route(request, verb, again), timeout_s)
        except ServiceError as error:
            return failed(0, error)
        except TimeoutError:
            return failed(0, too_late(timeout_s))
        finally:
            self.observe(verb or "none", time.perf_counter() - began_s)

    async def route(self, request: pb.Request, verb: str, again: bool) -> pb.Reply:
        if verb in OF_SESSION:
            return await self.in_session(request, verb, again)
        if verb == "start":
            await self.must_know(request.start.env)
            if request.start.again:
                await self.find_key(request.start)
            return await self.starts.start(request)
        if verb == "describe":
            return pb.Reply(describe=await self.describe(request.describe.env))
        if verb == "workers":
            return pb.Reply(workers=self.workers())
        if verb == "renew":
            return pb.Reply(renew=await self.renew(request.renew))
        if verb in ADMIN:
            return pb.Reply(**{verb: await getattr(self, verb)(getattr(request, verb))})
        for _ in range(2):  # Any worker can answer `tasks` and `call`.
            reply = await (await self.any_link(getattr(request, verb).env)).answer(request)
            if reply is not None:
                return reply
        raise ServiceError(StatusCode.DATA_LOSS, f"2 workers were lost while they answered {verb}")

    async def in_session(self, request: pb.Request, verb: str, again: bool) -> pb.Reply:
        """Forwards a request to the session's worker. Resends the request if the worker reconnects;
        numbers prevent duplicates."""
        asked = getattr(request, verb)
        match = SESSION.fullmatch(asked.session)
        if not match:
            message = f"{asked.session[:40]!r} is not the name of a session"
            raise ServiceError(StatusCode.NOT_FOUND, message)
        while True:
            if again and verb in NUMBERED and asked.number == 0:
                message = (
                    "the connection to the worker broke, and a request without a number is not "
                    "resent"
                )
                raise ServiceError(StatusCode.ABORTED, message)
            reply = await (await self.link_of(match[1])).answer(request)
            if reply is not None:
                return reply
            again = True

    def left_s(self, worker: str) -> float:
        """Remaining seconds in which a disconnected worker may (re)connect."""
        seen_s = self.lost.get(worker, self.began_s)
        return self.grace_s - (time.monotonic() - seen_s) if seen_s else 0.0

    async def link_of(self, worker: str) -> WorkerLink:
        """Waits for a worker's link. Raises ServiceError (DATA_LOSS) if the worker is lost."""
        while worker not in self.links:
            if self.left_s(worker) <= 0:
                raise ServiceError(
                    StatusCode.DATA_LOSS, f"the session is lost with its worker {worker}"
                )
            await self.changed.wait()
        return self.links[worker]

    async def must_know(self, env: str) -> None:
        while env not in self.envs:
            if time.monotonic() - self.began_s > (self.grace_s if self.envs else FIRST_S):
                known = ", ".join(sorted(self.envs)) or "none yet: no worker has joined"
                raise ServiceError(
                    StatusCode.NOT_FOUND, f"unknown environment {env[:80]!r}; known: {known}"
                )
            await self.changed.wait()

    async def any_link(self, env: str) -> WorkerLink:
        await self.must_know(env)
        while not (links := [link for link in self.links.values() if env in link.loads]):
            await self.changed.wait()
        return min(links, key=lambda link: (link.beat.draining, len(link.waiting)))

    async def describe(self, env: str) -> pb.DescribeReply:
        if env:
            await self.must_know(env)
        return pb.DescribeReply(
            envs=[self.envs[name] for name in sorted(self.envs) if env in ("", name)]
        )

    def workers(self) -> pb.WorkersReply:
        now = time.monotonic()
        reply = pb.WorkersReply(uptime_s=now - self.began_s)
        for link in self.links.values():
            worker = reply.workers.add()
            worker.CopyFrom(link.beat)
            worker.name = link.name
            worker.silent_s = now - link.heard_s
        for env in self.envs:
            reply.queued[env] = len(self.starts.queues.get(env, ()))
        return reply

    async def renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        by_worker: dict[str, list[str]] = {}
        for name in request.sessions:
            by_worker.setdefault(name.partition(".")[0], []).append(name)
        gone: list[str] = []
        asked: dict[str, pb.Request] = {}
        for worker, names in by_worker.items():
            if worker in self.links:
                asked[worker] = pb.Request(renew=pb.RenewRequest(sessions=names))
            elif not WORKER.fullmatch(worker) or self.left_s(worker) <= 0:
                gone += names
        for reply in (await self.ask_all(asked)).values():
            gone += reply.renew.gone
        return pb.RenewReply(gone=gone)

    async def find_key(self, start: pb.StartRequest) -> None:
        """Asks the workers for the session of a resent start's key. This hub may have restarted
        after the start was sent."""
        while time.monotonic() - self.began_s < self.grace_s:  # Some workers may not have joined.
            await self.changed.wait()
        if start.key and (start.env, start.key) not in self.starts.worker_of:
            asks = {"env": start.env, "key": start.key, "again": True}
            of_env = [name for name, link in self.links.items() if start.env in link.loads]
            replies = await self.ask_all(
                {name: pb.Request(start=pb.StartRequest(**asks)) for name in of_env}
            )
            for name in [name for name, reply in replies.items() if reply.code != NOT_FOUND]:
                self.starts.remember((start.env, start.key), name)
        start.again = False

    async def ask_all(self, requests: dict[str, pb.Request]) -> dict[str, pb.Reply]:
        """Sends requests to several workers. Returns worker -> reply, without workers that did not
        answer in time; a blocked worker handles its request later."""
        asked = {
            name: asyncio.ensure_future(self.links[name].answer(request))
            for name, request in requests.items()
        }
        if asked:
            _, blocked = await asyncio.wait(asked.values(), timeout=self.grace_s)
            for task in blocked:
                task.cancel()
        return {
            name: task.result() for name, task in asked.items() if task.done() and task.result()
        }

    # --- admin requests

    async def list_sessions(self, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
        """The sessions of all workers, the oldest first, and the workers that did not answer."""
        replies, silent = await self.ask_workers("list_sessions", request)
        total = pb.ListSessionsReply(silent=silent)
        for reply in replies:
            total.sessions.extend(reply.list_sessions.sessions)
        total.sessions.sort(key=lambda info: -info.age_s)
        return total

    async def cancel_all(self, request: pb.CancelAllRequest) -> pb.CancelAllReply:
        """Cancels sessions. Returns their number and the workers that did not answer."""
        replies, silent = await self.ask_workers("cancel_all", request)
        ended = sum(reply.cancel_all.ended for reply in replies)
        return pb.CancelAllReply(ended=ended, silent=silent)

    async def ask_workers(
        self, verb: str, request: pb.ListSessionsRequest | pb.CancelAllRequest
    ) -> tuple[list[pb.Reply], list[str]]:
        """(replies, names of workers that did not answer). Raises ServiceError for an unknown
        environment or worker."""
        if request.env and self.envs:  # Before a worker joins, the hub knows no environments.
            await self.must_know(request.env)
        names = [self.named(request.worker).name] if request.worker else list(self.links)
        # One Request per worker: each link writes its number into the request.
        replies = await self.ask_all({name: pb.Request(**{verb: request}) for name in names})
        good = {name: reply for name, reply in replies.items() if not reply.code}
        return list(good.values()), [name for name in names if name not in good]

    async def drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        """Drains a worker and returns the number of its open sessions. Raises ServiceError for an
        unknown worker."""
        reply = await self.named(request.worker).answer(pb.Request(drain=request))
        if reply is None:
            message = f"the connection to worker {request.worker} broke; retry"
            raise ServiceError(StatusCode.UNAVAILABLE, message)
        if reply.code:
            raise ServiceError(StatusCode.INTERNAL, reply.error)
        return reply.drain

    def named(self, worker: str) -> WorkerLink:
        """The link of a worker. Raises ServiceError for an unknown worker."""
        if worker not in self.links:
            known = ", ".join(sorted(self.links)) or "none"
            message = f"there is no worker {worker[:80]!r}; there are {known}"
            raise ServiceError(StatusCode.NOT_FOUND, message)
        return self.links[worker]

    # --- workers

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        self.starts.release()

    async def watch(self) -> None:
        """Removes silent workers and wakes the requests that wait for a worker, so that they check
        their deadlines. Time in which this process itself was stopped does not count as silence."""
        now = time.monotonic()
        while True:
            before = now
            await asyncio.sleep(self.heartbeat_s / 2)
            now = time.monotonic()
            deaf_s = max(0.0, now - before - self.heartbeat_s)
            for link in list(self.links.values()):
                link.heard_s = min(now, link.heard_s + deaf_s)
                if now - link.heard_s > self.grace_s:
                    self.drop(link)
            # Workers missing from `lost` count as lost from here on, so old entries can go.
            if now - self.began_s > self.grace_s:
                self.lost = {
                    name: seen_s for name, seen_s in self.lost.items() if self.left_s(name) > 0
                }
            self.tell()

    def died(self, worker: str) -> None:
        self.lost[worker] = 0.0
        self.tell()

    def drop(self, link: WorkerLink) -> None:
        if self.links.get(link.name) is link:
            del self.links[link.name]
            self.lost.setdefault(link.name, link.heard_s)
            self.past[link.name] = link.beat
            self.tell()
        link.close()

    async def join(
        self, _: AsyncIterator[pb.FromWorker], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            data = await asyncio.wait_for(context.read(), self.grace_s)
            first = parse(pb.FromWorker, b"" if data is grpc.aio.EOF else data)
        except (TimeoutError, ServiceError):
            first = pb.FromWorker()
        if not WORKER.fullmatch(first.hello.worker):
            message = "the first message of a worker must be a hello with a name of 12 hex digits"
            await context.abort(StatusCode.INVALID_ARGUMENT, message)
        link = WorkerLink(first.hello, first.heartbeat)
        if link.name in self.links:
            self.drop(self.links[link.name])  # The old connection broke unnoticed.
        self.past.pop(link.name, None)
        self.lost.pop(link.name, None)
        if first.hello.replaces:
            self.lost[first.hello.replaces] = 0.0
        self.links[link.name] = link
        self.envs |= {env.name: env for env in first.hello.envs}
        reader = asyncio.ensure_future(self.read_from(link, context))
        reader.add_done_callback(lambda _: self.drop(link))
        self.tell()
        try:
            await context.write(pb.ToWorker(heartbeat_s=self.heartbeat_s))
            while not link.closed:
                await link.send_queue.filled.wait()
                if batch := link.send_queue.take():
                    # Must not be cancelled: gRPC cannot end a stream within a message.
                    await context.write(pb.ToWorker(requests=batch))
        finally:
            reader.cancel()
            self.drop(link)
            [fault] = await asyncio.gather(reader, return_exceptions=True)
        if isinstance(fault, ServiceError):
            await context.abort(fault.code, fault.message)

    async def read_from(self, link: WorkerLink, context: grpc.aio.ServicerContext) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            message = parse(pb.FromWorker, data)
            link.heard_s = time.monotonic()
            for reply in message.replies:
                link.settle(reply)
            if message.HasField("heartbeat"):
                link.hear(message.heartbeat)
                self.starts.release()

    # --- gRPC

    def unary(self, verb: str) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[Message]]:
        async def handle(data: bytes, context: grpc.aio.ServicerContext) -> Message:
            try:
                request = pb.Request(
                    timeout_s=context.time_remaining() or 0.0, **{verb: parse(REQUESTS[verb], data)}
                )
                reply = await self.answer(request)
            except ServiceError as error:
                reply = failed(0, error)
            if reply.code:
                # gRPC sends the error as a header. Clients accept 8 KiB of headers, and each
                # non-ASCII byte takes three.
                await context.abort(
                    CODES[reply.code], reply.error.encode()[:MAX_DETAILS].decode(errors="ignore")
                )
            return getattr(reply, verb)

        return handle

    async def stream(
        self, _: AsyncIterator[pb.Requests], context: grpc.aio.ServicerContext
    ) -> None:
        """Serves a client's stream: concurrent requests, and replies in order of completion."""
        client = ClientStream()
        reader = asyncio.ensure_future(self.hear_client(client, context))
        try:
            while not client.is_over and (
                not client.has_said_all or client.num_open or client.send_queue.messages
            ):
                await client.send_queue.filled.wait()
                if batch := client.send_queue.take():
                    await context.write(pb.Replies(replies=batch))
        finally:
            client.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        if client.error:
            await context.abort(client.error.code, client.error.message)

    async def hear_client(self, client: ClientStream, context: grpc.aio.ServicerContext) -> None:
        try:
            while not client.is_over and (data := await context.read()) is not grpc.aio.EOF:
                await client.send_queue.below(UNREAD)
                for request in parse(pb.Requests, data).requests:
                    if client.num_open < PENDING:
                        self.submit(request, client)
                    else:
                        error = ServiceError(
                            StatusCode.RESOURCE_EXHAUSTED,
                            f"{PENDING} requests are unanswered; wait for replies first",
                        )
                        client.send_queue.put(failed(request.id, error))
        except ServiceError as error:
            client.close(error)
        finally:
            client.has_said_all = True
            client.send_queue.filled.set()

    def add_to(self, server: grpc.aio.Server) -> None:
        handlers = {
            METHODS[verb]: grpc.unary_unary_rpc_method_handler(
                self.unary(verb), None, REPLIES[verb].SerializeToString
            )
            for verb in VERBS
        }
        handlers["Stream"] = grpc.stream_stream_rpc_method_handler(
            self.stream, None, pb.Replies.SerializeToString
        )
        join = grpc.stream_stream_rpc_method_handler(self.join, None, pb.ToWorker.SerializeToString)
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(ENVIRONMENTS, handlers),
                grpc.method_handlers_generic_handler(HUB, {"Join": join}),
            ]
        )


def limit(timeout_s: float) -> float:
    return min(timeout_s, MAX_TIMEOUT_S) if timeout_s > 0 else MAX_TIMEOUT_S


def too_late(timeout_s: float) -> ServiceError:
    return ServiceError(StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s")
