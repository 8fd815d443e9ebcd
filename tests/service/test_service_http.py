"""The HTTP port of rl-core serve under attack: data of strangers is not inflated, read to its end, waited
for or logged at length."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
from contextlib import AsyncExitStack, ExitStack

import pytest
from test_service import COUNTER, Service, post

from rl_core import http_guard as http_guard
from rl_core.environments.service.gateway import open_http
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.security import Access
from rl_core.http_guard import RefusalReporter

TOKEN = "correct-horse-battery"
HEAD = "POST /v1/workers HTTP/1.1\r\nHost: x\r\n"
RIGHT = f"{HEAD}Authorization: Bearer {TOKEN}\r\n"


def with_port(play, monkeypatch, *, first_s: float = 60.0):
    """Result of play(port) next to a hub without workers. first_s: time to show the token."""
    monkeypatch.setattr(http_guard, "FIRST_S", first_s)

    async def serve():
        args = argparse.Namespace(host="127.0.0.1", http_port=0)
        async with AsyncExitStack() as stack:
            return await play(await open_http(Hub(), Access(token=TOKEN), args, stack))

    return asyncio.run(serve())


async def say(
    port: int, head: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    return reader, writer


async def ask(port: int, head: str, body: bytes = b"{}") -> tuple[int, str]:
    """Status and text of a reply."""
    reader, writer = await say(port, f"{head}Content-Length: {len(body)}\r\n\r\n", body)
    observed = await hear(reader)
    writer.close()
    return observed


async def hear(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
    length = re.search(r"Content-Length: (\d+)", head)[1]
    return int(head.split()[1]), (await reader.readexactly(int(length))).decode()


def test_nothing_is_read_on_after_a_401(monkeypatch):
    """A stranger who keeps sending fills the buffers of two sockets, and no more."""
    most = 64 << 20

    async def play(port: int) -> int:
        reader, writer = await say(port, f"{HEAD}Content-Length: {4 * most}\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
        num_sent = 0
        try:
            while num_sent < most:
                writer.write(bytes(1 << 20))
                await asyncio.wait_for(writer.drain(), 60)
                num_sent += 1 << 20
        except ConnectionError:
            pass
        writer.transport.abort()
        return num_sent

    assert with_port(play, monkeypatch) < most


def test_a_short_request_without_the_token_hears_why(monkeypatch):
    async def play(port: int) -> tuple[int, str]:
        return await ask(port, HEAD, b"x" * 9999)

    status, text = with_port(play, monkeypatch)
    assert (status, json.loads(text)["code"]) == (401, "UNAUTHENTICATED")


def test_a_connection_that_has_shown_the_token_may_wait(monkeypatch):
    async def play(port: int) -> list[int]:
        reader, writer = await say(port, f"{RIGHT}Content-Length: 2\r\n\r\n", b"{}")
        first, _ = await hear(reader)
        late, _ = await say(port, HEAD)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            # Ended later than the first one would have been.
            await asyncio.wait_for(late.readexactly(1), 60)
        writer.write(f"{RIGHT}Content-Length: 2\r\n\r\n{{}}".encode())
        second, _ = await hear(reader)
        return [first, second]

    assert with_port(play, monkeypatch, first_s=0.2) == [200, 200]


def test_each_kind_of_refusal_is_told_once_a_minute(capsys):
    now = [0.0]
    refusals = RefusalReporter(clock=lambda: now[0])
    for now[0] in (0, 1, 59, 60, 61, 200):
        refusals.report("a")
    refusals.report("b")
    output = [
        "HTTP: refused a",
        "HTTP: refused a (3 times)",
        "HTTP: refused a (2 times)",
        "HTTP: refused b",
    ]
    assert capsys.readouterr().err.splitlines() == output


def test_connections_that_no_file_is_left_for_are_told_in_one_line(monkeypatch, capsys):
    async def play(port: int) -> None:
        error = OSError(24, "Too many open files")
        for _ in range(5):
            output = {"message": "socket.accept() out of system resource", "exception": error}
            asyncio.get_running_loop().call_exception_handler(output)

    with_port(play, monkeypatch)
    line = "HTTP: refused connections: this process has no open files left (ulimit -n)\n"
    assert capsys.readouterr().err == line


def test_half_open_connections_neither_stop_a_service_nor_fill_its_log(tmp_path, monkeypatch):
    """More of them than the service may have files."""
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    limit = 400
    service = Service(
        path, "--port", 0, "--http_port", 0, "--workers", 1, token=TOKEN, max_files=limit
    )
    try:
        service.workers()
        host, _, port = service.http.removeprefix("http://").rpartition(":")
        with ExitStack() as stack:
            for _ in range(limit + 100):
                stack.enter_context(socket.create_connection((host, int(port)), 60))
            assert post(service, "workers", {})[0] == 200
            assert service.interact(service.start(), 1) == "1"
        assert len(service.lines) < 10, service.text()
        assert "HTTP: refused connections next to 100 others" in service.text()
    finally:
        service.close()
