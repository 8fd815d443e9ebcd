"""The rl-core command: train starts the ranks, check tries an environment without any model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from kit import ROOT, ForkedProcess, kill_session, wait_until, words

from rl_core import __version__
from rl_core.engines.scripted import ScriptedActor, ScriptedEngine, plain_chat
from rl_core.tools.cli import COMMANDS, main
from rl_core.types import SamplingParams

ENVS = ROOT / "envs"


# The command


SLOW = ("torch", "transformers", "datasets", "aiohttp", "matplotlib", "zstandard")
HEAVY = ("numpy", *SLOW)


def test_help_is_quick_since_it_imports_nothing_heavy():
    """All commands in one process, in which a heavy import fails."""
    code = f"""
import sys
sys.modules |= dict.fromkeys({HEAVY})
from rl_core.tools.cli import main
for command in {["", *COMMANDS]}:
    print("\\0", end="")
    try:
        status = main([*command.split(), "--help"])
    except SystemExit as end:
        status = end.code
    assert not status, (command, status)
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    _, page, *pages = done.stdout.split("\0")
    assert page.startswith("usage: rl-core COMMAND ")
    assert re.findall(r"^  (\w+)", page, re.MULTILINE) == list(COMMANDS)
    for command, page in zip(COMMANDS, pages, strict=True):
        assert page.startswith(f"usage: rl-core {command} "), page


@pytest.mark.parametrize(
    "argv",
    [
        "rl_core.train --model m --env_path math_answer --data.train r --out o",
        "rl_core.tools.cli train --model m --env_path math_answer --data.train r --out o",
        "rl_core.tools.cli eval m --env_path math_answer --data.train r",
        "rl_core.tools.cli collect m --env_path math_answer --data.train r --out o",
        "rl_core.tools.cli tokens --model m --data.train r",
        "rl_core.tools.cli plan --model m --env_path math_answer --data.train r",
    ],
)
def test_a_line_is_printed_before_torch_is_imported(argv):
    first, *others = without_torch([argv])
    loads = "tokenizer" if {"tokens", "plan"} & {*argv.split()} else "models"
    assert first == f"loading torch, the {loads} and the rows ..." and first not in others


def without_torch(commands: list[str]) -> list[str]:
    """The lines on stderr of commands in one process, in which an import of torch fails."""
    code = f"""
import runpy, sys
sys.modules |= dict.fromkeys({SLOW})
for module, *sys.argv[1:] in {[command.split() for command in commands]}:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code, sys.argv
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done.stderr.splitlines()


TRAIN = "rl_core.tools.cli train --model m --env_path math_answer"
OF_ROWS = "rl_core.tools.cli train --model m --algorithm {}"
PAIRS = "tests/cases/pairs.jsonl"
COLUMNS = f"--data.train {PAIRS} --data.columns"
# Command -> its error, which no line precedes.
SAID_AT_ONCE = {
    f"{TRAIN} --data.train r --out envs": "--out envs exists already; continue it with --resume",
    f"{TRAIN} --data.train no.jsonl --out o": "no.jsonl: no such file in",
    f"{TRAIN} --data.train rl_core/py.typed --out o": "py.typed: the data set is empty; it must",
    f"{TRAIN} --data.train r --data.eval no.csv --eval_every 1 --out o": "no.csv: no such file",
    "rl_core.tools.cli train --model ./no --env_path math_answer --out o": "model no: no such f",
    "rl_core.tools.cli train --model m --env_path no.py --out o": "no.py: no such file",
    "rl_core.tools.cli train --model m --out o": "--env_path is missing",
    "rl_core.tools.cli train --algorithm dpo --model m --out o --data.train tests/cases/nums.jsonl": (
        "row 1 of tests/cases/nums.jsonl: it needs a column 'chosen'; it has target, nums"
    ),
    "rl_core.tools.cli train --resume --out env": "no run to resume; did you mean envs?; to start",
    "rl_core.train --model m --env_path math_answer --data.train no.jsonl --out o": "no.jsonl: no",
    "rl_core.tools.cli eval m@http://h/v1 --env_path math_answer --data.eval no.csv": "no.csv: no",
    "rl_core.tools.cli collect m@http://h/v1 --env_path no.py --out o": "no.py: no such file",
    f"{TRAIN} --out o {COLUMNS} prompt=promt": f"prompt=promt: {PAIRS} has no column 'promt'; did",
    f"{OF_ROWS.format('sft')} --out o {COLUMNS} response=chosn": "chosn'; did you mean 'chosen'?",
    f"{OF_ROWS.format('sft')} --out o {COLUMNS} responce=chosen": "'response' with the reply to",
    f"{OF_ROWS.format('kto')} --out o {COLUMNS} completion=chosen,labl=system": "column 'label', true",
    f"{OF_ROWS.format('rm')} --out o {COLUMNS} chosen=choosen": "chosen=choosen: ",
    f"{OF_ROWS.format('orpo').replace('train', 'plan')} {COLUMNS} rejected=r": "rejected=r: ",
    f"rl_core.tools.cli eval m@http://h/v1 --env_path math_answer {COLUMNS} answer=chosn": "=chosn: ",
}


def test_what_can_be_said_without_torch_is_said_first():
    lines = without_torch([*SAID_AT_ONCE])
    for line, says in zip(lines, SAID_AT_ONCE.values(), strict=True):
        assert line.startswith("error: ") and says in line, line


def test_a_reader_that_stops_early_is_no_error():
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": env, "cwd": ROOT}
    command = subprocess.Popen([sys.executable, "-m", "rl_core.tools.cli", "--help"], **options)
    command.stdout.close()
    assert (command.stderr.read(), command.wait(60)) == (b"", 0)


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rl_core {__version__}\n"


# The status and arguments of a command => a piece of the error.
MISTAKES = f"""
2 chek => unknown command 'chek'; did you mean 'check'?
2 publish => unknown command 'publish'; known: init, train, check, envs, datasets, tokens, plan
1 datasets openai/gsmk8 => no recipe for 'openai/gsmk8'; the nearest are openai/gsm8k
1 datasets x => rl-core datasets lists all
1 datasets hermes => the nearest are teknium/OpenHermes-2.5, NousResearch/
2 check => give env (Python files of environments); rl-core check --help shows all
2 rescore => give run (folder of a run), --env_path (the changed environment file);
1 check {ENVS}/sort_digit.py => no such file; did you mean 'sort_digits.py'?
1 check {ENVS}/sort_digits.py --actors a,b => nothing says whose turn it is
1 check {ENVS}/sort_digits.py --reply "{{{{ anser }}}}" => 'anser' is undefined; columns: messages, answer
1 check {ENVS} => envs: is a folder; name a file in it
1 check {ROOT}/tests/cases/calls.jsonl => calls.jsonl holds rows and is not
1 eval m => error: episodes need an environment; name its file by --env_path
2 train --nproc_per_node two => invalid int value: 'two'
2 check x.py --data => unknown flag --data; did you mean '--data.train'?
2 check x.py --data.train => --data.train has no value
2 show runs/x --nun=3 => unknown flag --nun; did you mean '--num'?
2 sandbox run x.py --nun 3 => unrecognized arguments: --nun 3
1 train --nproc_per_node 0 --model m --env_path x.py --out x => =0 must be at least 1
1 train => --out is missing
1 train --help dta => no section and no flag has this name; did you mean 'data'?
1 train --nproc_per_node 2 --mdoel x => unknown flag --mdoel; did you mean 'model'?
""".strip().splitlines()


@pytest.mark.parametrize("line, says", [line.split(" => ") for line in MISTAKES])
def test_mistakes_are_one_line_with_the_nearest_name(line, says, capsys):
    status, *argv = shlex.split(line)
    assert main(argv) == int(status)
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1 and error.startswith("error: ")


def test_check_of_an_environment_without_rows_is_one_line(tmp_path, capsys):
    (tmp_path / "x.py").write_text(
        "def load_tasks(split): return []\ndef reward_fn(messages): return 1.0\n"
    )
    assert main(["check", str(tmp_path / "x.py")]) == 1
    assert "error: x: the train data set has no row" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    assert "usage: rl-core COMMAND" in capsys.readouterr().out


# Train


def train_flags(places, out, *flags) -> list[str]:
    sizes = "--max_tokens 8 --max_prompt_tokens 16 --tasks_per_step 4 --group_size 2"
    return words(
        "--model",
        places["model"],
        "--env_path",
        places["dir"] + "/letters.py",
        "--out",
        out,
        sizes,
        *flags,
    )


def start(*argv) -> ForkedProcess:
    """The command in a separate session, as a terminal would run it."""
    return ForkedProcess("-m", "rl_core.tools.cli", *argv)


def test_train_runs_here_with_one_rank(places, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", *train_flags(places, tmp_path / "run", "--num_steps 1")]) == 0
    assert (tmp_path / "run/hf/policy/model.safetensors").exists()


def running() -> dict[int, int]:
    """Process id -> its parent's, of all that run."""
    shown = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True).stdout
    return {
        int(pid): int(parent)
        for pid, parent, stat in map(str.split, shown.splitlines())
        if stat[0] != "Z"
    }


def family_of(pid: int) -> set[int]:
    """A process with all that descend from it."""
    return {pid}.union(*(family_of(child) for child, parent in running().items() if parent == pid))


@pytest.mark.slow
def test_several_ranks_and_ctrl_c_ends_them_all(places, tmp_path):
    process = start(
        "train",
        "--nproc_per_node",
        "2",
        *train_flags(places, tmp_path / "run", "--num_steps 100000"),
    )
    try:
        wait_until(
            lambda: re.search(r"step +([2-9]|\d\d+)/100000", process.stdout.readline()),
            "the second step",
        )
        family = family_of(process.pid)
        assert len(family) >= 3  # the launcher and two ranks
        os.killpg(process.pid, signal.SIGINT)  # As a terminal does.
        process.communicate(timeout=60)
        assert process.returncode != 0
        wait_until(lambda: not family & running().keys(), "all have ended")
    finally:
        kill_session(process)


@pytest.mark.slow
def test_a_frozen_rank_is_killed_once_another_has_given_up(places, tmp_path):
    """torchrun waits 30 s for it, whatever PET_SHUTDOWN_TIMEOUT says."""
    process, ranks = step_of_two_ranks(places, tmp_path / "run", "--timeout_s 5")
    try:
        os.kill(max(ranks), signal.SIGSTOP)
        output = "".join(process.communicate(timeout=120))
        assert process.returncode == 1 and not ranks & running().keys()
        assert len([line for line in output.splitlines() if line.startswith("error: ")]) == 1
    finally:
        kill_session(process)


def step_of_two_ranks(places, out, more=""):
    """(the command, its ranks' process ids) once a run on two ranks has done a step."""
    process = start(
        "train", "--nproc_per_node", "2", *train_flags(places, out, f"--num_steps 100000 {more}")
    )
    wait_until(lambda: re.search(r"step +\d+/100000", process.stdout.readline()), "the first steps")
    ranks = {child for child, parent in running().items() if parent == process.pid}
    assert len(ranks) == 2
    return process, ranks


def test_a_signal_to_the_command_saves_a_run_of_several_ranks(places, tmp_path):
    process, ranks = step_of_two_ranks(places, tmp_path / "run")
    try:
        process.terminate()
        output = "".join(process.communicate(timeout=60))
        assert process.returncode == 128 + signal.SIGTERM, output
        assert "ended by SIGTERM" in output and not ranks & running().keys()
        assert (tmp_path / "run/hf/policy/model.safetensors").exists()
    finally:
        kill_session(process)


def test_a_rank_that_is_killed_is_told_and_the_others_end(places, tmp_path):
    process, ranks = step_of_two_ranks(places, tmp_path / "run")
    try:
        os.kill(max(ranks), signal.SIGKILL)
        output = "".join(process.communicate(timeout=60))
        assert process.returncode == 1 and not ranks & running().keys()
        assert "error: rank 1 was ended by SIGKILL; continue with --resume\n" in output, output
    finally:
        kill_session(process)


def test_ranks_end_with_the_command_that_started_them(places, tmp_path):
    process, ranks = step_of_two_ranks(places, tmp_path / "run")
    try:
        process.kill()
        wait_until(lambda: not ranks & running().keys(), "all have ended")
    finally:
        kill_session(process)


def test_the_status_of_ranks_that_fail_is_the_commands(places, tmp_path):
    (tmp_path / "x.py").write_text(
        "def reward_fn(messages): raise RuntimeError('broken on purpose')\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n' * 8)
    flags = train_flags(places, tmp_path / "run", "--num_steps 1 --env_path", tmp_path / "x.py")
    process = start("train", "--nproc_per_node=2", *flags, "--data.train", tmp_path / "rows.jsonl")
    output = "".join(process.communicate(timeout=120))
    assert process.returncode == 1 and "broken on purpose" in output, output
    assert (
        "Traceback" not in output
        and len([x for x in output.splitlines() if x.startswith("error: ")]) == 1
    ), output


# The scripted engine


def test_the_scripted_engine_says_its_replies_in_order_with_the_end_token():
    chat = plain_chat()
    engine = ScriptedEngine(chat, ["<|end|> h\u00e9\n", "second"])
    params = SamplingParams(max_tokens=99, stop_token_ids=chat.stop_token_ids)
    output = [asyncio.run(engine.generate([1], params, seed=0)) for _ in range(3)]
    assert [c.text for c in output] == ["<|end|> h\u00e9\n", "second", "second"]
    assert all(
        c.token_ids.count(chat.end_token_id) == 1 and c.token_ids[-1] == chat.end_token_id
        for c in output
    )
    assert all(len(c.token_ids) == len(c.logprobs) and c.finish_reason == "stop" for c in output)
    cut = asyncio.run(engine.generate([1], dataclasses.replace(params, max_tokens=3), seed=0))
    assert (cut.text, cut.finish_reason, len(cut.token_ids)) == ("sec", "length", 3)
    stopped = asyncio.run(
        engine.generate([1], dataclasses.replace(params, stop=("co", "n")), seed=0)
    )
    assert (stopped.text, stopped.finish_reason, len(stopped.token_ids)) == ("seco", "stop", 4)


def test_a_scripted_actor_begins_anew_in_every_episode():
    chat = plain_chat()
    actor = ScriptedActor(name="bob", chat=chat, replies=["one", "two"])

    async def play(session):
        reply = await actor.bind_episode(SamplingParams(max_tokens=9), 0, session).respond("?")
        return [reply.text, (await reply.respond("and?")).text]

    async def play_both():
        return await asyncio.gather(play("a"), play("b"))

    assert asyncio.run(play_both()) == [["one", "two"], ["one", "two"]]
