"""The hub of rl-core serve and a worker's links to several, in this process: limits, and moments
that a process rarely meets."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import StatusCode
from kit import ROOT

from rl_core.service import control, joining, starts
from rl_core.service import environments_pb2 as pb
from rl_core.service import hub as hub_module
from rl_core.service.connection import Connection
from rl_core.service.gateway import Metrics
from rl_core.service.hosted import LocalEnv
from rl_core.service.hub import Hub
from rl_core.service.joining import join_all
from rl_core.service.links import WorkerLink
from rl_core.service.security import TOKEN_VARIABLE, Access, Admission
from rl_core.service.uplink import Uplink
from rl_core.service.wire import CHANNEL_OPTIONS, ENVIRONMENTS, HUB, UNUSABLE
from rl_core.service.worker import Worker


def beat(sessions: int = 0, capacity: int = 1, **more) -> pb.Worker:
    return pb.Worker(loads=[pb.Load(env="e", sessions=sessions, capacity=capacity, **more)])


def linked(hub: Hub, name: str, load: pb.Worker) -> WorkerLink:
    hub.links[name] = WorkerLink(pb.Hello(worker=name), load)
    return hub.links[name]


def starting(key: str = "") -> pb.Request:
    return pb.Request(start=pb.StartRequest(env="e", key=key))


async def happens(fact, what: str) -> None:
    async def wait() -> None:
        while True:
            if fact():
                return
            await asyncio.sleep(0.01)

    try:
        await asyncio.wait_for(wait(), 30)
    except asyncio.TimeoutError:
        raise AssertionError(what) from None


@asynccontextmanager
async def listening(
    hub: Hub, address: str, credentials: grpc.ServerCredentials | None = None, token: str = ""
) -> AsyncIterator[int]:
    """Its port."""
    admission = Admission(Access(token=token), (ENVIRONMENTS, HUB))
    server = grpc.aio.server(
        interceptors=[admission], options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)]
    )
    hub.add_to(server)
    add = (
        (server.add_secure_port, address, credentials)
        if credentials
        else (server.add_insecure_port, address)
    )
    port = add[0](*add[1:])
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def test_a_client_with_too_many_open_requests_is_refused_until_some_are_answered(monkeypatch):
    monkeypatch.setattr(hub_module, "PENDING", 4)

    async def ask() -> list[list[tuple[int, int]]]:
        hub, heard = Hub(), []
        async with (
            listening(hub, "127.0.0.1:0") as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stream = channel.stream_stream(
                f"/{ENVIRONMENTS}/Stream",
                request_serializer=pb.Requests.SerializeToString,
                response_deserializer=pb.Replies.FromString,
            )(timeout=60)

            async def hear(num: int) -> None:
                replies: list[pb.Reply] = []
                while len(replies) < num:
                    replies += (await stream.read()).replies
                heard.append(sorted((reply.id, reply.code) for reply in replies))

            async def say(*ids: int) -> None:
                # Waits for a worker.
                asked = [pb.Request(id=id, describe=pb.DescribeRequest(env="e")) for id in ids]
                await stream.write(pb.Requests(requests=asked))

            await say(1, 2, 3, 4, 5, 6)
            await hear(2)
            hub.envs["e"] = pb.Environment(name="e")
            hub.tell()
            await hear(4)
            await say(7, 8, 9, 10)
            await hear(4)
        return heard

    full = StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert asyncio.run(ask()) == [
        [(5, full), (6, full)],
        [(n, 0) for n in (1, 2, 3, 4)],
        [(n, 0) for n in (7, 8, 9, 10)],
    ]


def test_a_start_that_is_given_up_in_the_tick_in_which_it_is_granted_gives_its_room_to_the_next():
    async def play() -> tuple[int, list[int]]:
        hub = Hub()
        link = linked(hub, "a", beat(sessions=1))
        first, second = (asyncio.ensure_future(hub.starts.start(starting())) for _ in range(2))
        await asyncio.sleep(0)
        link.hear(beat(sessions=0))
        hub.tell()
        first.cancel()
        await happens(lambda: link.waiting, "the second start is asked of the worker")
        found = len(link.waiting), [link.started["e"], link.room("e")]
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        return found

    assert asyncio.run(play()) == (1, [1, 0])


def test_a_hub_remembers_the_last_keys_alone(monkeypatch):
    monkeypatch.setattr(starts, "KEPT_KEYS", 2)

    async def start(hub: Hub, key: str) -> str:
        """The worker that is asked."""
        task = asyncio.ensure_future(hub.starts.start(starting(key)))
        await happens(lambda: any(link.waiting for link in hub.links.values()), "a worker is asked")
        [link] = [link for link in hub.links.values() if link.waiting]
        link.settle(pb.Reply(id=link.last_id, start=pb.StartReply()))
        await task
        return link.name

    async def play() -> list[str]:
        hub = Hub()
        linked(hub, "a", beat(capacity=10))
        asked = [await start(hub, key) for key in "klm"]
        linked(hub, "b", beat(capacity=100))
        # The first one was forgotten, and goes where most room is.
        asked += [await start(hub, key) for key in "mlk"]
        assert list(hub.starts.worker_of) == [("e", "m"), ("e", "k")]
        return asked

    assert asyncio.run(play()) == ["a", "a", "a", "a", "a", "b"]


def test_totals_outlast_workers_and_take_bounded_memory(monkeypatch):
    monkeypatch.setattr(hub_module, "KEPT_PAST", 3)

    async def lose() -> tuple[int, dict[tuple, float]]:
        hub = Hub()
        metrics = Metrics(hub)
        for number in range(10):
            hub.drop(linked(hub, f"w{number}", beat(interactions=number, ended={"completed": 2})))
        hub.drop(linked(hub, "other", pb.Worker(loads=[pb.Load(env="f", interactions=5)])))
        values = [sample for family in metrics.collect() for sample in family.samples]
        return len(hub.past), {(s.name, *s.labels.values()): s.value for s in values}

    num_kept, found = asyncio.run(lose())
    assert num_kept == 4
    assert (found["rl_core_interactions_total", "e"], found["rl_core_interactions_total", "f"]) == (
        45,
        5,
    )
    assert found["rl_core_ended_total", "e", "completed"] == 20


class Names(asyncio.SelectorEventLoop):
    """An event loop with a table of names."""

    def __init__(self, names: dict[str, list[str]]):
        super().__init__()
        self.names = names

    async def getaddrinfo(self, host, port, **how):
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = [(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip) for ip in self.names[host]]
        return [(kind, socket.SOCK_STREAM, 6, "", (ip, port)) for kind, ip in kinds]


def in_loop(names: dict[str, list[str]], made) -> None:
    async def play() -> None:
        try:
            await made
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    loop = Names(names)
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()


def test_a_worker_joins_every_address_of_a_name_and_leaves_those_that_it_loses(monkeypatch):
    monkeypatch.setattr(joining, "LOOK_S", 0.01)
    names = {
        "hubs": ["10.0.0.1", "10.0.0.2"],
        "both": ["::1", "127.0.0.1"],
        "six": ["fd00::1", "fd00::2"],
    }
    opened: dict[str, asyncio.Event] = {}
    links: list[tuple[str, str]] = []

    class Link:
        def __init__(self, address: str, host: str):
            self.is_over = opened[address] = asyncio.Event()
            links.append((address, host))

    async def join() -> None:
        uplinks: list[Link] = []
        joined = asyncio.ensure_future(
            join_all("hubs:5,both:6,six:7,unix:/h,late:8", uplinks, Link)
        )
        await happens(lambda: len(uplinks) == 6, f"all are joined: {links}")
        six = [("[fd00::1]:7", "six"), ("[fd00::2]:7", "six")]
        # A hub that listens on both families is one hub, by its name.
        assert sorted(links) == sorted(
            [
                ("10.0.0.1:5", "hubs"),
                ("10.0.0.2:5", "hubs"),
                ("both:6", "both"),
                *six,
                ("unix:/h", ""),
            ]
        )
        names["hubs"], names["late"] = ["10.0.0.2", "10.0.0.3"], ["10.0.0.9"]
        await happens(lambda: len(links) == 8, f"new ones are joined: {links}")
        assert sorted(links[6:]) == [("10.0.0.3:5", "hubs"), ("late:8", "late")]
        assert [address for address, over in opened.items() if over.is_set()] == [
            "10.0.0.1:5"
        ] and len(uplinks) == 7
        del names["hubs"]  # a name server that is away changes nothing
        await asyncio.sleep(0.05)
        assert len(uplinks) == 7
        joined.cancel()
        await asyncio.wait([joined])

    in_loop(names, join())


def test_hubs_behind_one_name_show_a_certificate_of_that_name(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj "
        "/CN=hubs"
    )
    names = ["-addext", "subjectAltName=DNS:hubs", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    (tmp_path / "e.py").write_text("def reward_fn(completion): return 1")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    access = Access(ca=cert.read_bytes(), tls=True)

    async def join() -> None:
        worker = Worker(
            [LocalEnv(str(tmp_path / "e.py"), hook_timeout_s=9.0, idle_s=9.0)],
            capacity=1,
            idle_s=9.0,
        )
        one, two = Hub(), Hub()
        async with (
            listening(one, "127.0.0.1:0", credentials) as port,
            listening(two, f"127.0.0.2:{port}", credentials),
        ):
            made = lambda address, host: Uplink(worker, address, access, pytest.fail, host=host)  # noqa: E731
            joined = asyncio.ensure_future(join_all(f"hubs:{port}", worker.uplinks, made))
            await happens(lambda: one.links and two.links, "the worker joins both")
            assert list(one.links) == list(two.links) == [worker.name]
            joined.cancel()
            for uplink in worker.uplinks:
                uplink.is_over.set()

    in_loop({"hubs": ["127.0.0.1", "127.0.0.2"]}, join())


@pytest.mark.parametrize(
    ("verb", "reply"),
    [
        ("list_sessions", pb.ListSessionsReply(sessions=[pb.SessionInfo(session="b.1")])),
        ("cancel_all", pb.CancelAllReply(ended=2)),
    ],
)
def test_a_worker_that_answers_with_an_error_has_not_answered(verb, reply):
    async def ask():
        hub = Hub()
        links = [linked(hub, name, beat()) for name in "ab"]
        asked = asyncio.ensure_future(control.CONTROLS[verb](hub, type(request)()))
        await happens(lambda: all(link.waiting for link in links), "both are asked")
        [[first], [second]] = [link.waiting for link in links]
        links[0].settle(pb.Reply(id=first, code=StatusCode.INTERNAL.value[0], error="a fault"))
        links[1].settle(pb.Reply(id=second, **{verb: reply}))
        return await asked

    request = getattr(pb.Request(), verb)
    found = asyncio.run(ask())
    assert list(found.silent) == ["a"]
    found.ClearField("silent")
    assert found == reply


def test_a_hub_that_stood_still_takes_no_worker_for_silent():
    async def stand_still() -> None:
        hub = Hub(heartbeat_s=0.2)
        linked(hub, "a", beat())
        watching = asyncio.ensure_future(hub.watch())
        await asyncio.sleep(0.01)
        time.sleep(2 * hub.grace_s)  # noqa: ASYNC251
        for _ in range(5):
            await asyncio.sleep(0)
        assert "a" in hub.links
        await happens(lambda: not hub.links, "it is silent")
        watching.cancel()

    asyncio.run(stand_still())


def test_a_hub_that_refuses_a_worker_ends_its_own_link_alone(tmp_path):
    (tmp_path / "e.py").write_text("def reward_fn(completion): return 1")
    command = ["-m", "rl_core.service.worker", str(tmp_path / "e.py"), "--join"]
    env = os.environ | {TOKEN_VARIABLE: "right"}

    async def play() -> None:
        hub, other = Hub(), Hub()
        async with (
            listening(hub, "127.0.0.1:0", token="right") as port,
            listening(other, "127.0.0.1:0", token="b") as b,
        ):

            async def join(*ports: int) -> asyncio.subprocess.Process:
                addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
                how = {"env": env, "cwd": ROOT, "stderr": asyncio.subprocess.PIPE}
                return await asyncio.create_subprocess_exec(
                    sys.executable, *command, addresses, **how
                )

            refusal = (
                f"error: 127.0.0.1:{b} refused this worker: the bearer token is missing or wrong"
            )
            worker = await join(b, port)
            try:
                told = (
                    await asyncio.wait_for(worker.stderr.readuntil(b"without it\n"), 90)
                ).decode()
                await happens(lambda: hub.links, "it joins the other one")
                [name] = hub.links
                assert refusal in told and told.endswith(f"; worker {name} continues without it\n")
                start = pb.Request(start=pb.StartRequest(env="e", row='{"prompt": "x"}'))
                assert (await hub.answer(start)).start.session.startswith(name) and not other.links
            finally:
                worker.kill()
                await worker.wait()
            alone = await join(b)
            _, told = await asyncio.wait_for(alone.communicate(), 90)
            assert alone.returncode == UNUSABLE and refusal in told.decode()

    asyncio.run(play())


WAITS = """
import asyncio
from pathlib import Path

async def start(task):
    while not Path(__file__).with_suffix(".go").exists():
        await asyncio.sleep(0.01)

def reward_fn(completion):
    return 1
"""


def test_a_start_that_is_sent_again_over_another_hub_is_the_same_session(tmp_path):
    """One that has just begun, and that the session's worker joins after another one."""
    (tmp_path / "e.py").write_text(WAITS)

    async def play() -> tuple[str, str, list[int]]:
        one, two, heard = Hub(), Hub(), []
        two.observe = lambda verb, seconds: heard.append(verb)
        watching = asyncio.ensure_future(two.watch())
        made = lambda: LocalEnv(str(tmp_path / "e.py"), hook_timeout_s=90.0, idle_s=90.0)  # noqa: E731
        busy, idle, last = (Worker([made()], capacity=5, idle_s=90.0) for _ in range(3))

        async def join(worker: Worker, hub: Hub, port: int) -> None:
            worker.uplinks.append(Uplink(worker, f"127.0.0.1:{port}", Access(), pytest.fail))
            await happens(lambda: worker.name in hub.links, "it joins")

        async with listening(one, "127.0.0.1:0") as first, listening(two, "127.0.0.1:0") as second:
            await join(busy, one, first)
            await join(idle, one, first)
            async with listening(one, "127.0.0.1:0") as port:
                connection = Connection(f"127.0.0.1:{port}", Access(), 60.0)
                start = pb.StartRequest(env="e", key="k", row='{"prompt": "x"}')
                starting = asyncio.wrap_future(connection.send(start=start))
                await happens(lambda: busy.by_key, "it begins on the worker that came first")
            await join(idle, two, second)
            two.began_s = time.monotonic()
            async with listening(two, f"127.0.0.1:{port}"):
                await happens(lambda: heard, "the client is here")
                await join(busy, two, second)
                await join(last, two, second)
                (tmp_path / "e.go").touch()
                session = (await asyncio.wait_for(starting, 60)).session
                connection.close()
            watching.cancel()
            for uplink in (*busy.uplinks, *idle.uplinks, *last.uplinks):
                uplink.is_over.set()
        return session[:12], busy.name, [worker.num_held["e"] for worker in (busy, idle, last)]

    held_by, busy, num_held = asyncio.run(play())
    assert (held_by, num_held) == (busy, [1, 0, 0])
