"""Programs drafted side by side, run in the sandbox, fixed once, and combined into one.

    rl-core train --env_path envs/code_parallel.py --data.train mbpp.jsonl --data.columns
    prompt=text --model M --out runs/drafts
    rl-core train ... --actors.ann.model A --actors.ben.model B --actors.combiner.model C

Alone, an actor writes three drafts and combines them. Of several, `combiner` (or the first by name)
combines, and each other one writes two drafts. Who wrote a draft that fails sees why and writes it
again. Who combines sees all drafts and what their tests gave. Rows as in envs/code_feedback.py,
whose rows are used without --data.train: what is shown is of the first half of the tests, rewards
are of the others. Reward: the share of tests passed for who combines; a draft earns 0.7 of the
share of its last version, and 0.3 of the combined one's. Metric: `drafts_best`. Needs a GPU, not
run.
"""

import asyncio

from code_feedback import load_tasks, run

__all__ = ["load_tasks"]
NUM_DRAFTS = 3  # of an actor that is alone
NUM_EACH = 2
SHARED = 0.3  # of a draft's reward: how the combined program did
HOW = "Here are drafts of a program, and what some tests of them gave. Write the right program."
FIX = "Write the program again."
# Whoever combines reads all drafts; with --max_prompt_tokens it says how long that may be.
max_turns = 2 + NUM_DRAFTS


async def told(reply, row):
    """What the tests that are shown gave, in three lines at most; "" if all passed."""
    found = await run(reply.answer, row, shown=True)
    lines = [line for line in found.failures if line][:2]
    if not lines:
        return ""
    passed = f"{sum(found.passed)} of {len(found.passed)} tests passed: {found.status}."
    return "\n".join([passed, *lines])


async def fixed(draft, row):
    """The draft's conversation with what its tests gave; it has a second turn if one failed."""
    said = "It was cut off."
    if not draft.truncated:
        said = await told(draft, row)
    if said and not draft.truncated:
        draft = await draft.respond(f"{said}\n{FIX}")
        said = "It was cut off."
        if not draft.truncated:
            said = await told(draft, row)
    return draft, said or "All tests passed."


async def share(reply, row):
    if reply.truncated:
        return 0.0
    found = await run(reply.answer, row, shown=False)
    return found.share


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
    for place, (draft, said) in enumerate(tried, 1):
        text = draft.answer.strip()
        shown.append(f"Draft {place}:\n{text}\n{said}")
    message = {"role": "user", "content": "\n\n".join(shown)}
    answer = await actors[combiner].respond([*task.messages[:-1], message])
    replies = [draft for draft, _ in tried]
    scoring = [share(reply, row) for reply in [*replies, answer]]
    *own, combined = await asyncio.gather(*scoring)
    metrics = {"drafts_best": max(own)}
    found = [answer.trajectory({"right": combined}, seat="combine", metrics=metrics)]
    for draft, right in zip(replies, own, strict=True):
        parts = {
            "right": (1 - SHARED) * right,
            "combined": SHARED * combined,
        }
        found.append(draft.trajectory(parts, seat="draft"))
    return found
