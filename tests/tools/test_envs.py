"""rl-core envs: what files say of themselves, without an import of any."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from kit import ROOT

from rl_core.tools import envs
from rl_core.tools.cli import main as command
from rl_core.tools.envs import is_on_machine


@pytest.fixture
def listed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert command(["envs", "--json"]) == 0
    return {Path(one["path"]).stem: one for one in json.loads(capsys.readouterr().out)}


def test_every_environment_is_listed_with_what_it_needs(listed):
    assert {*listed} == {path.stem for path in (ROOT / "envs").glob("*.py")}
    for name, one in listed.items():
        assert one["about"] and f"envs/{name}.py" in one["command"], one
        assert "rl-core train" in one["command"], one
    box, sandbox = "bubblewrap, docker or podman", "a sandbox (rl-core sandbox level)"
    for name in ("terminal", "agentbench_os", "harbor"):
        assert [*listed[name]["machine"]] == [box]
    assert [*listed["code_parallel"]["machine"]] == [*listed["code"]["machine"]] == [sandbox]
    assert listed["sort_digits"]["machine"] == listed["word_problems"]["machine"] == {}
    assert listed["math_answer"]["packages"] == {}
    assert listed["word_problems"]["packages"] == listed["code"]["packages"] == {}
    assert listed["chess_game"]["packages"] == {"chess": True}
    assert listed["sort_digits"]["packages"] == listed["agentbench_db"]["packages"] == {}
    assert listed["search_qa"]["variables"] == ["SEARCH_CORPUS", "SEARCH_URL"]
    assert [name for name, one in listed.items() if not one["has_rows"]] == ["reward_model"]
    assert listed["harbor"]["has_oracle"] and not listed["sort_digits"]["has_oracle"]


def with_bin(folder, **commands):
    """A folder of commands that end with these exit codes."""
    folder.mkdir()
    for name, code in commands.items():
        (folder / name).write_text(f"#!/bin/sh\necho no daemon >&2\nexit {code}\n")
        (folder / name).chmod(0o755)


ASKS_BOXES = """from rl_core.sandbox import boxes
def load_tasks(split): return [{"prompt": "hi", "answer": "a"}]
async def oracle(task):
    async with await boxes.open(task.row): return 1.0
def reward_fn(answer): return 0.0
"""
BOXED = """agent, box = ["true"], True
def load_tasks(split): return [{"prompt": "hi"}]
def reward_fn(result): return 0.0
"""


@pytest.mark.parametrize("source", [ASKS_BOXES, BOXED, BOXED.replace("True", "{'image': 'a'}")])
def test_a_machine_without_boxes_is_said_before_a_model_loads(
    source, tmp_path, monkeypatch, capsys
):
    (tmp_path / "e.py").write_text(source)
    with_bin(tmp_path / "bin", docker=1)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    train = ["train", "--env_path", "e.py", "--model", "no/model", "--out", "out"]
    for words in (["check", "e.py"], ["check", "e.py", "--oracle"], train):
        assert command(words) == 1
        shown = "".join(capsys.readouterr())
        assert "e.py: no sandbox: this machine makes no box: " in shown, shown
        assert "docker: no daemon; podman is not installed" in shown
        assert "'image'" in source or "apt-get install bubblewrap" in shown
        assert "no good" not in shown and "does not solve" not in shown


def test_what_is_there_is_not_told_as_missing(tmp_path, monkeypatch, capsys):
    def needs(name: str) -> str:
        is_on_machine.cache_clear()
        assert command(["envs"]) == 0
        after = re.split(rf"(?m)^{name} .*\n", capsys.readouterr().out)[1].splitlines()[0]
        return after if after.startswith(" ") else ""

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(envs, "sandbox", lambda: {"bubblewrap": "it works"})
    with_bin(tmp_path / "with", podman=0)
    monkeypatch.setenv("PATH", str(tmp_path / "with"))
    assert not needs("code") and not needs("terminal") and not needs("math_answer")
    monkeypatch.setattr(envs, "sandbox", lambda: {"none": "nothing works"})
    with_bin(tmp_path / "without", docker=1)
    monkeypatch.setenv("PATH", str(tmp_path / "without"))
    monkeypatch.setattr(envs, "find_spec", lambda name: None)
    assert needs("code").endswith("needs a sandbox (rl-core sandbox level)")
    assert needs("terminal").endswith("needs bubblewrap, docker or podman")
    assert needs("chess_game").endswith("needs pip install chess")


def test_one_is_described_and_the_nearest_name_is_told(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert command(["envs", "terminal"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("== envs/terminal.py\n") and "bubblewrap, docker or podman" in output
    assert "rl-core train --env_path envs/terminal.py" in output
    assert command(["envs", "terminl"]) == 1
    assert "did you mean 'terminal'?" in capsys.readouterr().err
    assert command(["envs"]) == 0
    assert "reward_model  " in (output := capsys.readouterr().out)
    assert "needs rows (--data.train)" in output and max(map(len, output.splitlines())) < 140


def test_files_of_a_folder_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "envs").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs/mine.py").write_text(
        '"""Mine: one. And two.\n\n    rl-core train X\n    --more\n\nText."""\n'
        "import json\n\ndef reward_fn(completion):\n    import no_such_library\n"
    )
    assert command(["envs"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[:2] == [
        "mine  Mine: one",
        "      needs pip install no_such_library; rows (--data.train)",
    ]
    assert command(["envs", "mine"]) == 0
    assert capsys.readouterr().out.endswith("\n  rl-core train X --more\n")
    (tmp_path / "envs/bare.py").write_text("def reward_fn(completion): return 0.0\n")
    assert command(["envs", "bare"]) == 0
    command_of_rows = "rl-core train --env_path envs/bare.py --model M --data.train rows.jsonl"
    assert f"\n  {command_of_rows} --out runs/bare\n" in capsys.readouterr().out
    (tmp_path / "envs/broken.py").write_text("def x(:\n")
    assert command(["envs"]) == 1 and "broken.py: line 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_of_the_sdist_has_the_environments_in_any_folder(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "empty"
    folder.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("rl_core", "envs"):
        shutil.copytree(ROOT / name, source / name, ignore=unwanted)
    for name in ("setup.py", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)

    def call(*command, cwd=folder, path=""):
        environment = os.environ | {"PYTHONPATH": path}
        more = {"capture_output": True, "text": True, "timeout": 200}
        return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, **more)

    # The wheel is built from the sdist, which therefore has all files.
    assert call("setup.py", "-q", "sdist", "-d", tmp_path, cwd=source).returncode == 0
    [sdist] = tmp_path.glob("*.tar.gz")
    wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    assert call(*wheel, sdist).returncode == 0
    [file] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(tmp_path / "site")
    cli = ("-m", "rl_core.tools.cli")
    for words, says in {
        ("check", "sort_digits"): "every normal episode was scored",
        ("envs", "math_answer"): "--env_path math_answer",
        ("envs",): "terminal",
        ("check", "sort_digit"): "neither an environment nor a file has this name; did you mean 's",
        ("serve", "code,nosuch"): "nosuch: neither an environment nor a file has this name",
    }.items():
        done = call(*cli, *words, path=str(tmp_path / "site"))
        assert says in done.stdout + done.stderr, (words, done.stderr)
    (folder / "sort_digits.py").write_text("def load_tasks(split): return [{'prompt': 'mine'}]\n")
    done = call(*cli, "check", "sort_digits.py", path=str(tmp_path / "site"))
    assert "defines no hook" in done.stderr
