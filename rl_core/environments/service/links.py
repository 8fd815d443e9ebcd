"""The hub's side of streams: WorkerLink for a connected worker, ClientStream for a client."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from grpc import StatusCode

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.wire import CODES, SendQueue, ServiceError, failed

# Largest size of unread replies. Above this limit the client's stream ends; the client may resend.
MAX_UNREAD = 128 << 20

Done = Callable[["pb.Reply | None"], object]


class WorkerLink:
    """A connected worker."""

    def __init__(self, hello: pb.Hello, beat: pb.Worker):
        self.name = hello.worker
        self.heard_s = time.monotonic()
        self.waiting: dict[int, tuple[str, Done]] = {}
        self.send_queue = SendQueue()
        self.last_id = 0
        self.closed = False
        self.hear(beat)

    def hear(self, beat: pb.Worker) -> None:
        self.beat = beat
        self.loads = {load.env: load for load in beat.loads}
        self.started: Counter[str] = Counter()  # Environment -> starts since this heartbeat.

    def free_slots(self, env: str) -> int:
        """Number of further sessions that the worker can take."""
        load = self.loads.get(env)
        return (
            load.capacity - load.sessions - self.started[env]
            if load and not self.beat.draining
            else 0
        )

    def ask(self, request: pb.Request, verb: str, done: Done) -> int:
        """Sends a request and returns its number on this link. done(reply) is called once, with
        None if the connection breaks."""
        self.last_id += 1
        request.id = self.last_id
        self.waiting[request.id] = verb, done
        self.send_queue.put(request)
        return request.id

    async def answer(self, request: pb.Request) -> pb.Reply | None:
        """Sends a request and returns its reply. Returns None if the connection broke; the worker
        may or may not have handled the request."""
        if self.closed:
            return None
        future = asyncio.get_running_loop().create_future()
        verb = request.WhichOneof("verb")
        number = self.ask(request, verb, lambda reply: future.done() or future.set_result(reply))
        try:
            return await future
        finally:
            self.waiting.pop(number, None)

    def settle(self, reply: pb.Reply) -> None:
        verb, done = self.waiting.pop(reply.id, (None, None))
        if done is None:
            return
        if reply.code not in CODES or (reply.code == 0 and reply.WhichOneof("verb") != verb):
            reply = failed(
                0,
                ServiceError(
                    StatusCode.INTERNAL,
                    f"worker {self.name} answered {verb} with a reply of another type",
                ),
            )
        done(reply)

    def close(self) -> None:
        self.closed = True
        self.send_queue.messages.clear()
        self.send_queue.filled.set()
        waiting = self.waiting
        self.waiting = {}
        for _, done in waiting.values():
            done(None)


class ClientStream:
    """One client's stream: its open requests and unread replies."""

    def __init__(self):
        self.send_queue = SendQueue()
        self.num_open = 0
        self.has_said_all = False
        self.is_over = False
        self.error = None
        self.tasks: set[asyncio.Task] = set()

    def put(self, reply: pb.Reply) -> None:
        self.num_open -= 1
        if not self.is_over:
            self.send_queue.put(reply)
            if self.send_queue.num_bytes > MAX_UNREAD:
                message = (
                    f"more than {MAX_UNREAD} bytes of replies are unread; read them and resend"
                )
                self.close(ServiceError(StatusCode.RESOURCE_EXHAUSTED, message))

    def close(self, error: ServiceError | None = None) -> None:
        """Ends the stream with an error, if any. Drops all unread replies."""
        self.error = self.error or error
        self.is_over = True
        self.send_queue.num_bytes = 0
        self.send_queue.messages.clear()
        for task in self.tasks:
            task.cancel()
