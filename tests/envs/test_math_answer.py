"""envs/math_answer.py on the real GSM8K: 7,473 + 1,319 rows."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit import load_rows

from rl_core.data.task_rows import TaskSource
from rl_core.engines.scripted import ScriptedActor, plain_chat
from rl_core.environments.env_file import load_env
from rl_core.environments.row_columns import check_columns
from rl_core.rewards import maths
from rl_core.sampling.actor import EpisodeActors
from rl_core.types import SamplingParams

CHAT, PARAMS = plain_chat(), SamplingParams(max_tokens=100_000)
ENV = str(Path(__file__).parents[2] / "envs/math_answer.py")


def scores(tasks, reply_to) -> list[float]:
    """The reward of reply_to(row) for each task, in as many episodes at once as a run has."""
    env = load_env(ENV)

    async def play(tasks):
        actors = (
            {"policy": ScriptedActor(name="policy", chat=CHAT, replies=[reply_to(t.row)])}
            for t in tasks
        )
        played = [
            env.rollout(t, EpisodeActors(a, PARAMS, 0, "s"))
            for t, a in zip(tasks, actors, strict=True)
        ]
        return [trajectory.reward for [trajectory] in await asyncio.gather(*played)]

    return [
        reward
        for i in range(0, len(tasks), 256)
        for reward in asyncio.run(play(tasks[i : i + 256]))
    ]


def source(*answers) -> list:
    rows = [{"prompt": "?", "answer": answer} for answer in answers]
    return list(TaskSource(rows, env="m", split="train", seed=0, shuffle=False))


@pytest.fixture(scope="module")
def tasks(data_dir, request):
    """All rows with --slow, else every fifth."""
    tasks = []
    for split, count in (("train", 7473), ("test", 1319)):
        rows = load_rows(str(data_dir / f"gsm8k_{split}.jsonl.gz"))
        check_columns(load_env(ENV), rows, split=split)
        tasks += TaskSource(rows, env="math_answer", split=split, seed=0, shuffle=False)
        assert len(rows) == count
    return tasks if request.config.option.slow else tasks[::5]


def final(row) -> str:
    return row["answer"].split("####")[1].strip()


def changed(row) -> str:
    """The final answer with 1 added, thousands separated as before."""
    number = int(final(row).replace(",", "")) + 1
    return f"{number:,}" if "," in final(row) else str(number)


def test_every_reference_scores_1(tasks):
    rewards = scores(tasks, lambda row: row["answer"])
    assert [tasks[i].row for i, reward in enumerate(rewards) if reward != 1] == []


def test_every_changed_number_scores_0(tasks):
    rewards = scores(tasks, lambda row: re.sub(r"####.*", f"#### {changed(row)}", row["answer"]))
    assert [tasks[i].row for i, reward in enumerate(rewards) if reward != 0] == []


FORMATS = {
    "boxed": "First 3+4=7. Hence \\boxed{{{n}}}.",
    "####": "She sells 3/4 of 16.\n#### {n}",
    "sentence": "So, after 2 days, the answer is {n}.",
    "units": "She earns ${n} and has {n} eggs.",
    "thousands separators": "In all, that makes {n:,}",
    "fraction": "The answer is {twice}/2.",
    "percent": "That is $\\boxed{{{n}\\%}}$.",
    "LaTeX": "\\[ x = \\frac{{{twice}}}{{2}} \\]",
}


@pytest.mark.parametrize("style", FORMATS)
def test_every_number_counts_in_eight_formats_and_a_changed_one_in_none(style, tasks, request):
    for task in tasks if request.config.option.slow else tasks[::20]:
        number = int(final(task.row).replace(",", ""))
        for n, reward in ((number, 1), (number + 1, 0)):
            reply = FORMATS[style].format(n=n, twice=2 * n)
            assert maths(reply, task.row["answer"]) == reward, (reply, final(task.row))


def test_sums_are_graded_right_and_held_out_apart():
    train, held_out = (load_env(ENV).load_tasks(split) for split in ("train", "eval"))
    assert {row["level"] for row in held_out} == {1, 2, 3} and 150 < len(held_out) < len(train) / 7
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    by_prompt = {row["prompt"]: row["answer"] for row in train + held_out}
    assert [by_prompt[f"What is {asked}?"] for asked in ("2+15", "13+16")] == [17, 29]
    assert by_prompt == {
        row["prompt"]: row["answer"]
        for split in ("train", "eval")
        for row in load_env(ENV).load_tasks(split)
    }


def test_a_task_asks_the_question(tasks):
    assert [m["content"] for m in tasks[0].messages] == [tasks[0].row["question"]]


@pytest.mark.parametrize(
    "style",
    ["{}", "The answer is {}.", "**{}**", "${}$", "\\boxed{{{}}}", "So she makes ${}.", "It costs \\${} in all.", "#### ${}",
     "\\boxed{{{}\\text{{ "
     "eggs}}}}", "\\boxed{{\\text{{{} eggs}}}}", "#### {} dollars", "{}.00", "First 3+4=7. Then #### {}\n"],
)  # fmt: skip
@pytest.mark.parametrize("number", ["18", "1,080", "1080", "-7", "2,520,000"])
def test_the_number_counts_and_not_how_it_is_written(style, number):
    reply = style.format(number)

    def score(answer):
        return scores(source(answer), lambda row: reply)[0]

    value = int(number.replace(",", ""))
    assert [score(number), score(value), score(f"steps 99\n#### {value}")] == [1, 1, 1]
    assert [score(value + 1), score(str(value * 10)), score(f"#### {-value}")] == [0, 0, 0]


def test_fractions_and_formulas_count_too():
    assert [maths(text, "-7%") for text in ("-7", r"\boxed{-7\%}", "-0.07", "7%")] == [1, 1, 0, 0]
    tasks = source(r"\frac{1}{2}", "0.5", r"$\frac{1}{2}$", "1/2")
    assert scores(tasks, lambda row: r"Hence \boxed{\frac{1}{2}}.") == [1, 1, 1, 1]
    assert scores(tasks, lambda row: r"Hence \boxed{\frac{1}{3}}.") == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "reply", ["", "   ", "####", "no idea", "(" * 3000, "\\frac{" * 500, "1+" * 3000]
)
def test_a_reply_without_an_answer_scores_0(reply):
    assert scores(source("18"), lambda row: reply) == [0]


def test_no_reply_can_hold_the_interpreter():
    towers = [
        "9^9^9^9",
        "9^{9^{9^9}}",
        "((9^{99})^{99})^{99}",
        "(9^9)^{(9^9)}",
        "9^{99999999999}",
        "99999999!",
        "9**9**9**9",
        r"\binom{100000000}{50000000}",
        r"\sum_{i=1}^{100000000} i^2",
        "[0, 9^{9^{9^9}}]",
        "2^{-9^{9^9}}",
        r"\begin{pmatrix}9^{9^{9^9}}\end{pmatrix}",
        "((9^{99})^{99}\n)^{99}",
    ]
    code = f"""
import sys
sys.path.append({str(Path(ENV).parent)!r})
from math_answer import reward_fn
for tower in {towers!r}:
    for style in ("{{}}", "${{}}$", "\\\\boxed{{{{{{}}}}}}", "#### {{}}"):
        assert reward_fn([{{"content": style.format(tower)}}], "18") == 0
    assert reward_fn([{{"content": "First " + tower + ". Hence \\\\boxed{{18}}."}}], "18") == 1
"""
    # A separate process: code that holds the interpreter would hold the tests too.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_reference_without_an_answer_is_an_error():
    with pytest.raises(RuntimeError, match="answer='none' must hold a number or a formula"):
        scores(source("none"), lambda row: "18")
