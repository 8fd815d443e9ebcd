"""Bounded output of a command. Standard library only, because boxes run this file too."""

from __future__ import annotations

MAX_OUTPUT_BYTES = 1 << 20  # Limit of stdout and of stderr; the middle of more is left out.


class Output:
    """The beginning and the end of a program's output."""

    def __init__(self, max_bytes: int = MAX_OUTPUT_BYTES):
        self.half = max_bytes // 2
        self.head, self.tail = b"", b""
        self.num_bytes = 0

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        num_left = self.half - len(self.head)
        self.head += data[:num_left]
        self.tail = (self.tail + data[num_left:])[-self.half :]

    def data(self) -> bytes:
        left_out = self.num_bytes - len(self.head) - len(self.tail)
        middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return self.head + middle + self.tail

    def text(self) -> str:
        return self.data().decode(errors="replace")
