"""Order of requests, repeats, and promises of their results.

A request gets a promise at once; the client polls for the result. Requests of a model run in the
order of seq_id, however they arrive. A repeated one gets the promise of the first.

POST with seq_id -> Lane of its model -> Turns: a tenant after the other -> one thread -> Promise
waits for the one before   waits for the thread    unblocked by the next POST or the thread
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from rl_core.http_guard import HttpError, one_line
from rl_core.types import JSONObject, RunError

POLL_S = 25.0  # Clients give up after 45 s.
MAX_WAITING, MAX_WAITING_BYTES = 1024, 256 << 20  # Requests of a tenant.
MAX_RESULTS, MAX_RESULT_BYTES = 8192, 256 << 20  # Finished promises of a tenant.
GAP_S = 600.0  # Longest wait for a request before those that arrived.
WAIT_S = 3600.0  # Longest wait for the thread.

Result: TypeAlias = "bytes | JSONObject"  # Protobuf or JSON.


class Refused(Exception):
    """A request that fails by the server's fault."""


@dataclass(kw_only=True, slots=True, eq=False)
class Promise:
    request_id: str
    tenant: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    task: asyncio.Task | None = None  # Of samples, which can be cancelled.
    facts: JSONObject = field(default_factory=dict)  # Further fields of the first answer.
    known: dict[int, Promise] = field(default_factory=dict)  # By seq_id, of the model or sampler.
    seq_id: int = 0


def failure(error: BaseException) -> JSONObject:
    """The result of a failed request."""
    is_user = isinstance(error, ValueError)
    text = one_line(str(error) or type(error).__name__)
    if not is_user and not isinstance(error, Refused):
        text = one_line(f"{type(error).__name__}: {error}")
        traceback.print_exception(error, file=sys.stderr)
    return {"error": text, "category": "user" if is_user else "server"}


class Promises:
    """Promises of all tenants by id. The oldest finished ones of a tenant are dropped."""

    def __init__(self):
        self.by_id: dict[str, Promise] = {}
        self.finished: dict[str, dict[str, int]] = {}  # Tenant -> id -> bytes, oldest first.
        self.num_bytes: Counter[str] = Counter()

    def add(
        self,
        tenant: str,
        request_id: str,
        known: dict[int, Promise] | None = None,
        seq_id: int = 0,
    ) -> Promise:
        """A promise, also in `known`, where a repeat of its request finds it."""
        known = {} if known is None else known
        promise = Promise(request_id=request_id, tenant=tenant, known=known, seq_id=seq_id)
        # A model of the same id may have been unloaded.
        self.num_bytes[tenant] -= self.finished.get(tenant, {}).pop(request_id, 0)
        self.by_id[request_id] = known[seq_id] = promise
        return promise

    def find(self, tenant: str, request_id: str) -> Promise:
        """Raises HttpError 410, after which clients send the request again."""
        promise = self.by_id.get(request_id)
        if promise is None or promise.tenant != tenant:
            raise HttpError(410, "no such request: its result was dropped, or the server restarted")
        return promise

    def finish(self, promise: Promise, result: Result | BaseException) -> None:
        promise.result = failure(result) if isinstance(result, BaseException) else result
        promise.done.set()
        tenant, request_id = promise.tenant, promise.request_id
        kept = self.finished.setdefault(tenant, {})
        num_bytes = len(promise.result) if isinstance(promise.result, bytes) else 200
        kept[request_id] = num_bytes + len(str(promise.facts))
        self.num_bytes[tenant] += kept[request_id]
        while len(kept) > MAX_RESULTS or self.num_bytes[tenant] > MAX_RESULT_BYTES:
            oldest = next(iter(kept))
            self.num_bytes[tenant] -= kept.pop(oldest)
            dropped = self.by_id.pop(oldest)
            dropped.known.pop(dropped.seq_id, None)

    async def wait(self, promise: Promise) -> Result:
        """The result, or the answer to ask again."""
        try:
            await asyncio.wait_for(promise.done.wait(), POLL_S)
        except TimeoutError:
            return {"type": "try_again", "queue_state": "active", "request_id": promise.request_id}
        assert promise.result is not None
        return promise.result


@dataclass(kw_only=True, slots=True, eq=False)
class QueuedJob:
    promise: Promise
    run: Callable[[], Result]  # In the thread.
    kind: str = ""  # "backward" and "step" for gradients.
    size: int = 0  # Bytes of the request.
    arrived_s: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True, slots=True, eq=False)
class Lane:
    """The requests of a model, in their order."""

    tenant: str
    next_id: int = 1
    jobs: dict[int, QueuedJob] = field(default_factory=dict)  # By seq_id.
    known: dict[int, Promise] = field(default_factory=dict)
    # Reason of a failed backward: its gradients are dropped, and requests up to the next optimizer
    # step fail.
    error: str = ""
    served: int = 0  # Number of the last job among all.

    def skip_gap(self) -> None:
        """Gives up waiting for a request that should have come long ago."""
        if not self.jobs or self.next_id in self.jobs:
            return
        if time.monotonic() - min(job.arrived_s for job in self.jobs.values()) > GAP_S:
            self.error = f"request {self.next_id} did not arrive within {GAP_S:g} s"
            self.next_id = min(self.jobs)


class Turns:
    """Runs jobs one after the other in a thread: the tenant's that was served longest ago, and of a
    tenant's models likewise."""

    def __init__(self, promises: Promises, drop_gradients: Callable[[Lane], None]):
        self.promises, self.drop_gradients = promises, drop_gradients
        self.lanes: list[Lane] = []
        self.waiting: Counter[str] = Counter()  # Tenant -> number of jobs.
        self.waiting_bytes: Counter[str] = Counter()
        self.served: Counter[str] = Counter()  # Tenant -> number of its last job.
        self.num_served = 0
        self.arrived = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "learner")

    def submit(
        self,
        lane: Lane,
        seq_id: int | None,
        request_id: str,
        run: Callable[[], Result],
        *,
        kind: str = "",
        size: int = 0,
    ) -> Promise:
        """The promise of a request; without seq_id it comes after those that arrived, however
        many they are. Raises HttpError 429 if the tenant has too many requests."""
        is_bounded = seq_id is not None
        if seq_id is None:
            seq_id = max(lane.jobs, default=lane.next_id - 1) + 1
        elif seq_id in lane.known:
            return lane.known[seq_id]
        elif seq_id < lane.next_id:
            raise HttpError(400, f"seq_id {seq_id} is over; the next is {lane.next_id}")
        tenant = lane.tenant
        # The next in line is taken in any case: the others wait for it.
        is_full = self.waiting[tenant] >= MAX_WAITING
        is_full = is_full or self.waiting_bytes[tenant] + size > MAX_WAITING_BYTES
        if is_bounded and is_full and seq_id != lane.next_id:
            raise HttpError(429, f"{self.waiting[tenant]} requests wait; send fewer at once")
        promise = self.promises.add(tenant, request_id, lane.known, seq_id)
        lane.jobs[seq_id] = QueuedJob(promise=promise, run=run, kind=kind, size=size)
        if lane not in self.lanes:
            self.lanes.append(lane)
        self.waiting[tenant] += 1
        self.waiting_bytes[tenant] += size
        self.arrived.set()
        return promise

    def drop(self, lane: Lane, reason: str) -> None:
        """Fails what waits in a lane, which ends."""
        for job in lane.jobs.values():
            self.finish(lane, job, Refused(reason))
        lane.jobs.clear()
        if lane in self.lanes:
            self.lanes.remove(lane)

    def next_lane(self) -> Lane | None:
        ready = []
        for lane in self.lanes:
            lane.skip_gap()
            if lane.next_id in lane.jobs:
                ready.append(lane)
        return min(ready, key=lambda lane: (self.served[lane.tenant], lane.served), default=None)

    async def work(self) -> None:
        """Runs until it is cancelled. Raises RunError if ranks cannot continue together."""
        while True:
            lane = self.next_lane()
            if lane is None:
                self.arrived.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.arrived.wait(), GAP_S / 10)
                continue
            job = lane.jobs.pop(lane.next_id)
            lane.next_id += 1
            self.num_served += 1
            self.served[lane.tenant] = lane.served = self.num_served
            if not lane.jobs:
                self.lanes.remove(lane)
            await self.run(lane, job)

    async def run(self, lane: Lane, job: QueuedJob) -> None:
        result: Result | BaseException
        loop = asyncio.get_running_loop()
        if lane.error:
            result = ValueError(f"an earlier request of this model failed: {lane.error}")
        elif time.monotonic() - job.arrived_s > WAIT_S:
            result = Refused(f"the request waited for more than {WAIT_S:g} s")
        else:
            try:
                result = await loop.run_in_executor(self.thread, job.run)
            except RunError:
                raise
            except Exception as error:  # The client's request fails, and the server continues.
                result = error
        if isinstance(result, BaseException) and job.kind:
            await loop.run_in_executor(self.thread, self.drop_gradients, lane)
            lane.error = "" if job.kind == "step" else lane.error or one_line(str(result))
        self.finish(lane, job, result)

    def finish(self, lane: Lane, job: QueuedJob, result: Result | BaseException) -> None:
        self.waiting[lane.tenant] -= 1
        self.waiting_bytes[lane.tenant] -= job.size
        self.promises.finish(job.promise, result)


class FairGate:
    """Admits `capacity` entries at once, one tenant after the other."""

    def __init__(self, capacity: int):
        self.free = capacity
        self.waiting: dict[str, list[asyncio.Future]] = {}  # Tenants in the order of their turns.

    async def run(self, tenant: str, start: Callable[[], Awaitable]):
        """The result of start(), once it is this entry's turn."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(tenant, []).append(turn)
        self.admit()
        try:
            await turn
        except asyncio.CancelledError:
            self.leave(tenant, turn)
            raise
        try:
            return await start()
        finally:
            self.free += 1
            self.admit()

    def leave(self, tenant: str, turn: asyncio.Future) -> None:
        if turn in self.waiting.get(tenant, ()):
            self.waiting[tenant].remove(turn)
        elif turn.done() and not turn.cancelled():
            self.free += 1  # It was admitted in the same moment.
        self.admit()

    def admit(self) -> None:
        while self.free and self.waiting:
            tenant = next(iter(self.waiting))
            turns = self.waiting.pop(tenant)
            if turns:
                self.waiting[tenant] = turns  # The last in turn from here on.
                turn = turns.pop(0)
                if not turns:
                    del self.waiting[tenant]
                if not turn.done():
                    turn.set_result(None)
                    self.free -= 1
