"""Word problems that are made up: a reader of one sentence at a time finds the answer."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import stage
from kit import ROOT

from rl_core.environments.env_file import load_env


def env_of(name: str):
    return load_env(str(ROOT / f"envs/{name}.py"))


def rows_of(name: str) -> list[dict]:
    return env_of(name).load_tasks("train")


def reward(name: str, reply: str, answer) -> float:
    return stage.play(env_of(name), reply, row={"prompt": "?", "answer": answer}).reward


def test_a_problem_is_in_one_split_and_levels_are_even():
    train, held_out = (env_of("word_problems").load_tasks(split) for split in ("train", "eval"))
    assert len(train) > 2500 and len(held_out) > 250
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    counts = Counter(row["level"] for row in train).values()
    assert max(counts) < 1.5 * min(counts)


STEPS = {
    r"has (\d+) \w+\.$": lambda count, n: n,
    r"gets (\d+) more": lambda count, n: count + n,
    r"gives away (\d+)": lambda count, n: count - n,
    r"buys (\d+) boxes with (\d+)": lambda count, n, each: count + n * each,
    r"has (\d+) times as many": lambda count, n: count * n,
    r"equally with (\d+) friends": lambda count, n: Fraction(count, n + 1),
    r"equally with a friend": lambda count: Fraction(count, 2),
    r"has (\d+) more \w+ than": lambda count, n: count + n,
    r"to walk to": lambda count, *_: count,
}


def reckoned(text: str) -> Fraction:
    """The answer of someone who reads a sentence at a time."""
    *sentences, question = re.findall(r"[^.?]+[.?]", text)
    counts = []
    for sentence in sentences:
        [(pattern, step)] = [of for of in STEPS.items() if re.search(of[0], sentence)]
        numbers = [int(number) for number in re.search(pattern, sentence).groups()]
        counts.append(step(counts[-1] if counts else 0, *numbers))
    return counts[-1] + counts[-2] if "both together" in question else counts[-1]


def test_who_reads_a_sentence_at_a_time_finds_the_answer_and_a_level_is_its_steps():
    for row in rows_of("word_problems")[:800]:
        assert reckoned(row["prompt"]) == row["answer"] > 0, row
        sentences = len(re.findall("[.?]", row["prompt"]))
        assert sentences == row["level"] + 2 + (row["level"] > 2), row
    assert reward("word_problems", "It is 1,204 apples.", 1204) == 1
    assert reward("word_problems", "1204 or 5", 1204) == 0


def test_short_problems_come_first_and_then_those_that_are_solved_half_of_the_time():
    weight = env_of("word_problems").hooks["task_weight"].function
    assert weight(0.5, 0, 1) > weight(0.5, 0, 2) > weight(0.5, 0, 5) > 0
    assert weight(0.5, 3, 5) > weight(0.0, 3, 5) == weight(1.0, 3, 1) > 0
