"""Programs drafted side by side, run in the sandbox, fixed once, and combined into one.

    rl-core train --env_path envs/code_parallel.py --data.train mbpp.jsonl --data.columns
    prompt=text --model M --out runs/drafts
    rl-core train ... --actors.ann.model A --actors.ben.model B --actors.combiner.model C

Alone, an actor writes three drafts and combines them. Of several, `combiner` (or the first by name)
combines, and each other one writes two drafts. A draft that fails is written again by its author,
who sees the failures. The combiner sees all drafts and the results of their tests. Rows as in
envs/code.py; without --data.train, lines through points: `f(1) is 5` -> `def f(x): return 3*x+2`.
Feedback comes from the first half of the tests and the reward from the other half where there are
at least four. Reward: the share of tests passed for the combiner; a draft earns 0.7 of the share of
its last version, and 0.3 of the combined one's. Metric: `drafts_best`.
"""

import asyncio
import zlib

from rl_core.sandbox import Sandbox
from rl_core.sandbox.rows import code_of, function_tests

NUM_DRAFTS = 3  # One actor alone writes this many.
NUM_EACH = 2
SHARED = 0.3  # Share of the combined program's reward in a draft's reward.
HOW = "Here are drafts of a program, and what some tests of them gave. Write the right program."
FIX = "Write the program again."
# Whoever combines reads all drafts; with --max_prompt_tokens it says how long that may be.
max_turns = 2 + NUM_DRAFTS
sandbox = Sandbox()


def load_tasks(split):
    """Lines a*x+b; a hash of the prompt holds out one tenth."""
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
    """Result of the shown half of the tests, or of the hidden half."""
    name = row.get("entry_point")
    setup, tests = function_tests(row, row["prompt"] if name else "")
    if len(tests) >= 4:
        half = len(tests) // 2
        tests = tests[:half] if shown else tests[half:]
    code, _ = code_of(text)
    if name and f"def {name}" not in code:
        code = row["prompt"] + code
    return await sandbox.run(code, tests=tests, setup=setup)


async def feedback(reply, row):
    """Results of the shown tests in at most three lines; "" if all passed."""
    result = await run(reply.answer, row, shown=True)
    lines = [line for line in result.failures if line][:2]
    if not lines:
        return ""
    passed = f"{sum(result.passed)} of {len(result.passed)} tests passed: {result.status}."
    return "\n".join([passed, *lines])


async def fixed(draft, row):
    """The draft's conversation with what its tests gave; it has a second turn if one failed."""
    verdict = "It was cut off."
    if not draft.truncated:
        verdict = await feedback(draft, row)
    if verdict and not draft.truncated:
        draft = await draft.respond(f"{verdict}\n{FIX}")
        verdict = "It was cut off."
        if not draft.truncated:
            verdict = await feedback(draft, row)
    return draft, verdict or "All tests passed."


async def share(reply, row):
    if reply.truncated:
        return 0.0
    result = await run(reply.answer, row, shown=False)
    return result.share


async def rollout(task, actors):
    row = task.row
    combiner = "combiner" if "combiner" in actors else min(actors)
    drafters = [actors[name] for name in sorted(actors) if name != combiner]
    number = NUM_EACH
    if not drafters:
        drafters = [actors[combiner]]
        number = NUM_DRAFTS
    writing = [actor.respond(task.messages, n=number) for actor in drafters]
    drafts = []
    for of_one in await asyncio.gather(*writing):
        drafts += of_one
    fixing = [fixed(draft, row) for draft in drafts]
    tried = await asyncio.gather(*fixing)
    asked = task.messages[-1]["content"]
    shown = [asked, HOW]
    for index, (draft, verdict) in enumerate(tried, 1):
        text = draft.answer.strip()
        shown.append(f"Draft {index}:\n{text}\n{verdict}")
    message = {"role": "user", "content": "\n\n".join(shown)}
    answer = await actors[combiner].respond([*task.messages[:-1], message])
    replies = [draft for draft, _ in tried]
    scoring = [share(reply, row) for reply in [*replies, answer]]
    *scores, combined = await asyncio.gather(*scoring)
    metrics = {"drafts_best": max(scores)}
    trajectories = [answer.trajectory({"right": combined}, player="combine", metrics=metrics)]
    for draft, right in zip(replies, scores, strict=True):
        parts = {
            "right": (1 - SHARED) * right,
            "combined": SHARED * combined,
        }
        trajectories.append(draft.trajectory(parts, player="draft"))
    return trajectories
