"""Frames on a socket, and plain values as JSON with their types: nothing that a sender writes is
ever executed."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

MAX_FRAME = 64 << 20  # Bytes.
TAGS = {tuple: "tuple", set: "set", frozenset: "frozenset"}
MAKERS = {name: kind for kind, name in TAGS.items()}


def keep_ends(text: str, most: int) -> str:
    """The text of rl_core.errors.keep_ends(), which is absent where programs run."""
    if len(text) <= most:
        return text
    start = most // 3
    return f"{text[:start]} ... {text[start + 5 - most :]}"


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """JSON of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict. A
    subclass is written as the builtin type, by that type's own methods. `other` gives the JSON of
    anything else; without it TypeError is raised."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        value = int.__index__(value)
        return value if abs(value) < 1 << 62 else {"int": hex(value)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, other) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(k, other), encode(v, other)] for k, v in dict.items(value)]}
    for kind, name in TAGS.items():
        if isinstance(value, kind):
            return {name: [encode(item, other) for item in kind.__iter__(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy":
        return encode(value.tolist(), other)
    if other is not None:
        return other(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")


def decode(data: Any, remote: Callable[..., Any] | None = None) -> Any:
    """The value that encode() wrote. `remote` resolves references to values of the program. Raises
    ValueError or TypeError for anything else."""
    if isinstance(data, list):
        return [decode(item, remote) for item in data]
    if not isinstance(data, dict):
        return data
    [(name, inner)] = data.items()
    if name == "dict":
        return {decode(key, remote): decode(value, remote) for key, value in inner}
    if name in MAKERS:
        return MAKERS[name](decode(item, remote) for item in inner)
    if name == "remote" and remote is not None:
        return remote(*inner)
    makers = {
        "int": lambda text: int(text, 16),
        "bytes": bytes.fromhex,
        "complex": lambda parts: complex(*parts),
    }
    if name not in makers:
        raise ValueError(f"no value is called {name!r}")
    return makers[name](inner)


def is_same(a: Any, b: Any) -> bool:
    """True if two values are equal in type and value at every depth: 1, 1.0 and True differ, nan
    equals nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        a, b = ({with_type(key): value for key, value in one.items()} for one in (a, b))
        return a.keys() == b.keys() and all(is_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (set, frozenset)):
        return set(map(with_type, a)) == set(map(with_type, b))
    return a == b or (a != a and b != b)


def with_type(member: Any) -> tuple:
    """Wraps a set's member or a key, so that two are equal only if their types are too, at every
    depth."""
    if isinstance(member, (tuple, frozenset)):
        return type(member), type(member)(map(with_type, member))
    return type(member), member if member == member else "nan"


def write_frame(to: socket.socket, data: bytes) -> None:
    to.sendall(len(data).to_bytes(4, "big") + data)


def read_frame(source: socket.socket) -> bytes | None:
    """Reads a frame. Returns None at the end of the stream."""
    head = read_exactly(source, 4)
    return head and read_exactly(source, int.from_bytes(head, "big"))


def read_exactly(source: socket.socket, size: int) -> bytes | None:
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes, at most {MAX_FRAME} are read")
    data = bytearray()
    while len(data) < size:
        chunk = source.recv(min(size - len(data), 1 << 20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def send(to: socket.socket, value: Any) -> None:
    write_frame(to, json.dumps(value).encode())


def receive(source: socket.socket) -> Any:
    """Reads a value. Raises EOFError at the end of the stream, ValueError for malformed JSON."""
    frame = read_frame(source)
    if frame is None:
        raise EOFError
    return json.loads(frame)
