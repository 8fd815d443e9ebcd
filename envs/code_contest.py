"""Write a program that reads stdin and prints to stdout, as on Codeforces, in Python, C++ or bash
(the name of the fence).

    rl-core train --env_path envs/code_contest.py --model M --out runs/contest
    --data.train open-r1/codeforces:verifiable-prompts --max_prompt_tokens 2048

Rewards, from a sandbox (docs/sandbox.md): 1 if every test passes within the time limit, and 0.1
times the share that passes: more for a share would reward printing the commonest answer. Tests are
in the row's `tests` (pairs of stdin and stdout, or as of DeepCoder), `verification_info`
(PrimeIntellect), `official_tests` and `examples` (Codeforces), `input_output` (APPS, TACO), or
`public_tests` and `private_tests` (CodeContests); `time_limit` is in seconds. Rows whose tests call
a function fail. Without rows: one word about a line of numbers, such as `max` or `sorted`, in three
levels; a hash of the prompt says which quarter is held out. Needs a GPU, not run: only by scripted
actors.
"""

import random
import re
import zlib

from rl_core.sandbox import Sandbox
from rl_core.sandbox.rows import code_of, stdin_tests

FIRST = {
    "all": list,
    "even": lambda v: [x for x in v if x % 2 == 0],
    "distinct": lambda v: list(dict.fromkeys(v)),
}
LAST = {
    "sum": sum,
    "count": len,
    "max": lambda v: max(v, default=0),
    "min": lambda v: min(v, default=0),
}
THEN = {
    "": lambda x: x,
    " squared": lambda x: x * x,
    " negated": lambda x: -x,
    " plus 1": lambda x: x + 1,
}
sandbox = Sandbox()


def load_tasks(split):
    rng, rows = random.Random(0), []
    for first, last, then in ((f, x, t) for f in FIRST for x in LAST for t in THEN):
        asked = f"Read a line of numbers. Print the {last} of {first} numbers{then}."
        lines = [[rng.randint(-9, 9) for _ in range(rng.randint(1, 8))] for _ in range(6)]
        tests = [
            [" ".join(map(str, v)) + "\n", f"{THEN[then](LAST[last](FIRST[first](v)))}\n"]
            for v in lines
        ]
        rows.append({"prompt": asked, "tests": tests, "level": 1 + (first != "all") + bool(then)})
    return [
        row for row in rows if (zlib.crc32(row["prompt"].encode()) % 4 == 0) == (split != "train")
    ]


async def reward_fn(completion, task):
    code, language = code_of(completion)
    limit = float(re.match(r"[\d.]+", str(task.row.get("time_limit") or 2.0))[0])
    result = await sandbox.run(
        code, tests=stdin_tests(task.row), language=language, timeout_s=limit
    )
    return {"accepted": float(result.status == "ok"), "share": 0.1 * result.share}
