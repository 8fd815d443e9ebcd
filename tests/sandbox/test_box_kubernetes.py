"""Boxes as pods, in a cluster that refuses, cuts, evicts and forgets. tests/sandbox/kube_server.py"""

import ast
import asyncio
import base64
import gc
import inspect
import json
import os
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import kit
import kube_server
import machine
import pytest
from kit import wait_until

from rl_core.config import parse_config
from rl_core.environments.agents import forward
from rl_core.environments.service.server import worker_command
from rl_core.run.plan.environments import configure_boxes
from rl_core.sandbox import box_kubernetes, box_remote, boxes, tunnel
from rl_core.tools.serve import read_flags

REASON = machine.missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture
def server(tmp_path, monkeypatch):
    settings = boxes.SERVICES.settings
    with kube_server.KubeServer(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        boxes.configure(box_driver="kubernetes")
        yield server
        boxes.SERVICES.close()
    boxes.SERVICES.settings = settings


async def run_one(command="echo works", row=None, **options):
    async with await boxes.open(row or {}) as box:
        return await box.exec(command, **options)


def test_a_pod_has_limits_labels_a_deadline_and_no_rights(server, tmp_path):
    boxes.configure(box_driver="kubernetes", lifetime_s=600.0, run_file=str(tmp_path / "run"))

    async def work():
        limits = boxes.Limits(memory_mib=512, disk_mib=256, cpus=1.5)
        async with await boxes.open({"image": "a/b:1"}, limits=limits) as box:
            return server.pods[box.box.sandbox.id].manifest

    manifest = asyncio.run(work())
    spec, labels = manifest["spec"], manifest["metadata"]["labels"]
    assert labels["rl-core/run"] == f"{(tmp_path / 'run').read_text()}-0"
    assert labels["rl-core/network"] == "none"
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 600)
    assert spec["automountServiceAccountToken"] is False
    [container] = spec["containers"]
    assert container["image"] == "a/b:1"
    limits = {"memory": "512Mi", "ephemeral-storage": "256Mi", "cpu": "1.5"}
    assert container["resources"] == {"limits": limits, "requests": {"cpu": "1.5"}}
    security = container["securityContext"]
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert security["capabilities"]["drop"] == ["ALL"]


BUSY, LATER, FAILED = (429, {}, "busy"), (429, {"Retry-After": "1"}, "busy"), (500, {}, "etcd")


@pytest.mark.parametrize(
    "kind, faults, num_seen, least_s",
    [
        ("create", [BUSY, FAILED], 3, 0),
        ("create", [LATER], 2, 1),
        ("read", [BUSY, FAILED], 3, 0),
        ("exec", [BUSY, LATER], 3, 1),
        ("delete", [FAILED], 2, 0),
    ],
)
def test_a_busy_cluster_is_asked_again(server, kind, faults, num_seen, least_s):
    server.faults[kind] = list(faults)
    begun = time.monotonic()
    assert asyncio.run(run_one()).stdout == "works\n"
    assert time.monotonic() - begun >= least_s
    assert server.seen.count(kind) == num_seen and not server.pods


REFUSED = {
    "forbidden": (
        (403, {}, 'User "me" cannot create resource "pods"'),
        "403: User .* needs get, li",
    ),
    "policy": ((403, {}, "violates PodSecurity"), "403: violates PodSecurity"),
    "no such namespace": ((404, {}, 'namespaces "x" not found'), '404: namespaces "x" not found'),
    "wrong token": ((401, {}, f"Unauthorized {kube_server.TOKEN}"), r"401: Unauthorized \*\*\*"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cluster_refuses_is_an_error_at_once(server, name):
    fault, error = REFUSED[name]
    server.faults["create"] = [fault]
    with pytest.raises(RuntimeError, match=f"kubernetes: creating a box: {error}") as raised:
        asyncio.run(run_one())
    assert kube_server.TOKEN not in str(raised.value) and server.seen.count("create") == 1


def test_a_full_quota_names_the_flag(server):
    server.max_pods = 0
    with pytest.raises(RuntimeError, match=r"exceeded quota.*lower --sandbox\.max_boxes"):
        asyncio.run(run_one())


@pytest.mark.parametrize(
    "image, error",
    [
        ("no/such:image", "does not start: ImagePullBackOff: Back-off pulling image"),
        ("huge:image", "did not start within 1 s: Unschedulable: 0/3 nodes are available"),
        ("slow:image", "did not start within 1 s: ContainerCreating"),
    ],
)
def test_a_pod_that_never_starts_says_why_and_is_removed(server, monkeypatch, image, error):
    monkeypatch.setattr(box_remote, "OPEN_S", 1.0)
    with pytest.raises(RuntimeError, match=error):
        asyncio.run(run_one(row={"image": image}))
    wait_until(lambda: not server.pods, "the removal of the pod")


@pytest.mark.parametrize(
    "kind, limit, error",
    [
        ("create", "CREATE_S", "no box of a:1 within 0 s: the service still"),
        ("list", "TRANSFER_S", "old boxes of this run"),
    ],
)
def test_a_cluster_that_does_not_answer_has_a_deadline(
    server, tmp_path, monkeypatch, kind, limit, error
):
    monkeypatch.setattr(box_remote, limit, 0.4)
    boxes.configure(box_driver="kubernetes", run_file=str(tmp_path / "run"))
    server.faults[kind] = ["hang"]
    with pytest.raises(RuntimeError, match=error):
        asyncio.run(run_one(row={"image": "a:1"}))


def test_a_box_that_is_cancelled_while_it_opens_leaves_no_pod(server):
    async def work(after_s):
        opening = asyncio.ensure_future(boxes.open({"image": "slow:image"}))
        await asyncio.sleep(after_s)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    for after_s in (0.01, 2.0):  # The first may be before the request.
        asyncio.run(work(after_s))
    created = server.seen.count("create")
    wait_until(lambda: server.seen.count("delete") == created, "the removal of the pods")
    assert created and not server.pods


def test_a_connection_that_is_cut_fails_the_command_once_and_not_the_box(server):
    async def work():
        async with await boxes.open({}) as box:
            server.faults["exec"] = ["cut"]
            with pytest.raises(OSError, match="the connection was cut before the command ended"):
                await box.exec("echo x >> /tmp/times; sleep 98715")
            left = "while pgrep -f '[s]leep 98715'; do sleep 0.1; done"
            assert not (await box.exec(left)).timed_out
            return (await box.exec("cat /tmp/times")).stdout

    assert asyncio.run(work()) == "x\n"


def test_a_command_that_hangs_ends_at_its_deadline(server):
    async def work():
        async with await boxes.open({}) as box:
            server.faults["exec"] = ["hang"]
            hung = await box.exec("true", timeout_s=0.5)
            return hung.timed_out, hung.code, (await box.exec("echo works")).stdout

    assert asyncio.run(work()) == (True, 137, "works\n")


def test_an_evicted_pod_ends_its_command_with_the_reason(server):
    async def work():
        async with await boxes.open({}) as box:
            running = asyncio.ensure_future(box.exec("sleep 1000"))
            await asyncio.sleep(0.5)
            server.evict(box.box.sandbox.id)
            for call in (running, box.exec("true"), box.put("a", "x"), box.get("a")):
                with pytest.raises(boxes.BoxEnded, match="Evicted: The node was low on resource"):
                    await call

    asyncio.run(work())


def test_a_run_has_at_most_max_boxes(server):
    boxes.configure(box_driver="kubernetes", max_boxes=2)

    async def work():
        return await asyncio.gather(*(run_one() for _ in range(5)))

    done = asyncio.run(asyncio.wait_for(work(), 60))
    assert [each.code for each in done] == [0] * 5
    assert server.most == 2 and not server.pods


OWNER = """
import asyncio, os, sys
from rl_core.sandbox import boxes
name, end = sys.argv[1:]
boxes.configure(box_driver="kubernetes", idle_s=1.0, run_file=name)
async def main():
    box = globals()["kept"] = await boxes.open({})
    print(box.box.sandbox.id, flush=True)
    await asyncio.sleep(2.5)
    assert (await box.exec("echo alive")).stdout == "alive\\n"
asyncio.run(main())
os._exit(3) if end == "killed" else None
"""


def test_pods_end_with_their_run_and_with_the_next_start_of_a_killed_one(server, tmp_path):
    """Idle after 1 s: the owner renews them as long as it lives."""

    def start(end):
        (tmp_path / end).mkdir()
        line = [sys.executable, "-c", OWNER, str(tmp_path / end / "run"), end]
        return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)

    def start_again(name):
        boxes.configure(box_driver="kubernetes", run_file=str(tmp_path / name / "run"))
        assert asyncio.run(run_one()).stdout == "works\n"

    processes = [start("exits"), start("killed")]
    names = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 3]
    assert [*server.pods] == names[1:]
    wait_until(lambda: server.pods[names[1]].status["phase"] == "Succeeded", "its end")
    start_again("exits")
    assert [*server.pods] == names[1:]
    start_again("killed")
    assert not server.pods


def test_a_new_token_of_the_kubeconfig_is_read(server, monkeypatch):
    monkeypatch.setattr(box_kubernetes, "RELOAD_S", 0.0)

    async def work():
        async with await boxes.open({}) as box:
            config = json.loads(server.kubeconfig.read_text())
            config["users"][0]["user"]["token"] = server.token = "another-token"
            server.kubeconfig.write_text(json.dumps(config))
            return await box.exec("echo works")

    assert asyncio.run(work()).stdout == "works\n"


# Prints a token that is valid for a second, and a new one once the file exists.
PLUGIN = """
import datetime, json, os, sys
text = "second-token" if os.path.exists(sys.argv[1]) else "first-token"
until = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=1)
status = {"token": text, "expirationTimestamp": until.strftime("%Y-%m-%dT%H:%M:%SZ")}
version = "client.authentication.k8s.io/v1"
print(json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status}))
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Folder with server.pem and client.pem, each with its key in the same file."""
    folder = tmp_path_factory.mktemp("tls")
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
    line += "-subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {0}.key -out {0}.pem"
    for name in ("server", "client"):
        subprocess.run(line.format(name).split(), check=True, capture_output=True, cwd=folder)
    return folder


@pytest.mark.parametrize("kind", ["client certificate", "exec plugin", "service account"])
def test_a_cluster_with_tls_takes_every_kind_of_login(tmp_path, monkeypatch, certificates, kind):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.load_verify_locations(certificates / "client.pem")
    context.verify_mode = ssl.CERT_OPTIONAL
    as_data = lambda name: base64.b64encode((certificates / name).read_bytes()).decode()  # noqa: E731
    (tmp_path / "plugin.py").write_text(PLUGIN)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable}
    plugin |= {"args": [str(tmp_path / "plugin.py"), str(tmp_path / "rotated")]}
    plugin["interactiveMode"] = "Never"
    users = {"exec plugin": {"exec": plugin}, "service account": {}}
    users["client certificate"] = {
        "client-certificate-data": as_data("client.pem"),
        "client-key-data": as_data("client.key"),
    }

    async def work(server):
        if kind == "exec plugin":
            server.token = "first-token"
        async with await boxes.open({}) as box:
            await box.put("/app/a", "1\n")
            first = await box.exec("cat a")
            if kind == "exec plugin":
                (tmp_path / "rotated").touch()
                server.token = "second-token"
            return first.stdout + (await box.exec("cat a")).stdout

    with kube_server.KubeServer(tmp_path, context=context) as server:
        server.write_kubeconfig(
            users[kind], **{"certificate-authority-data": as_data("server.pem")}
        )
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        if kind == "service account":
            (tmp_path / "namespace").write_text(kube_server.NAMESPACE)
            (tmp_path / "token").write_text(kube_server.TOKEN)
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
            monkeypatch.setattr(box_kubernetes, "SERVICE_ACCOUNT", tmp_path)
            module = box_kubernetes.kubernetes.config.incluster_config
            monkeypatch.setattr(module, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
            monkeypatch.setattr(module, "SERVICE_CERT_FILENAME", str(certificates / "server.pem"))
        boxes.configure(box_driver="kubernetes")
        try:
            assert asyncio.run(work(server)) == "1\n1\n"
        finally:
            boxes.SERVICES.close()
            boxes.configure()


def test_the_owner_of_pods_is_the_pod_of_the_run(server):
    metadata = {"name": os.uname().nodename, "namespace": kube_server.NAMESPACE, "uid": "an-uid"}
    server.pods[metadata["name"]] = kube_server.KubePod(
        {"metadata": metadata, "spec": {"containers": []}}, {"phase": "Running"}
    )
    service = boxes.SERVICES.get("kubernetes")

    async def work():
        await service.driver.connect()
        server.faults["read"] = [(500, {}, "etcd")]
        with pytest.raises(box_kubernetes.ApiException):
            await service.driver.find_owner(kube_server.NAMESPACE)
        return [
            await service.driver.find_owner(name) for name in (kube_server.NAMESPACE, "another")
        ]

    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": "an-uid"}
    assert asyncio.run(service.run(work())) == [[owner], []]


def test_what_is_missing_is_named_before_a_model_loads(server, monkeypatch, tmp_path):
    server.faults["list"] = [(401, {}, "Unauthorized")]
    with pytest.raises(OSError, match="401: Unauthorized; the kubeconfig's user needs"):
        boxes.check_machine("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    boxes.configure(box_driver="kubernetes", max_boxes=7)
    with pytest.raises(RuntimeError, match="there is no kubeconfig in"):
        boxes.check_machine()
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    monkeypatch.delitem(sys.modules, "rl_core.sandbox.box_kubernetes")
    with pytest.raises(RuntimeError, match=r"pip install 'rl_core\[kubernetes\]'"):
        boxes.check_machine()
    with pytest.raises(
        ValueError, match=r"--sandbox\.box_driver 'lambda' is not one of bubblewrap"
    ):
        boxes.configure(box_driver="lambda")


@pytest.mark.parametrize("max_boxes, share", [(3, 0), (4, 1), (11, 2)])
def test_ranks_and_workers_share_the_bound_and_each_needs_a_box(
    server, monkeypatch, tmp_path, max_boxes, share
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"--model m --env_path e.py --out {tmp_path / 'out'} --sandbox.max_boxes {max_boxes}"
    configure_boxes(parse_config([*shlex.split(flags), "--sandbox.box_driver", "kubernetes"]))
    assert boxes.SERVICES.settings.max_boxes == share
    args = read_flags(["e.py", "--workers", "4", *flags.split()[-2:]])
    command = worker_command(args, "127.0.0.1:1", "w", "", False)
    assert command[command.index("--sandbox.max_boxes") + 1] == str(share)
    with nullcontext() if share else pytest.raises(RuntimeError, match="less than the number of r"):
        boxes.check_machine()


def test_workers_of_served_environments_have_the_flags_of_boxes(server, tmp_path):
    (tmp_path / "env.py").write_text(ENV)
    server.faults["list"] = [(403, {}, "no pods for you")] * 2
    line = [sys.executable, "-m", "rl_core.tools.cli", "serve", tmp_path / "env.py", "--port", "0"]
    line += ["--sandbox.box_driver", "kubernetes", "--workers", "1"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert "env.py: kubernetes: a request: 403: no pods for you" in done.stderr, done


def test_a_forgotten_box_is_removed_and_never_by_a_fork(server, tmp_path):
    boxes.configure(box_driver="kubernetes", run_file=str(tmp_path / "run"))
    box = asyncio.run(boxes.open({}))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            del box
            code = asyncio.run(run_one()).code
            boxes.SERVICES.close()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert asyncio.run(box.exec("echo works")).stdout == "works\n" and server.pods
    del box
    gc.collect()
    wait_until(lambda: not server.pods, "the removal of the pod")


AGENT = """
import json, os, sys, urllib.request

def ask(text, url=os.environ["OPENAI_BASE_URL"]):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), key)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

open("said.txt", "w").write(ask(sys.argv[1]))
"""
ENV = """
from rl_core.sandbox import Sandbox

agent = ["python3", "program.py", "{prompt}"]
box = True
sandbox = Sandbox()

def load_tasks(split):
    return [{"prompt": "12"}, {"prompt": "34"}]

async def reward_fn(box, result):
    assert result.exit_code == 0, result
    total = sum(await box.get("/app/said.txt"))
    code = f"def f(x): return x + {total}"
    return total * (await sandbox.run(code, tests=[f"assert f(1) == {total + 1}"])).share
"""


def test_a_run_trains_on_agents_in_pods(server, tmp_path, make_model):
    """From the kubeconfig to a trained step."""
    (tmp_path / "program.py").write_text(AGENT)
    (tmp_path / "env.py").write_text(ENV)
    out = kit.run(
        tmp_path / "out",
        f"--model {make_model(hidden=32)} --env_path {tmp_path / 'env.py'} --num_steps 1",
        "--tasks_per_step 2 --group_size 2 --max_prompt_tokens 64 --max_tokens 8",
        "--sandbox.box_driver kubernetes --sandbox.max_boxes 3",
    )
    [row] = kit.steps(out)
    assert row["learn/policy/grad_norm"] > 0
    assert abs(row["learn/policy/mismatch_kl_nats"]) < 1e-5
    assert server.seen.count("create") >= 4 and server.most == 3
    wait_until(lambda: not server.pods, "the removal of the pods")


ECHO = """
import socket, sys, threading
path, size, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
same = []
def talk(index):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        data = bytes([index]) * size
        def send():
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        sending = threading.Thread(target=send)
        sending.start()
        back = b""
        while part := client.recv(1 << 16):
            back += part
        same.append(back == data)
idle = socket.socket(socket.AF_UNIX)  # Nobody answers this one, and it reads nothing.
idle.connect(path)
idle.sendall(b"!")
threads = [threading.Thread(target=talk, args=(index,)) for index in range(number)]
[each.start() for each in threads]
[each.join() for each in threads]
print(sum(same))
"""


@pytest.mark.parametrize("module", [forward, tunnel])
def test_programs_for_boxes_are_python_3_8(module):
    ast.parse(inspect.getsource(module), feature_version=(3, 8))


@pytest.fixture
def echo(tmp_path):
    """Binds with a socket that sends all bytes back, and floods a client that sends "!"."""
    folder = tmp_path / "shown"
    folder.mkdir()
    loop = asyncio.new_event_loop()

    async def answer(reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data if data != b"!" else b"x" * 5_000_000)
            await writer.drain()
        writer.close()

    loop.run_until_complete(asyncio.start_unix_server(answer, str(folder / "echo.sock")))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield {"/run/shown": str(folder)}
    loop.call_soon_threadsafe(loop.stop)


def test_a_driver_without_a_way_to_the_endpoint_is_refused_for_agents(server, env_of, monkeypatch):
    monkeypatch.setattr(box_kubernetes.Driver, "has_stdin", False)
    for setting in ("True", '{"driver": "kubernetes"}'):
        env = env_of(ENV.replace("box = True", f"box = {setting}"))
        with pytest.raises(OSError, match="box driver kubernetes cannot run agents in boxes"):
            env.check_machine()
    assert asyncio.run(run_one()).stdout == "works\n"


def test_many_connections_share_a_tunnel_and_none_holds_up_another(server, echo):
    async def work():
        async with await boxes.open({}, binds=echo) as box:
            line = ["python3", "-c", ECHO, "/run/shown/echo.sock", "1000000", "20"]
            first = await box.exec(line)
            await box.end_processes()
            return first, await box.exec([*line[:-2], "100", "2"])

    first, second = asyncio.run(work())
    assert (first.stdout, second.stdout) == ("20\n", "2\n"), (first, second)


def test_an_answer_that_comes_while_a_channel_opens_is_kept():
    async def work():
        ours, theirs = socket.socketpair()
        client = await asyncio.open_unix_connection(sock=ours)
        sent = []

        async def write(line):  # Returns when the other end has answered.
            sent.append(line)
            if line == b"1 o \n":
                multiplexer.receive(1, "d", b"answer")

        multiplexer = tunnel.Multiplexer(write)
        await multiplexer.open(*await asyncio.open_unix_connection(sock=theirs))
        assert await asyncio.wait_for(client[0].read(6), 5) == b"answer"
        assert sent[0] == b"1 o \n"

    asyncio.run(work())


def test_a_tunnel_that_is_cut_or_killed_is_opened_again(server, echo):
    talk = 'until python3 -c "$1" /run/shown/echo.sock 10 1 2>/dev/null; do sleep 0.1; done'
    script = f"{talk}; touch /tmp/first; while [ -e /tmp/first ]; do sleep 0.1; done; "
    script += f"{talk}; pkill -f '[p]ython3 /tmp/.rl_core'; sleep 0.2; {talk}"

    async def work():
        async with await boxes.open({}, binds=echo) as box:
            running = asyncio.ensure_future(box.exec(["sh", "-c", script, "sh", ECHO]))
            await box.exec("until [ -e /tmp/first ]; do sleep 0.1; done")
            server.cut_streams()
            await box.exec("rm /tmp/first")
            return (await running).stdout

    assert asyncio.run(work()) == "1\n1\n1\n"


@pytest.mark.parametrize("text", ["echo no such module >&2; exit 1", "echo hello there"])
def test_an_image_without_a_working_python_is_an_error(server, echo, tmp_path, text):
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{text}\n")
    python.chmod(0o755)
    errors = "no such module|unexpected output b'hello there"

    async def work():
        async with await boxes.open({}, binds=echo) as box:
            await box.put("/tmp/bin/python3", python)
            with pytest.raises(OSError, match=f"endpoint, which needs python3 .*: ({errors})"):
                await box.exec("true")

    asyncio.run(work())
