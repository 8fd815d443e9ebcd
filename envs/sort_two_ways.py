"""Two actors are shown the same five digits: `up` sorts them up, `down` down. The reward is the
share of right positions.

    rl-core train --env_path envs/sort_two_ways.py --actors.up.model MODEL --actors.up.lora.rank 16
    --actors.down.lora_base up \
        --out runs/two_ways --max_tokens 8 --max_prompt_tokens 16

An episode is of one of them, as the row says. They differ by their adapters alone.
docs/actors.md has their results.
"""

import itertools
import random

NUM_EVAL = 128


def load_tasks(split):
    prompts = ["".join(digits) for digits in itertools.permutations("0123456789", 5)]
    random.Random(0).shuffle(prompts)
    chosen = prompts[NUM_EVAL:] if split == "train" else prompts[:NUM_EVAL]
    ways = {"up": False, "down": True}
    return [
        {"prompt": p, "speaker": name, "answer": "".join(sorted(p, reverse=way))}
        for p in chosen
        for name, way in ways.items()
    ]


def turns(task):
    yield task.row["speaker"]


def reward_fn(messages, answer):
    reply = messages[-1]["content"].strip()
    if sorted(reply) != sorted(answer):
        return 0.0
    return sum(a == b for a, b in zip(reply, answer)) / len(answer)  # noqa: B905
