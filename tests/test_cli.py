"""The rl-core command: train starts the ranks, check tells what an environment does without any model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_core.cli import main, split_num_ranks
from rl_core.engines.scripted import ScriptedActor, ScriptedEngine, plain_chat
from rl_core.types import SamplingParams

ROOT = Path(__file__).parent.parent
ENVS = ROOT / "envs"


# The command


def test_help_is_quick_and_lists_what_there_is():
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from rl_core.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^  (\w+)", done.stdout, re.MULTILINE) == ["train", "check"]


def test_check_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from rl_core.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "check", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--data.train ROWS" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "argv, says",
    [
        (["chek"], "unknown command 'chek'; did you mean 'check'?"),
        (["serve"], "unknown command 'serve'; known: train, check"),
        (["check", "envs/x.py", "--data.trian", "x"], "unknown flag --data.trian; did you mean '--data.train'?"),
        (["check", str(ENVS / "sort_digit.py")], "no such file; did you mean 'sort_digits.py'?"),
        (["check", str(ENVS / "sort_digits.py"), "--actors", "a,b"], "nothing says whose turn it is"),
        (
            ["check", str(ENVS / "sort_digits.py"), "--reply", "{{ anser }}"],
            "'anser' is undefined; columns: messages, answer",
        ),
        (["train", "--nproc_per_node", "two"], "--nproc_per_node=two must be a whole number of at least 1"),
        (["train", "--nproc_per_node=0"], "--nproc_per_node=0 must be a whole number of at least 1"),
        (["train", "--nproc_per_node", "2", "--mdoel", "x"], "unknown flag --mdoel; did you mean 'model'?"),
    ],
)
def test_mistakes_are_one_line_with_the_nearest_name(argv, says, capsys):
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1 and error.startswith("error: ")


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 1
    assert "usage: rl-core COMMAND" in capsys.readouterr().out


def test_the_entry_point_is_this_command():
    assert '"rl-core = rl_core.cli:main"' in (ROOT / "setup.py").read_text()


# Train


def test_ranks_are_taken_out_of_the_flags():
    assert split_num_ranks(["--seed", "1"]) == (None, ["--seed", "1"])
    assert split_num_ranks(["--nproc_per_node", "3", "--seed", "1"]) == (3, ["--seed", "1"])
    assert split_num_ranks(["--seed=1", "--nproc-per-node=2"]) == (2, ["--seed=1"])


def train_flags(model, out, *flags):
    given = [
        "--model",
        model,
        "--env_path",
        ENVS / "sort_digits.py",
        "--max_prompt_tokens",
        16,
        "--max_tokens",
        8,
        "--out",
        out,
    ]
    return [str(arg) for arg in (*given, "--tasks_per_step", 4, "--group_size", 2, *flags)]


def start(*argv):
    """The command in a session of its own, as a terminal would run it."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rl_core.cli", *argv]
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def test_train_runs_here_with_one_rank(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["train", *train_flags(tiny_model, tmp_path / "run", "--num_steps", 1)]) == 0
    assert (tmp_path / "run/hf/policy/model.safetensors").exists()


def processes():
    """Process id -> its parent's, of all that run."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def family_of(pid):
    """A process with all that descend from it."""
    children = [child for child, parent in processes().items() if parent == pid]
    return {pid}.union(*map(family_of, children))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_several_ranks_and_ctrl_c_ends_them_all(tiny_model, tmp_path):
    process = start(
        "train", "--nproc_per_node", "2", *train_flags(tiny_model, tmp_path / "run", "--num_steps", 100_000)
    )
    family = {process.pid}
    try:
        for line in process.stdout:
            if re.search(r"step +2/100000", line):
                break
        else:
            pytest.fail("it ended before it was interrupted")
        family = family_of(process.pid)
        assert len(family) >= 3  # the launcher and two ranks
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        rest = process.communicate(timeout=60)[0]
        assert process.returncode != 0, rest
        ends_s = time.monotonic() + 20
        while family & processes().keys() and time.monotonic() < ends_s:
            time.sleep(0.1)
        assert not family & processes().keys()
    finally:
        for pid in family & processes().keys():
            os.kill(pid, signal.SIGKILL)


def test_the_status_of_ranks_that_fail_is_the_commands(tiny_model, tmp_path):
    (tmp_path / "x.py").write_text("def reward_fn(messages): raise RuntimeError('broken on purpose')\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n' * 8)
    flags = train_flags(tiny_model, tmp_path / "run", "--num_steps", 1, "--env_path", tmp_path / "x.py")
    process = start("train", "--nproc_per_node=2", *flags, "--data.train", str(tmp_path / "rows.jsonl"))
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "broken on purpose" in said, said
    assert "Traceback" not in said and len([x for x in said.splitlines() if x.startswith("error: ")]) == 1, said


# The scripted engine


def test_the_scripted_engine_says_its_replies_in_order_with_the_end_token():
    chat = plain_chat()
    engine = ScriptedEngine(chat, ["<|end|> h\u00e9\n", "second"])
    params = SamplingParams(max_tokens=99, stop_token_ids=chat.stop_token_ids)
    said = [asyncio.run(engine.generate([1], params, seed=0)) for _ in range(3)]
    assert [c.text for c in said] == ["<|end|> h\u00e9\n", "second", "second"]
    assert all(c.token_ids.count(chat.end_token_id) == 1 and c.token_ids[-1] == chat.end_token_id for c in said)
    assert all(len(c.token_ids) == len(c.logprobs) and c.finish_reason == "stop" for c in said)
    cut = asyncio.run(engine.generate([1], dataclasses.replace(params, max_tokens=3), seed=0))
    assert (cut.text, cut.finish_reason, len(cut.token_ids)) == ("sec", "length", 3)
    stopped = asyncio.run(engine.generate([1], dataclasses.replace(params, stop=("co", "n")), seed=0))
    assert (stopped.text, stopped.finish_reason, len(stopped.token_ids)) == ("seco", "stop", 4)


def test_a_scripted_actor_begins_anew_in_every_episode():
    chat = plain_chat()
    actor = ScriptedActor(name="bob", chat=chat, replies=["one", "two"], max_turns=2)

    async def play(session):
        reply = await actor.in_episode(SamplingParams(max_tokens=9), 0, session).respond("?")
        return [reply.text, (await reply.respond("and?")).text]

    async def play_both():
        return await asyncio.gather(play("a"), play("b"))

    assert asyncio.run(play_both()) == [["one", "two"], ["one", "two"]]
