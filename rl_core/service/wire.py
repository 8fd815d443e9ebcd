"""What client, hub and workers share: the service's methods, JSON in messages, and errors with a
code."""

from __future__ import annotations

import asyncio
import atexit
import datetime
import gc
import json
import time
from collections import deque
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from rl_core.json_limits import STRICT_DECODER
from rl_core.service import environments_pb2 as pb

Parsed = TypeVar("Parsed", bound=Message)
ENVIRONMENTS = "rl_core.v1.Environments"
HUB = "rl_core.v1.Hub"
VERBS = tuple(field.name for field in pb.Request.DESCRIPTOR.oneofs_by_name["verb"].fields)
METHODS = {verb: verb.title().replace("_", "") for verb in VERBS}
REQUESTS = {verb: getattr(pb, f"{METHODS[verb]}Request") for verb in VERBS}
VERB_OF = {kind: verb for verb, kind in REQUESTS.items()}
REPLIES = {verb: getattr(pb, f"{METHODS[verb]}Reply") for verb in VERBS}
MAX_MESSAGE = 64 << 20  # bytes of one message either way, which may hold many requests
MAX_REQUEST = 16 << 20  # bytes of one request or reply
BATCH = 4 << 20  # bytes after which a batch is full
REPLACED = 75  # exit status of a worker in whose place another one shall start
UNUSABLE = 78  # exit status of a worker that cannot start or is refused (EX_CONFIG)
COLLECT_S = 1.0  # between two collections of garbage, at least
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # That an attempt to connect may take, its TLS handshake included.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
CODES = {code.value[0]: code for code in grpc.StatusCode}


def collect_rarely() -> None:
    """For a process that serves, in its event loop. Python's default looks for cycles every 700 new
    objects, and walks through all sessions every 70,000, for which requests wait 0.1 s."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # Libraries print what is frozen at the end as leaks.
    gc.set_threshold(100_000, 50, 1_000)
    collect()


def collect() -> None:
    """By the clock, so that a state in a cycle ends soon after its session, however few objects it
    has. A hundredth of the time is for this."""
    began_s = time.perf_counter()
    gc.collect()
    took_s = time.perf_counter() - began_s
    asyncio.get_running_loop().call_later(max(COLLECT_S, 100 * took_s), collect)


class ServiceError(Exception):
    """A request that failed, with its code."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message
        self.told_by_service = message  # what describe_error() shows


def wrong(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, message)


def parse(kind: type[Parsed], data: bytes) -> Parsed:
    """Raises ServiceError for bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise wrong(f"no {kind.DESCRIPTOR.name}: {error}") from None


def to_json(value: Any, what: str) -> str:
    """Numbers and arrays of numpy and torch become numbers and lists, dates ISO 8601. Raises
    ServiceError for what JSON cannot hold otherwise; NaN is such a thing."""
    try:
        text = ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ServiceError(
            grpc.StatusCode.UNKNOWN, f"{what} must be JSON to travel: {error}"
        ) from None
    return text if is_unicode(text) else json.dumps(value, separators=(",", ":"), default=plain)


def plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise TypeError(
        f"it holds a {type(value).__name__}; give text, numbers, lists and dictionaries"
    )


def is_unicode(text: str) -> bool:
    """False if half a surrogate pair is in it, which JSON can hold and protobuf cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_json(text: str, kind: type, what: str) -> Any:
    """Raises ServiceError unless the text is JSON of this kind."""
    try:
        value = STRICT_DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{what} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise wrong(f"{what} must be a JSON {kind.__name__}, is a {type(value).__name__}")
    return value


# json.dumps() makes one for each call that has options.
ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain
)


def failed(id: int, error: ServiceError) -> pb.Reply:
    return pb.Reply(
        id=id, code=error.code.value[0], error=error.message.encode("utf-8", "replace").decode()
    )


def fitting(reply: pb.Reply) -> pb.Reply:
    """The reply, or an error in its place if it has more than MAX_REQUEST bytes."""
    if (size := reply.ByteSize()) <= MAX_REQUEST:
        return reply
    return failed(
        reply.id,
        ServiceError(
            grpc.StatusCode.UNKNOWN, f"the reply has {size} bytes; {MAX_REQUEST} may travel"
        ),
    )


class Outbox:
    """Messages that wait to be written to one stream, so that a reader that is slow holds up no one
    else."""

    def __init__(self):
        self.messages: deque[tuple[Any, int]] = deque()
        self.num_bytes = 0
        self.filled = asyncio.Event()
        self.emptied = asyncio.Event()

    def put(self, message: Any) -> None:
        size = message.ByteSize()
        self.messages.append((message, size))
        self.num_bytes += size
        self.filled.set()

    def take(self) -> list[Any]:
        """The next batch, which one message of the stream can hold. Empty if nothing waits."""
        batch = []
        total = 0
        while self.messages and total < BATCH:
            message, size = self.messages.popleft()
            batch.append(message)
            total += size
        self.num_bytes -= total
        if not self.messages:
            self.filled.clear()
        self.emptied.set()
        return batch

    async def below(self, num_bytes: int) -> None:
        """Waits until fewer bytes wait to be written."""
        while self.num_bytes >= num_bytes:
            self.emptied.clear()
            await self.emptied.wait()
