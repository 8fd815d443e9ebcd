"""The hub of rl-core serve in this process: limits, and states that a process rarely reaches."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import StatusCode
from kit import ROOT

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service import hub as hub_module
from rl_core.environments.service import starts
from rl_core.environments.service.connection import Connection
from rl_core.environments.service.hosted import LocalEnv
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.links import WorkerLink
from rl_core.environments.service.security import TOKEN_VARIABLE, Access, Admission
from rl_core.environments.service.uplink import Uplink
from rl_core.environments.service.wire import CHANNEL_OPTIONS, ENVIRONMENTS, HUB, UNUSABLE
from rl_core.environments.service.worker import Worker


def beat(sessions: int = 0, capacity: int = 1, **more) -> pb.Worker:
    return pb.Worker(loads=[pb.Load(env="e", sessions=sessions, capacity=capacity, **more)])


def linked(hub: Hub, name: str, load: pb.Worker) -> WorkerLink:
    hub.links[name] = WorkerLink(pb.Hello(worker=name), load)
    return hub.links[name]


def starting(key: str = "") -> pb.Request:
    return pb.Request(start=pb.StartRequest(env="e", key=key))


async def happens(fact, description: str) -> None:
    async def wait() -> None:
        while True:
            if fact():
                return
            await asyncio.sleep(0.01)

    try:
        await asyncio.wait_for(wait(), 30)
    except TimeoutError:
        raise AssertionError(description) from None


@asynccontextmanager
async def listening(hub: Hub, address: str, token: str = "") -> AsyncIterator[int]:
    """Serves the hub and yields the port."""
    admission = Admission(Access(token=token), (ENVIRONMENTS, HUB))
    server = grpc.aio.server(
        interceptors=[admission], options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)]
    )
    hub.add_to(server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def test_a_client_with_too_many_open_requests_is_refused(monkeypatch):
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


def test_a_start_given_up_when_granted_gives_its_room_on():
    async def play() -> tuple[int, list[int]]:
        hub = Hub()
        link = linked(hub, "a", beat(sessions=1))
        first, second = (asyncio.ensure_future(hub.starts.start(starting())) for _ in range(2))
        await asyncio.sleep(0)
        link.hear(beat(sessions=0))
        hub.tell()
        first.cancel()
        await happens(lambda: link.waiting, "the second start is asked of the worker")
        observed = len(link.waiting), [link.started["e"], link.free_slots("e")]
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        return observed

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


@pytest.mark.parametrize(
    "verb, reply",
    [
        ("list_sessions", pb.ListSessionsReply(sessions=[pb.SessionInfo(session="b.1")])),
        ("cancel_all", pb.CancelAllReply(ended=2)),
    ],
)
def test_a_worker_that_answers_with_an_error_has_not_answered(verb, reply):
    async def ask():
        hub = Hub()
        links = [linked(hub, name, beat()) for name in "ab"]
        asked = asyncio.ensure_future(getattr(hub, verb)(type(request)()))
        await happens(lambda: all(link.waiting for link in links), "both are asked")
        [[first], [second]] = [link.waiting for link in links]
        links[0].settle(pb.Reply(id=first, code=StatusCode.INTERNAL.value[0], error="a fault"))
        links[1].settle(pb.Reply(id=second, **{verb: reply}))
        return await asked

    request = getattr(pb.Request(), verb)
    observed = asyncio.run(ask())
    assert list(observed.silent) == ["a"]
    observed.ClearField("silent")
    assert observed == reply


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


def test_a_worker_that_its_hub_refuses_exits(tmp_path):
    (tmp_path / "e.py").write_text("def reward_fn(completion): return 1")
    command = ["-m", "rl_core.environments.service.worker", str(tmp_path / "e.py"), "--join"]

    async def play() -> tuple[int, str]:
        async with listening(Hub(), "127.0.0.1:0", token="right") as port:
            env, pipe = os.environ | {TOKEN_VARIABLE: "wrong"}, asyncio.subprocess.PIPE
            worker = await asyncio.create_subprocess_exec(
                sys.executable, *command, f"127.0.0.1:{port}", env=env, cwd=ROOT, stderr=pipe
            )
            _, text = await asyncio.wait_for(worker.communicate(), 90)
            return worker.returncode, text.decode()

    code, text = asyncio.run(play())
    assert code == UNUSABLE and "refused this worker: the bearer token is missing or wrong" in text


WAITS = """
import asyncio
from pathlib import Path

async def start(task):
    while not Path(__file__).with_suffix(".go").exists():
        await asyncio.sleep(0.01)

def reward_fn(completion):
    return 1
"""


def test_a_start_that_is_sent_again_to_a_restarted_hub_is_the_same_session(tmp_path):
    """The session's worker joins the new hub after an idle one."""
    (tmp_path / "e.py").write_text(WAITS)

    async def play() -> tuple[str, str, list[int]]:
        old, new, heard = Hub(), Hub(), []
        new.observe = lambda verb, seconds: heard.append(verb)
        made = lambda: LocalEnv(str(tmp_path / "e.py"), hook_timeout_s=90.0, idle_s=90.0)  # noqa: E731
        busy, idle = (Worker([made()], capacity=5, idle_s=90.0) for _ in range(2))

        async def join(worker: Worker, hub: Hub, port: int) -> None:
            worker.uplink = Uplink(worker, f"127.0.0.1:{port}", Access(), pytest.fail)
            await happens(lambda: worker.name in hub.links, "the worker joins")

        async with listening(old, "127.0.0.1:0") as port, listening(old, "127.0.0.1:0") as first:
            await join(busy, old, first)
            connection = Connection(f"127.0.0.1:{port}", Access(), 60.0)
            start = pb.StartRequest(env="e", key="k", row='{"prompt": "x"}')
            starting = asyncio.wrap_future(connection.send(start=start))
            await happens(lambda: busy.by_key, "the session begins")
        busy.uplink.is_over.set()
        new.began_s = time.monotonic()
        watching = asyncio.ensure_future(new.watch())
        async with listening(new, f"127.0.0.1:{port}"):
            await join(idle, new, port)
            await happens(lambda: heard, "the client is here")
            await join(busy, new, port)
            (tmp_path / "e.go").touch()
            session = (await asyncio.wait_for(starting, 60)).session
            connection.close()
        watching.cancel()
        for worker in (busy, idle):
            worker.uplink.is_over.set()
        return session[:12], busy.name, [worker.num_held["e"] for worker in (busy, idle)]

    held_by, busy, num_held = asyncio.run(play())
    assert (held_by, num_held) == (busy, [1, 0])
