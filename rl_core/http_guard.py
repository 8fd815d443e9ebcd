"""Connection limits, deadlines and errors of every HTTP server of rl_core: the agents' endpoint,
engines on other ranks, the reward model's server, the viewer and `rl-core serve`.

A connection that has not sent a valid key is a stranger. Strangers must send a key within seconds,
their number is bounded, and their bodies are neither read nor decompressed. A refusal is one line
of JSON; stderr gets at most one line a minute for each kind of refusal.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import resource
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from rl_core.errors import keep_ends
from rl_core.json_limits import (
    ESCAPED,
    MAX_DEPTH,
    STRICT_DECODER,
    TOO_DEEP,
    check_value,
    may_be_deeper,
)

if TYPE_CHECKING:
    from rl_core.types import AnyJSON


LOOPBACK = "127.0.0.1"
FIRST_S = 10.0  # Deadline for the key of a new connection.
BODY_S = 60.0  # Deadline for a body.
KEEP_ALIVE_S = 75.0  # Longest pause between two requests of a connection.
# Extra time after a deadline, for data that arrived in time while the event loop was busy.
GRACE_S = 1.0
# Limits of strangers: at a port for a network, and inside a run, whose clients connect at once.
MAX_STRANGERS = 256
MAX_LOCAL_STRANGERS = 4096
MAX_OPEN_FILES = 1 << 16
MAX_BACKLOG = 1024
SHORT_BYTES = 1 << 16  # A body of at most this size is read even if its request is refused.
REPORT_EVERY_S = 60.0

ErrorWriter = Callable[[int, str], object]  # (status, message) -> the body, as JSON


class HttpError(Exception):
    """A request that is refused with this status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status
        self.message = message


class RefusalReporter:
    """Reports refusals on stderr: at most one line a minute for each kind, with a count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.reported_s: dict[str, float] = {}
        self.num_unreported: Counter[str] = Counter()

    def report(self, kind: str) -> None:
        self.num_unreported[kind] += 1
        now_s = self.clock()
        if now_s - self.reported_s.get(kind, -math.inf) < REPORT_EVERY_S:
            return
        self.reported_s[kind] = now_s
        times = self.num_unreported.pop(kind)
        more = f" ({times} times)" if times > 1 else ""
        print(f"HTTP: refused {kind}{more}", file=sys.stderr, flush=True)

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Exception handler of the event loop. Reports connections that fail for lack of open files
        in one line; asyncio prints a traceback for each."""
        if str(context["message"]).startswith("socket.accept()"):
            self.report("connections: this process has no open files left (ulimit -n)")
        else:
            loop.default_exception_handler(context)


class ConnectionLimits:
    """Closes connections of strangers that send no key in time, and the oldest stranger's if there
    are too many. Bounds the connections of each key, and of all."""

    def __init__(
        self,
        reporter: RefusalReporter,
        max_strangers: int,
        max_per_key: float = math.inf,
    ):
        num_files = raise_open_files()
        self.reporter = reporter
        self.max_strangers = min(max_strangers, num_files // 4)
        self.max_open = num_files // 4 * 3
        self.max_per_key = max_per_key
        self.strangers: dict[GuardedConnection, asyncio.TimerHandle] = {}
        self.keys: dict[GuardedConnection, str] = {}
        self.num_open: Counter[str] = Counter()  # connections of each key

    def add(self, connection: GuardedConnection) -> None:
        if len(self.strangers) >= self.max_strangers:
            oldest = next(iter(self.strangers))
            many = f"connections next to {self.max_strangers} others that have not sent the token"
            self.end(oldest, many)
        if len(self.strangers) + len(self.keys) >= self.max_open:
            self.end(connection, f"connections next to {self.max_open} others")
            return
        self.strangers[connection] = self.call_later(FIRST_S, self.warn, connection)

    def warn(self, connection: GuardedConnection) -> None:
        late = f"connections that had not sent the token after {FIRST_S:g} s"
        grace_s = min(GRACE_S, FIRST_S)
        self.strangers[connection] = self.call_later(grace_s, self.end, connection, late)

    def call_later(
        self, seconds: float, call: Callable[..., None], *args: object
    ) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, call, *args)

    def admit(self, connection: GuardedConnection, key: str = "") -> None:
        """Counts a connection that has sent a valid key. Raises HttpError if the key has too many
        connections."""
        if connection in self.keys or connection.transport is None:
            return
        if self.num_open[key] >= self.max_per_key:
            self.reporter.report("connections of a key that has too many")
            raise HttpError(429, f"a key may have {self.max_per_key} connections at once")
        self.forget(connection)
        self.keys[connection] = key
        self.num_open[key] += 1

    def forget(self, connection: GuardedConnection) -> None:
        timer = self.strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        key = self.keys.pop(connection, None)
        if key is not None:
            self.num_open[key] -= 1
            if not self.num_open[key]:
                del self.num_open[key]

    def end(self, connection: GuardedConnection, kind: str) -> None:
        self.reporter.report(kind)
        self.forget(connection)
        if connection.transport is not None:
            connection.transport.abort()


class GuardedConnection(web.RequestHandler):
    """One connection, with `limits` that admit or close it."""

    def __init__(
        self, server: web.Server, limits: ConnectionLimits, write_error: ErrorWriter, **options: Any
    ):
        super().__init__(server, **options)
        self.limits = limits
        self.write_error = write_error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.limits.add(self)

    def connection_lost(self, error: BaseException | None) -> None:
        self.limits.forget(self)
        super().connection_lost(error)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An error response of one line instead of aiohttp's page. Reports the error in one line on
        stderr instead of a traceback."""
        if isinstance(exc, HttpProcessingError):
            self.limits.reporter.report("bytes that are not HTTP")
            text = "the bytes are not HTTP"
        elif isinstance(exc, ConnectionError):
            text = "the connection is lost"
        else:
            text = one_line(f"{type(exc).__name__}: {exc}")
            self.limits.reporter.report(f"a request that failed with {text}")
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response was sent")
        response = web.json_response(self.write_error(status, text), status=status)
        response.force_close()
        return response


class HttpServer:
    """An aiohttp application that listens with limits of connections."""

    def __init__(
        self,
        app: web.Application,
        *,
        write_error: ErrorWriter = lambda status, message: {"error": message},
        has_keys: bool = True,
        max_strangers: int,
        max_per_key: float = math.inf,
        handler_cancellation: bool = False,
    ):
        """`has_keys`: handlers call limits.admit() for requests with a valid key. Without keys
        every complete request is admitted. Handlers read bodies with read_body()."""
        self.write_error = write_error
        self.has_keys = has_keys
        self.limits = ConnectionLimits(RefusalReporter(), max_strangers, max_per_key)
        app.middlewares.insert(0, self.guard)
        self.runner = web.AppRunner(
            app, handler_cancellation=handler_cancellation, shutdown_timeout=1.0
        )
        self.log = RefusalLog(self.limits.reporter)
        self.servers: list[asyncio.Server] = []

    async def listen(
        self, host: str | None = LOOPBACK, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listens and returns the port. `host` None: all interfaces. Raises OSError."""
        loop = await self.start()
        options = {"ssl": tls, "ssl_handshake_timeout": FIRST_S} if tls else {}
        for address in [host] if host else ["0.0.0.0", "::"]:
            # asyncio would choose a port for IPv4 and another one for IPv6.
            is_optional = not host and address == "::"  # The machine may have no IPv6.
            with suppress(OSError) if is_optional else nullcontext():
                server = await loop.create_server(
                    self.connection, address, port, backlog=self.backlog(), **options
                )
                self.servers.append(server)
                port = server.sockets[0].getsockname()[1]
        return port

    async def listen_at(self, path: str) -> None:
        """Listens at a Unix socket. Raises OSError."""
        loop = await self.start()
        server = await loop.create_unix_server(self.connection, path, backlog=self.backlog())
        self.servers.append(server)

    async def start(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self.runner.server is None:
            await self.runner.setup()
            if loop.get_exception_handler() is None:
                loop.set_exception_handler(self.limits.reporter.handle)
        return loop

    def backlog(self) -> int:
        # The event loop may accept this number of connections before it reads from any of them.
        return max(8, min(MAX_BACKLOG, self.limits.max_strangers // 3))

    def connection(self) -> GuardedConnection:
        assert self.runner.server is not None
        return GuardedConnection(
            self.runner.server,
            self.limits,
            self.write_error,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEP_ALIVE_S,
            access_log=None,
            logger=self.log,
            # Bodies of strangers are not inflated.
            auto_decompress=False,
        )

    async def close(self) -> None:
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        if loop.get_exception_handler() == self.limits.reporter.handle:
            loop.set_exception_handler(None)
        await self.runner.cleanup()

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admits requests of a server without keys, and writes errors as JSON."""
        try:
            if not self.has_keys:
                assert isinstance(request.protocol, GuardedConnection)
                self.limits.admit(request.protocol)
            return await handler(request)
        except HttpError as error:
            status, message = error.status, error.message
        except web.HTTPException as error:
            if error.status < 400:
                raise
            status, message = error.status, one_line(error.text or error.reason)
        response = web.json_response(self.write_error(status, message), status=status)
        await turn_away(request, response)
        return response


class RefusalLog(logging.Logger):
    """Logger for aiohttp: one line for each kind of error instead of tracebacks."""

    def __init__(self, reporter: RefusalReporter):
        super().__init__("rl_core.http", logging.ERROR)
        self.reporter = reporter

    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else ""
        self.reporter.report(one_line(f"a request: {record.getMessage()} {error!r}"))


async def turn_away(request: web.Request, response: web.Response) -> None:
    """Closes the connection of a refused request. The rest of a short body is read first, so that
    the client gets the response."""
    response.force_close()
    is_short = not request.body_exists or (request.content_length or math.inf) <= SHORT_BYTES
    if not is_short:
        await response.prepare(request)
        await response.write_eof()
        request.protocol.force_close()


async def read_body(request: web.Request) -> bytes:
    """The body, up to the application's client_max_size. Raises HttpError if the body is
    compressed, too large or late."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise HttpError(
            400, f"Content-Encoding: {encoding[:40]} is not supported; send the body uncompressed"
        )
    if (request.content_length or 0) > request.client_max_size:
        raise HttpError(413, f"the body is larger than {request.client_max_size} bytes")
    reading = asyncio.ensure_future(request.read())
    try:
        for seconds in (BODY_S, GRACE_S):
            await asyncio.wait({reading}, timeout=seconds)
            if reading.done():
                return reading.result()
    except web.HTTPRequestEntityTooLarge:
        raise HttpError(413, f"the body is larger than {request.client_max_size} bytes") from None
    except ConnectionError:
        raise HttpError(400, "the connection was lost before the body was complete") from None
    finally:
        reading.cancel()
    raise HttpError(408, f"the body was not complete after {BODY_S:g} s")


async def read_json(request: web.Request) -> AnyJSON:
    """The body as JSON. Raises HttpError for a body that read_body() or parse_json() refuses."""
    try:
        return parse_json(await read_body(request))
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None


def parse_json(body: bytes) -> AnyJSON:
    """The value of a JSON body. Raises ValueError unless the body is JSON in UTF-8, without lone
    surrogates, and nested at most MAX_DEPTH levels."""
    text = body.decode()
    try:
        value = STRICT_DECODER.decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if may_be_deeper(text, MAX_DEPTH) or ESCAPED.search(text):
        check_value(value)
    return value


def is_key(value: str, key: str) -> bool:
    """True if a header's value is the key, compared in constant time. The value may have any
    bytes."""
    return hmac.compare_digest(value.encode(errors="replace"), key.encode())


def one_line(text: str) -> str:
    return keep_ends(" ".join(text.split()), 400)


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard limit, or to MAX_OPEN_FILES if that is lower.
    Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # macOS has another, lower limit.
            return soft
    return most
