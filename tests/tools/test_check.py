"""rl-core check: its report of an environment, without any model."""

from __future__ import annotations

import json
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from kit import ROOT, ForkedProcess

from rl_core.tools.cli import main

ENVS = ROOT / "envs"


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """check(code or file, *flags) -> (exit status, section -> its lines, what stderr says)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(subject, *flags):
        if not isinstance(subject, Path):
            Path("x.py").write_text(textwrap.dedent(subject))
            subject = "x.py"
        status = main(["check", str(subject), *map(str, flags)])
        printed = capsys.readouterr()
        sections = re.findall(r"== (.*)\n((?:  .*\n|\n(?!==))*)", printed.out)
        return (
            status,
            {name: [line[2:] for line in text.splitlines() if line] for name, text in sections},
            printed.err,
        )

    return run


def outcomes(report):
    """(kind of reply, actor) -> (episodes, turns, reward, the rest)."""
    rows = [line.split(None, 5) for line in report["episodes"][1:]]
    return {
        (kind, actor): (episodes, turns, reward, *rest)
        for kinds, actor, episodes, turns, reward, *rest in rows
        for kind in kinds.split(",")
    }


def test_check_of_sort_digits(check):
    status, report, _ = check(ENVS / "sort_digits.py")
    assert status == 0 and report["result"] == ["every normal episode was scored"]
    assert "reward_fn(messages, answer)    reads answer" in report["environment"]
    assert report["data"] == [
        "load_tasks('train'): 29984 rows with messages, answer; the first 8 are tried"
    ]
    values = outcomes(report)
    assert values["right", "policy"] == ("8", "1", "1", "reward_fn 1")
    assert values["plain", "policy"] == ("8", "1", "0", "reward_fn 0")
    assert values["cut", "policy"] == ("1", "1", "0", "truncated: reward_fn 0")
    assert {kind for kind, _ in values} == {"right", "plain", "empty", "cut"}
    assert report["tokens"][-4:] == [
        "| <|start|>user",
        "| 92853<|end|>",
        "| <|start|>assistant",
        "> 23589<|end|>",
    ]


def test_check_of_the_calculator_with_a_reply_for_each_turn(check):
    replies = ["--reply", "<call>{{ prompt }}</call>", "--reply", "{{ answer }}", "--num_tasks", 3]
    status, report, _ = check(ENVS / "calculator.py", *replies)
    assert status == 0
    assert outcomes(report)["right", "policy"] == ("3", "2", "1", "reward_fn 1")
    # The tool's message is not trained, both turns are.
    shown = report["tokens"][-6:]
    assert (
        shown[0].startswith("> <call>")
        and shown[2] == "| <|start|>tool"
        and shown[-1].startswith("> ")
    ), shown


def test_the_report_in_the_docs_is_what_is_printed(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", sys.path[:])
    text = (ROOT / "docs/environments.md").read_text()
    command, report = re.search(
        r"```console\n\$ rl-core (check .*)\n((?:.*\n)*?)```", text
    ).groups()
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == report + "\n"


def test_check_says_what_hooks_see_of_an_episode_that_is_cut_off(check):
    env = "def load_tasks(split): return [{'prompt': 'a', 'answer': 'abcdef'}]\n"
    env += "def interact(messages): return None\ndef reward_fn(answer): return 1\n"
    for more, last in (
        ("", "rewards score the text up to the cut: 'abc'"),
        (
            "truncated_reward = -1",
            "truncated_reward = -1 is the reward, other rewards are not called",
        ),
    ):
        status, report, _ = check(env + more)
        assert status == 0 and report["truncated"] == [
            "a turn that is cut off, as by --max_tokens, ends the episode, with status truncated",
            "interact() is not called after it: no tool answers, and no message comes",
            last,
        ]


def test_check_tells_no_prompt_as_what_a_cut_off_actor_said(check):
    env = "def load_tasks(split): return [{'prompt': 'a', 'answer': 'abcdef'}]\n"
    env += "def start(task): raise RuntimeError('down')\ndef reward_fn(answer): return 1\n"
    _, report, _ = check(env)
    assert report["truncated"][-1] == "rewards score the text up to the cut: nothing"


def test_check_of_math_answers(check, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"question": "3+4?", "answer": "3+4=7\\n#### 7"}\n{"question": "10/2?", "answer": "#### '
        '5"}\n'
    )
    ours = tmp_path / "own.py"
    ours.write_text("def reward_fn(completion): return 0.0")
    status, report, error = check(ours)
    assert status == 1 and "name its rows with --data.train" in error
    rows.write_text(rows.read_text().replace("answer", "solution"))
    status, report, _ = check(
        ENVS / "math_answer.py", "--data.train", rows, "--data.columns", "answer=solution"
    )
    result = outcomes(report)
    assert status == 0
    assert [result[kind, "policy"][2] for kind in ("right", "plain", "empty")] == ["1", "0", "0"]


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


def test_a_hook_that_breaks_on_a_bad_reply_is_found(check):
    status, report, _ = check(BREAKS)
    values = outcomes(report)
    assert status == 1 and report["result"] == ["3 of 6 normal episodes failed"]
    assert values["right", "policy"] == ("3", "1", "1", "reward_fn 1")
    assert "x.py:5: ValueError: invalid literal" in values["plain", "policy"][3]
    assert "failed: reward_fn()" in values["empty", "policy"][3]
    assert any("<|start|>tools" in line for line in report["tokens"])


def test_an_error_of_all_replies_is_printed_once(check):
    env = "def load_tasks(split): return [{'prompt': 'go', 'answer': '7'}] * 3\n"
    status, report, _ = check(env + "def reward_fn(completion, answer): answer in completion\n")
    [line] = report["episodes"][1:]
    assert status == 1 and line.startswith("right,plain,empty,cut policy            8     -  ")
    says = "reward_fn returned None: is a `return` missing? One reward of policy must be a number"
    assert line.endswith(f"failed: x.py: {says}")


def test_what_an_error_holds_does_not_reach_the_terminal(check, capsys):
    Path("y.py").write_text(
        BREAKS.replace("return 1 /", "raise ValueError('\\x07' + completion) #")
    )
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


def test_that_no_right_reply_was_tried_is_told(check):
    code = """
        def load_tasks(split): return [{"prompt": "go", "word": "7"}]
        def reward_fn(completion, word): return float(word in completion)
    """
    status, report, _ = check(code)
    shown = (
        "no right reply was tried, as no hook reads a column such as answer: give one by --reply "
        "TEXT"
    )
    assert status == 0 and report["result"] == ["every normal episode was scored", shown]
    assert check(code, "--reply", "{{ word }}")[1]["result"] == ["every normal episode was scored"]


def test_a_column_that_is_missing_is_refused(check):
    status, _, error = check("""
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        def reward_fn(completion, anser): return 1.0
    """)
    assert status == 1 and "asks for 'anser'" in error
    assert "has prompt, answer; did you mean 'answer'?" in error


def test_check_of_several_actors(check):
    status, report, _ = check("""
        turns = "bob -> alice -> bob"
        system_prompts = {"bob": "You are Bob. {{ secret }}"}
        def load_tasks(split): return [{"prompt": "go", "secret": "s1", "answer": "7"}]
        def reward_fn(messages, answer, actor): return float(actor == "bob" and answer in messages[-1]["content"])
        def group_reward_fn(trajectories): return [len(trajectories) / 4] * len(trajectories)
    """)
    assert status == 0
    assert outcomes(report)["right", "bob"] == ("2", "2", "1.5", "reward_fn 1, group_reward_fn 0.5")
    assert outcomes(report)["right", "alice"] == (
        "2",
        "1",
        "0.5",
        "reward_fn 0, group_reward_fn 0.5",
    )
    assert sum("are trained" in line for line in report["tokens"]) == 2
    assert "| You are Bob. s1<|end|>" in report["tokens"]


def test_check_gives_each_actor_another_reply(check):
    code = """
        turns = "bob -> alice"
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        def reward_fn(completion, answer, actor): return float(completion == answer)
    """
    reply = "{{ answer if actor == 'bob' else 'well done' }}"
    _, report, _ = check(code, "--reply", reply)
    rewards = [outcomes(report)["right", actor][2] for actor in ("bob", "alice")]
    assert rewards == ["1", "0"]


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
    status, report, _ = check(code.replace('"7"}]', '"7"}] * 3'))
    assert (
        status == 1
        and "'bob' is not an actor; known: policy (--actors adds one)" in report["episodes"][1]
    )
    assert [o.split()[::2][:2] for o in report["episodes"][1:]] == [["plain,empty,cut", "5"]]


def test_check_of_a_rollout_that_opens_an_endpoint(check):
    code = """
        import openai
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}]
        async def rollout(task, actors):
            async with actors["policy"].endpoint() as llm:
                async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
                    asked = {"model": "m", "messages": task.messages}
                    reply = await client.chat.completions.create(**asked)
                said = reply.choices[0].message.content
                return llm.trajectories(float(said == task.row["answer"]))
    """
    status, report, _ = check(code, "--reply", "{{ answer }}")
    assert status == 0
    assert [outcomes(report)[reply, "policy"][2] for reply in ("right", "plain")] == ["1", "0"]


def test_several_environments_are_checked_with_their_hooks_side_by_side(check, tmp_path):
    # Each hook waits until those of all episodes are there: one after the other they would time
    # out.
    Path("all.py").write_text(
        textwrap.dedent("""
        import asyncio
        here = []
        def load_tasks(split): return [{"prompt": "go", "answer": "7"}] * 3
        async def reward_fn(completion, answer):
            here.append(completion)
            while len(here) < 8:
                await asyncio.sleep(0.01)
            return 1.0
        """)
    )
    assert check(tmp_path / "all.py", ENVS / "sort_digits.py", "--hook_timeout_s", "5")[0] == 0
    Path("slow.py").write_text(Path("all.py").read_text().replace("8", "9"))
    status, report, _ = check(
        ENVS / "sort_digits.py", tmp_path / "slow.py", "--hook_timeout_s", "0.2"
    )
    assert status == 1 and "ran longer than 0.2 s" in outcomes(report)["plain", "policy"][3]
    assert "or raise --hook_timeout_s" in outcomes(report)["plain", "policy"][3]


def test_check_tells_while_it_waits_for_a_hook(check, monkeypatch):
    monkeypatch.setattr("rl_core.tools.check.TELL_S", 0.01)
    code = """
        import asyncio
        def load_tasks(split): return [{"prompt": "a"}]
        async def reward_fn(completion):
            await asyncio.sleep(0.1)
            return 1.0
        """
    assert (
        "s; a call of a hook may last 7 s (--hook_timeout_s)"
        in check(code, "--hook_timeout_s", "7")[2]
    )


def test_check_ends_where_a_hook_holds_the_interpreter(tmp_path):
    (tmp_path / "held.py").write_text(
        "import re\n"
        "def load_tasks(split): return [{'prompt': 'a', 'answer': 'b'}]\n"
        "def reward_fn(completion): return float(bool(re.match('(a+)+$', 'a' * 40 + 'b')))\n"
    )
    code = (
        "import sys; from rl_core.sampling import watchdog; from rl_core.tools.cli import main; "
        "watchdog.HELD_MARGIN_S = 0.5; sys.exit(main(sys.argv[1:]))"
    )
    process = ForkedProcess("-c", code, "check", tmp_path / "held.py", "--hook_timeout_s", "0.2")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and 'held.py", line 3 in reward_fn' in errors


def test_json_holds_outcomes_and_nothing_that_hooks_print(tmp_path, capsys):
    (tmp_path / "x.py").write_text(
        "def load_tasks(split): return [{'prompt': 'a', 'answer': 'b'}]\n"
        "def reward_fn(completion, answer):\n    print('heard', completion)\n"
        "    return {'same': 1.0} if completion == answer else 1 / 0\n"
    )
    assert (
        main(
            [
                "check",
                str(ENVS / "sort_digits.py"),
                str(tmp_path / "x.py"),
                "--num_tasks",
                "2",
                "--json",
            ]
        )
        == 1
    )
    sort, ours = json.loads(capsys.readouterr().out)
    assert (sort["normal"], sort["failed"], sort["num_tasks"], ours["failed"]) == (4, 0, 2, 1)
    right, plain, *_ = ours["episodes"]
    assert right == {
        "reply": "right",
        "actor": "policy",
        "status": "ok",
        "error": "",
        "episodes": 1,
        "turns": 1,
        "reward": 1,
        "parts": {"same": 1},
    }
    assert (
        plain["status"] == "failed"
        and "division by zero" in plain["error"]
        and "reward" not in plain
    )
    assert ours["columns"] == ["prompt", "answer"] and any(
        line == "> b<|end|>" for line in ours["tokens"]
    )
