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

from rl_core.environments.env_file import load_env
from rl_core.sandbox.engines import find_engine
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


def test_a_command_in_a_container_reaches_the_endpoint_alone_and_rewards_look_inside(tmp_path):
    (tmp_path / "program.py").write_text(ASK + PROGRAM)
    file = tmp_path / "env.py"
    file.write_text(ENV.format(engine=find_engine("this test"), image=IMAGE))
    env = load_env(str(file))
    trajectories = run(env, cast(policy="x"), rows=[ROW], group_size=2, timeout_s=300)
    assert [(t.error, t.reward) for t in trajectories] == [("", 1.0)] * 2
    assert [turn.completion.text for turn in trajectories[0].turns] == ["x"]


def test_a_task_in_a_container_is_solved_by_its_solution_and_not_by_nothing(
    tmp_path, monkeypatch, capsys
):
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
