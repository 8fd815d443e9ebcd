"""Where sessions begin: on a worker with room that the strategy chooses, else in a queue per
environment."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from grpc import StatusCode

from rl_core.service import environments_pb2 as pb
from rl_core.service.dispatch import Strategy
from rl_core.service.links import WorkerLink
from rl_core.service.wire import ServiceError

KEPT_KEYS = 100_000  # of starts
FULL = StatusCode.RESOURCE_EXHAUSTED.value[0]


class Starts:
    def __init__(
        self,
        links: dict[str, WorkerLink],
        max_queue: int,
        link_of: Callable[[str], Awaitable[WorkerLink]],
        choose: Strategy,
    ):
        """link_of(worker) waits for one that may come back, and raises ServiceError for one that is
        gone."""
        self.links = links
        self.max_queue = max_queue
        self.link_of = link_of
        self.choose = choose
        self.draining = False
        self.queues: dict[str, OrderedDict[asyncio.Future, pb.StartRequest]] = {}
        self.worker_of: OrderedDict[tuple[str, str], str] = OrderedDict()  # (environment, key)

    async def start(self, request: pb.Request) -> pb.Reply:
        """In the order of arrival. The same key goes to the same worker, which knows the
        session."""
        env = request.start.env
        key = (request.start.env, request.start.key)
        is_first = False
        num_lost = 0
        while num_lost < 2:  # what ends every worker that begins it is not tried on all of them
            if self.draining:
                raise is_draining()
            link = await self.known(key) or self.reserve(request.start)
            link = link or await self.wait(request.start, is_first)
            # It came twice, and the other one waited less.
            if self.worker_of.get(key, link.name) != link.name:
                link.started[env] -= 1
                self.release()
                continue
            if request.start.key:
                self.remember(key, link.name)
            reply = await link.answer(request)
            if reply is not None and reply.code != FULL:
                return reply
            if reply is not None:  # it filled up meanwhile
                self.worker_of.pop(key, None)
                link.started[env] += max(0, link.room(env))  # no room until its next heartbeat
            is_first = True
            num_lost = num_lost + (reply is None)
        raise ServiceError(
            StatusCode.DATA_LOSS, f"{num_lost} workers went away while they started this session"
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

    def reserve(self, start: pb.StartRequest, *, is_next: bool = False) -> WorkerLink | None:
        """A worker with room, of which one session's is taken."""
        env = start.env
        if not is_next and self.queues.get(env):
            return None
        links = [link for link in self.links.values() if link.room(env) > 0]
        if not links:
            return None
        link = self.choose(links, start)
        link.started[env] += 1
        return link

    async def wait(self, start: pb.StartRequest, is_first: bool) -> WorkerLink:
        """A worker that has room at last. Raises ServiceError if too many wait already."""
        env = start.env
        queue = self.queues.setdefault(env, OrderedDict())
        if len(queue) >= self.max_queue and not is_first:
            message = (
                f"all workers of {env} are full and {len(queue)} starts wait; try again later, or "
                "add workers"
            )
            raise ServiceError(StatusCode.RESOURCE_EXHAUSTED, message)
        future = asyncio.get_running_loop().create_future()
        queue[future] = start
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
        """Lets as many starts go on as there is room for."""
        for env, queue in self.queues.items():
            while queue and (link := self.reserve(next(iter(queue.values())), is_next=True)):
                future, _ = queue.popitem(last=False)
                if future.done():
                    link.started[env] -= 1
                else:
                    future.set_result(link)

    def drain(self) -> None:
        """No new sessions."""
        self.draining = True
        for queue in self.queues.values():
            for future in queue:
                if not future.done():
                    future.set_exception(is_draining())


def is_draining() -> ServiceError:
    return ServiceError(StatusCode.UNAVAILABLE, "the server is draining: it starts no sessions")
