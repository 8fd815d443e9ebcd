"""Any number of actors work on one problem, each in turn, and who speaks last answers it for all.

    rl-core train --env_path envs/collaborate.py --data.train problems.jsonl --out runs/team \
        --actors.ann.model A --actors.ben.model B --actors.cleo.api https://host/v1
        --actors.cleo.model C

Rows: {"prompt": "How many ...?", "answer": "12"}; without --data.train, sums of three numbers. They
speak in the order of the flags, twice each, or once if they are more than four. All who learn share
the reward: 1 if the last reply is the answer and nothing else.
"""

import random

max_turns = 8
name_prefix = True
truncated_reward = 0.0  # who was cut off did not speak last
TALK = "You are one of a team. Say in one or two sentences what helps to solve this."
ANSWER = "Time is up. Reply with the answer alone."
NUM_EVAL = 100


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for _ in range(2000):
        a, b, c = (rng.randrange(1, 100) for _ in range(3))
        rows[a, b, c] = {"prompt": f"{TALK}\n\n{a}+{b}+{c}", "answer": str(a + b + c)}
    rows = list(rows.values())
    if split == "train":
        return rows[NUM_EVAL:]
    return rows[:NUM_EVAL]


def turns(actors):
    num_rounds = 2 if 2 * len(actors) <= max_turns else 1
    return [*actors] * num_rounds


def interact(messages, task):
    num_spoken = sum(message["role"] == "assistant" for message in messages)
    if num_spoken < len(task.info["turns"]) - 1:
        return None
    return [{"role": "user", "content": ANSWER}]


def reward_fn(messages, answer):
    reply = messages[-1]["content"].rpartition("</think>")[2]
    return float(reply.strip().lower() == str(answer).strip().lower())
