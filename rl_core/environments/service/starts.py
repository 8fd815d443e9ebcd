"""Starts of sessions: on the worker with most room, or in a queue per environment until a worker
has room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from grpc import StatusCode

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.links import WorkerLink
from rl_core.environments.service.wire import ServiceError

KEPT_KEYS = 100_000  # Number of remembered keys of starts.
FULL = StatusCode.RESOURCE_EXHAUSTED.value[0]


class SessionStarts:
    def __init__(
        self,
        links: dict[str, WorkerLink],
        max_queue: int,
        link_of: Callable[[str], Awaitable[WorkerLink]],
    ):
        """link_of(worker) waits for a worker that may reconnect, and raises ServiceError for a lost
        worker."""
        self.links = links
        self.max_queue = max_queue
        self.link_of = link_of
        self.draining = False
        self.queues: dict[str, OrderedDict[asyncio.Future, None]] = {}
        # (environment, key of a start) -> worker.
        self.worker_of: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def start(self, request: pb.Request) -> pb.Reply:
        """Starts a session; starts of an environment keep their order of arrival. The same key goes
        to the same worker, which knows the session."""
        env = request.start.env
        key = (request.start.env, request.start.key)
        is_first = False
        num_lost = 0
        while num_lost < 2:  # A start that kills its worker must not kill all workers.
            if self.draining:
                raise is_draining()
            link = await self.known(key) or self.reserve(env)
            link = link or await self.wait(env, is_first)
            # The start was sent twice, and the other copy got a worker first.
            if self.worker_of.get(key, link.name) != link.name:
                link.started[env] -= 1
                self.release()
                continue
            if request.start.key:
                self.remember(key, link.name)
            reply = await link.answer(request)
            if reply is not None and reply.code != FULL:
                return reply
            if reply is not None:  # The worker is full.
                self.worker_of.pop(key, None)
                link.started[env] += max(0, link.free_slots(env))  # Full until a heartbeat.
            is_first = True
            num_lost = num_lost + (reply is None)
        raise ServiceError(
            StatusCode.DATA_LOSS, f"{num_lost} workers were lost while they started this session"
        )

    def remember(self, key: tuple[str, str], worker: str) -> None:
        self.worker_of[key] = worker
        if len(self.worker_of) > KEPT_KEYS:
            self.worker_of.popitem(last=False)

    async def known(self, key: tuple[str, str]) -> WorkerLink | None:
        try:
            return await self.link_of(self.worker_of[key]) if key in self.worker_of else None
        except ServiceError:
            self.worker_of.pop(key, None)
            return None

    def reserve(self, env: str, *, is_next: bool = False) -> WorkerLink | None:
        """Reserves room for one session on a worker. Returns None without a worker with room."""
        if not is_next and self.queues.get(env):
            return None
        links = [link for link in self.links.values() if link.free_slots(env) > 0]
        if not links:
            return None
        link = max(links, key=lambda link: link.free_slots(env))
        link.started[env] += 1
        return link

    async def wait(self, env: str, is_first: bool) -> WorkerLink:
        """Waits in the queue for a worker with room. Raises ServiceError if the queue is full."""
        queue = self.queues.setdefault(env, OrderedDict())
        if len(queue) >= self.max_queue and not is_first:
            message = (
                f"all workers of {env} are full and {len(queue)} starts wait; try again later, or "
                "add workers"
            )
            raise ServiceError(StatusCode.RESOURCE_EXHAUSTED, message)
        future = asyncio.get_running_loop().create_future()
        queue[future] = None
        if is_first:
            queue.move_to_end(future, last=False)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                future.result().started[env] -= 1
                self.release()
            raise
        finally:
            queue.pop(future, None)

    def release(self) -> None:
        """Resumes waiting starts while workers have room."""
        for env, queue in self.queues.items():
            while queue and (link := self.reserve(env, is_next=True)):
                future, _ = queue.popitem(last=False)
                if future.done():
                    link.started[env] -= 1
                else:
                    future.set_result(link)

    def drain(self) -> None:
        """Refuses new sessions from now on."""
        self.draining = True
        for queue in self.queues.values():
            for future in queue:
                if not future.done():
                    future.set_exception(is_draining())


def is_draining() -> ServiceError:
    return ServiceError(StatusCode.UNAVAILABLE, "the server is draining: it starts no sessions")
