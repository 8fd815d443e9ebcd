"""An agent's command, and tasks in Harbor's format, in real containers. scripts/test_containers.sh
runs these: they need docker or podman, and an image with python3 whose user is root in
RL_CORE_TEST_IMAGE."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from kit import ROOT
from stage import cast, run
from test_boxed import ASK, ROW
from test_harbor import bash, episode

from rl_core.environments.env_file import load_env
from rl_core.sandbox.engines import ask_engine, find_engine
from rl_core.tools.cli import main

IMAGE = os.environ.get("RL_CORE_TEST_IMAGE", "")
pytestmark = pytest.mark.skipif(
    not IMAGE, reason="no container runtime: scripts/test_containers.sh"
)
PROGRAM = """
import socket
said = ask("hi")
try:
    socket.create_connection(("192.0.2.1", 9), timeout=2)
except OSError:
    said += " alone"
open("made.txt", "w").write(said + " " + sys.argv[1])
print(json.load(open(os.environ["RL_CORE_TASK"]))["prompt"], os.path.exists("/agent/program.py"))
"""
ENV = """
agent = ["python3", "program.py", "{{answer}}"]
box = {{"driver": {engine!r}, "image": {image!r}}}

async def reward_fn(result, box):
    assert (result.exit_code, result.text) == (0, "2+2 True"), result
    done = await box.exec("cat made.txt", cwd=result.workspace)
    return float(done.stdout == "x alone 4")
"""


def test_a_contained_command_reaches_the_endpoint_alone(tmp_path):
    (tmp_path / "program.py").write_text(ASK + PROGRAM)
    file = tmp_path / "env.py"
    file.write_text(ENV.format(engine=find_engine("this test"), image=IMAGE))
    env = load_env(str(file))
    trajectories = run(env, cast(policy="x"), rows=[ROW], group_size=2, timeout_s=300)
    assert [(t.error, t.reward) for t in trajectories] == [("", 1.0)] * 2
    assert [turn.completion.text for turn in trajectories[0].turns] == ["x"]


def test_a_solution_solves_a_contained_task(tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(ROOT / "envs/tasks/make-file", tmp_path / "make-file")
    dockerfile = folder / "environment/Dockerfile"
    kept = dockerfile.read_text().splitlines()[1:]
    dockerfile.write_text("\n".join([f"FROM {IMAGE}", *kept]) + "\n")
    monkeypatch.setenv("HARBOR_DRIVER", find_engine("this test"))
    env = str(ROOT / "envs/harbor.py")
    assert main(["check", env, "--data.train", str(folder), "--oracle", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    [verdict] = report["oracle"]
    assert (verdict["task"], verdict["oracle"], verdict["nothing"]) == ("make-file", 1.0, 0.0)


COMPOSE = """\
services:
  main:
    depends_on: {api: {condition: service_healthy}}
  seed:
    image: ${IMAGE}
    command: sh -c "echo $$WORD"
    environment: [WORD=x]
  api:
    build: {context: ./api, args: {BASE: "${IMAGE}"}}
    command: [python3, /data/serve.py]
    volumes: ["./data:/data"]
    depends_on: {seed: {condition: service_completed_successfully}}
    healthcheck:
      test: [CMD, python3, -c, "import socket; socket.create_connection(('api', 5000))"]
      interval: 200ms
      retries: 50
"""
TOML = """\
version = "1.0"
[environment]
allow_internet = false
env.IMAGE = "{image}"
[[steps]]
name = "fetch"
[[steps]]
name = "fetch-again"
"""
# Ends when it is asked to.
SERVE = """\
import os
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
class Handler(SimpleHTTPRequestHandler):
    def do_POST(self):
        os._exit(1)
HTTPServer(("", 5000), partial(Handler, directory="/data")).serve_forever()
"""
STOP = """python3 -c "import urllib.request as u; u.urlopen('http://api:5000/', b'')" """
FETCH = """\
#!/usr/bin/env python3
import urllib.request
try:
    word = urllib.request.urlopen("http://api:5000/word").read().decode()
except OSError:
    word = ""
"""
SOLVE = 'open("/app/word", "w").write(word)\n'
CHECK = """\
try:
    is_right = open("/app/word").read() == word != ""
except FileNotFoundError:
    is_right = False
open("/logs/verifier/reward.txt", "w").write(str(int(is_right)))
"""


def test_a_task_with_services_is_played_in_containers(tmp_path, monkeypatch, capsys):
    """Each step ends all processes of the agent's box, and the services run on."""
    engine = find_engine("this test")
    files = {"environment/docker-compose.yaml": COMPOSE, "environment/data/word": "yes"}
    files["environment/data/serve.py"] = SERVE
    files["environment/Dockerfile"] = f"FROM {IMAGE}\nWORKDIR /app\n"
    files["environment/api/Dockerfile"] = "ARG BASE\nFROM ${BASE}\n"
    files |= {"task.toml": TOML.format(image=IMAGE), "tests/test.sh": FETCH + CHECK}
    files |= {f"steps/{name}/instruction.md": "Go." for name in ("fetch", "fetch-again")}
    files["solution/solve.sh"] = FETCH + SOLVE
    for name, text in files.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    monkeypatch.setenv("HARBOR_DRIVER", engine)
    env, before = str(ROOT / "envs/harbor.py"), ask_engine(engine, ["ps", "--all", "--quiet"])
    assert main(["check", env, "--data.train", str(tmp_path), "--oracle", "--json"]) == 0
    [verdict] = json.loads(capsys.readouterr().out)["oracle"]
    assert (verdict["oracle"], verdict["nothing"]) == (1.0, 0.0), verdict
    assert ask_engine(engine, ["ps", "--all", "--quiet"]) == before
    played = episode(tmp_path / "task", bash(STOP), "Done.")
    assert (played.status, played.reward, played.error) == ("ok", 0.0, "")
    assert played.metrics["services_ended"] == 1.0
    assert "[services that have ended: api]" in played.log
    # A service that fails ends the episode with its output, and leaves nothing.
    file = tmp_path / "task/environment/docker-compose.yaml"
    file.write_text(COMPOSE.replace("echo $$WORD", "echo oh no; exit 3"))
    assert main(["check", env, "--data.train", str(tmp_path), "--oracle", "--json"]) == 1
    [verdict] = json.loads(capsys.readouterr().out)["oracle"]
    assert "the service seed is not ready: it ended with exit code 3: oh no" in verdict["error"]
    assert ask_engine(engine, ["ps", "--all", "--quiet"]) == before
