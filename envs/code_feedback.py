"""Write a Python function in up to four turns: what failed comes back, in three lines at most.

    rl-core train --env_path envs/code_feedback.py --data.train mbpp.jsonl --data.columns
    prompt=text --model M --out runs/fix

The reward is the share of tests that the last program passes, minus 0.05 for every turn after the
first, in a sandbox (docs/sandbox.md). Rows as in envs/code.py; no reward for what the first half of
the tests shows: feedback is of these, and the reward counts the others alone where there are at
least four. Without rows: lines through points, `f(1) is 5` -> `def f(x): return 3*x+2`, which one
point does not decide. A hash of the prompt says which tenth is held out. Needs a GPU, not run: only
by scripted actors.
"""

import zlib

from rl_core.sandbox import Sandbox
from rl_core.sandbox.rows import code_of, function_tests

max_turns = 4
PENALTY = 0.05
sandbox = Sandbox()


def load_tasks(split):
    rows = []
    for a in range(2, 10):
        for b in range(2, 30):
            x = a % 3 + 1
            prompt = (
                f"f({x}) is {a * x + b}. f is a*x+b with b from 2 to 29. "
                f"({a * 7 + b * 3} is 7*a+3*b)"
            )
            is_held_out = zlib.crc32(prompt.encode()) % 10 == 0
            if is_held_out == (split != "train"):
                tests = [f"assert f({x}) == {a * x + b}" for x in (0, 1, 5, -3)]
                rows.append({"prompt": prompt, "test_list": tests})
    return rows


async def run(text, row, shown):
    """What the shown tests give, or the others."""
    name = row.get("entry_point")
    setup, tests = function_tests(row, row["prompt"] if name else "")
    if len(tests) >= 4:
        half = len(tests) // 2
        tests = tests[:half] if shown else tests[half:]
    code, _ = code_of(text)
    if name and f"def {name}" not in code:
        code = row["prompt"] + code
    return await sandbox.run(code, tests=tests, setup=setup)


async def interact(messages, task):
    found = await run(messages[-1]["content"], task.row, shown=True)
    lines = [line for line in found.failures if line][:2]
    if not lines:
        return None
    told = f"{sum(found.passed)} of {len(found.passed)} tests passed: {found.status}."
    return [{"role": "user", "content": "\n".join([told, *lines])}]


async def reward_fn(messages, completion, task):
    num_turns = sum(message["role"] == "assistant" for message in messages)
    found = await run(completion, task.row, shown=False)
    return found.share - PENALTY * (num_turns - 1)
