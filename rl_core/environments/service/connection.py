"""One stream to a service, shared by all environments and sessions of a process. A broken stream is
reopened and unanswered requests are resent; numbers and keys of requests prevent duplicates."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import math
import os
import re
import secrets
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

import grpc

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.security import Access
from rl_core.environments.service.wire import (
    CHANNEL_OPTIONS,
    CODES,
    ENVIRONMENTS,
    MAX_REQUEST,
    SendQueue,
    ServiceError,
)
from rl_core.sampling.deadlines import run_within

MARGIN_S = 10.0  # Time for an answer beyond the server's deadline.
BACKOFF_S = (0.1, 5.0)  # First and longest pause between attempts to connect or resend.
TELL_S = 1.0  # Longer waits for a service are reported on stderr.
RECONNECT_S = 120.0  # Requests fail if a service is unreachable for this long.
# Limit instead of RECONNECT_S for a service that was never reached, if its host name is unknown or
# its port on this machine is closed, and the URL has no ?reconnect_s=.
NOWHERE_S = 15.0
NOWHERE = re.compile(
    r"name not found|name or service not known|ip(v4:127\.|v6:\S*::1).*connection refused", re.I
)
# Time at process exit for cancelling the process's sessions at the service.
EXIT_S = 1.0
TICK_S = 0.25
HOPELESS = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
AGAIN = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class Unreachable(ServiceError):
    """The service was unreachable for too long, or refuses this client."""


@cache
def service_loop() -> tuple[asyncio.AbstractEventLoop, int]:
    """(event loop of all connections, process ID). The loop runs in a separate thread. Only this
    thread changes the connections' state, so threads and finalizers of sessions need no lock. A
    forked process inherits the loop without its thread, and gRPC does not work there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="service", daemon=True)
    thread.start()

    def stop(pid: int = os.getpid()) -> None:
        if os.getpid() == pid:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(EXIT_S)

    atexit.register(stop)
    return loop, os.getpid()


class Connection:
    def __init__(self, address: str, access: Access, reconnect_s: float | None):
        """reconnect_s: longest time without the service; None: RECONNECT_S, or NOWHERE_S if the
        address looks wrong."""
        self.address = address
        self.access = access
        self.may_be_nowhere = reconnect_s is None
        self.reconnect_s = RECONNECT_S if reconnect_s is None else reconnect_s
        (self.loop, self.pid) = service_loop()
        self.ids = itertools.count(1)
        # Only the loop's thread uses the attributes below.
        # Unanswered requests in the order in which they were sent.
        self.pending: dict[int, tuple[pb.Request, Future]] = {}
        # Sessions to renew: name -> idle timeout in seconds.
        self.sessions: dict[str, float] = {}
        self.send_queue = SendQueue()
        self.trouble = ""
        self.down_s = None  # Loop time since which no stream has answered.
        self.running: asyncio.Task | None = None
        self.loop.call_soon_threadsafe(self._begin)
        atexit.register(self.close)

    # --- from any thread

    def send(self, timeout_s: float = 0.0, **verb: Any) -> Future:
        """A future of the reply. The future raises ServiceError."""
        request = pb.Request(id=next(self.ids), timeout_s=timeout_s, **verb)
        future = Future()
        if (size := request.ByteSize()) > MAX_REQUEST:
            message = (
                f"a request of {size / 2**20:.1f} MiB exceeds the limit of {MAX_REQUEST >> 20} MiB"
            )
            future.set_exception(ServiceError(grpc.StatusCode.INVALID_ARGUMENT, message))
        elif os.getpid() != self.pid:
            message = (
                "this process was forked from a process with a connection to a service, and gRPC "
                "does not work after a fork; start the process by spawn"
            )
            future.set_exception(ServiceError(grpc.StatusCode.FAILED_PRECONDITION, message))
        else:
            self.loop.call_soon_threadsafe(self._post, request, future)
        return future

    async def ask(self, timeout_s: float, **verb: Any) -> Any:
        """Sends a request and returns the reply. Resends the request while the service has no room.
        Waits at most for the server's timeout plus the time to reconnect. Raises ServiceError."""
        loop = asyncio.get_running_loop()
        limit_s = timeout_s + self.reconnect_s + MARGIN_S
        wait_s = BACKOFF_S[0]
        until_s = loop.time() + limit_s
        while True:
            sent = asyncio.wrap_future(self.send(timeout_s, **verb))
            try:
                return await run_within(sent, max(0.0, until_s - loop.time()))
            except TimeoutError:
                why = f": {self.trouble}" if self.trouble else ""
                message = f"{self.address} did not answer in {limit_s:g} s{why}"
                raise ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
            except ServiceError as error:
                is_final = error.code not in AGAIN or isinstance(error, Unreachable)
                if is_final or loop.time() + wait_s > until_s:
                    raise
            await asyncio.sleep(jittered(wait_s))
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    def hold(self, session: str, idle_s: float) -> None:
        """Renews a session until end()."""
        self.loop.call_soon_threadsafe(self.sessions.__setitem__, session, idle_s)

    def end(self, session: str, status: int) -> None:
        """Cancels a session at the service."""
        if session and os.getpid() == self.pid:
            self.loop.call_soon_threadsafe(self._end, session, status)

    def close(self) -> None:
        """Cancels all sessions. Called at exit."""
        if os.getpid() == self.pid:
            with suppress(Exception):  # An error here must not disturb the exit.
                asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(EXIT_S)

    # --- in the loop's thread

    def _begin(self) -> None:
        self.running = asyncio.ensure_future(self._run())

    def _post(self, request: pb.Request, future: Future) -> None:
        self.pending[request.id] = request, future
        self.send_queue.put(request)

    def _end(self, session: str, status: int) -> None:
        if self.sessions.pop(session, None) is not None:
            self._post(
                pb.Request(
                    id=next(self.ids), cancel=pb.CancelRequest(session=session, status=status)
                ),
                Future(),
            )

    async def _close(self) -> None:
        for session in list(self.sessions):
            self._end(session, pb.CANCELLED)
        cancels = [
            asyncio.wrap_future(future)
            for request, future in self.pending.values()
            if request.HasField("cancel")
        ]
        if cancels and not self.down_s:
            await asyncio.wait(cancels, timeout=EXIT_S / 2)
        self.running.cancel()
        await asyncio.wait({self.running})

    async def _run(self) -> None:
        """Keeps a stream open, reconnecting with backoff."""
        wait_s = BACKOFF_S[0]
        ticking = asyncio.ensure_future(self._tick())
        try:
            async with self.access.channel_aio(self.address, CHANNEL_OPTIONS) as channel:
                while True:
                    self.down_s = self.down_s or self.loop.time()
                    code, self.trouble = await self._stream(channel)
                    if self.down_s is None:  # The stream had answered.
                        self.down_s = self.loop.time()
                        wait_s = BACKOFF_S[0]
                    limit_s = self._limit_s()
                    left_s = self.down_s + limit_s - self.loop.time()
                    if code in HOPELESS:
                        self._fail(Unreachable(code, f"{self.address}: {self.trouble}"))
                    elif left_s <= 0:
                        hint = (
                            f"; ?reconnect_s={RECONNECT_S:g} in the URL waits longer"
                            if limit_s == NOWHERE_S
                            else ""
                        )
                        message = (
                            f"{self.address} could not be reached for {limit_s:g} s: "
                            f"{self.trouble}{hint}"
                        )
                        self._fail(Unreachable(grpc.StatusCode.UNAVAILABLE, message))
                    await asyncio.sleep(min(jittered(wait_s), left_s if left_s > 0 else math.inf))
                    wait_s = min(2 * wait_s, BACKOFF_S[1])
        finally:
            ticking.cancel()

    def _limit_s(self) -> float:
        return (
            NOWHERE_S if self.may_be_nowhere and NOWHERE.search(self.trouble) else self.reconnect_s
        )

    def _is_waited_for(self) -> bool:
        return any(not request.HasField("renew") for request, _ in self.pending.values())

    async def _stream(self, channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str]:
        """Runs one stream until it breaks. Returns the status and the reason."""
        again = {id: held for id, held in self.pending.items() if not held[1].cancelled()}
        self.pending = {id: held for id, held in again.items() if not held[0].HasField("renew")}
        self.send_queue = SendQueue()
        self._post_renewal()  # The answer shows that the service is up.
        for request, _ in list(self.pending.values())[:-1]:
            if self.trouble and request.HasField("start"):  # The session may exist already.
                request.start.again = True
            self.send_queue.put(request)
        stream = channel.stream_stream(
            f"/{ENVIRONMENTS}/Stream",
            request_serializer=pb.Requests.SerializeToString,
            response_deserializer=pb.Replies.FromString,
        )(metadata=self.access.metadata())
        writing = asyncio.ensure_future(self._write(stream, self.send_queue))
        try:
            while (batch := await stream.read()) is not grpc.aio.EOF:
                self.down_s = None
                self.trouble = ""
                self.may_be_nowhere = False
                for reply in batch.replies:
                    self._settle(reply)
            return grpc.StatusCode.UNAVAILABLE, "the server ended the stream"
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or error.code().name
        finally:
            writing.cancel()
            stream.cancel()

    async def _write(self, stream: grpc.aio.StreamStreamCall, send_queue: SendQueue) -> None:
        # The reader in _stream() reports errors of the stream.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await send_queue.filled.wait()
                await stream.write(pb.Requests(requests=send_queue.take()))

    async def _tick(self) -> None:
        """Renews sessions so that they do not expire during generation and training. Reports an
        unreachable service once."""
        renewed_s = self.loop.time()
        told_s = None
        while True:
            await asyncio.sleep(TICK_S)
            due_s = renewed_s + min(self.sessions.values(), default=0.0) / 3
            if self.sessions and not self.down_s and self.loop.time() >= due_s:
                renewed_s = self.loop.time()
                self._post_renewal()
            gone_s = self.loop.time() - (self.down_s or self.loop.time())
            if gone_s > TELL_S and self.down_s != told_s and self._is_waited_for():
                told_s = self.down_s
                self._tell(self._limit_s() - gone_s)

    def _tell(self, left_s: float) -> None:
        """Reports the wait on stderr, on one rank per machine."""
        if left_s > 0 and os.environ.get("LOCAL_RANK", "0") == "0":
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
            text = (
                f"waiting for a service at {self.address} until {until} (?reconnect_s= in the URL "
                "sets the limit)"
            )
            print(f"{text}: {self.trouble or 'no answer yet'}", file=sys.stderr, flush=True)

    def _post_renewal(self) -> None:
        future: Future = Future()
        future.add_done_callback(self._renewed)
        self._post(
            pb.Request(id=next(self.ids), renew=pb.RenewRequest(sessions=self.sessions)), future
        )

    def _renewed(self, future: Future) -> None:
        if not future.cancelled() and not future.exception():
            for session in future.result().gone:  # The session's next request gets the error.
                self.sessions.pop(session, None)

    def _settle(self, reply: pb.Reply) -> None:
        (_, future) = self.pending.pop(reply.id, (None, None))
        verb = reply.WhichOneof("verb")
        if future is None or not future.set_running_or_notify_cancel():
            if reply.HasField("start"):  # The request was cancelled, so end its session.
                self.sessions[reply.start.session] = reply.start.idle_s
                self._end(reply.start.session, pb.CANCELLED)
        elif reply.code or verb is None:
            future.set_exception(
                ServiceError(CODES.get(reply.code, grpc.StatusCode.UNKNOWN), reply.error)
            )
        else:
            future.set_result(getattr(reply, verb))

    def _fail(self, error: ServiceError) -> None:
        """Fails all pending requests."""
        failed = self.pending
        self.pending = {}
        self.send_queue = SendQueue()
        for _, future in failed.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def jittered(wait_s: float) -> float:
    """Random wait around `wait_s`, so that ranks do not reconnect at the same time."""
    return wait_s * (0.5 + secrets.randbelow(1000) / 1000)
