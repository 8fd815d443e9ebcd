"""Commands that `rl-core envs NAME` prints run as blocks of pages do, with tiny models and rows in
the form of the data that the commands name."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from kit import ROOT, metrics, steps
from test_boxes import needs_bubblewrap
from test_docs_run import Runner, free_port, judge, make_runs, prepare
from test_envs_tools import OpenEnvServer
from test_outside_games import REASONING_GYM, TEXTARENA
from test_tau2 import TASKS, TOOLS

from rl_core.tools.cli import main as command

# Environment -> the reason why its command cannot run here.
NOT_RUN = {"verifiers_env": "my-taskset is a package of the reader"}
MARKS = {
    **dict.fromkeys(("agentbench_os", "harbor", "python_tool", "terminal"), needs_bubblewrap),
    "reasoning_gym_env": REASONING_GYM,
    "textarena_env": TEXTARENA,
}
NAMES = sorted(path.stem for path in (ROOT / "envs").glob("*.py"))
EACH = [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES if name not in NOT_RUN]
# Sizes of Qwen3, whose positions the printed sizes are for.
POSITIONS = 40960
MODELS = ("A", "B", "C", "T", "BOB", "ALICE", "MODEL")
MBPP = {"text": "Write a function f that adds 2.", "code": "", "test_setup_code": ""}
MBPP |= {"test_list": [f"assert f({n}) == {n + 2}" for n in range(4)], "challenge_test_list": []}
HUMANEVAL = {
    "prompt": 'def f(x):\n    """Returns x."""\n',
    "canonical_solution": "    return x",
    "entry_point": "f",
}
HUMANEVAL["test"] = "def check(candidate):\n    assert candidate(1) == 1"
OS = {"description": "How many?", "create": {"init": "mkdir ~/a"}}
OS["evaluation"] = {"check": [None, {"language": "python", "file": "check.py"}], "example": "ls"}
TABLE = {"columns": [{"name": "who", "type": "TEXT"}], "rows": [["Ada"], ["Ben"]]}
DB = {"description": "How many?", "type": ["counting"], "label": ["2"], "add_description": ""}
DB["table"] = {"table_name": "people", "table_info": TABLE}
# File -> its rows, in the form of the data set.
FILES = {
    "AgentBench/data/dbbench/standard.jsonl": DB,
    "AgentBench/data/os_interaction/train_0317/training.json": OS,
    "humaneval.jsonl": HUMANEVAL,
    "mbpp.jsonl": MBPP,
    "problems.jsonl": {"prompt": "1+1?", "answer": "2"},
    "cnn_dailymail.parquet": {"article": "A dog barked.", "highlights": "It barked.", "id": "1"},
}
STDIN = [{"input": "1\n", "output": "1\n"}]
CODEFORCES = {
    "description": "Print n.",
    "input_format": "n",
    "output_format": "n",
    "examples": STDIN,
}
CODEFORCES |= {"official_tests": STDIN, "time_limit": 1.0}
# Data set of the hub -> its configurations and their rows.
HUB = {
    "openai/gsm8k": {"main": {"question": "1 and 1?", "answer": "1 + 1 = 2\n#### 2"}},
    "open-r1/codeforces": {
        "default": CODEFORCES,
        "verifiable-prompts": CODEFORCES | {"prompt": "Print n.", "language": "python"},
    },
    "wmt/wmt14": {"de-en": {"translation": {"de": "Hallo", "en": "Hello"}}},
}


@pytest.fixture(scope="module")
def printed():
    """Environment -> its commands."""
    with redirect_stdout(StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert command(["envs", "--json"]) == 0
    return {Path(one["path"]).stem: one["command"] for one in json.loads(out.getvalue())}


@pytest.fixture(scope="module")
def runner(tiny_model, tmp_path_factory):
    """Runs commands in a folder with all that they name."""
    folder = tmp_path_factory.mktemp("envs_run")
    model = folder / "long"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": POSITIONS}))
    prepare(folder, model)
    for name in MODELS:
        (folder / name).symlink_to(model)
    write_data(folder)
    with Runner(folder, "rl-core envs") as runner:
        yield runner


@pytest.fixture(scope="module")
def texts():
    """Text of a command -> text that stands for the same here."""
    game = OpenEnvServer()
    with judge() as address:
        yield {
            "https://host/v1": address,
            "https://h/v1": address,
            "http://127.0.0.1:8000": game.url,
            "8001": str(free_port()),
            "my_package:MyEnv-v0": "gymnasium:CliffWalking-v1",
            "npx -y some-server": f"{sys.executable} envs/mcp_tools.py",
            # Rules of a game: a token of the tiny model is a character.
            "--max_turns 12": "--max_turns 12 --max_prompt_tokens 2048",
        }
    game.close()


def write_data(folder: Path) -> None:
    import datasets

    for name, row in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            datasets.Dataset.from_list([row, row]).to_parquet(file)
        elif file.suffix == ".json":
            file.write_text(json.dumps([row, row]))
        else:
            file.write_text(f"{json.dumps(row)}\n" * 2)
    for name, configs in HUB.items():
        (folder / name).mkdir(parents=True)
        card = "---\nconfigs:\n"
        for config, row in configs.items():
            (folder / name / f"{config}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
            card += f"- {{config_name: {config}, data_files: {config}.jsonl}}\n"
        (folder / name / "README.md").write_text(f"{card}---\n")
    scripts = folder / "AgentBench/data/os_interaction/scripts/7"
    scripts.mkdir(parents=True)
    (scripts / "check.py").write_text("")
    (folder / "TASKS").symlink_to(ROOT / "envs/tasks")
    domain = folder / "tau2-bench/data/tau2/domains/retail"
    domain.mkdir(parents=True)
    (domain / "tasks.json").write_text(json.dumps(TASKS))
    (domain / "db.json").write_text(json.dumps({"books": {"Emma": {}}}))
    (domain / "policy.md").write_text("Lend one book.")
    tools = folder / "tau2/domains/retail/tools.py"
    tools.parent.mkdir(parents=True)
    tools.write_text(TOOLS)


def spelled_out(commands: str) -> str:
    """Commands with flags of the first one in place of `...`: those that the line lacks, and no
    --model where the line names a model for each actor."""
    lines = commands.splitlines()
    first = next(line for line in lines if "rl-core train" in line)
    flags = re.findall(r"(--[\w.]+) ('[^']*'|\S+)", first)
    for number, line in enumerate(lines):
        lacking = [
            f"{flag} {value}"
            for flag, value in flags
            if f"{flag} " not in line and not (flag == "--model" and "--actors." in line)
        ]
        lines[number] = line.replace("...", " ".join(lacking))
    return "\n".join(lines)


def test_environments_that_are_not_run_exist():
    assert {*NOT_RUN, *MARKS} <= {*NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_printed_commands_run(name, printed, runner, texts, monkeypatch):
    monkeypatch.chdir(runner.folder)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    code = spelled_out(printed[name])
    for theirs, ours in texts.items():
        code = code.replace(theirs, ours)
    make_runs(runner, code)
    runner.bash(code)
    for out in re.findall(r"--out (runs/\S+)", code):
        assert steps(Path(out)), f"{out} learned nothing"
        failed = [
            (key, value)
            for row in metrics(Path(out))
            for key, value in row.items()
            if key.endswith("/failed")
        ]
        assert failed and not any(value for _, value in failed), failed
