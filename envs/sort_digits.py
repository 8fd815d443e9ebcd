"""Sort five different digits: `31524` -> `12345`. The reward is the share of right positions."""

import itertools
import random

NUM_EVAL = 256


def load_tasks(split):
    prompts = ["".join(digits) for digits in itertools.permutations("0123456789", 5)]
    random.Random(0).shuffle(prompts)
    chosen = prompts[NUM_EVAL:] if split == "train" else prompts[:NUM_EVAL]
    return [
        {"messages": [{"role": "user", "content": p}], "answer": "".join(sorted(p))} for p in chosen
    ]


def reward_fn(messages, answer):
    reply = messages[-1]["content"].strip()
    if sorted(reply) != sorted(answer):
        return 0.0
    return sum(a == b for a, b in zip(reply, answer)) / len(answer)  # noqa: B905
