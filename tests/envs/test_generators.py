"""Word problems that are made up: a reader of one sentence at a time finds the answer."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from fractions import Fraction

import pytest
import stage
from kit import ROOT
from test_each_env import instructed

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


def test_sentences_one_by_one_hold_the_answer():
    for row in rows_of("word_problems")[:800]:
        assert reckoned(row["prompt"]) == row["answer"] > 0, row
        sentences = len(re.findall("[.?]", row["prompt"]))
        assert sentences == row["level"] + 2 + (row["level"] > 2), row
    assert reward("word_problems", "It is 1,204 apples.", 1204) == 1
    assert reward("word_problems", "1204 or 5", 1204) == 0


def test_short_and_half_solved_problems_come_first():
    weight = env_of("word_problems").hooks["task_weight"].function
    assert weight(0.5, 0, 1) > weight(0.5, 0, 2) > weight(0.5, 0, 5) > 0
    assert weight(0.5, 3, 5) > weight(0.0, 3, 5) == weight(1.0, 3, 1) > 0


INSTRUCTIONS = runpy.run_path(str(ROOT / "envs/instructions.py"))


def test_each_instruction_can_be_followed_and_splits_share_no_wording():
    texts = []
    for split, number in (("train", 500), ("eval", 200)):
        rows = INSTRUCTIONS["load_tasks"](split)
        assert len(rows) == number
        for row in rows:
            assert INSTRUCTIONS["reward_fn"](*instructed(row), row["rules"]) == 1.0, row
        texts.append({row["prompt"].split(". ")[1] for row in rows})
    assert not texts[0] & texts[1]


# (rule, argument, replies that follow it, replies that do not)
FOLLOWED = [
    ("sentences", 2, ["It is dark. Bees sleep!"], ["It is dark.", "It is dark. Bees", "A. B. C."]),
    ("at_most", 4, ["one two, three four"], ["one two three four five"]),
    ("bullets", 2, ["- one bee\n\n- two bees", "* a b\n* c d"], ["- a b c", "- a b\nc d\n- e f"]),
    ("json", ["a", "b"], ['{"b": "one two", "a": 1}'], ['{"a": "x y z"}', "a b c", '["a", "b"]']),
    ("json", ["a", "b"], [], ['```{"a": 1, "b": 2}```', '{"a": 1, "b": 2, "c": 3}', "[" * 9999]),
    ("include", ["sun", "sea"], ["Sea and SUN"], ["seas and sun", "the sun shines"]),
    ("avoid", "the", ["then we slept"], ["we saw The sea"]),
    ("first", "Once", ["Once we slept", '"Once we slept"'], ["once we slept", "We once slept"]),
    ("last", "That is all.", ["Bees. That is all."], ["Bees. That is all"]),
    ("upper", "", ["BEES FLY, 2 HOURS"], ["BEES fly far"]),
    ("lower", "", ["bees fly far."], ["Bees fly far."]),
]


@pytest.mark.parametrize("rule, argument, right, wrong", FOLLOWED)
def test_a_rule_of_an_instruction_is_checked(rule, argument, right, wrong):
    rules = [{"rule": rule, "argument": argument}]
    rewards = [INSTRUCTIONS["reward_fn"](reply, rules) for reply in right + wrong]
    assert rewards == [1.0] * len(right) + [0.0] * len(wrong)
