"""Tasks of reasoning-gym by their names and levels (arXiv:2505.24760):
https://github.com/open-thought/reasoning-gym.

    pip install reasoning-gym
    REASONING_GYM=chain_sum,leg_counting REASONING_GYM_LEVELS=0,1,2 rl-core train
    --env_path envs/reasoning_gym_env.py --model M --max_tokens 1024 --out runs/gym

Problems and scores are the library's: from 0 to 1, for what stands in <answer>...</answer>. A level
is one of the task's curriculum, for all its attributes; a task without a curriculum has level 0
alone. There are $REASONING_GYM_SIZE (500) problems of each task and level, drawn from a seed, and a
tenth as many from another one to evaluate. What was run: docs/environments.md.
"""

import difflib
import os
import random
from functools import cache

try:
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset
    from reasoning_gym.utils import extract_answer
except ImportError:
    raise ImportError("reasoning-gym is missing: pip install reasoning-gym") from None

NAMES = os.environ.get("REASONING_GYM", "chain_sum").split(",")
LEVELS = [int(level) for level in os.environ.get("REASONING_GYM_LEVELS", "0").split(",")]
SIZE = int(os.environ.get("REASONING_GYM_SIZE", "500"))
SEEDS = {"train": 1, "eval": 2}
HOW = "Think, then write <answer>...</answer>, the answer alone."

for unknown in {*NAMES} - {*DATASETS}:
    near = ", ".join(difflib.get_close_matches(unknown, DATASETS)) or "see its README"
    raise ValueError(f"REASONING_GYM: reasoning-gym has no task {unknown!r}; near are: {near}")


@cache
def problems(name, level, split):
    """The library's data set. It makes each problem anew when it is asked for."""
    size = SIZE if split == "train" else max(1, SIZE // 10)
    drawn = {"seed": SEEDS[split], "size": size}
    if name not in CURRICULA:
        return create_dataset(name, **drawn)
    curriculum = create_curriculum(name)
    for attribute, defined in curriculum.attributes.items():
        curriculum.set_attr_level(attribute, min(level, len(defined.levels) - 1))
    config = curriculum.generate_configuration(drawn)
    return DATASETS[name][0](config=config)


def load_tasks(split):
    rows = []
    for name in NAMES:
        for level in LEVELS if name in CURRICULA else [0]:
            for index, entry in enumerate(problems(name, level, split)):
                rows.append(
                    {
                        "prompt": f"{entry['question']}\n\n{HOW}",
                        "answer": f"<answer>{entry['answer']}</answer>",
                        "gym": name,
                        "level": level,
                        "index": index,
                        "split": split,
                    }
                )
    random.Random(0).shuffle(rows)
    return rows


def reward_fn(completion, answer, gym, level, index, split):
    held = problems(gym, level, split)
    reply = extract_answer(completion.rpartition("</think>")[2])
    return float(held.score_answer(reply, held[index]))
