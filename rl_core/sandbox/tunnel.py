"""Connections to a Unix socket in a box, carried over the standard streams of one command.

    python3 tunnel.py SOCKET

The box may have an older Python than the run and no packages: this file needs Python 3.8 alone. The
other end, in the run, connects to the real socket. Each line is "CHANNEL KIND BASE64":

    o  a client has connected                 d  data
    e  the sender will send no more           c  number of bytes that the receiver has passed on
    x  the local end of the sender is gone    r  the box listens
"""

import asyncio
import base64
import os
import sys
from contextlib import suppress

CHUNK_BYTES = 1 << 15
MAX_LINE_BYTES = 1 << 17
# Bytes of one channel that were sent and not yet passed on: a client that does not read holds up
# its own channel alone.
WINDOW_BYTES = 1 << 18
MAX_CHANNELS = 256


class TunnelChannel:
    """One connection. `opening` gives the reader and the writer of its local end."""

    def __init__(self, multiplexer, number, opening):
        self.multiplexer = multiplexer
        self.number = number
        self.credit = WINDOW_BYTES
        self.has_credit = asyncio.Event()
        self.received = asyncio.Queue()
        self.waiting_bytes = 0
        self.task = asyncio.ensure_future(self.run(opening))

    async def run(self, opening):
        writer, tasks = None, []
        try:
            reader, writer = await opening
            for copying in (self.send_all(reader), self.write_all(writer)):
                tasks.append(asyncio.ensure_future(copying))
            await asyncio.gather(*tasks)
        except OSError:  # The local end is gone.
            await self.multiplexer.send(self.number, "x")
        finally:
            for task in tasks:
                task.cancel()
            if writer is not None:
                writer.close()
            self.multiplexer.channels.pop(self.number, None)

    async def send_all(self, reader):
        while True:
            data = await reader.read(CHUNK_BYTES)
            await self.multiplexer.send(self.number, "d" if data else "e", data)
            if not data:
                return
            self.credit -= len(data)
            while self.credit <= 0:
                self.has_credit.clear()
                await self.has_credit.wait()

    async def write_all(self, writer):
        while True:
            data = await self.received.get()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            self.waiting_bytes -= len(data)
            await self.multiplexer.send(self.number, "c", b"%d" % len(data))

    def receive(self, kind, data):
        """Raises ValueError for a sender that exceeds the window."""
        if kind == "c":
            self.credit += int(data)
            self.has_credit.set()
        elif kind == "x":
            self.task.cancel()
        elif kind in ("d", "e"):
            self.waiting_bytes += len(data)
            if self.waiting_bytes > WINDOW_BYTES + CHUNK_BYTES:
                raise ValueError("a channel sends more than its window")
            self.received.put_nowait(data)


class Multiplexer:
    """One end of the tunnel. `write` sends bytes to the other end. `connect` opens the local end of
    a channel that the other end asks for; None refuses these. `ready` is set when the box
    listens."""

    def __init__(self, write, connect=None, ready=None):
        self.write = write
        self.connect = connect
        self.ready = ready
        self.channels = {}
        self.num_opened = 0

    async def send(self, number, kind, data=b""):
        await self.write(b"%d %s %s\n" % (number, kind.encode(), base64.b64encode(data)))

    async def open(self, reader, writer):
        """A new channel for a client that has connected here."""
        if len(self.channels) >= MAX_CHANNELS:
            writer.close()
            return
        self.num_opened += 1
        number = self.num_opened
        opened = asyncio.get_event_loop().create_future()
        opened.set_result((reader, writer))
        # Before the other end can answer, and its task writes nothing before the "o".
        self.channels[number] = TunnelChannel(self, number, opened)
        await self.send(number, "o")

    async def run(self, lines):
        """Serves the channels until the other end is gone. Raises ValueError for other text."""
        try:
            while True:
                line = await lines.readline()
                if not line:
                    return
                words = line.rstrip(b"\n").split(b" ")
                if len(words) != 3 or not words[0].isdigit():
                    raise ValueError(f"unexpected output {line[:100]!r}")
                self.receive(int(words[0]), words[1].decode(), base64.b64decode(words[2]))
        finally:
            for channel in list(self.channels.values()):
                channel.task.cancel()

    def receive(self, number, kind, data):
        if kind == "r" and self.ready is not None:
            self.ready.set()
        elif kind == "o" and self.connect is not None:
            if number in self.channels or len(self.channels) >= MAX_CHANNELS:
                raise ValueError("too many channels")
            self.channels[number] = TunnelChannel(self, number, self.connect())
        elif number in self.channels:  # Else it was closed here while the line was on its way.
            self.channels[number].receive(kind, data)


async def main(path):
    loop = asyncio.get_event_loop()
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout
    )
    output = asyncio.StreamWriter(transport, protocol, None, loop)

    async def write(data):
        output.write(data)
        await output.drain()

    multiplexer = Multiplexer(write)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileNotFoundError):
        os.unlink(path)
    server = await asyncio.start_unix_server(multiplexer.open, path)
    os.chmod(path, 0o666)  # The agent may be another user; it needs a key.
    await multiplexer.send(0, "r")
    await multiplexer.run(lines)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
    os._exit(0)
