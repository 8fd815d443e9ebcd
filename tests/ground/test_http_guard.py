"""Every HTTP server of rl_core under what strangers and broken clients send."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import resource
import tempfile
import zlib
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from aiohttp import web
from kit import ROOT, ForkedProcess
from test_online import opened as sessions_of

from rl_core import http_guard
from rl_core.data.tool_calls import ToolCalls
from rl_core.engines.remote import EngineServer, address_of
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.agents.endpoint import MAX_BODY_BYTES, EndpointServer
from rl_core.environments.service.gateway import open_http
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.security import Access
from rl_core.environments.service.wire import MAX_REQUEST
from rl_core.rewards import reward_model
from rl_core.sampling.actor import EpisodeActors
from rl_core.tools.viewer import server as viewer
from rl_core.types import SamplingParams

CHAT = plain_chat(ToolCalls)
TOKEN = "correct-horse-battery"
MIB = 1 << 20
BOMB = gzip.compress(bytes(32 * MIB))


@dataclass(kw_only=True)
class Opened:
    port: int
    path: str  # Path of a POST with JSON.
    key: str = ""  # the header's value; "" where no key is asked
    other_key: str = ""
    max_bytes: int

    def head(self, *headers: str, key: str | None = None) -> str:
        lines = [f"POST {self.path} HTTP/1.1", "Host: localhost", *headers]
        key = self.key if key is None else key
        return "\r\n".join([*lines, *([f"Authorization: {key}"] if key else []), ""])


@asynccontextmanager
async def endpoint(capsys):
    made = ScriptedActor(name="policy", chat=CHAT, replies=["one"])
    actors = EpisodeActors({"policy": made}, SamplingParams(max_tokens=9), 1, "s")
    server = EndpointServer()
    llm, other = await server.open(actors), await server.open(actors)
    yield Opened(
        port=int(llm.address.rpartition(":")[2]),
        path="/v1/chat/completions",
        key=f"Bearer {llm.api_key}",
        other_key=f"Bearer {other.api_key}",
        max_bytes=MAX_BODY_BYTES,
    )
    server.shut(llm)
    server.shut(other)
    await server.close()


@asynccontextmanager
async def online(capsys):
    """A run that stays open, with two sessions."""
    with tempfile.TemporaryDirectory() as folder:
        async with sessions_of(Path(folder)) as (client, _):
            mine, other = await client.start(), await client.start()
            yield Opened(
                port=int(client.url.rpartition(":")[2]),
                path="/rl/set_reward",
                key=f"Bearer {mine.key}",
                other_key=f"Bearer {other.key}",
                max_bytes=MAX_BODY_BYTES,
            )


@asynccontextmanager
async def engine_rank(capsys):
    ranks = SimpleNamespace(store=dist.HashStore(), group=0, rank=1)
    server = EngineServer({"policy": None}, None, ranks, None)
    serving = asyncio.ensure_future(server.serve())
    facts = json.loads(await asyncio.to_thread(ranks.store.get, address_of(0, 1)))
    key = f"Bearer {facts['token']}"
    port = int(facts["url"].rpartition(":")[2])
    yield Opened(port=port, path="/policy/generate", key=key, max_bytes=1 << 30)
    server.stopped.set()
    await serving


@asynccontextmanager
async def printing(serving, capsys):
    """The port that a server prints."""
    task = asyncio.ensure_future(serving)
    printed = ""
    while not (values := re.search(r"http://[^ ]+:(\d+)", printed)):
        assert not task.done(), task.result()
        await asyncio.sleep(0.01)
        printed += capsys.readouterr().out
    yield int(values[1])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def scores(capsys):
    model = SimpleNamespace(path="m")  # What is refused does not reach it.
    async with printing(reward_model.serve(model, "127.0.0.1", 0, MIB), capsys) as port:
        yield Opened(port=port, path="/classify", max_bytes=MIB)


@asynccontextmanager
async def page(capsys):
    async with printing(viewer.serve([], "127.0.0.1", 0), capsys) as port:
        yield Opened(port=port, path="/", max_bytes=MIB)


@asynccontextmanager
async def gateway(capsys):
    args = argparse.Namespace(host="127.0.0.1", http_port=0)
    async with AsyncExitStack() as stack:
        port = await open_http(Hub(), Access(token=TOKEN), args, stack)
        yield Opened(port=port, path="/v1/workers", key=f"Bearer {TOKEN}", max_bytes=MAX_REQUEST)


SERVERS = {each.__name__: each for each in (endpoint, online, engine_rank, scores, page, gateway)}
READERS = [name for name in SERVERS if name != "page"]  # The page has no bodies.
KEYED = ["endpoint", "online", "engine_rank", "gateway"]


@pytest.fixture
def play(request, capsys, monkeypatch):
    """Runs work(server) at the named server."""

    def run(name, work, **bounds):
        for bound, value in bounds.items():
            monkeypatch.setattr(http_guard, bound, value)

        async def open_and_work():
            async with SERVERS[name](capsys) as opened:
                return await work(opened)

        return asyncio.run(open_and_work())

    return run


async def say(opened: Opened, head: str, body: bytes = b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
    writer.write(head.encode(errors="surrogateescape") + body)
    return reader, writer


async def hear(reader) -> tuple[int, str]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode()
    length = int(re.search(r"Content-Length: (\d+)", head)[1])
    return int(head.split()[1]), (await reader.readexactly(length)).decode()


async def ask(opened: Opened, head: str, body: bytes = b"{}") -> tuple[int, str]:
    reader, writer = await say(opened, f"{head}Content-Length: {len(body)}\r\n\r\n", body)
    result = await hear(reader)
    writer.close()
    return result


def is_json_line(text: str) -> bool:
    json.loads(text)
    return "\n" not in text and "Traceback" not in text and len(text) < 1000


@pytest.mark.parametrize("name", SERVERS)
def test_no_server_inflates_a_body(name, play, monkeypatch):
    inflated = []
    decompress = zlib.decompressobj
    monkeypatch.setattr(
        zlib, "decompressobj", lambda *args, **more: inflated.append(args) or decompress(*args)
    )

    async def bomb(opened):
        return [
            await ask(opened, opened.head("Content-Encoding: gzip", key=key), BOMB)
            for key in ("Bearer wrong", opened.key)
        ]

    for status, text in play(name, bomb):
        assert 400 <= status < 500 and is_json_line(text), (status, text)
    assert not inflated


# Each body with a part of the reason.
REFUSED = {
    "not JSON": (b"{", "Expecting property name"),
    "not UTF-8": (b'{"a": "\xff"}', "can't decode byte 0xff"),
    "half a character": (b'{"a": ["half \\ud83d"]}', "lone surrogate"),
    "half a character as bytes": (b'{"a": "\xed\xa0\xbd"}', "can't decode byte 0xed"),
    "half a character in a key": (b'{"half \\uDE00": 1}', "lone surrogate"),
    "deep": (b'{"a": ' + b"[" * 600 + b"]" * 600 + b"}", "nested deeper than 128 levels"),
    "very deep": (b"[" * 100_000, "nested deeper than 128 levels"),
    "deep objects": (b'{"a":' * 200 + b"1" + b"}" * 200, "nested deeper than 128 levels"),
    "a long number": (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
}


@pytest.mark.parametrize("name", ["endpoint", "online", "scores", "gateway"])
def test_what_is_not_json_is_refused_in_one_line(name, play, capsys):
    async def send(opened):
        return {kind: await ask(opened, opened.head(), REFUSED[kind][0]) for kind in REFUSED}

    for kind, (status, text) in play(name, send).items():
        assert status == 400 and is_json_line(text), (kind, status, text)
        assert REFUSED[kind][1] in text, (kind, text)
    assert "Traceback" not in capsys.readouterr().err


def test_pairs_of_surrogates_and_many_values_are_read():
    many = {"a": [[[{}]]] * 1000, "b": '"\\ud83d" 🙂'}
    assert http_guard.parse_json(json.dumps(many).encode()) == many
    assert http_guard.parse_json(b'"\\ud83d\\ude42"') == "🙂"
    # 128 levels, and one list more.
    assert http_guard.parse_json(b"[[]," + b"[" * 127 + b"1" + b"]" * 128)
    with pytest.raises(ValueError, match="nested deeper than 128 levels"):
        http_guard.parse_json(b"[" * 129 + b"1" + b"]" * 129)


@pytest.mark.parametrize("name", KEYED)
@pytest.mark.parametrize("key", ["Bearer \udcff\udcfe", "Bearer", "ä", "x" * 4000])
def test_a_key_of_any_bytes_is_a_wrong_key(name, key, play, capsys):
    async def send(opened):
        return await ask(opened, opened.head(key=key))

    status, text = play(name, send)
    assert status == 401 and is_json_line(text)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", SERVERS)
def test_what_is_not_http_and_long_headers_are_refused_in_one_line(name, play, capsys):
    async def send(opened):
        result = []
        for head in (opened.head(f"X: {'x' * 20_000}"), opened.head(*["X: y"] * 400), "no\r\n"):
            result.append(await ask(opened, head))
        return result

    for status, text in play(name, send):
        assert status == 400 and is_json_line(text)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", SERVERS)
def test_an_unknown_path_and_method_are_refused_in_json(name, play):
    async def send(opened):
        heads = (
            f"{verb} /no/such/place HTTP/1.1\r\nHost: localhost\r\n" for verb in ("GET", "PUT")
        )
        return [await ask(opened, head, b"") for head in heads]

    for status, text in play(name, send):
        assert status in (401, 404, 405) and is_json_line(text)


@pytest.mark.parametrize("name", READERS)
def test_a_large_body_is_refused_before_it_is_read(name, play):
    async def send(opened):
        head = opened.head(f"Content-Length: {opened.max_bytes + 1}")
        reader, writer = await say(opened, f"{head}\r\n")
        result = await hear(reader)
        writer.close()
        return result

    status, text = play(name, send)
    assert status in (413, 429) and is_json_line(text)


@pytest.mark.parametrize("name", READERS)
def test_a_body_that_does_not_come_is_refused(name, play):
    async def send(opened):
        reader, writer = await say(opened, opened.head("Content-Length: 9") + "\r\n{")
        result = await hear(reader)
        writer.close()
        return result

    status, text = play(name, send, BODY_S=0.1, GRACE_S=0.1)
    assert status in (400, 408) and is_json_line(text)


@pytest.mark.parametrize("name", SERVERS)
def test_a_connection_that_asks_nothing_is_ended(name, play, capsys):
    async def wait(opened):
        reader, _ = await say(opened, "POST / HTTP/1.1\r\nHost: ")
        return await asyncio.wait_for(reader.read(), 20)

    assert play(name, wait, FIRST_S=0.1) == b""
    line = "HTTP: refused connections that had not sent the token after 0.1 s"
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("name", SERVERS)
def test_half_open_connections_leave_room_for_others(name, play, capsys):
    async def crowd(opened):
        opened_now = [await say(opened, "") for _ in range(30)]
        status, _ = await ask(opened, opened.head())
        for _, writer in opened_now:
            writer.close()
        return status

    assert play(name, crowd, MAX_OPEN_FILES=40) in (200, 400, 405, 500)
    assert "next to 10 others that have not sent the token" in capsys.readouterr().err


def test_connections_of_one_key_are_bounded_and_other_keys_have_room(play):
    async def crowd(opened):
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        head = f"{opened.head()}Content-Length: {len(body)}\r\n\r\n"
        result = []
        for _ in range(258):
            reader, writer = await say(opened, head, body)
            result.append(((await hear(reader))[0], writer))
        of_other, _ = await ask(opened, opened.head(key=opened.other_key), body)
        result[0][1].close()
        await asyncio.sleep(0.1)
        again, _ = await ask(opened, opened.head(), body)
        for _, writer in result:
            writer.close()
        return [status for status, _ in result], of_other, again

    statuses, of_other, again = play("endpoint", crowd)
    assert statuses == [200] * 256 + [429] * 2 and of_other == again == 200


def test_connections_of_all_keys_are_bounded(play, capsys):
    async def crowd(opened):
        writers = []
        for number in range(31):
            reader, writer = await say(opened, f"{opened.head()}Content-Length: 2\r\n\r\n", b"{}")
            writers.append(writer)
            if number == 30:
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await hear(reader)
            else:
                assert (await hear(reader))[0] == 400
        for writer in writers:
            writer.close()

    play("endpoint", crowd, MAX_OPEN_FILES=40)
    assert "refused connections next to 30 others" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["endpoint"])
def test_the_limit_of_open_files_is_raised(name):
    code = f"""
import asyncio, resource, sys
sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests/ground")!r}]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from types import SimpleNamespace
import io, contextlib, test_http_guard
class Capsys:
    def __init__(self):
        self.out = sys.stdout = io.StringIO()
    def readouterr(self):
        return SimpleNamespace(out=self.out.getvalue())
async def main():
    async with test_http_guard.SERVERS[{name!r}](Capsys()):
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], file=sys.stderr)
asyncio.run(main())
"""
    _, errors = ForkedProcess("-c", code).communicate(timeout=120)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    assert str(most) in errors.split(), errors


def test_a_server_on_all_interfaces_has_one_port():
    async def families():
        server = http_guard.HttpServer(web.Application(), max_strangers=1)
        port = await server.listen(None)
        ends = [end.getsockname() for each in server.servers for end in each.sockets]
        await server.close()
        assert {end[1] for end in ends} == {port}
        return [end[0] for end in ends]

    assert asyncio.run(families())[0] == "0.0.0.0"
