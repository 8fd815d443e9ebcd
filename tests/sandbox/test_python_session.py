"""Python in a box that keeps its variables. docs/sandbox.md"""

from __future__ import annotations

import asyncio

import pytest
from test_boxes import needs_bubblewrap

from rl_core.sandbox import boxes
from rl_core.sandbox.python_session import PythonSession

pytestmark = needs_bubblewrap
ENDED = "[the interpreter ended; the next call has a new interpreter, without variables]"


def outputs(*calls: str, timeout_s: float = 20.0, **limits) -> list[str]:
    """Outputs of these calls in one session."""

    async def run():
        async with await boxes.open({}, limits=boxes.Limits(**limits)) as box:
            session = PythonSession(box, timeout_s)
            return [await session.run(code) for code in calls]

    return asyncio.run(run())


def test_variables_and_imports_stay_and_a_last_expression_is_shown():
    observed = outputs(
        "import math\nx = 3", "def f(n):\n    return n * x\nprint(f(2))\nf(3)", "math.pi", ""
    )
    assert observed == ["", "6\n9\n", "3.141592653589793\n", ""]


def test_an_error_is_told_with_its_lines_and_leaves_the_variables():
    code = "y = 1\ndef g():\n    return y / 0\ng()"
    observed = outputs(code, "def (", "import sys; sys.exit(3)", "y", "input()", "'\ud800'")
    assert '"<call 1>", line 3, in g\n    return y / 0' in observed[0]
    assert observed[0].endswith("ZeroDivisionError: division by zero\n")
    assert observed[1].endswith("SyntaxError: invalid syntax\n") and "ast.py" not in observed[1]
    assert observed[2].endswith("SystemExit: 3\n") and observed[3] == "1\n"
    assert "EOFError" in observed[4] and observed[5] == "'?'\n"


def test_output_is_limited_and_that_of_programs_is_in_it():
    long, program = outputs(
        "print('a' * 50_000 + 'b')", "import os\n_ = os.system('echo out; echo bad >&2')"
    )
    assert 16_000 <= len(long) < 16_100
    assert long.startswith("aaa") and long.endswith("ab\n") and "[34002 bytes left out]" in long
    assert program == "out\nbad\n"


@pytest.mark.parametrize(
    "code, why",
    [
        ("while True: pass", "[ended: the call took longer than 2 s; "),
        ("import os; os._exit(1)", ENDED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ENDED),
    ],
)
def test_an_interpreter_that_ends_is_replaced_and_that_is_told(code, why):
    ended, after, new = outputs("z = 1", code, "z", "z = 2; z", timeout_s=2.0)[1:]
    assert ended.startswith(why) and ended.endswith("a new interpreter, without variables]")
    assert after.endswith("NameError: name 'z' is not defined\n") and new == "2\n"


def test_memory_is_bounded_by_the_box():
    observed = outputs("b = bytearray(2 << 30)", "1 + 1", memory_mib=512)
    assert observed[0].endswith("MemoryError\n") and observed[1] == "2\n"


def test_episodes_are_apart_and_a_cancelled_one_leaves_no_interpreter():
    async def run():
        async with await boxes.open({}) as first, await boxes.open({}) as second:
            one, two = PythonSession(first), PythonSession(second)
            await asyncio.gather(one.run("v = 1"), two.run("v = 2"))
            seen = await asyncio.gather(one.run("v"), two.run("v"))
            slow = asyncio.create_task(one.run("import time; time.sleep(60)"))
            await asyncio.sleep(0.5)
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            again = await one.run("'v' in dir()")
        with pytest.raises((boxes.BoxEnded, OSError)):
            await one.run("1")
        return seen, again

    assert asyncio.run(run()) == (["1\n", "2\n"], "False\n")


def test_a_timeout_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"timeout_s=0 must be above 0, such as 10"):
        PythonSession(None, 0)
