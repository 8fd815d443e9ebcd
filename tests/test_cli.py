"""The rl-core command: train starts the ranks, check tells what an environment does without any model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rl_core.cli import main, split_num_ranks
from rl_core.engines.scripted import ScriptedActor, ScriptedEngine, plain_chat
from rl_core.types import SamplingParams

ROOT = Path(__file__).parent.parent
ENVS = ROOT / "envs"


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check(code or file, *flags) -> (exit status, section -> its lines, what stderr says)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(what, *flags):
        if not isinstance(what, Path):
            Path("x.py").write_text(textwrap.dedent(what))
            what = "x.py"
        status = main(["check", str(what), *map(str, flags)])
        printed = capsys.readouterr()
        sections = re.findall(r"== (.*)\n((?:  .*\n|\n(?!==))*)", printed.out)
        return status, {name: [line[2:] for line in text.splitlines() if line] for name, text in sections}, printed.err

    return run


def outcomes(report):
    """(kind of reply, actor) -> (episodes, turns, reward, the rest)."""
    rows = [line.split(None, 5) for line in report["episodes"][1:]]
    return {(kind, actor): (episodes, turns, reward, *rest) for kind, actor, episodes, turns, reward, *rest in rows}


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
        (["check", str(ENVS / "sort_digits.py"), "--num_tasks", "0"], "--num_tasks=0 must be at least 1"),
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


# Check


def test_check_of_sort_digits(check):
    status, report, _ = check(ENVS / "sort_digits.py")
    assert status == 0 and report["result"] == ["every normal episode was scored"]
    assert "reward_fn(messages, answer)    reads the column answer" in report["environment"]
    assert report["data"] == ["load_tasks('train'): 29984 rows with messages, answer; the first 8 are tried"]
    found = outcomes(report)
    assert found["right", "policy"] == ("8", "1", "1", "reward_fn 1")
    assert found["plain", "policy"] == ("8", "1", "0", "reward_fn 0")
    assert found["truncated", "policy"] == ("1", "1", "0", "truncated: reward_fn 0")
    assert {kind for kind, _ in found} == {"right", "plain", "empty", "truncated", "garbage", "long", "special"}
    assert "notes" not in report
    assert report["tokens"][-4:] == ["| <|start|>user", "| 92853<|end|>", "| <|start|>assistant", "> 23589<|end|>"]
    assert re.fullmatch(r"reward_fn +21 calls, mean .* ms, slowest .* ms \(\w+ reply\)", report["hooks' time"][0])


def test_check_of_the_calculator_with_a_reply_for_each_turn(check):
    status, report, _ = check(ENVS / "calculator.py")
    assert status == 0 and any("no reply led to a second turn" in note for note in report["notes"])
    replies = ["--reply", "<call>{{ prompt }}</call>", "--reply", "{{ answer }}", "--num_tasks", 3]
    status, report, _ = check(ENVS / "calculator.py", *replies)
    assert status == 0 and "notes" not in report
    assert outcomes(report)["right", "policy"] == ("3", "2", "1", "reward_fn 1")
    # What the tool says is not trained, both turns are.
    shown = report["tokens"][-6:]
    assert shown[0].startswith("> <call>") and shown[2] == "| <|start|>tool" and shown[-1].startswith("> "), shown


def test_the_report_in_the_docs_is_what_is_printed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", sys.path[:])
    text = (ROOT / "docs/environments.md").read_text()
    command, report = re.search(r"```\n\$ rl-core (check .*)\n((?:.*\n)*?)```", text).groups()
    assert main(shlex.split(command)) == 0
    shown, printed = (
        [line for line in out.splitlines() if " ms" not in line] for out in (report, capsys.readouterr().out)
    )
    assert printed[:-1] == shown


def test_each_of_several_actors_has_its_own_replies(check):
    text = (ROOT / "docs/environments.md").read_text()
    race = re.search(r"```python\n(# race\.py\n.*?)```", text, re.DOTALL)[1]
    race += "def load_tasks(split): return [{'prompt': 'a sum', 'sum': '3+4'}] * 2\n"
    replies = ["--reply", "proposer={{ sum }}", "--reply", "solver=a=7", "--reply", "judge=yes"]
    status, report, _ = check(race, "--actors", "proposer,solver,judge", *replies)
    found = outcomes(report)
    assert status == 0 and found["right", "solver"][2] == "1" and found["plain", "solver"][2] == "0"
    shown = "\n".join(report["tokens"])
    assert "> 3+4<|end|>" in shown and "> a=7<|end|>" in shown
    assert "--reply proposer='{{ sum }}'; --reply solver='a=7'; --reply judge='yes'" in report["replies"][0]
    status, report, _ = check(race, "--actors", "proposer,solver,judge", "--reply", "judge=yes", "--reply", "x=1")
    assert "> x=1<|end|>" in "\n".join(report["tokens"]) and outcomes(report)["right", "solver"][2] == "1"


def test_check_of_math_answers(check, tmp_path):
    pytest.importorskip("math_verify")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "3+4?", "answer": "3+4=7\\n#### 7"}\n{"question": "10/2?", "answer": "#### 5"}\n')
    status, report, error = check(ENVS / "math_answer.py")
    assert status == 1 and "name its rows with --data.train" in error
    status, report, _ = check(ENVS / "math_answer.py", "--data.train", rows)
    found = outcomes(report)
    assert status == 0
    assert [found[kind, "policy"][2] for kind in ("right", "plain", "empty", "garbage")] == ["1", "0", "0", "0"]


def test_check_with_a_models_own_chat_template(check, tiny_model):
    status, report, _ = check(ENVS / "sort_digits.py", "--model", tiny_model)
    assert status == 0
    assert report["tokens"][-2:] == ["| <|user|>92853<|end|><|assistant|>", "> 23589<|end|>"]


BREAKS = """
tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
def load_tasks(split): return [{"prompt": "go", "answer": "7"}] * 3
async def reward_fn(completion, answer):
    return 1 / (int(completion) - 6)
"""


def test_a_hook_that_breaks_on_a_bad_reply_is_found(check, tiny_model):
    status, report, _ = check(BREAKS)
    found = outcomes(report)
    assert status == 1 and report["result"] == ["3 of 6 normal episodes failed"]
    assert found["right", "policy"] == ("3", "1", "1", "reward_fn 1")
    assert "x.py:5: ValueError: invalid literal" in found["plain", "policy"][3]
    assert all("failed: reward_fn()" in found[kind, "policy"][3] for kind in ("empty", "garbage", "long", "special"))
    assert any(note.startswith("empty, garbage, long, special: such a reply fails") for note in report["notes"])
    assert "tools = look" in report["environment"] and any("<|start|>tools" in line for line in report["tokens"])
    _, report, _ = check(BREAKS, "--model", tiny_model)
    assert any("does not show tools" in note for note in report["notes"])


def test_what_a_bad_reply_holds_does_not_reach_the_terminal(check, capsys):
    Path("y.py").write_text(BREAKS.replace("return 1 /", "raise ValueError(completion) #"))
    assert main(["check", "y.py"]) == 1
    printed = capsys.readouterr().out
    assert "\\x07" in printed and not [c for c in printed if c != "\n" and not c.isprintable()]


def test_only_bad_replies_may_fail(check):
    status, report, _ = check("""
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        def reward_fn(completion, answer): return {"right": float(answer in completion), "short": 1 / len(completion)}
    """)
    assert status == 0 and "ZeroDivisionError" in outcomes(report)["empty", "policy"][3]
    assert outcomes(report)["right", "policy"][3] == "right 1, short 1"


def test_rewards_that_teach_nothing_or_the_wrong_thing_are_noted(check):
    rows = 'def load_tasks(split): return [{"prompt": "go", "answer": "7"}]\n'
    status, report, _ = check(rows + "def reward_fn(answer): return 0.5")
    assert status == 0 and report["notes"] == ["every kind of reply earns 0.5: groups with equal rewards teach nothing"]
    status, report, _ = check(rows + "def reward_fn(completion, answer): return -len(completion)")
    assert status == 0 and report["notes"] == ["the empty reply earns 0, the right one -1: is that meant?"]


def test_a_column_that_is_missing_and_an_advantage_that_is_unfit_are_refused(check):
    status, _, error = check("""
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        def reward_fn(completion, anser): return 1.0
    """)
    assert status == 1 and "names 'anser'" in error and "did you mean 'answer'?" in error
    status, _, error = check("""
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        def reward_fn(completion, answer): return float(completion == answer)
        def advantage_fn(rewards): return rewards[1:]
    """)
    assert status == 1 and "it must give one for each reward" in error


def test_check_of_several_actors(check):
    status, report, _ = check("""
        turns = "bob -> alice -> bob"
        system_prompts = {"bob": "You are Bob. {{ secret }}"}
        def load_tasks(split): return [{"prompt": "go", "secret": "s1", "answer": "7"}]
        def reward_fn(messages, answer, actor): return float(actor == "bob" and answer in messages[-1]["content"])
        def group_reward_fn(trajectories): return [len(trajectories) / 4] * len(trajectories)
    """)
    assert status == 0
    assert "system_prompts of bob (columns secret)" in report["environment"]
    assert outcomes(report)["right", "bob"] == ("2", "2", "1.5", "reward_fn 1, group_reward_fn 0.5")
    assert outcomes(report)["right", "alice"] == ("2", "1", "0.5", "reward_fn 0, group_reward_fn 0.5")
    assert sum("are trained" in line for line in report["tokens"]) == 2
    assert "| You are Bob. s1<|end|>" in report["tokens"]


def test_check_of_a_rollout_of_ones_own(check):
    code = """
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        async def rollout(task, actors):
            reply = await actors["bob"].respond(task.messages)
            verdict = await actors["judge"].respond("Is this right? " + reply.text)
            return [reply.trajectory(reward=float("know" in verdict.text))]
    """
    status, report, _ = check(code, "--actors", "bob,judge")
    assert status == 0 and outcomes(report)["plain", "bob"][:3] == ("1", "1", "1")
    status, report, _ = check(code)
    assert status == 1 and "'bob' is no actor" in report["episodes"][1]
    assert any("give them with --actors A,B" in note for note in report["notes"])
