"""Write a Python function. The reward is the share of its tests that pass, 0 to 1, in a sandbox
(docs/sandbox.md).

    rl-core train --env_path envs/code.py --data.train humaneval.jsonl --model M --out runs/code

The last fenced block of a reply is its program, otherwise all of it. Rows as in HumanEval
(`prompt`, `test`, `entry_point`; a program without that function continues the prompt) or MBPP
(`test_list`, and `test_setup_code`, `test_imports`; the problem as `prompt`, or `--data.columns
prompt=text`) or KodCode (`test`, a file for pytest). Without rows: one-line functions of levels 1
to 3, as `add 3, multiply by 2` -> `def f(x): return (x+3)*2`. A hash of the prompt says which tenth
is held out. CODE_SYNTAX=0.1 gives a tenth of the reward for code that parses and defines the
function, not an empty one. Curve on a CPU: docs/evidence/curves.md.
"""

import os
import random
import zlib

from rl_core.rewards import syntax
from rl_core.sandbox import Sandbox
from rl_core.sandbox.rows import code_of, function_tests

OPERATIONS = {"add": "({}+{})", "subtract": "({}-{})", "multiply by": "({}*{})"}
TIMEOUT_S = 5.0
SYNTAX = float(os.environ.get("CODE_SYNTAX", "0"))
if not 0 <= SYNTAX <= 1:
    raise ValueError(f"CODE_SYNTAX={SYNTAX} must be from 0 to 1, such as 0.1")
sandbox = Sandbox()


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for level, count in ((1, 900), (2, 600), (3, 600)):
        for _ in range(count):
            steps = [
                (rng.choice(list(OPERATIONS)), rng.randint(2, 99 if level == 1 else 9))
                for _ in range(level)
            ]
            asked, term = ", ".join(f"{name} {number}" for name, number in steps), "x"
            for name, number in steps:
                term = OPERATIONS[name].format(term, number)
            tests = [f"assert f({x}) == {eval(term)}" for x in (0, 1, 7, -4)]
            rows[asked] = {
                "prompt": asked,
                "solution": f"def f(x): return {term[1:-1]}",
                "test_list": tests,
                "level": level,
            }
    return [
        row
        for asked, row in rows.items()
        if (zlib.crc32(asked.encode()) % 10 == 0) == (split != "train")
    ]


async def reward_fn(completion, prompt, task):
    asked, (code, _) = prompt[-1]["content"], code_of(completion)
    name = task.row.get("entry_point", "")
    setup, tests = function_tests(task.row, asked if name else "")
    if name and f"def {name}" not in code:
        code = asked + code
    share = (await sandbox.run(code, tests=tests, setup=setup, timeout_s=TIMEOUT_S)).share
    if not SYNTAX:
        return share
    # A prompt with helper functions before the asked one parses by itself; the name separates them
    # apart.
    return {"tests": (1 - SYNTAX) * share, "syntax": SYNTAX * syntax(code, name)}
