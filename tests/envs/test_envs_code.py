"""The shipped environments for code, with the real sandbox and scripted actors."""

from __future__ import annotations

import json

import pytest
import stage
from kit import ROOT

from rl_core.environments.env_file import load_env
from rl_core.sandbox.rows import code_of, function_tests, stdin_tests

ENVS = ROOT / "envs"
HUMANEVAL = {
    "prompt": 'def helper(x):\n    return x + 1\n\ndef twice(x):\n    """Twice x."""\n',
    "entry_point": "twice",
    "test": "META = 1\n\ndef check(c):\n    n = META\n    assert c(n) == 2\n    assert helper(c(2)) == 5\n",
}
MBPP = {
    "prompt": "Write twice.",
    "test_list": ["assert twice(1) == 2", "assert math.isclose(twice(.5), 1)"],
}
MBPP |= {"test_imports": ["import math"], "test_setup_code": ""}


def env_of(name: str, **options):
    return load_env(str(ENVS / f"{name}.py"), **options)


def reward(name: str, row: dict, *replies: str) -> float:
    trajectory = stage.play(env_of(name), *replies, row=row, max_tokens=500)
    assert trajectory.status != "failed", trajectory.error
    return trajectory.reward


@pytest.mark.parametrize("name", ["code", "code_contest"])
def test_splits_share_no_prompt(name):
    train, held_out = (
        {row["prompt"] for row in env_of(name).load_tasks(split)} for split in ("train", "eval")
    )
    assert len(train) >= 30 and len(held_out) >= 10 and not train & held_out


def test_written_solutions_of_the_generator_earn_all():
    rows = env_of("code").load_tasks("eval")
    for row in [next(row for row in rows if row["level"] == level) for level in (1, 2, 3)]:
        assert reward("code", row, row["solution"]) == 1.0
        assert reward("code", row, "def f(x): return 1000") == 0.0
    assert [row["prompt"] for row in rows[:3]] == [
        row["prompt"] for row in env_of("code").load_tasks("eval")[:3]
    ]


@pytest.mark.parametrize(
    "reply, earned",
    [
        ("def twice(x): return x * 2", 1.0),
        ("Like so:\n```python\ndef twice(x):\n    return x * 2\n```\nThat is it.", 1.0),
        ("```python\nwrong\n```\nno:\n```py\ntwice = lambda x: x + x", 1.0),
        ("<think>```python\nx\n```</think>\ndef twice(x): return x * 2", 1.0),
        ("def twice(x): return 2", 0.5),
        ("def twice(x): return x * 3", 0.0),
        ("", 0.0),
        ("I do not know.", 0.0),
        ("```python\n", 0.0),
        ("\x00}{<|end|>", 0.0),
        ("class A:\n    __eq__ = lambda a, b: True\ndef twice(x): return A()", 0.0),
        ("import sys\ndef twice(x): sys.exit(0)", 0.0),
        ("def helper(x): return 5\ndef twice(x): return 0", 0.0),
        ("print('2 tests passed')", 0.0),
    ],
)
def test_rows_of_humaneval_and_mbpp_are_scored_by_their_tests(reply, earned):
    assert reward("code", HUMANEVAL, reply) == earned
    assert reward("code", MBPP, reply) == earned


PYTEST = """import pytest
from solution import Stack, half, joined, TooBig

@pytest.fixture
def stack():
    made = Stack()
    made.push(3)
    yield made

@pytest.mark.parametrize("n, expected", [(1, 0.5), (3, 1.5), pytest.param(0.2, 0.1, id="small")])
@pytest.mark.parametrize("sign", [1, -1])
def test_halves(n, expected, sign):
    assert half(sign * n) == pytest.approx(sign * expected)
    assert half(n) != pytest.approx(expected + 4e-7, abs=1e-9)

def test_errors():
    with pytest.raises(ValueError, match="^no half of None$") as caught:
        half(None)
    assert str(caught.value) == "no half of None"
    with pytest.raises(TooBig):
        half(10**9)

def test_any_error():
    with pytest.raises(Exception):
        half("x")

def test_a_stack(stack):
    assert stack.pop() == 3
    with pytest.raises((IndexError, KeyError)):
        stack.pop()

@pytest.mark.slow
class TestObjects:
    def setup_method(self):
        self.first, self.second = Stack(), Stack()

    def test_an_object_is_an_argument_and_has_attributes(self):
        self.first.items = [1]
        self.second.push(2)
        assert joined([self.first, self.second]).items == [1, 2]
"""
SOLVED = """class TooBig(Exception): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
def half(n):
    if n is None: raise ValueError("no half of None")
    if n > 10**6: raise TooBig
    return n / 2
def joined(stacks):
    made = Stack()
    made.items = sum((stack.items for stack in stacks), [])
    return made
"""


@pytest.mark.parametrize(
    "reply, earned",
    [
        (SOLVED, 1.0),
        (SOLVED.replace("n / 2", "n // 2"), 0.8),
        (SOLVED.replace("half of", "part of"), 0.8),
        (SOLVED.replace("(Exception)", "(BaseException)").replace("raise TooBig", "exit()"), 0.8),
        (SOLVED.replace("self.items.pop()", "3"), 0.8),
        (SOLVED.replace("stacks), []", "stacks[:1]), []"), 0.8),
        (SOLVED.replace("if n is", "if n == 'x': import os; os._exit(0)\n    if n is"), 0.4),
        (SOLVED.replace("if n is", "if n == 'x': exit()\n    if n is"), 0.8),
        (SOLVED.replace("def joined", "def join"), 0.0),
        (SOLVED + "raise IndexError", 0.0),
        (SOLVED + "import os; os._exit(0)", 0.0),
        (SOLVED + "exit()", 0.0),
        ("class Any:\n    __getattr__ = __call__ = __eq__ = lambda *_: Any()\n"
         "Stack = half = joined = TooBig = Any()", 0.0),
        ("import sys, types\nfake = sys.modules['pytest'] = types.ModuleType('pytest')\n"
         "fake.play = fake.raises = fake.approx = print\nStack = half = joined = TooBig = print", 0.0),
        ("import solution\nfrom pytest import *", 0.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_rows_of_kodcode_are_scored_by_their_files_for_pytest(reply, earned):
    assert reward("code", {"question": "Write it.", "test": PYTEST, "style": "x"}, reply) == earned


@pytest.mark.parametrize(
    "test, error",
    [
        ("def test_it(capsys): assert f() == 1", "asks for capsys, which is not a fixture"),
        ("import pytest\ndef test_it(): pytest.warns(f)", "pytest.warns, which is not supported"),
        ("from solution import f", "has no function check"),
        ("import absent\ndef test_it(): assert f() == 1", "No module named 'absent'"),
    ],
)
def test_a_file_for_pytest_that_cannot_run_is_no_fault_of_the_program(test, error):
    row = {"question": "Write it.", "test": test}
    assert error in stage.error_of(env_of("code"), "def f(): return 1", row=row, max_tokens=500)


def test_a_reply_of_the_body_alone_continues_the_prompt():
    assert reward("code", HUMANEVAL, "    return helper(x) + x - 1\n") == 1.0


def test_tests_of_rows_are_found_in_every_form():
    setup, tests = function_tests(HUMANEVAL, HUMANEVAL["prompt"])
    assert "def helper" in setup and "META = 1" in setup and "twice" not in setup
    assert tests[0] == "c = twice\nn = META\nassert c(n) == 2" and len(tests) == 2
    sums = {
        "code": "def sum(a, b):\n    return a - b",
        "test_list": ["assert sum(3, 1) == 2"],
        "prompt": "Write sum.",
    }
    assert (
        reward("code", sums, sums["code"]) == 1.0
        and reward("code", sums, "def sum(a, b): return 4") == 0.0
    )
    pairs = [("1\n", "2\n"), ("2\n", "4\n")]
    cases = [{"type": "stdin_stdout", "input": i, "output": o} for i, o in pairs]
    split = {"input": ["1\n"], "output": ["2\n"]}, {"input": ["2\n"], "output": ["4\n"]}
    for row in (
        {"tests": [list(pair) for pair in pairs]},
        {
            "official_tests": [{"input": "1\n", "output": "2\n"}],
            "examples": [{"input": "2\n", "output": "4\n"}],
        },
        {"input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})},
        {"public_tests": split[0], "private_tests": split[1]},
        {"tests": json.dumps(cases)},
        {"tests": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})},
        {"verification_info": json.dumps({"language": "python", "test_cases": cases})},
        {"verification_info": {"test_cases": [case | {"fn_name": None} for case in cases]}},
    ):
        assert stdin_tests(row) == pairs
    call = {"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}
    for row in (
        {"tests": [call]},
        {"tests": json.dumps([{"input": "1", "output": "2", "testtype": "functional"}])},
        {"input_output": json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]})},
    ):
        with pytest.raises(ValueError, match="its tests call a function"):
            stdin_tests(row)
    for empty in (
        lambda: stdin_tests({"prompt": "?", "examples": None}),
        lambda: function_tests({"prompt": "?", "test_list": []}),
        lambda: function_tests({"test": "def check(c):\n    ask(c)", "entry_point": "f"}),
    ):
        # Or every program would earn all.
        with pytest.raises(ValueError, match=r"no tests|no assert"):
            empty()
    assert code_of("```c++\nint main() {}\n```") == ("int main() {}\n", "cpp")
    assert (
        code_of("```bash\nls\n```")[1] == "bash"
        and code_of("x")[1] == code_of("```\nx\n```")[1] == "python"
    )


CONTEST = {
    "prompt": "Print the double.",
    "tests": [["1\n", "2\n"], ["2\n", "4\n"]],
    "time_limit": 3,
}


@pytest.mark.parametrize(
    "reply, earned",
    [
        ("print(int(input()) * 2)", 1.1),
        ("```cpp\n#include <cstdio>\nint main() { int x; scanf(\"%d\", &x); printf(\"%d\", 2 * x); }\n```", 1.1),
        ("```bash\nread x; echo $((2 * x))\n```", 1.1),
        ("print(2)", 0.05),
        ("print(2)\nprint(4)", 0.0),
        ("x = int(input())\nprint(x * 2)\nraise SystemExit(1)", 0.0),
        ("", 0.0),
        ("```cpp\nint main( {\n```", 0.0),
    ],
)  # fmt: skip
def test_a_contest_pays_for_all_tests_and_a_little_for_some(reply, earned):
    assert reward("code_contest", CONTEST, reply) == pytest.approx(earned)
