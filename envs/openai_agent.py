"""A program that exists already is trained as it is: envs/programs/calculator_agent.py, written for
OpenAI's client, asks the model of the run.

    rl-core train --env_path envs/openai_agent.py --model Qwen/Qwen3-0.6B --out runs/agent
    --max_prompt_tokens 1024 --max_tokens 256

Reward: 1 if the program's result is the product. Without --data.train the questions are products of
two digits and one. docs/agents.md; curve on a CPU: docs/evidence/curves.md.
"""

import random

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from programs.calculator_agent import solve

NUM_EVAL = 72
max_turns = 4


def load_tasks(split):
    rows = []
    for a in range(10, 100):
        for b in range(2, 10):
            rows.append({"prompt": f"{a}*{b}?", "answer": str(a * b)})
    random.Random(0).shuffle(rows)
    return rows[NUM_EVAL:] if split == "train" else rows[:NUM_EVAL]


async def agent(task, llm):
    # The endpoint has no certificate to check, and reading those of the system takes 30 ms.
    http = DefaultAsyncHttpxClient(verify=False)
    address = {"base_url": llm.base_url, "api_key": llm.api_key}
    async with AsyncOpenAI(http_client=http, **address) as client:
        return await solve(task.row["prompt"], client)


def reward_fn(result, answer):
    return float((result or "").strip() == answer)
