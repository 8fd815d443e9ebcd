"""Guess a number in several turns: the model names one, and hears `higher` or `lower` until it is
right or has no try left.

    rl-core train --env_path envs/guess_number.py --model M --out runs/guess --max_tokens 256

Rows: {"prompt", "secret": 14, "tries": 3}; without --data.train, ranges of 7, 15, 31 and 63 numbers
(levels 1 to 4), with as many tries as halving needs. Reward: 1 if the number was found. A reply
that is not one number alone costs a try. Curve on a CPU: docs/curves.md.
"""

import random
import re
import zlib

HOW = (
    "I think of a number from {} to {}. You have {} tries; reply with a number alone. I say higher "
    "or lower."
)
max_turns = 6


def load_tasks(split):
    """A hash of the range says which tenth is held out."""
    rng, found = random.Random(0), {}
    for tries in (3, 4, 5, 6):
        for _ in range(600):
            low = rng.randint(1, 100 - 2**tries)
            high = low + 2**tries - 2
            prompt, secret = HOW.format(low, high, tries), rng.randint(low, high)
            row = {
                "prompt": prompt,
                "low": low,
                "high": high,
                "secret": secret,
                "tries": tries,
                "level": tries - 2,
            }
            found[prompt, secret] = row
    return [
        row
        for row in found.values()
        if (zlib.crc32(row["prompt"].encode()) % 10 == 0) == (split != "train")
    ]


def guessed(messages):
    """The number that the last reply names; None if it is not one number alone."""
    said = re.fullmatch(r"\s*([0-9]{1,9})[\s.]*", messages[-1]["content"].rpartition("</think>")[2])
    return int(said[1]) if said else None


def interact(messages, secret, tries):
    guess, num_tries = (
        guessed(messages),
        sum(message["role"] == "assistant" for message in messages),
    )
    if guess == secret or num_tries >= tries:
        return None
    said = "One number alone, please." if guess is None else "higher" if guess < secret else "lower"
    return [{"role": "user", "content": said}]


def reward_fn(messages, secret):
    return float(guessed(messages) == secret)
