"""rl-core serve: its sessions, queue, workers that die or fall silent, several hubs, security,
HTTP, metrics."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit import ROOT, run_afresh, wait_until
from prometheus_client.parser import text_string_to_metric_families

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.links import WorkerLink
from rl_core.environments.service.security import TOKEN_VARIABLE, Access, read_token
from rl_core.environments.service.wire import (
    CHANNEL_OPTIONS,
    ENVIRONMENTS,
    HUB,
    MAX_REQUEST,
    METHODS,
    REPLIES,
    REQUESTS,
)
from rl_core.tools import cli

TOKEN = "correct-horse-battery"
COUNTER = """
import asyncio, os, time

max_turns = 1000

def load_tasks(split):
    return [{"prompt": f"task {n}"} for n in range(3)]

def start(task):
    if task.row["prompt"] == "die":
        os.kill(os.getpid(), 9)
    return {"count": 0}

async def interact(messages, state):
    word, _, number = messages[-1]["content"].partition(" ")
    if word == "die":
        os.kill(os.getpid(), 9)
    if word == "block":
        time.sleep(float(number))
    if word == "fail":
        raise RuntimeError("é" * int(number or 0))
    if word == "sleep":
        await asyncio.sleep(float(number))
    state["count"] += 1
    return [{"role": "user", "content": "x" * int(number) if word == "big" else str(state["count"])}]

async def reward_fn(state):
    return state["count"]
"""


class Service:
    """A server with its workers."""

    def __init__(self, *args, token: str = "", ca: bytes | None = None, max_files: int = 0):
        command = [sys.executable, "-m", "rl_core.tools.cli", "serve", *map(str, args)]
        env = {k: v for k, v in os.environ.items() if k != TOKEN_VARIABLE} | (
            {TOKEN_VARIABLE: token} if token else {}
        )
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "start_new_session": True,
        }
        limit = (
            (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files)))
            if max_files
            else None
        )
        pipes["preexec_fn"] = limit
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env | {"OMP_NUM_THREADS": "1"}, **pipes
        )
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()
        self.token, self.ca, self.channels = token, ca, []
        wanted = ["worker "] if "--join" in args else ["serving on "]
        wanted += ["HTTP on "] if "--http_port" in args else []
        where = [self.wait_for_line(start) for start in wanted]
        self.address, self.http = where[0], f"http{'s' if ca else ''}://{where[-1]}"

    def wait_for_line(self, start: str) -> str:
        def found():
            assert self.process.poll() is None or self.lines, f"ended with {self.process.poll()}"
            return [line for line in self.lines if line.startswith(start)]

        wait_until(found, f"{start!r} in {self.lines}", 90)
        return found()[0].split()[-1]

    def text(self) -> str:
        return "".join(self.lines)

    def channel(self) -> grpc.Channel:
        if not self.channels:
            secure = self.ca and grpc.ssl_channel_credentials(self.ca)
            make = grpc.secure_channel if secure else grpc.insecure_channel
            self.channels.append(make(self.address, *([secure] if secure else []), CHANNEL_OPTIONS))
        return self.channels[0]

    def metadata(self, token: str | None = None) -> list[tuple[str, str]]:
        token = self.token if token is None else token
        return [("authorization", f"Bearer {token}")] if token else []

    def call(self, verb: str, timeout_s: float = 60, token: str | None = None, **fields):
        ask = self.channel().unary_unary(
            f"/{ENVIRONMENTS}/{METHODS[verb]}",
            request_serializer=REQUESTS[verb].SerializeToString,
            response_deserializer=REPLIES[verb].FromString,
        )
        return ask(
            REQUESTS[verb](**fields),
            timeout=timeout_s,
            metadata=self.metadata(token),
            wait_for_ready=True,
        )

    def refused(self, verb: str, **fields) -> tuple[StatusCode, str]:
        with pytest.raises(grpc.RpcError) as error:
            self.call(verb, **fields)
        return error.value.code(), error.value.details()

    def start(self, prompt: str = "count", **fields) -> str:
        return self.call(
            "start", env="counter", row=json.dumps({"prompt": prompt}), **fields
        ).session

    def interact(self, session: str, number: int, text: str = "x", **fields) -> str:
        reply = self.call("interact", session=session, number=number, said=said(text), **fields)
        return json.loads(reply.messages)[0]["content"]

    def stream(self) -> Stream:
        return Stream(self.channel(), self.metadata())

    def workers(self, at_least: int = 1) -> list[pb.Worker]:
        observed = []

        def enough():
            observed[:] = self.call("workers").workers
            return len(observed) >= at_least

        wait_until(enough, f"{at_least} workers: {self.lines}", 90)
        return observed

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        if self.process.poll() is None:
            for process in [
                psutil.Process(self.process.pid),
                *psutil.Process(self.process.pid).children(),
            ]:
                process.kill()
        self.process.wait()


class Stream:
    """The rpc of the same name."""

    def __init__(self, channel: grpc.Channel, metadata: list):
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        call = channel.stream_stream(
            f"/{ENVIRONMENTS}/Stream",
            request_serializer=pb.Requests.SerializeToString,
            response_deserializer=pb.Replies.FromString,
        )
        self.replies = call(iter(self.requests.get, None), timeout=60, metadata=metadata)
        self.early: list[pb.Reply] = []

    def say(self, *requests: pb.Request) -> None:
        self.requests.put(pb.Requests(requests=requests))

    def hear(self, num: int) -> dict[int, pb.Reply]:
        """The next replies, in the order in which they came."""
        while len(self.early) < num:
            self.early += next(self.replies).replies
        observed, self.early = self.early[:num], self.early[num:]
        return {reply.id: reply for reply in observed}


def said(text: str = "x") -> pb.Said:
    return pb.Said(messages=json.dumps([{"role": "assistant", "content": text}]))


def starting(id: int, **fields) -> pb.Request:
    return pb.Request(
        id=id, start=pb.StartRequest(env="counter", row='{"prompt": "count"}'), **fields
    )


@pytest.fixture(scope="module")
def counter(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("envs") / "counter.py"
    path.write_text(COUNTER)
    return path


@contextmanager
def serving(*args, **options):
    service = Service(*args, **options)
    try:
        yield service
    finally:
        service.close()


@pytest.fixture(scope="module")
def service(counter):
    flags = ["--port", "0", "--http_port", "0", "--workers", "2", "--heartbeat_s", "0.8"]
    with serving(counter, *flags, token=TOKEN) as service:
        service.workers(2)
        yield service


def post(
    service: Service, verb: str, body: bytes | dict, token: str | None = None, **more: str
) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{service.http}/v1/{verb}", data, dict(service.metadata(token)) | more
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# --- sessions


def test_an_episode_plays_over_the_verbs(service):
    assert [env.name for env in service.call("describe", env="counter").envs] == ["counter"]
    tasks = service.call("tasks", env="counter", split="train")
    assert (list(tasks.rows), tasks.total) == ([f'{{"prompt":"task {n}"}}' for n in range(3)], 3)
    begun = service.call("start", env="counter", task_id="train/2")
    assert json.loads(begun.messages) == [{"role": "user", "content": "task 2"}]
    assert [service.interact(begun.session, n) for n in (1, 2, 3)] == ["1", "2", "3"]
    score = service.call("score", session=begun.session, number=4).scores[0]
    assert (score.reward, score.parts["reward_fn"]) == (3.0, 3.0)
    assert list(service.call("renew", sessions=[begun.session, "none"]).gone) == ["none"]
    assert service.call("cancel", session=begun.session).status == pb.CANCELLED


def test_health_and_reflection_tell_of_the_service(service):
    ask = health_pb2_grpc.HealthStub(service.channel()).Check
    for name in ("", HUB, ENVIRONMENTS):
        assert (
            ask(health_pb2.HealthCheckRequest(service=name)).status
            == health_pb2.HealthCheckResponse.SERVING
        )
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    reply = next(
        reflection_pb2_grpc.ServerReflectionStub(service.channel()).ServerReflectionInfo(
            iter([request])
        )
    )
    assert {ENVIRONMENTS, HUB} <= {
        observed.name for observed in reply.list_services_response.service
    }


def test_starts_wait_in_their_order_and_too_many_are_refused(counter):
    with serving(counter, "--port", 0, "--workers", 1, "--capacity", 1, "--queue", 2) as service:
        service.workers()
        stream = service.stream()
        stream.say(*map(starting, (1, 2, 3, 4)), starting(5, timeout_s=0.3))
        first = stream.hear(3)
        assert [first[id].code for id in (1, 4, 5)] == [
            0,
            *[StatusCode.RESOURCE_EXHAUSTED.value[0]] * 2,
        ]
        assert service.call("workers").queued["counter"] == 2
        stream.say(starting(6))
        assert stream.hear(1)[6].error.startswith(
            "all workers of counter are full and 2 starts wait"
        )
        order, session = [], first[1].start.session
        for _ in range(2):
            service.call("cancel", session=session)
            [(id, reply)] = stream.hear(1).items()
            order, session = [*order, id], reply.start.session
        assert order == [2, 3]
        stream.say(starting(7, timeout_s=0.2))
        assert stream.hear(1)[7].code == StatusCode.DEADLINE_EXCEEDED.value[0]
        assert service.call("workers").queued["counter"] == 0


def test_a_start_is_not_lost_when_its_client_goes_away(counter):
    with serving(counter, "--port", 0, "--workers", 1, "--capacity", 1) as service:
        session = service.start()
        stream = service.stream()
        stream.say(starting(1))
        wait_until(lambda: service.call("workers").queued["counter"] == 1, "the start waits")
        stream.replies.cancel()
        wait_until(lambda: service.call("workers").queued["counter"] == 0, "nobody waits for it")
        service.call("cancel", session=session)
        assert service.interact(service.start(), 1) == "1"


# --- workers that die


def test_a_key_that_waits_twice_starts_on_one_worker():
    async def play() -> list[int]:
        full, free = (pb.Worker(loads=[pb.Load(env="e", sessions=n, capacity=1)]) for n in (1, 0))
        hub = Hub()
        hub.links |= {name: WorkerLink(pb.Hello(worker=name), full) for name in ("a", "b")}
        request = pb.Request(start=pb.StartRequest(env="e", key="k"))
        waiting = [asyncio.ensure_future(hub.starts.start(request)) for _ in range(2)]
        await asyncio.sleep(0)
        for link in hub.links.values():
            link.hear(free)
        hub.tell()
        await asyncio.sleep(0.01)
        for task in waiting:
            task.cancel()
        return sorted(len(link.waiting) for link in hub.links.values())

    assert asyncio.run(play()) == [0, 2]


def test_a_renewal_waits_for_no_worker_that_is_blocked():
    async def renew() -> list[str]:
        hub, blocked, gone = Hub(heartbeat_s=0.01), f"{'a' * 12}.1", f"{'b' * 12}.1"
        hub.links["a" * 12] = WorkerLink(pb.Hello(worker="a" * 12), pb.Worker())
        hub.died("b" * 12)
        return list(
            (await asyncio.wait_for(hub.renew(pb.RenewRequest(sessions=[blocked, gone])), 60)).gone
        )

    assert asyncio.run(renew()) == [f"{'b' * 12}.1"]


def test_a_worker_that_blocks_is_not_taken_for_dead(service):
    session = service.start()
    # Longer than the silence that removes a worker.
    assert service.interact(session, 1, "block 3") == "1"
    assert service.interact(session, 2) == "2"


def test_a_crash_ends_the_sessions_of_its_worker_alone(service):
    sessions = {service.start() for _ in range(6)}
    doomed = min(sessions)
    rest = {s for s in sessions if s[:12] != doomed[:12]}
    assert (
        rest
        and service.refused("interact", session=doomed, number=1, said=said("die"))[0]
        == StatusCode.DATA_LOSS
    )
    assert {
        service.refused("interact", session=s, number=1, said=said())[0] for s in sessions - rest
    } == {StatusCode.DATA_LOSS}
    assert [service.interact(s, 1) for s in sorted(rest)] == ["1"] * len(rest)
    assert doomed[:12] not in {worker.name for worker in service.workers(2)}


def test_a_start_that_ends_its_worker_is_tried_on_two(counter):
    with serving(counter, "--port", 0, "--workers", 3) as service:
        before = {worker.name for worker in service.workers(3)}
        code, text = service.refused("start", env="counter", row='{"prompt": "die"}')
        assert (code, text) == (
            StatusCode.DATA_LOSS,
            "2 workers were lost while they started this session",
        )
        assert len(before & {worker.name for worker in service.workers()}) == 1


def test_a_silent_worker_is_removed_and_its_sessions_go_on_when_it_is_back(service):
    session = service.start()
    pid = next(worker.pid for worker in service.workers(2) if session.startswith(worker.name))
    os.kill(pid, signal.SIGSTOP)
    try:
        assert (
            service.refused("interact", session=session, number=1, said=said())[0]
            == StatusCode.DATA_LOSS
        )
        assert session[:12] not in {worker.name for worker in service.workers()}
        assert service.interact(service.start(), 1) == "1"  # On the other worker.
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: session[:12] in {worker.name for worker in service.workers()}, "the worker is back"
    )
    assert service.interact(session, 1) == "1"  # done once, though it was asked twice


def test_workers_end_with_their_server(counter):
    with serving(counter, "--port", 0, "--workers", 1, "--heartbeat_s", "0.4") as service:
        worker = psutil.Process(service.workers()[0].pid)
        service.process.kill()
        worker.wait(timeout=60)


@pytest.mark.parametrize(
    "flags", [["--workers", 2], ["--controller"]], ids=["workers", "controller"]
)
def test_a_server_that_is_killed_leaves_nothing_in_the_temporary_folder(
    counter, tmp_path, monkeypatch, flags
):
    long = tmp_path / ("long" * 20)  # no path for a socket
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with serving(*([] if "--controller" in flags else [counter]), *flags) as service:
        service.process.kill()
        service.process.wait()
        name = f"rl_core_serve_*_{service.process.pid}_*"
        wait_until(lambda: not list(Path("/tmp").glob(name)), "the folder of the socket is gone")


# --- clients that misbehave


def test_a_client_that_does_not_read_slows_nobody_and_fills_no_memory(service):
    slow, hub = service.stream(), psutil.Process(service.process.pid)
    sessions, before = [service.start() for _ in range(90)], hub.memory_info().rss
    asked = [
        pb.InteractRequest(session=session, number=1, said=said(f"big {4 << 20}"))
        for session in sessions
    ]
    # 360 MiB of replies.
    slow.say(*(pb.Request(id=n, interact=request) for n, request in enumerate(asked)))
    wait_until(lambda: hub.memory_info().rss > before + (32 << 20), "replies wait")
    other = service.start()
    assert [service.interact(other, n) for n in range(1, 21)] == [str(n) for n in range(1, 21)]
    # All requests of each worker were answered.
    for last in {session[:12]: session for session in sessions}.values():
        assert len(service.interact(last, 1, f"big {4 << 20}")) == 4 << 20
    assert hub.memory_info().rss - before < 340 << 20
    with pytest.raises(grpc.RpcError) as error:
        slow.hear(60)
    assert error.value.code() == StatusCode.RESOURCE_EXHAUSTED


def test_a_client_that_reads_late_gets_all_replies(service):
    """80 MiB wait, which no message of a stream can hold, and the next requests are begun once they
    are read."""
    late, sessions = service.stream(), [service.start() for _ in range(40)]
    asked = [
        pb.InteractRequest(session=session, number=1, said=said(f"big {4 << 20}"))
        for session in sessions
    ]
    for first in (0, 20):
        late.say(*(pb.Request(id=n, interact=asked[n]) for n in range(first, first + 20)))
        # Requests of each worker.
        for last in {sessions[n][:12]: sessions[n] for n in range(first, first + 20)}.values():
            assert len(service.interact(last, 1, f"big {4 << 20}")) == 4 << 20
    assert all(len(reply.interact.messages) > 4 << 20 for reply in late.hear(40).values())


def test_what_is_too_large_fails_alone(service):
    stream, session = service.stream(), service.start()
    large = pb.InteractRequest(session=session, number=1, said=said("x" * MAX_REQUEST))
    small = pb.InteractRequest(session=session, number=1, said=said())
    stream.say(pb.Request(id=1, interact=large), pb.Request(id=2, interact=small))
    replies = stream.hear(2)
    assert (replies[1].code, replies[2].code) == (StatusCode.RESOURCE_EXHAUSTED.value[0], 0)
    huge = pb.InteractRequest(session=session, number=2, said=said("x" * (65 << 20)))
    other = Stream(service.channel(), service.metadata())
    other.say(pb.Request(id=1, interact=huge))
    with pytest.raises(grpc.RpcError) as error:
        other.hear(1)
    assert error.value.code() == StatusCode.RESOURCE_EXHAUSTED
    stream.say(
        pb.Request(
            id=3,
            interact=pb.InteractRequest(session=session, number=2, said=said(f"big {MAX_REQUEST}")),
        )
    )
    assert stream.hear(1)[3].error.endswith(f"bytes; at most {MAX_REQUEST} can be sent")
    assert service.interact(session, 3) == "3"


def test_an_error_that_is_too_long_for_a_header_is_cut(service):
    code, text = service.refused(
        "interact", session=service.start(), number=1, said=said("fail 9000")
    )
    assert (
        code == StatusCode.UNKNOWN
        and "RuntimeError: éé" in text
        and 1000 < len(text.encode()) <= 2000
    )


# --- security


def test_every_verb_needs_the_token(service):
    for verb in REQUESTS:
        for token in ("", "wrong", TOKEN[:-1], TOKEN + "x"):
            code, text = service.refused(verb, token=token)
            assert code == StatusCode.UNAUTHENTICATED and TOKEN not in text
            status, output = post(service, verb, {}, token=token)
            assert status == 401 and TOKEN not in str(output)
    for method, request in ((f"/{ENVIRONMENTS}/Stream", b""), (f"/{HUB}/Join", b"")):
        with pytest.raises(grpc.RpcError) as error:
            next(service.channel().stream_stream(method)(iter([request])))
        assert error.value.code() == StatusCode.UNAUTHENTICATED


def test_what_a_stranger_sends_is_not_read_into_memory(service):
    def peak_mib() -> int:
        return int(re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())[1]) >> 10

    process = Path(f"/proc/{service.process.pid}")
    (process / "clear_refs").write_text("5")  # the peak is that from here on
    before, data = peak_mib(), b"x" * (60 << 20)
    starts = [
        service.channel().unary_unary(f"/{ENVIRONMENTS}/Start").future(data, timeout=30)
        for _ in range(3)
    ]
    assert [start.code() for start in starts] == [StatusCode.UNAUTHENTICATED] * 3
    assert peak_mib() - before < 60


def test_the_token_stands_in_no_command_output_or_environment(service):
    server = psutil.Process(service.process.pid)
    workers = server.children(recursive=True)
    lines = [" ".join(process.cmdline()) for process in (server, *workers)]
    assert len(lines) >= 3 and not any(TOKEN in line for line in lines)
    assert not any(
        TOKEN.encode() in Path(f"/proc/{worker.pid}/environ").read_bytes() for worker in workers
    )
    assert TOKEN not in service.text()
    assert TOKEN not in repr(Access(token=TOKEN))


def test_a_token_that_no_header_can_hold_is_refused_without_telling_it(tmp_path):
    (tmp_path / "token").write_text("correct horse\n")
    with pytest.raises(ValueError, match="must be printable ASCII without spaces") as error:
        read_token(str(tmp_path / "token"))
    assert "horse" not in str(error.value)


def test_a_page_in_a_browser_may_not_ask(service):
    assert post(service, "workers", {}, Origin="https://example.com")[0] == 403


def made_certificate(folder: Path) -> tuple[list, Path]:
    """(flags of a server, its certificate)."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj "
        "/CN=localhost"
    )
    names = [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return ["--tls_cert", cert, "--tls_key", key], cert


def test_tls_by_files(counter, tmp_path):
    tls, cert = made_certificate(tmp_path)
    with serving("--controller", "--port", 0, *tls, token=TOKEN, ca=cert.read_bytes()) as hub:
        join = [
            "--join",
            hub.address.replace("127.0.0.1", "localhost"),
            "--tls_ca",
            cert,
            "--workers",
            1,
        ]
        with serving(counter, *join, token=TOKEN):
            assert hub.interact(hub.start(), 1) == "1"
        with grpc.insecure_channel(hub.address) as plain, pytest.raises(grpc.RpcError):
            plain.unary_unary(f"/{ENVIRONMENTS}/Workers")(b"", metadata=hub.metadata(), timeout=1)


def test_local_workers_join_without_tls_in_a_private_folder(counter, tmp_path):
    tls, cert = made_certificate(tmp_path)
    flags = ["--port", 0, "--http_port", 0, "--workers", 1, *tls]
    with serving(counter, *flags, token=TOKEN, ca=cert.read_bytes()) as service:
        assert service.interact(service.start(), 1) == "1"
        [worker] = psutil.Process(service.process.pid).children()
        folder = Path(re.search(r"--join unix:(\S+)/hub", " ".join(worker.cmdline()))[1])
        assert folder.stat().st_mode & 0o777 == 0o700
        import ssl

        context = ssl.create_default_context(cadata=cert.read_text())
        with urllib.request.urlopen(
            f"{service.http}/metrics", timeout=30, context=context
        ) as reply:
            assert b"rl_core_workers 1.0" in reply.read()


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--host 0.0.0.0",
            "--host 0.0.0.0 is reachable from other machines and needs a token: set "
            "RL_CORE_SERVICE_TOKEN",
        ),
        ("--tls_cert x.pem", "--tls_cert and --tls_key need each other"),
        ("--controller", "name environment files, or --controller: one of them"),
        ("--token_file /dev/null", "error: token_file /dev/null is empty"),
        ("--token_file nowhere", "error: token_file nowhere: No such file or directory"),
        ("--join x:1 --http_port 0", "--join x:1 opens no hub"),
        ("--join a:1,b:1", "--join a:1,b:1 must be HOST:PORT of one controller"),
        ("--join a", "--join a must be HOST:PORT of one controller"),
        ("--http_port 99999", "--port 0 and --http_port 99999 must be from 0 to 65535"),
        (
            "--host 127.0.0.1 --http_port TAKEN",
            "of 127.0.0.1: Address already in use; --http_port 0 picks a free port",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(flags, message, counter, capsys, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = flags.replace("TAKEN", str(listener.getsockname()[1]))
        assert cli.main(["serve", str(counter), "--port", "0", *flags.split()]) == 1
    assert message in capsys.readouterr().err


EXTRA = [
    "grpc",
    "google.protobuf",
    "grpc_health.v1",
    "grpc_reflection.v1alpha",
    "prometheus_client",
]


def without(missing: list[str], *command: object) -> list[str]:
    """Output, with the status behind it, and errors of rl-core without these packages."""
    code = "from rl_core.tools import cli; print(cli.main(sys.argv[1:]))"
    return run_afresh(code, *map(str, command), missing=missing, check=False)


@pytest.mark.parametrize("missing", EXTRA)
def test_a_package_of_the_extra_that_is_missing_is_one_line(missing, counter):
    output, errors = without([missing], "serve", counter, "--port", 0, "--http_port", 0)
    assert re.fullmatch(
        rf"error: rl-core serve needs gRPC \(.*{re.escape(missing.split('.')[0])}.*\): pip install "
        rf"'rl_core\[service\]'\n",
        errors,
    )
    assert output == "1\n"


def test_help_and_wrong_flags_of_serve_need_no_grpc():
    assert "--http_port" in without(EXTRA, "serve", "--help")[0]
    flags = "serve", "--controller", "--workers", 0
    assert without(EXTRA, *flags) == ["1\n", "error: --workers 0 must be above 0\n"]
    output, errors = without(EXTRA, "service", "workers", "grpc://127.0.0.1:1")
    assert output == "1\n" and errors.startswith("error: rl-core service needs gRPC (")


def test_a_port_that_is_taken_is_an_error(counter, service, capsys):
    port = service.address.rpartition(":")[2]
    assert cli.main(["serve", str(counter), "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, error",
    [
        (None, "typo.py: no such file; did you mean 'type.py'?"),
        (
            "import no_such_module",
            "typo.py:1: ModuleNotFoundError: No module named 'no_such_module'; pip install it",
        ),
        ("x = 1", "typo.py: defines no hook; it needs def reward_fn(messages, ...)"),
    ],
)
def test_a_file_that_cannot_be_served_is_refused_before_an_address_is_told(
    text, error, tmp_path, capfd
):
    (tmp_path / "type.py").touch()
    if text:
        (tmp_path / "typo.py").write_text(text)
    assert cli.main(["serve", str(tmp_path / "typo.py"), "--port", "0", "--workers", "1"]) == 1
    out, err = capfd.readouterr()
    assert error in err and out == ""


# --- clients that die

HOLDS = """
import asyncio, sys, time
from rl_core.environments.env_file import load_env
from rl_core.environments.service.client import load_module
from rl_core.types import Task

async def begin(env):
    hook, asked = env.hooks["start"], [{"role": "user", "content": "count"}]
    task = Task(id="train/0", env="counter", row={"prompt": "count"}, messages=asked)
    return [await hook(task, dict.fromkeys(hook.ours) | {"task": task}) for _ in range(2)]

held = asyncio.run(begin(load_env(sys.argv[1], module=load_module(sys.argv[1]))))
print(*(session.name for session in held), flush=True)
time.sleep(600)
"""


def test_a_killed_clients_sessions_expire_and_make_room(counter):
    """It holds all the room that there is, and renews its sessions while it lives."""
    with serving(counter, "--port", 0, "--workers", 1, "--capacity", 2, "--idle_s", 1) as service:
        command = [sys.executable, "-c", HOLDS, f"grpc://{service.address}/counter"]
        client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            names = client.stdout.readline().split()
        finally:
            client.kill()
            client.communicate()
        assert service.start() not in names  # it waited for room
        code, output = service.refused("interact", session=names[0], number=1, said=said())
        assert code == StatusCode.FAILED_PRECONDITION
        assert f"session {names[0]} has ended (expired): it had no request for 1 s" in output

        def num_expired() -> int:
            [worker] = service.workers()
            return worker.loads[0].ended["expired"]

        wait_until(lambda: num_expired() >= 2, "both have expired")


# --- its end


def test_a_server_that_drains_lets_sessions_end(counter):
    with serving(counter, "--port", 0, "--workers", 1, "--capacity", 1) as service:
        session, stream = service.start(), service.stream()
        stream.say(starting(1))
        wait_until(lambda: service.call("workers").queued["counter"] == 1, "a start waits")
        service.process.send_signal(signal.SIGTERM)
        service.wait_for_line("draining")
        assert stream.hear(1)[1].code == StatusCode.UNAVAILABLE.value[0]
        wait_until(
            lambda: service.refused("start", env="counter", row="{}")[0] == StatusCode.UNAVAILABLE,
            "no starts",
        )
        health = health_pb2_grpc.HealthStub(service.channel()).Check(
            health_pb2.HealthCheckRequest()
        )
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert service.interact(session, 1) == "1"
        service.call("cancel", session=session)
        assert service.process.wait(60) == 0


def test_a_second_signal_ends_at_once(counter):
    with serving(counter, "--port", 0, "--workers", 1, "--drain_s", 600) as service:
        service.start()
        service.process.send_signal(signal.SIGINT)
        service.wait_for_line("draining")
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(60) == 0


# --- HTTP, metrics, rl-core service


def test_an_episode_plays_over_http(service):
    status, begun = post(service, "start", {"env": "counter", "row": '{"prompt": "count"}'})
    assert (status, begun["messages"]) == (200, '[{"role":"user","content":"count"}]')
    body = {
        "session": begun["session"],
        "number": 1,
        "said": {"messages": '[{"role": "assistant", "content": "x"}]'},
    }
    expected = {
        "messages": '[{"role":"user","content":"1"}]',
        "done": False,
        "status": "RUNNING",
        "metrics": {},
    }
    assert post(service, "interact", body) == post(service, "interact", body) == (200, expected)
    status, scored = post(service, "score", {"session": begun["session"], "number": 2})
    assert (status, scored["scores"][0]["reward"]) == (200, 1.0)
    assert post(service, "cancel", {"session": begun["session"]}) == (200, {"status": "CANCELLED"})


@pytest.mark.parametrize(
    "verb, body, status, code",
    [
        ("start", {"env": "nothing"}, 404, "NOT_FOUND"),
        ("start", b'{"x":' * 5000, 400, "INVALID_ARGUMENT"),
        ("start", b"x" * (MAX_REQUEST + 1), 429, "RESOURCE_EXHAUSTED"),
        ("nothing", {}, 404, "NOT_FOUND"),
        ("interact", {"session": "x"}, 404, "NOT_FOUND"),
        ("interact", {"session": "0" * 12 + "." + "0" * 16}, 500, "DATA_LOSS"),
    ],
)
def test_http_says_what_is_wrong(service, verb, body, status, code):
    observed = post(service, verb, body)
    assert (observed[0], observed[1]["code"]) == (status, code), observed


def test_prometheus_reads_what_happened(counter):
    with serving(
        counter,
        "--port",
        0,
        "--http_port",
        0,
        "--workers",
        1,
        "--capacity",
        5,
        "--heartbeat_s",
        0.8,
    ) as service:
        sessions = [service.start() for _ in range(3)]
        for n in (1, 2, 3, 4):
            service.interact(sessions[0], n)
        service.refused("interact", session=sessions[1], number=1, said=said("fail"))
        service.call("cancel", session=sessions[2], status=pb.AGENT_ERROR)

        def values():
            with urllib.request.urlopen(f"{service.http}/metrics", timeout=30) as reply:
                families = text_string_to_metric_families(reply.read().decode())
            return {
                (s.name, *s.labels.values()): s.value for family in families for s in family.samples
            }

        wait_until(
            lambda: values().get(("rl_core_ended_total", "counter", "agent_error")) == 1,
            "a heartbeat sent",
        )
        observed = values()
        of_env = {
            name: observed[f"rl_core_{name}", "counter"]
            for name in ("sessions", "capacity", "queue", "interactions_total")
        }
        assert of_env == {"sessions": 1, "capacity": 5, "queue": 0, "interactions_total": 5}
        assert observed["rl_core_workers",] == 1
        assert observed["rl_core_ended_total", "counter", "environment_error"] == 1
        assert observed["rl_core_request_seconds_count", "interact"] == 5
        os.kill(pid := service.workers()[0].pid, signal.SIGSTOP)
        try:
            wait_until(lambda: values()["rl_core_workers",] == 0, "it is silent")
            assert values()["rl_core_interactions_total", "counter"] == 5  # a counter does not fall
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: values()["rl_core_workers",] == 1, "it is back")
        assert values()["rl_core_interactions_total", "counter"] == 5


def test_the_command_shows_the_workers(service, capsys, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    workers = service.workers(2)
    assert cli.main(["service", "workers", f"grpc://{service.address}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == [
        "worker",
        *(worker.name for worker in workers),
    ]
    assert cli.main(["service", "workers", f"grpc://{service.address}", "--json"]) == 0
    assert [worker["pid"] for worker in json.loads(capsys.readouterr().out)["workers"]] == [
        w.pid for w in workers
    ]
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    assert cli.main(["service", "workers", f"grpc://{service.address}"]) == 1
    assert (
        "UNAUTHENTICATED: the bearer token is missing or wrong; send authorization: Bearer TOKEN "
        "(rl_core" in capsys.readouterr().err
    )
