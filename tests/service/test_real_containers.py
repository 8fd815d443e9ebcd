"""Environments with an image and the sandbox, in real containers: what closes them in, and what
removes them.

scripts/test_containers.sh runs these: they need docker or podman, and in RL_CORE_TEST_IMAGE the
workers' image.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from contextlib import suppress

import grpc
import psutil
import pytest
from grpc import StatusCode
from kit import ROOT, wait_until
from test_service import Service, said

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.containers import find_runtime
from rl_core.environments.service.security import TOKEN_VARIABLE
from rl_core.sandbox import Sandbox
from rl_core.sandbox.engines import OWNER, ask_engine

IMAGE = os.environ.get("RL_CORE_TEST_IMAGE", "")
pytestmark = pytest.mark.skipif(
    not IMAGE, reason="no container runtime: scripts/test_containers.sh"
)
MIB = 1 << 20
# Each reply is an expression that the container evaluates.
BOXED = f"""
import os, pathlib, re, socket, threading, time

image = {IMAGE!r}
memory = "256m"
cpus = 0.5

def limits():
    at = pathlib.Path("/sys/fs/cgroup")
    names = ["memory.max", "cpu.max", "pids.max"]
    if not (at / "cgroup.controllers").exists():  # version 1
        names = ["memory/memory.limit_in_bytes", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us", "pids/pids.max"]
    return " ".join((at / name).read_text().strip() for name in names)

def write(path):
    try:
        return pathlib.Path(path).write_text("x")
    except OSError as error:
        return -error.errno

def connect(host):
    return socket.socket().connect_ex((host, 80))

def status(name):
    return re.search(rf"^{{name}}:\\s+(\\S+)", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)[1]

def interact(completion):
    value = eval(completion)
    return None if value == "over" else [{{"role": "user", "content": repr(value)}}]

def reward_fn():
    return 1.0
"""
# Holds the interpreter's lock, so the container does not see its stdin end.
HANG = "re.match('(a+)+$', 'a' * 64 + 'b')"


@pytest.fixture(scope="module")
def runtime():
    return find_runtime("0" * 12, "this test")


@pytest.fixture
def serve(tmp_path, runtime):
    """serve(*flags, env=) is a service with one worker whose sessions run in containers. It leaves
    none."""
    services = []

    def make(*args, env: str = BOXED) -> Boxes:
        (tmp_path / "boxed.py").write_text(env)
        # Pytest's folders are for their owner alone, and the image's user is nobody.
        tmp_path.chmod(0o755)
        services.append(
            Boxes(runtime, tmp_path / "boxed.py", "--port", "0", "--workers", "1", *args)
        )
        return services[-1]

    yield make
    for service in services:
        service.close()
        service.process.kill()
        service.process.wait()
        subprocess.run(runtime.remove_argv(service.containers()), capture_output=True)


class Boxes(Service):
    def __init__(self, runtime, *args):
        self.runtime = runtime
        super().__init__(*args, token="t" * 32)
        self.worker = self.workers()[0].name

    def containers(self) -> list[str]:
        """Container of the first worker."""
        listing = [
            "ps",
            "--all",
            "--filter",
            f"label=rl_core.worker={self.worker}",
            "--format",
            "{{.Names}}",
        ]
        return ask_engine(self.runtime.program, listing).split()

    def wait_for_containers(self, num: int) -> None:
        wait_until(lambda: len(self.containers()) == num, f"{num} containers")

    def begin(self) -> str:
        return self.call("start", timeout_s=120, env="boxed", row='{"prompt": "x"}').session

    def hang(self, session: str, number: int) -> None:
        """Processes that only the end of the container stops."""

        def run():
            with suppress(grpc.RpcError, ValueError):  # ValueError: the channel is closed
                self.interact(session, number, HANG, timeout_s=300)

        before = self.cpu_s()
        threading.Thread(target=run, daemon=True).start()
        wait_until(lambda: self.cpu_s() > before + 1, "a hook that hangs")

    def cpu_s(self) -> float:
        """Programs in all containers here. A program that hangs uses CPU."""
        seen = [p.info for p in psutil.process_iter(["cmdline", "cpu_times"])]
        return sum(
            sum(p["cpu_times"][:2])
            for p in seen
            if "rl_core.environments.service.contained" in (p["cmdline"] or [])
        )


def test_a_session_is_limited_and_has_neither_network_nor_rights(serve):
    service = serve()
    session = service.begin()
    expected = {
        "limits()": f"{256 * MIB} 50000 100000 512",  # half a core
        "os.getuid()": 65534,
        "[t in open('/proc/self/status').read() for t in ('CapEff:\\t' + '0' * 16, "
        "'NoNewPrivs:\\t1')]": [True, True],
        "[write(path) for path in ('/x', '/env/x', '/usr/x', '/tmp/x')]": [-errno.EROFS] * 3 + [1],
        "os.statvfs('/tmp').f_blocks * os.statvfs('/tmp').f_frsize": 256 * MIB,
        "[name for _, name in socket.if_nameindex()]": ["lo"],
        "socket.socket().connect_ex(('192.0.2.1', 80))": errno.ENETUNREACH,
        "[name for name in os.environ if 'RL_CORE' in name]": [],
    }
    observed = {
        text: eval(service.interact(session, n, text, timeout_s=60))
        for n, text in enumerate(expected, 1)
    }
    assert observed == expected


def test_a_session_has_a_network_if_its_file_asks_for_one(serve):
    service = serve(env=BOXED.replace("cpus = 0.5", "network = True"))
    session = service.begin()
    assert len(eval(service.interact(session, 1, "socket.if_nameindex()", timeout_s=60))) == 2
    routes = eval(
        service.interact(session, 2, "pathlib.Path('/proc/net/route').read_text()", timeout_s=60)
    )
    assert "00000000" in [line.split()[1] for line in routes.splitlines()[1:]]  # a way out


def test_too_much_memory_or_too_many_processes_end_one_session(serve):
    service = serve()
    greedy, many, other = service.begin(), service.begin(), service.begin()
    code, why = service.refused(
        "interact", session=greedy, number=1, said=said("b'x' * 10**9"), timeout_s=60
    )
    assert (
        code == StatusCode.UNKNOWN and "ended (exit code 137, killed, perhaps out of memory)" in why
    )
    sleepers = "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(600)]"
    code, why = service.refused(
        "interact", session=many, number=1, said=said(sleepers), timeout_s=60
    )
    assert code == StatusCode.UNKNOWN and "can't start new thread" in why
    assert service.interact(other, 1, "1 + 1", timeout_s=60) == "2"
    service.wait_for_containers(2)
    assert (
        "environment error"
        in service.refused("interact", session=greedy, number=2, said=said("1"))[1]
    )
    assert not (ROOT / "oom").exists()  # podman leaves it in its current folder


def test_a_container_is_removed_with_its_session(serve):
    service = serve()
    over, cancelled, hanging = service.begin(), service.begin(), service.begin()
    assert len(service.containers()) == 4  # one is for what belongs to no session
    done = service.call("interact", session=over, number=1, said=said("'over'"), timeout_s=60)
    assert done.status == pb.COMPLETED
    assert service.call("score", session=over, number=2).scores[0].reward == 1.0
    for session, left in ((over, 3), (cancelled, 2)):
        service.call("cancel", session=session)
        service.wait_for_containers(left)
    service.hang(hanging, 1)
    service.call("cancel", session=hanging)
    service.wait_for_containers(1)
    service.process.terminate()
    assert service.process.wait(60) == 0
    assert not service.containers()


def test_a_container_is_removed_when_its_session_expires(serve):
    service = serve("--idle_s", "2")
    session = service.begin()
    service.wait_for_containers(1)
    assert (
        "it had no request"
        in service.refused("interact", session=session, number=1, said=said("1"))[1]
    )


def test_containers_of_a_killed_worker_are_removed(serve):
    service = serve()
    for session in [service.begin() for _ in range(3)][:2]:
        service.hang(session, 1)
    psutil.Process(service.workers()[0].pid).kill()
    service.wait_for_containers(0)
    wait_until(lambda: [w.name for w in service.workers()] != [service.worker], "the next worker")
    service.begin()


def test_containers_of_a_killed_client_of_the_engine_are_removed(serve):
    service = serve()
    service.hang(service.begin(), 1)
    clients = [
        p
        for p in psutil.Process(service.workers()[0].pid).children()
        if p.name() == service.runtime.program
    ]
    max(clients, key=psutil.Process.create_time).kill()
    service.wait_for_containers(1)


def test_containers_of_a_killed_server_are_removed(serve):
    service = serve()
    assert service.begin() != service.begin() and len(service.containers()) == 3
    service.process.kill()
    service.wait_for_containers(0)


def test_the_image_is_small_and_serves_as_nobody(tmp_path, runtime):
    assert (
        int(ask_engine(runtime.program, ["image", "inspect", "--format", "{{.Size}}", IMAGE]))
        < 300e6
    )
    tasks = "def load_tasks(split):\n    return [{'prompt': 'x'}]\n\n"
    (tmp_path / "game.py").write_text(f"{tasks}def reward_fn():\n    return 1.0\n")
    tmp_path.chmod(0o755)
    args = ["--rm", "--detach", "--volume", f"{tmp_path}:/envs:ro", "--publish", "127.0.0.1::50051"]
    args += ["--label", f"{OWNER}=test", "--env", TOKEN_VARIABLE]
    env = os.environ | {TOKEN_VARIABLE: "t" * 32}
    command = [
        runtime.program,
        "run",
        *args,
        IMAGE,
        "game.py",
        "--host",
        "0.0.0.0",
        "--workers",
        "1",
    ]
    name = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    try:
        assert ask_engine(runtime.program, ["exec", name, "id", "-u"]).strip() == "65534"
        wait_until(
            lambda: "serving on" in subprocess.getoutput(f"{runtime.program} logs {name}"),
            "the server",
        )
        address = ask_engine(runtime.program, ["port", name, "50051"]).split()[0]
        client = [
            sys.executable,
            str(ROOT / "scripts/grpc_client.py"),
            "--address",
            address,
            "--env",
            "game",
        ]
        done = subprocess.run(client, env=env, capture_output=True, text=True, timeout=120)
        assert "reward 1" in done.stdout, done.stderr
    finally:
        ask_engine(runtime.program, ["rm", "--force", name])


def test_the_sandbox_runs_programs_in_a_container(runtime):
    def containers() -> list[str]:
        return ask_engine(
            runtime.program, ["ps", "--all", "--quiet", "--filter", "label=rl_core.test"]
        ).split()

    flags = ["--label=rl_core.test=1"]
    sandbox = Sandbox(level=runtime.program, image=IMAGE, flags=flags)
    assert sandbox.start() == runtime.program and len(containers()) == 1

    def run(code: str, **options):
        return asyncio.run(sandbox.run(code, **options))

    assert run("def f(x): return 2 * x", tests=["assert f(2) == 4", "assert f(2) == 5"]).passed == [
        True,
        False,
    ]
    assert (
        run("import os, sys; print(os.getuid(), sys.flags.hash_randomization)").stdout
        == "65534 0\n"
    )
    assert (
        "Network is unreachable"
        in run("import socket; socket.create_connection(('192.0.2.1', 80))").stderr
    )
    assert "Read-only file system" in run("open('/usr/x', 'w')").stderr
    assert run("b'x' * 10**9").status == "memory"
    assert run("while True: pass", timeout_s=1).status == "timeout"
    sandbox.close()
    wait_until(lambda: not containers(), "the container's removal")
    owner = "import sys, time\nfrom rl_core.sandbox import Sandbox\n"
    owner += (
        f"print(Sandbox(level={runtime.program!r}, image={IMAGE!r}, flags={flags!r}).start(), "
        "flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().strip() == runtime.program
        process.kill()
    wait_until(lambda: not containers(), "the container's removal after its owner was killed")
