"""Two models agree on a code: Bob alone sees an object and sends two digits, Alice alone sees three
objects and picks his.

    python scripts/demo_data.py --task referential --out data/referential    # bob.jsonl,
    alice.jsonl to warm them up
    rl-core train --env_path envs/referential_game.py --actors.bob.model BOB --actors.alice.model
    ALICE --out runs/game \
        --group_size 8 --max_tokens 4 --max_prompt_tokens 64 --algo.entropy_coef 0.01

Both earn 1 if he sent two digits and nothing else, and she picks the object that he saw.
docs/actors.md has all commands and their results.
"""

import random
import re

OBJECTS = "abcdefghijklmnop"
NUM_EVAL = 128
truncated_reward = 0.0  # who was cut off ends the game
turns = "bob -> alice"
system_prompts = {"bob": "Send {{ object }} as two digits.", "alice": "Which of {{ candidates }}?"}


def load_tasks(split):
    """2,000 different games, with every object as often as the others."""
    rng, games = random.Random(0), {}
    while len(games) < 2000:
        seen = OBJECTS[len(games) % len(OBJECTS)]
        others = rng.sample(OBJECTS.replace(seen, ""), 2)
        shown = "".join(rng.sample([seen, *others], 3))
        games[seen, shown] = {"prompt": "Go.", "object": seen, "candidates": shown}
    games = list(games.values())
    if split == "train":
        return games[NUM_EVAL:]
    return games[:NUM_EVAL]


def reward_fn(messages, object):
    sent = messages[-2]["content"].strip()
    picked = messages[-1]["content"].strip()
    if not re.fullmatch("[0-9]{2}", sent):
        return 0.0
    return float(picked == object)
