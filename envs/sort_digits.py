"""Sort five different digits: `31524` -> `12345`. The reward is the share of right positions."""

import itertools
import random

NUM_EVAL = 256


def load_tasks(split):
    rows = []
    for digits in itertools.permutations("0123456789", 5):
        messages = [{"role": "user", "content": "".join(digits)}]
        rows.append({"messages": messages, "answer": "".join(sorted(digits))})
    random.Random(0).shuffle(rows)
    if split == "train":
        return rows[NUM_EVAL:]
    return rows[:NUM_EVAL]


def reward_fn(messages, answer):
    reply = messages[-1]["content"].strip()
    if sorted(reply) != sorted(answer):
        return 0.0
    return sum(a == b for a, b in zip(reply, answer)) / len(answer)  # noqa: B905


def teacher_prompt(task, answer):
    """With --algo.teacher self the teacher reads the solution too (scripts/self_distill.py)."""
    return f"{task.messages[-1]['content']}={answer}"
