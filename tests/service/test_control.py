"""Actions of a service's operator: listing and ending sessions, draining a worker, and choosing the
worker that a session starts on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import contextmanager

import pytest
from grpc import StatusCode
from kit import wait_until
from test_service import COUNTER, TOKEN, serving

from rl_core.environments.service import client, manage, starts
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.flags import TOKEN_VARIABLE
from rl_core.environments.service.hosted import LocalEnv
from rl_core.environments.service.links import WorkerLink
from rl_core.environments.service.worker import Worker
from rl_core.tools import cli
from rl_core.types import Task

OTHER = COUNTER.replace("max_turns = 1000", "max_turns = 7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("control")
    (folder / "counter.py").write_text(COUNTER)
    (folder / "other.py").write_text(OTHER)
    return folder


@contextmanager
def two_workers(folder):
    files = folder / "counter.py", folder / "other.py"
    with serving(*files, "--port", 0, "--workers", 2, token=TOKEN) as service:
        service.workers(2)
        yield service


@pytest.fixture(scope="module")
def shared(folder):
    with two_workers(folder) as service:
        yield service


@pytest.fixture
def service(shared, monkeypatch):
    """A service without sessions, whose workers a test leaves as they are."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    yield shared
    shared.call("cancel_all")


@pytest.fixture
def drained(folder, monkeypatch):
    """A service whose workers a test may drain."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with two_workers(folder) as service:
        yield service


def test_sessions_are_listed_and_ended_by_environment_owner_and_worker(service, capsys):
    url = f"grpc://{service.address}"
    first = service.start(owner="ann", task_id="train/4")
    second = service.start(owner="ben")
    other = service.call("start", env="other", row='{"prompt": "x"}', owner="ann").session
    for number in (1, 2, 3):
        service.interact(first, number)
    service.call("score", session=first, number=4)

    observed = {info.session: info for info in manage.list_sessions(url).sessions}
    assert observed.keys() == {first, second, other}
    info = observed[first]
    assert (info.env, info.owner, info.worker, info.turns) == ("counter", "ann", first[:12], 3)
    assert info.status == pb.RUNNING and info.task_id == "train/4" and info.age_s >= info.idle_s
    assert [s.session for s in manage.list_sessions(url, env="other").sessions] == [other]
    held = [s.session for s in manage.list_sessions(url, worker=second[:12]).sessions]
    assert set(held) == {name for name in observed if name[:12] == second[:12]}

    assert cli.main(["service", "sessions", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["session", "env", "worker", "owner"]
    assert {line.split()[0] for line in lines[1:-1]} == set(observed) and lines[-1] == "3 sessions"

    assert cli.main(["service", "cancel", url, "--owner", "ann", "--env", "counter"]) == 0
    assert capsys.readouterr().out == "1 sessions ended\n"
    code, text = service.refused("interact", session=first, number=5)
    assert code == StatusCode.FAILED_PRECONDITION and "cancelled" in text
    assert service.interact(second, 1) == "1"
    held = [second, other, *(service.start() for _ in range(4))]
    of_worker = [session for session in held if session[:12] == second[:12]]
    assert 0 < len(of_worker) < len(held)
    assert manage.cancel_all(url, worker=second[:12]).ended == len(of_worker)
    assert manage.cancel_all(url).ended == len(held) - len(of_worker)
    assert not manage.list_sessions(url).sessions


def test_a_run_says_whose_its_sessions_are(service):
    url = f"grpc://{service.address}"
    messages = [{"role": "user", "content": "count"}]
    task = Task(id="train/9", env="counter", row={"prompt": "count"}, messages=messages)
    for setting, owner in (("", f"{socket.gethostname()}/{os.getpid()}"), ("?owner=me", "me")):
        served = client.parse(f"{url}/counter{setting}")
        served.connection.send(start=client.start_request(served, task)).result(60)
        [info] = manage.list_sessions(url, owner=owner).sessions
        assert (info.task_id, info.owner) == ("train/9", owner)


def test_ending_all_sessions_ends_hooks_that_run_and_makes_room(service):
    session = service.start(owner="ann")
    stream = service.stream()
    text = pb.Said(messages=json.dumps([{"role": "assistant", "content": "sleep 100"}]))
    asked = pb.InteractRequest(session=session, number=1, said=text)
    stream.say(pb.Request(id=1, interact=asked))
    url = f"grpc://{service.address}"
    wait_until(lambda: manage.list_sessions(url).sessions[0].idle_s == 0, "the hook runs")
    assert manage.cancel_all(url, owner="ann").ended == 1
    reply = stream.hear(1)[1]
    assert reply.code == StatusCode.FAILED_PRECONDITION.value[0], reply
    wait_until(
        lambda: not any(load.sessions for w in service.workers(2) for load in w.loads), "room"
    )


def test_a_wrong_command_is_refused_and_changes_nothing(service, capsys, monkeypatch):
    url = f"grpc://{service.address}"
    session = service.start()
    for words, says in (
        (["cancel", url], "needs --env, --owner or --worker, or else --all"),
        (["cancel", url, "--all", "--env", "x"], "needs --env, --owner or --worker, or else --all"),
        (["sesions", url], "did you mean 'sessions'?"),
        (["drain", url], "needs --worker"),
        (["drain", url, "--worker", "0" * 12], f"there is no worker '{'0' * 12}'; there are"),
        (
            ["sessions", url, "--env", "countr"],
            "unknown environment 'countr'; known: counter",
        ),
        (["cancel", url, "--env", "countr"], "unknown environment 'countr'"),
        (["cancel", url, "--worker", "nobody"], "there is no worker 'nobody'"),
        (["sessions", "grpc://127.0.0.1:1"], "UNAVAILABLE"),
        (["sessions", "http://127.0.0.1:1"], "must be grpc://HOST:PORT"),
    ):
        assert cli.main(["service", *words]) == 1
        assert says in capsys.readouterr().err, words
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    assert cli.main(["service", "cancel", url, "--all"]) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err
    assert service.interact(session, 1) == "1"


@pytest.mark.parametrize("by", ["command", "signal"])
def test_a_drained_worker_ends_with_its_sessions_and_loses_none(drained, by):
    sessions = [drained.start() for _ in range(8)]
    name = sessions[0][:12]
    of_it = [session for session in sessions if session.startswith(name)]
    assert 0 < len(of_it) < 8, "both workers have sessions"
    pid = next(worker.pid for worker in drained.workers(2) if worker.name == name)
    url = f"grpc://{drained.address}"
    if by == "command":
        assert manage.drain(url, name).sessions == len(of_it)
    else:
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: [w.draining for w in drained.workers(2) if w.name == name] == [True], by)
    more = [drained.start() for _ in range(8)]
    assert not [session for session in more if session.startswith(name)]
    for number in (1, 2, 3):
        assert {drained.interact(session, number) for session in sessions + more} <= {str(number)}
    for session in sessions:
        scores = drained.call("score", session=session, number=4).scores
        assert scores[0].reward == 3.0
        drained.call("cancel", session=session)
    wait_until(lambda: len(drained.call("workers").workers) == 1, "it has left")
    drained.wait_for_line(f"worker {name} exited: it was drained")
    assert drained.process.poll() is None
    assert {drained.interact(session, 4) for session in more} == {"4"}


def test_a_drained_worker_refuses_a_start_that_was_on_its_way(folder):
    async def codes():
        env = LocalEnv(str(folder / "counter.py"), hook_timeout_s=20.0, idle_s=60.0)
        worker = Worker([env], capacity=9, idle_s=60.0)
        asked = pb.Request(start=pb.StartRequest(env="counter", row='{"prompt": "x"}'))
        before = await worker.answer(asked)
        worker.drain()
        return before.code, (await worker.answer(asked)).code

    assert asyncio.run(codes()) == (0, StatusCode.RESOURCE_EXHAUSTED.value[0])


def test_a_worker_that_is_drained_to_be_replaced_is(drained):
    old = {worker.name for worker in drained.workers(2)}
    name = min(old)
    assert (
        cli.main(["service", "drain", f"grpc://{drained.address}", "--worker", name, "--replace"])
        == 0
    )

    def is_replaced():
        now = {worker.name for worker in drained.call("workers").workers}
        return len(now) == 2 and name not in now

    wait_until(is_replaced, "another worker is in its place", 60)


def test_a_session_starts_on_the_worker_with_most_room():
    rooms = {"a": 5, "b": 3, "c": 9, "d": 4}
    links = {}
    for name, room in rooms.items():
        beat = pb.Worker(loads=[pb.Load(env="e", capacity=room)])
        links[name] = WorkerLink(pb.Hello(worker=name), beat)
    queue = starts.SessionStarts(links, 10, None)
    assert [queue.reserve("e").name for _ in range(6)] == ["c"] * 4 + ["a", "c"]
