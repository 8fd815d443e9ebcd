"""Environments with an image: its settings, the command that is built, and the program of the
container, as a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import grpc
import pytest
import yaml
from kit import wait_until

from rl_core.environments.service import containers
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.containers import (
    ContainedEnv,
    Runtime,
    Settings,
    container_settings,
)
from rl_core.environments.service.gateway import Metrics
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.security import TOKEN_VARIABLE
from rl_core.environments.service.wire import (
    ENVIRONMENTS,
    HUB,
    METHODS,
    REPLIES,
    REQUESTS,
    UNUSABLE,
)
from rl_core.environments.service.worker import Worker
from rl_core.sandbox import engines
from rl_core.tools.serve import read_flags

ROOT = Path(__file__).parents[2]
BOXED = """
import os, subprocess, sys
import only_in_the_image

image = "rl-core-chess:1"
memory = "512m"
cpus = 0.5
capacity = 3
calls = 0
print("printed while it loads")

def load_tasks(split):
    return [{"prompt": "x"}, {"prompt": "y"}]

def start(task):
    if task.row["prompt"] == "refuse":
        raise KeyError("no such board")
    return {"n": 0}

def interact(completion, state):
    global calls
    calls += 1
    state["n"] += 1
    print("printed", flush=True)
    os.write(1, b"written")
    subprocess.run(["echo", "by a child"])
    assert sys.stdin.read() == ""
    if completion == "crash":
        os.kill(os.getpid(), 9)
    if completion == "fail":
        raise ValueError("broken board")
    return [{"role": "user", "content": f"{completion} {state['n']} {calls} {os.getpid()}"}]

def reward_fn(completion, state):
    return state["n"]

def advantage_fn(rewards):
    return [r + 1 for r in rewards]
"""


class AsProcess(Runtime):
    """The program of a container, run without one."""

    def argv(self, name, path, settings, hook_timeout_s):
        line = [sys.executable, "-m", "rl_core.environments.service.contained", path]
        return [*line, "--hook_timeout_s", str(hook_timeout_s)]

    def remove_argv(self, names):
        return ["true", *names]


@pytest.fixture
def play_boxed(tmp_path, monkeypatch):
    """play_boxed(script, idle_s, code) runs script(worker, ask) on a worker that serves the
    code."""
    (tmp_path / "only_in_the_image.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def main(script, idle_s):
        runtime = AsProcess(program="", worker="0" * 12)
        path = str(tmp_path / "boxed.py")
        limits = {"hook_timeout_s": 20.0, "idle_s": idle_s}
        env = await ContainedEnv.open(path, container_settings(path), runtime, **limits)
        worker = Worker([env], capacity=100, idle_s=idle_s)

        async def ask(code: int = 0, **verb):
            reply = await worker.answer(pb.Request(**verb))
            assert reply.code == code, (reply.code, reply.error)
            return reply.error if code else getattr(reply, next(iter(verb)))

        try:
            return await script(worker, ask)
        finally:
            for held in list(worker.held.values()):
                worker.close(held)
            env.close()
            await runtime.close()

    def play(script, idle_s: float = 60.0, code: str = BOXED):
        (tmp_path / "boxed.py").write_text(code)
        return asyncio.run(asyncio.wait_for(main(script, idle_s), 240))

    return play


async def begin(ask, code: int = 0, prompt: str = "x"):
    reply = await ask(code, start=pb.StartRequest(env="boxed", row=json.dumps({"prompt": prompt})))
    return reply if code else reply.session


async def say(ask, session: str, text: str, number: int = 0, code: int = 0):
    message = pb.Said(messages=json.dumps([{"role": "assistant", "content": text}]))
    reply = await ask(
        code, interact=pb.InteractRequest(session=session, number=number, said=message)
    )
    return reply if code else json.loads(reply.messages)[0]["content"]


async def until(condition) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never was")


def is_running(pid: int) -> bool:
    return (
        engines.start_time(pid) != ""
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    )


def test_each_session_has_a_process_of_its_own_that_ends_with_it(play_boxed):
    async def script(worker, ask):
        assert worker.envs["boxed"].described.name == "boxed"
        assert [h.name for h in worker.envs["boxed"].described.hooks if h.is_reward] == [
            "reward_fn"
        ]
        one, two = await asyncio.gather(begin(ask), begin(ask))
        assert one.startswith(worker.name)
        *first, pid = (await say(ask, one, "a", 1)).split()
        *other, pid_of_two = (await say(ask, two, "b", 1)).split()
        assert (first, other) == (["a", "1", "1"], ["b", "1", "1"])
        assert pid != pid_of_two
        assert (await say(ask, one, "a", 1)).split()[:2] == ["a", "1"]  # it came again
        assert "another request" in await say(ask, one, "c", 1, code=6)
        assert "still here" in await say(ask, two, "still here", 2)
        scores = (await ask(score=pb.ScoreRequest(session=two, number=3))).scores
        assert dict(scores[0].parts) == {"reward_fn": 2.0}
        assert worker.heartbeat().loads[0].interactions == 3
        await begin(ask)
        assert "no room" in await begin(ask, 8)
        assert (await ask(cancel=pb.CancelRequest(session=one))).status == pb.CANCELLED
        await until(lambda: not is_running(int(pid)))
        assert is_running(int(pid_of_two))
        assert (await ask(tasks=pb.TasksRequest(env="boxed", split="train"))).total == 2
        arguments = json.dumps({"rewards": [1, 2]})
        assert (
            await ask(call=pb.CallRequest(env="boxed", hook="advantage_fn", given=arguments))
        ).value == "[2.0,3.0]"

    play_boxed(script)


ASKING = """
image = "rl-core-chess:1"

async def rollout(task, actors):
    reply = await actors["policy"].respond(task.messages)
    return [reply.trajectory(len(reply.text))]
"""


def test_a_rollout_in_a_container_asks_actors(play_boxed):
    async def script(worker, ask):
        start = pb.StartRequest(env="boxed", row='{"prompt": "x"}', cast='[{"name": "policy"}]')
        session = (await ask(start=start)).session
        asked = (await ask(run=pb.RunRequest(session=session, number=1, hook="rollout"))).asked
        assert json.loads(asked.openings[0].messages) == [{"role": "user", "content": "x"}]
        spoken = pb.Spoken(
            ask=asked.asks[0].id, messages='[{"role": "assistant", "content": "abc"}]'
        )
        answer = pb.AnswerRequest(session=session, number=2, call=1, answers=[spoken])
        output = await ask(answer=answer)
        assert (
            json.loads(output.run.value)[0]["reward"] == 3.0 and await ask(answer=answer) == output
        )
        assert (
            worker.held[session].session.status == pb.COMPLETED
            and worker.envs["boxed"].interactions == 1
        )

    play_boxed(script, code=ASKING)


def test_what_dies_in_a_container_ends_one_session(play_boxed):
    async def script(worker, ask):
        one, two = await asyncio.gather(begin(ask), begin(ask))
        error = await say(ask, one, "crash", code=2)
        assert "ended (exit code -9, killed, perhaps out of memory)" in error
        assert "environment error" in await say(ask, one, "a", code=9)
        assert "broken board" in await say(ask, two, "fail", code=2)
        assert "no such board" in await begin(ask, 2, "refuse")
        assert worker.num_held["boxed"] == 0
        idle = await begin(ask)
        os.kill(int((await say(ask, idle, "a")).split()[-1]), 9)
        sweep = asyncio.ensure_future(worker.sweep())
        await until(lambda: idle not in worker.held)
        assert "killed, perhaps out of memory" in await say(ask, idle, "a", code=9)
        worker.envs["boxed"].common.process.kill()  # the one for all is started again
        await worker.envs["boxed"].common.process.wait()
        assert (await ask(tasks=pb.TasksRequest(env="boxed", split="train"))).total == 2
        sweep.cancel()

    play_boxed(script, idle_s=2.0)


def test_a_container_that_talks_nonsense_is_refused(tmp_path):
    (tmp_path / "boxed.py").write_text(BOXED)
    path = str(tmp_path / "boxed.py")

    async def main(garbage: bytes):
        class Nonsense(AsProcess):
            def argv(self, *_):
                return [
                    sys.executable,
                    "-c",
                    f"import os, sys; os.write(1, {garbage!r}); sys.stdin.read()",
                ]

        runtime = Nonsense(program="", worker="0" * 12)
        with pytest.raises(ValueError, match="ended \\(exit code 0\\)"):
            await ContainedEnv.open(
                path, container_settings(path), runtime, hook_timeout_s=20.0, idle_s=60.0
            )
        await runtime.close()

    for garbage in (b"\x00\x00\x00\x02\xff\xff", b"Hello, I am no frame"):
        asyncio.run(asyncio.wait_for(main(garbage), 90))


def test_the_command_limits_the_container(tmp_path):
    (tmp_path / "boxed.py").write_text(BOXED)
    path = str(tmp_path / "boxed.py")
    settings = container_settings(path)
    assert settings == Settings(image="rl-core-chess:1", memory="512m", cpus=0.5, capacity=3)
    argv = Runtime(program="docker", worker="0123456789ab").argv("rl-core-x", path, settings, 60.0)
    assert " ".join(argv).replace(engines.owner(), "OWNER") == (
        "docker run --rm --cap-drop ALL --security-opt no-new-privileges --log-driver none "
        "--pids-limit 512 --network none --label rl_core.owner=OWNER "
        "--interactive --init --read-only --env HOME=/tmp --tmpfs /tmp:rw,nosuid,nodev,size=256m "
        "--name rl-core-x --label rl_core.worker=0123456789ab --cpus 0.5 --memory 512m "
        f"--memory-swap 512m --mount type=bind,source={tmp_path},target=/env,readonly --entrypoint "
        "python rl-core-chess:1 "
        "-m rl_core.environments.service.contained /env/boxed.py --hook_timeout_s 60"
    )
    settings.network = True
    argv = Runtime(program="docker", worker="0123456789ab").argv("rl-core-x", path, settings, 60.0)
    assert argv[argv.index("--network") + 1] == "bridge"


def test_docker_can_read_the_command(tmp_path):
    if shutil.which("docker") is None:
        pytest.skip("no container runtime")
    argv = Runtime(program="docker", worker="0" * 12).argv(
        "rl-core-x", str(tmp_path / "a.py"), Settings(image="a:1"), 1
    )
    # It reads its flags before it dials.
    env = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/nobody"}
    done = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )
    assert "Docker daemon" in done.stderr, done.stderr
    listing = [*Runtime(program="docker", worker="0" * 12).remove_argv(["x"])]
    done = subprocess.run(listing, env=env, capture_output=True, text=True, timeout=180)
    assert "Docker daemon" in done.stderr, done.stderr
    bad = [argv[0], argv[1], "--no-such-flag", *argv[2:]]
    assert (
        "unknown flag"
        in subprocess.run(bad, env=env, capture_output=True, text=True, timeout=180).stderr
    )


@pytest.mark.parametrize(
    "line, why",
    [
        ("image = 5", "image = 5 must be an image's name"),
        ("image = '-v /:/host'", "must be an image's name"),
        ("image = 'a'; memory = 'lots'", "memory = 'lots' must be text such as"),
        ("image = 'a'; cpus = 0", "cpus = 0 must be a number above 0"),
        ("image = 'a'; network = 'none'", "network = 'none' must be True or False"),
        ("image = 'a'; capacity = 0", "capacity = 0 must be a whole number"),
        ("import os; image = os.name", "image must be literals"),
    ],
)
def test_settings_of_a_container_are_checked(line, why, tmp_path):
    (tmp_path / "a.py").write_text(line)
    with pytest.raises(ValueError, match=why):
        container_settings(str(tmp_path / "a.py"))


def test_without_an_image_there_is_no_container(tmp_path):
    (tmp_path / "a.py").write_text("memory = '1g'\nbox: str = 'x'\n\ndef f():\n    image = 'a'\n")
    assert container_settings(str(tmp_path / "a.py")) is None
    (tmp_path / "a.py").write_text("image: str = 'a'\nnetwork = True\n")
    assert container_settings(str(tmp_path / "a.py")) == Settings(image="a", network=True)


def test_a_container_is_removed_with_its_worker_alone():
    began = engines.start_time(os.getpid())
    assert int(began) > 0
    assert not engines.is_dead(engines.owner())
    # Another process has its number now.
    assert engines.is_dead(engines.owner().replace(began, "1"))
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = engines.owner().partition(" ")[0]
    assert engines.is_dead(f"{host} {ended.pid} {began}")
    assert not engines.is_dead(f"another-host {ended.pid} 1")
    assert not engines.is_dead("")


def test_containers_that_nobody_owns_or_that_hang_are_removed_by_force(tmp_path, monkeypatch):
    log, where = tmp_path / "log", os.path.realpath(tempfile.gettempdir())
    (tmp_path / "docker").write_text(
        f'#!/bin/sh\necho "$*" >> {log}\n[ "$1" != run ] || {{ pwd -P >> {log}; exec sleep 600; '
        f"}}\n"
        '[ "$4" != dead ] || exit 1  # another worker removes them\n'
        f'[ "$1" != ps ] || printf \'dead rl_core.worker=x,rl_core.owner={engines.owner()}0\\n'
        f"also map[rl_core.owner:{engines.owner()}0 rl_core.worker:x]\\nliving "
        f"rl_core.owner={engines.owner()}\\n'\n"
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def main() -> list[containers.EnvContainer]:
        runtime, arguments = (
            containers.find_runtime("0" * 12, "this test"),
            (Settings(image="a:1"), 1.0, lambda why: None),
        )
        boxes = [await runtime.open(str(tmp_path / "a.py"), *arguments) for _ in range(2)]
        # Engines run where podman may leave a file.
        await asyncio.to_thread(
            wait_until, lambda: log.read_text().splitlines().count(where) == 2, "they run", 30
        )
        boxes[1].process.kill()  # Ends the engine's client; its container continues.
        for box in boxes * 2:
            box.close()
        await runtime.close()
        await asyncio.gather(*(box.process.wait() for box in boxes))
        return boxes

    boxes = asyncio.run(asyncio.wait_for(main(), 60))
    dead, also, *removals = [line for line in log.read_text().splitlines() if line.startswith("rm")]
    assert [dead, also] == ["rm --force --volumes dead", "rm --force --volumes also"]
    assert sorted(removals) == sorted(f"rm --force --volumes {box.name}" for box in boxes)


def test_an_image_without_a_runtime_is_refused(tmp_path):
    (tmp_path / "boxed.py").write_text(BOXED)
    command = [
        sys.executable,
        "-m",
        "rl_core.environments.service.worker",
        str(tmp_path / "boxed.py"),
        "--join",
        "127.0.0.1:1",
    ]
    env = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == UNUSABLE
    assert (
        "boxed.py says image = 'rl-core-chess:1', which needs docker or podman: docker is not "
        "installed" in done.stderr
    )


def needed_by(requirements: list[str]) -> set[str]:
    """Names of the packages, and of those that they need."""
    observed, names = set(), [re.match(r"[\w.-]+", line)[0] for line in requirements]
    while names:
        name = canonical(names.pop())
        if name not in observed:
            observed.add(name)
            needs = [line for line in metadata.requires(name) or [] if "extra ==" not in line]
            names += [re.match(r"[\w.-]+", line)[0] for line in needs if is_installed(line)]
    return observed


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(requirement: str) -> bool:
    try:
        return bool(metadata.version(re.match(r"[\w.-]+", requirement)[0]))
    except metadata.PackageNotFoundError:
        return False


ONLY = """
import importlib.metadata, re, sys
from importlib.machinery import PathFinder

class Only(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        packages = FOUND.get(name.partition(".")[0], [])
        if packages and not any(re.sub(r"[-_.]+", "-", p).lower() in ALLOWED for p in packages):
            return None
        return PathFinder.find_spec(name, path, target)

ALLOWED = %r
FOUND = importlib.metadata.packages_distributions()
sys.meta_path[:] = [Only if finder is PathFinder else finder for finder in sys.meta_path]
"""


def test_the_image_has_what_serving_needs_without_torch(tmp_path):
    lines = (ROOT / "scripts/worker_requirements.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    declared = (ROOT / "setup.py").read_text()
    assert all(f'"{requirement}"' in declared for requirement in requirements)
    allowed = needed_by(requirements) | {"rl-core"}
    assert not allowed & {"torch", "transformers", "datasets", "pyyaml"}
    (tmp_path / "sitecustomize.py").write_text(ONLY % (allowed,))
    (tmp_path / "game.py").write_text("def reward_fn(messages):\n    return 1.0\n")
    (tmp_path / "tools.py").write_text(
        "def f(x: int):\n    'Doubles.'\ntools = [f]\ndef reward_fn(messages):\n    return 1.0"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def command(*args: str) -> list[str]:
        return [
            sys.executable,
            "-m",
            "rl_core.tools.cli",
            "serve",
            *args,
            "--port",
            "0",
            "--workers",
            "1",
        ]

    done = subprocess.run(
        command("tools.py"), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert (
        "No module named 'transformers'; pip install transformers, or write the OpenAI schemas"
        in done.stderr
    )
    server = subprocess.Popen(
        command("game.py", "--http_port", "0"),
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server, grpc.insecure_channel(server.stdout.readline().split()[-1]) as channel:
        try:
            start, score = (
                channel.unary_unary(
                    f"/{ENVIRONMENTS}/{METHODS[verb]}",
                    request_serializer=REQUESTS[verb].SerializeToString,
                    response_deserializer=REPLIES[verb].FromString,
                )
                for verb in ("start", "score")
            )
            session = start(pb.StartRequest(env="game", row='{"prompt": "x"}'), timeout=90).session
            assert score(pb.ScoreRequest(session=session), timeout=90).scores[0].reward == 1.0
        finally:
            server.kill()


def flags_of_deployment(spec: dict) -> tuple:
    """(flags of its container, the container, the pod), whose parts name each other."""
    pod = spec["template"]
    assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    secrets = [(e["name"], e["valueFrom"]["secretKeyRef"]["key"]) for e in container["env"]]
    assert secrets == [(TOKEN_VARIABLE, "token")]
    return read_flags(container["args"]), container, pod


def test_manifests_fit_together():
    files = sorted((ROOT / "scripts/k8s").glob("*.yaml"))
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    of = {(d["kind"], d["metadata"]["name"]): d["spec"] for d in documents}
    assert len(of) == len(documents) == 4
    flags = {}
    for (kind, name), spec in of.items():
        if kind == "Deployment":
            flags[name] = flags_of_deployment(spec)
    controller, container, pod = flags["rl-core-controller"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": controller.port, "http": controller.http_port}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(controller.http_port)
    assert container["livenessProbe"]["grpc"]["port"] == controller.port
    assert container["readinessProbe"]["grpc"] == {"port": controller.port, "service": HUB}
    services = {name: spec for (kind, name), spec in of.items() if kind == "Service"}
    for spec in services.values():
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        assert {port["targetPort"] for port in spec["ports"]} <= ports.keys()
    worker, container, pod = flags["rl-core-workers"]
    host, _, port = worker.join.partition(":")
    assert int(port) in [p["port"] for p in services[host]["ports"]]
    assert worker.drain_s < pod["spec"]["terminationGracePeriodSeconds"]
    assert all(env.startswith("/envs/") for env in worker.envs)
    scaler = of["HorizontalPodAutoscaler", "rl-core-workers"]
    assert ("Deployment", scaler["scaleTargetRef"]["name"]) in of
    rules = yaml.safe_load((ROOT / "scripts/k8s/prometheus_adapter/values.yaml").read_text())[
        "rules"
    ]["external"]
    assert [m["external"]["metric"]["name"] for m in scaler["metrics"]] == [
        rule["name"]["as"] for rule in rules
    ]
    exported = {metric.name for metric in Metrics(Hub()).collect()}
    for rule in rules:
        assert {rule["seriesQuery"], *re.findall(r"sum\((\w+)\)", rule["metricsQuery"])} <= exported
