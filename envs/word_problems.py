"""Word problems of one to five steps, made up; 1 if the last number of a reply is the answer.

    rl-core train --env_path envs/word_problems.py --model M --max_tokens 512 --out runs/words

The level of a row (column `level`) is the number of its steps: something is bought, given away,
lost, multiplied, shared out, or compared with what another person has, and from level 3 on there is
a number that does not matter. A hash of the prompt says which tenth is held out. Rows of your own:
a prompt, and `answer`, a number. A curriculum draws short ones first, then those solved half of
the time. Needs a GPU, not run.
"""

import random
import zlib

from rl_core.rewards import numeric

PEOPLE = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana")
THINGS = ("apples", "stamps", "marbles", "coins", "books", "shells", "cards", "pens")
PLACES = ("the market", "the beach", "school", "the library")
LEVELS = (1, 2, 3, 4, 5)


def gain(count, who, thing, rng):
    more = rng.randint(2, 30)
    return count + more, f"{who} gets {more} more {thing}."


def loss(count, who, thing, rng):
    fewer = rng.randint(1, count - 1)
    return count - fewer, f"{who} gives away {fewer} {thing}."


def boxes(count, who, thing, rng):
    number = rng.randint(2, 6)
    each = rng.randint(2, 12)
    sentence = f"{who} buys {number} boxes with {each} {thing} each."
    return count + number * each, sentence


def multiple(count, who, thing, rng):
    times = rng.randint(2, 4)
    return count * times, f"Then {who} has {times} times as many {thing} as before."


def share(count, who, thing, rng):
    """Parts are equal: the number of people divides the count."""
    people = [number for number in (2, 3, 4, 5) if count % number == 0]
    if not people:
        return gain(count, who, thing, rng)
    number = rng.choice(people)
    friends = "a friend"
    if number > 2:
        friends = f"{number - 1} friends"
    sentence = f"{who} shares them equally with {friends}, and keeps one part."
    return count // number, sentence


STEPS = (gain, loss, boxes, multiple, share)


def compare(count, who, other, thing, rng):
    """The last step: what another one has, or both together."""
    more = rng.randint(2, 20)
    sentence = f"{other} has {more} more {thing} than {who} has then."
    others = count + more
    if rng.random() < 0.5:
        return others, f"{sentence} How many {thing} has {other}?"
    return count + others, f"{sentence} How many {thing} have both together?"


def make_problem(level, rng):
    """(text, answer)."""
    who, other = rng.sample(PEOPLE, 2)
    thing = rng.choice(THINGS)
    count = rng.randint(3, 40)
    lines = [f"{who} has {count} {thing}."]
    is_compared = level > 1 and rng.random() < 0.5
    for _ in range(level - is_compared):
        # Numbers stay small, and there is always something to give away.
        steps = list(STEPS)
        if count == 1:
            steps.remove(loss)
        if count > 60:
            steps = [loss, share]
        step = rng.choice(steps)
        count, line = step(count, who, thing, rng)
        lines.append(line)
    if level > 2:
        spot = rng.choice(PLACES)
        minutes = rng.randint(2, 59)
        away = f"It takes {who} {minutes} minutes to walk to {spot}."
        where = rng.randint(1, len(lines) - 1)
        lines.insert(where, away)
    if is_compared:
        count, question = compare(count, who, other, thing, rng)
    else:
        question = f"How many {thing} has {who} then?"
    return " ".join([*lines, question]), count


def load_tasks(split):
    rng, rows = random.Random(0), {}
    for number in range(4000):
        level = LEVELS[number % len(LEVELS)]
        prompt, answer = make_problem(level, rng)
        is_held_out = zlib.crc32(prompt.encode()) % 10 == 0
        if is_held_out == (split != "train"):
            rows[prompt] = {
                "prompt": prompt,
                "answer": answer,
                "level": level,
            }
    return list(rows.values())


def reward_fn(completion, answer):
    return numeric(completion, answer)


def task_weight(success_rate, tries, level=1):
    if not tries:
        return 1 / level**2
    return success_rate * (1 - success_rate) + 0.02
