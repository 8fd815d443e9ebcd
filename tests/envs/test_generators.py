"""Problems that are made up: what another library finds is the answer, and nothing else is."""

from __future__ import annotations

import json
import re
from collections import Counter
from fractions import Fraction

import pytest
import stage
import sympy
from kit import ROOT, metrics, run

from rl_core.plugins.env_file import load_env

X, Y = sympy.symbols("x y")


def env_of(name: str):
    return load_env(str(ROOT / f"envs/{name}.py"))


def rows_of(name: str) -> list[dict]:
    return env_of(name).load_tasks("train")


def reward(name: str, said: str, answer) -> float:
    return stage.play(env_of(name), said, row={"prompt": "?", "answer": answer}).reward


@pytest.mark.parametrize("name", ["algebra", "word_problems"])
def test_a_problem_is_in_one_split_and_levels_are_even(name):
    train, held_out = (env_of(name).load_tasks(split) for split in ("train", "eval"))
    assert len(train) > 2500 and len(held_out) > 250
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    counts = Counter(row["level"] for row in train).values()
    assert max(counts) < 1.5 * min(counts)


# Algebra


def parsed(text: str):
    """A side of an equation as sympy's expression."""
    text = re.sub(r"([0-9])([xy(])", r"\1*\2", text.replace("^", "**"))
    return sympy.sympify(text, locals={"x": X, "y": Y})


def solved(asked: str) -> str:
    """What sympy says of the equation or inequality, in the form of answers."""
    equations = []
    for equation in asked.split(" and "):
        left, sign, right = equation.partition(re.search("<=|>=|=|<|>", equation)[0])
        equations.append((parsed(left), sign, parsed(right)))
    left, sign, right = equations[0]
    if len(equations) == 2:
        found = sympy.solve([a - b for a, _, b in equations], [X, Y])
        return f"x = {found[X]}, y = {found[Y]}"
    if sign == "=":
        return " or ".join(f"x = {root}" for root in sorted(sympy.solve(left - right, X)))
    found = sympy.solve_univariate_inequality(sympy.Rel(left, right, sign), X, relational=False)
    edge = found.end if found.start == -sympy.oo else found.start
    is_open = found.right_open if found.start == -sympy.oo else found.left_open
    side = "<" if found.start == -sympy.oo else ">"
    return f"x {side}{'' if is_open else '='} {edge}"


def test_sympy_finds_the_answers():
    seen = Counter()
    for row in rows_of("algebra")[:240]:
        asked = row["prompt"].split("\n")[0].removeprefix("Solve ")
        assert solved(asked) == row["answer"], row
        seen[row["kind"], row["level"]] += 1
    assert len(seen) == 12


@pytest.mark.parametrize(
    "answer, said, right",
    [
        ("x = 3", "3x = 9\nx=3", 1),
        ("x = 3", "so $x = 3$.", 1),
        ("x = 3", "x = 6/2", 1),
        ("x = 5/2", "x = 2.5", 1),
        ("x = 3", "x = 3 or x = 4", 0),
        ("x = 3", "x = 3\nThat is it.", 0),
        ("x = 3", "3", 0),
        ("x = 3", "x = 3/0", 0),
        ("x = 3", "x = 3000000000000", 0),
        ("x = 3", "", 0),
        ("x = -1/2 or x = 2", "x = 2, x = \u22121/2", 1),
        ("x = -1/2 or x = 2", "x = 2", 0),
        ("x = 1, y = -4", "y = -4 and x = 1", 1),
        ("x = 1, y = -4", "x = -4, y = 1", 0),
        ("x >= 5/2", "x \u2265 2.5", 1),
        ("x >= 5/2", "x > 2.5", 0),
        ("x >= 5/2", "x <= 2.5", 0),
    ],
)
def test_solutions_are_compared_as_numbers(answer, said, right):
    reward_fn = env_of("algebra").hooks["reward_fn"].function
    assert reward_fn(said, answer) == right


# Word problems

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


# Steps of the real command


@pytest.fixture(scope="module")
def warm(tiny_model, made_once):
    """A tiny model that says x = 1, 2 or 3 to each equation, and 1, 2 or 3 to other questions."""

    def make(out):
        out.mkdir()
        rows = []
        for number in range(120):
            said = number % 3 + 1
            for asked, answer in (("Solve it", f"x = {said}"), ("How many?", str(said))):
                messages = [{"role": "user", "content": asked}]
                rows.append({"messages": [*messages, {"role": "assistant", "content": answer}]})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / "sft.jsonl").write_text(text)
        how = "--algorithm sft --max_tokens 20 --max_prompt_tokens 40 --tasks_per_step 16 "
        how += "--num_steps 60 --optim.lr 4e-3 --data.train"
        run(out / "run", "--model", tiny_model, how, out / "sft.jsonl")

    return made_once("warm_generators", make) / "run/hf/policy"


@pytest.mark.parametrize("name, prompt", [("algebra", "Solve it"), ("word_problems", "How many?")])
def test_three_steps_learn(name, prompt, warm, tmp_path):
    row = {"prompt": prompt, "answer": {"algebra": "x = 2"}.get(name, 2), "level": 1}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n")
    how = "--tasks_per_step 1 --group_size 16 --num_steps 3 --max_tokens 20 --max_prompt_tokens 40"
    path = ROOT / f"envs/{name}.py"
    rows = ["--data.train", tmp_path / "rows.jsonl"]
    out = run(tmp_path / "run", "--model", warm, "--env_path", path, *rows, how)
    found = [line for line in metrics(out) if "rollout/policy/reward_mean" in line]
    assert len(found) == 3 and any(line.get("learn/policy/grad_norm", 0) > 0 for line in found)
    assert not any(line.get("rollout/policy/failed") for line in found)
