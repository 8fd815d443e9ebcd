"""Questions about a file of numbers, answered with a Python that keeps its variables, in a box
without network (docs/sandbox.md).

    rl-core train --env_path envs/python_tool.py --model Qwen/Qwen3-0.6B --out runs/python
    --max_prompt_tokens 1024 --max_tokens 512

The model calls `python` and sees the code's output, its error, and the value of its last
expression; variables stay until the episode ends. A call has 10 s. Reward: 1 if the last number of
the last reply is the answer; 0 for a reply that is cut off or calls. Metric: `calls`. Rows of your
own: a prompt, `answer`, and optionally `files` (name -> text). A hash of the prompt says which
tenth is held out. Needs a GPU, not run: only by scripted actors and for a few steps.
"""

import itertools
import json
import random
import zlib

from rl_core.rewards import numeric
from rl_core.sandbox import boxes
from rl_core.sandbox.python_session import PythonSession

CALL_S, FOLDER, NAME = 10.0, "/app", "numbers.txt"
QUESTIONS = {
    "What is the sum of the numbers in {}?": sum,
    "How many different numbers are in {}?": lambda numbers: len({*numbers}),
    "What is the largest difference of neighbours in {}?": lambda numbers: max(
        abs(a - b) for a, b in itertools.pairwise(numbers)
    ),
}
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code and gives what it prints. Variables stay.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code"}},
            "required": ["code"],
        },
    },
}
max_turns = 5
tools = [PYTHON]


def load_tasks(split):
    rng, rows = random.Random(0), []
    for number in range(900):
        asked, answer_of = list(QUESTIONS.items())[number % len(QUESTIONS)]
        name = f"{number}_{NAME}"
        numbers = [rng.randrange(1000) for _ in range(rng.randrange(5, 200))]
        files = {name: " ".join(map(str, numbers))}
        rows.append({"prompt": asked.format(name), "answer": answer_of(numbers), "files": files})
    return [row for row in rows if is_held_out(row) == (split != "train")]


def is_held_out(row):
    return zlib.crc32(row["prompt"].encode()) % 10 == 0


async def answer(call, session):
    """The message that answers a call."""
    function = call["function"]
    arguments = function["arguments"]
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if function["name"] == "python" and isinstance(code, str):
        result = await session.run(code)
    else:
        result = 'error: there is one tool, python, with one argument: {"code": "..."}'
    return {"role": "tool", "content": result, "tool_call_id": call.get("id", "")}


async def rollout(task, actors):
    actor, num_calls = next(iter(actors.values())), 0
    async with await boxes.open(task.row) as box:
        for name, text in (task.row.get("files") or {}).items():
            await box.put(f"{FOLDER}/{name}", text)
        session = PythonSession(box, CALL_S)
        reply = await actor.respond(task.messages, tools=tools)
        for _ in range(actors.max_turns - 1):
            calls = reply.messages[-1].get("tool_calls") or []
            if reply.truncated or not calls:
                break
            num_calls += len(calls)
            reply = await reply.respond([await answer(call, session) for call in calls])
    is_answer = not reply.truncated and not reply.messages[-1].get("tool_calls")
    reward = numeric(reply.answer, task.row["answer"]) if is_answer else 0.0
    return [reply.trajectory(reward, metrics={"calls": num_calls})]
