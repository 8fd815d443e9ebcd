"""The protocol that client, hub and workers share: methods, JSON in messages, and errors with a
status code."""

from __future__ import annotations

import asyncio
import atexit
import datetime
import gc
import json
import time
from collections import deque
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from rl_core.environments.service import environments_pb2 as pb
from rl_core.json_limits import STRICT_DECODER

Parsed = TypeVar("Parsed", bound=Message)
Value = TypeVar("Value")
ENVIRONMENTS = "rl_core.v1.Environments"
HUB = "rl_core.v1.Hub"
VERBS = tuple(field.name for field in pb.Request.DESCRIPTOR.oneofs_by_name["verb"].fields)
METHODS = {verb: verb.title().replace("_", "") for verb in VERBS}
REQUESTS = {verb: getattr(pb, f"{METHODS[verb]}Request") for verb in VERBS}
VERB_OF = {kind: verb for verb, kind in REQUESTS.items()}
REPLIES = {verb: getattr(pb, f"{METHODS[verb]}Reply") for verb in VERBS}
MAX_MESSAGE = 64 << 20  # Largest gRPC message in bytes; a message may hold many requests.
MAX_REQUEST = 16 << 20  # Largest request or reply in bytes.
BATCH = 4 << 20  # Size in bytes at which a batch is full.
REPLACED = 75  # Exit status of a worker that another worker shall replace.
UNUSABLE = 78  # Exit status of a worker that cannot start or is refused (EX_CONFIG).
COLLECT_S = 1.0  # Shortest interval between garbage collections.
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Timeout of an attempt to connect, including the TLS handshake.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
Numbered = pb.InteractRequest | pb.ScoreRequest | pb.RunRequest | pb.AnswerRequest
CODES = {code.value[0]: code for code in grpc.StatusCode}


def collect_rarely() -> None:
    """Raises the garbage-collection thresholds of a serving process and collects on a timer. Call
    in the event loop. Python's defaults collect every 700 new objects, and walk all sessions every
    70,000, which delays requests by 0.1 s."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # Libraries report frozen objects at exit as leaks.
    gc.set_threshold(100_000, 50, 1_000)
    collect()


def collect() -> None:
    """Collects garbage on a timer, so that states in reference cycles are freed soon after their
    session. Uses at most 1 % of the time."""
    began_s = time.perf_counter()
    gc.collect()
    took_s = time.perf_counter() - began_s
    asyncio.get_running_loop().call_later(max(COLLECT_S, 100 * took_s), collect)


class ServiceError(Exception):
    """A failed request with its gRPC status code."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code
        self.message = message
        self.service_message = message  # The text that describe_error() shows.


def wrong(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, message)


def parse(kind: type[Parsed], data: bytes) -> Parsed:
    """Parses a protobuf message. Raises ServiceError for malformed bytes."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise wrong(f"not a {kind.DESCRIPTOR.name}: {error}") from None


def to_json(value: object, label: str) -> str:
    """JSON text. Converts numpy and torch values to numbers and lists, and dates to ISO 8601.
    Raises ServiceError for other values that JSON cannot hold, including NaN."""
    try:
        text = ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ServiceError(
            grpc.StatusCode.UNKNOWN, f"{label} must be JSON to be sent: {error}"
        ) from None
    return text if is_unicode(text) else json.dumps(value, separators=(",", ":"), default=plain)


def plain(value: object) -> object:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    raise TypeError(
        f"it contains a value of type {type(value).__name__}; use text, numbers, lists and dicts"
    )


def is_unicode(text: str) -> bool:
    """False if the text has a lone surrogate, which JSON can hold and protobuf cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_json(text: str, kind: type[Value], label: str) -> Value:
    """Parses JSON. Raises ServiceError if the text is not JSON of type `kind`."""
    try:
        value = STRICT_DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"{label} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise wrong(f"{label} must be a JSON {kind.__name__}, is a {type(value).__name__}")
    return value


# Shared, because json.dumps() with options makes an encoder per call.
ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=plain
)


def failed(id: int, error: ServiceError) -> pb.Reply:
    return pb.Reply(
        id=id, code=error.code.value[0], error=error.message.encode("utf-8", "replace").decode()
    )


def fitting(reply: pb.Reply) -> pb.Reply:
    """The reply, or an error reply if the reply exceeds MAX_REQUEST bytes."""
    if (size := reply.ByteSize()) <= MAX_REQUEST:
        return reply
    return failed(
        reply.id,
        ServiceError(
            grpc.StatusCode.UNKNOWN,
            f"the reply has {size} bytes; at most {MAX_REQUEST} can be sent",
        ),
    )


class SendQueue:
    """Queue of messages to one stream, so that a slow reader does not block others."""

    def __init__(self):
        self.messages: deque[tuple[Message, int]] = deque()
        self.num_bytes = 0
        self.filled = asyncio.Event()
        self.emptied = asyncio.Event()

    def put(self, message: Message) -> None:
        size = message.ByteSize()
        self.messages.append((message, size))
        self.num_bytes += size
        self.filled.set()

    def take(self) -> list[Message]:
        """Removes and returns the next batch, which fits into one message; [] if nothing waits."""
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
