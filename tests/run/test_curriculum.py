"""task_weight(): which tasks are drawn, by one rank or several, in one run or a resumed one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kit import metrics, trajectories

from rl_core.config import parse_config
from rl_core.data.task_rows import TaskSource
from rl_core.data.tasks.task_mix import TaskMix
from rl_core.environments.env_file import load_env
from rl_core.run.curriculum import Progress, WeightedOrder, record, task_weight
from rl_core.run.plan.plan import make_plan
from rl_core.tools.cli import main as rl_core
from rl_core.train import main
from rl_core.types import Task

ROOT = Path(__file__).parents[2]
COUNT = """
def load_tasks(split): return [{"prompt": str(n), "n": n} for n in range(12)]
def reward_fn(completion, n): return float(len(completion) % 3 == 0) if n % 3 else 0.0
"""
HOOK = (
    "def task_weight(success_rate, tries, n): return (1 - success_rate) * (n % 3) + (n == 6) * "
    "(tries < 2)\n"
)


def source(num_rows: int = 6, env: str = "e", seed: int = 0) -> TaskSource:
    rows = [{"prompt": str(n)} for n in range(num_rows)]
    return TaskSource(rows, env=env, split="train", seed=seed, shuffle=True)


def weighted(weights: list[float], **more) -> TaskSource:
    result = source(len(weights), **more)
    result.draw_by(WeightedOrder(result, lambda row, known: weights[row], is_by_row=True))
    return result


def drawn(tasks: TaskSource, position: int, n: int) -> list[Task]:
    return [tasks.task(p) for p in range(position, position + n)]


def rows_drawn(tasks: TaskSource, position: int, n: int) -> list[int]:
    return [int(t.id.split("/")[1]) for t in drawn(tasks, position, n)]


def test_tasks_are_drawn_by_weight_and_never_those_of_weight_0():
    weights = [0.0, 1.0, 2.0, 5.0, 0.0]
    firsts, pairs = [0] * 5, 0
    for start in range(1500):
        tasks = weighted(weights)
        tasks.order.record([], start)
        first, second, third = rows_drawn(tasks, start, 3)
        assert {first, second, third} == {1, 2, 3}
        firsts[first] += 1
        pairs += (first, second) == (3, 1)
    assert [n / 1500 for n in firsts] == pytest.approx([0, 1 / 8, 2 / 8, 5 / 8, 0], abs=0.04)
    assert pairs / 1500 == pytest.approx(5 / 8 * 1 / 3, abs=0.04)


def test_every_weighted_task_comes_before_one_comes_twice():
    weights = [float(n % 7) for n in range(3000)]
    tasks, can = weighted(weights), sum(n % 7 > 0 for n in range(3000))
    result = rows_drawn(tasks, 0, 2 * can)
    assert len(set(result[:can])) == can and result[can:] == result[:can]
    assert [rows_drawn(weighted(weights), p, 1) for p in (2000, 5, 1023, 1024)] == [
        [result[p]] for p in (2000, 5, 1023, 1024)
    ]
    assert rows_drawn(weighted(weights, seed=1), 0, can) != result[:can]


def test_what_is_known_counts_the_newest_group_half():
    known = Progress()
    assert (known.tries, known.success_rate, known.mean_reward) == (0, 0.5, 0.0)
    for rate, mean in ((1.0, 2.0), (0.0, 1.0), (0.5, -1.0)):
        known.add(rate, mean)
    assert (known.tries, known.success_rate, known.mean_reward) == (3, 0.5, 0.25)


def test_rows_that_were_left_out_are_neither_drawn_nor_weighed():
    tasks, asked = source(8), []
    tasks.keep([1, 4, 6])

    def weigh(row, known):
        asked.append(row)
        return float(not known.tries)

    tasks.draw_by(WeightedOrder(tasks, weigh, is_by_row=True))
    tasks.order.record([(4, 1.0, 1.0), (5, 1.0, 1.0)], 10)
    assert asked == [1, 4, 6, 4]
    assert sorted(rows_drawn(tasks, 10, 2)) == [1, 6]


def test_in_a_mix_each_environment_has_its_own_curriculum_or_none():
    solved: list[int] = []
    one, other, plain = source(env="one"), source(env="other"), source(env="other")
    one.draw_by(
        WeightedOrder(one, lambda row, known: float(known.success_rate < 0.9), is_by_row=False)
    )
    mix = TaskMix([one, other], [2.0, 1.0])
    position = 0
    for step in range(4):
        tasks = drawn(mix, position, 3)
        rows = [int(t.id.split("/")[1]) for t in tasks if t.env == "one"]
        assert len(rows) == 2 and not set(rows) & set(solved)
        assert [t.id for t in tasks if t.env == "other"] == [plain.task(step).id]
        position += 3
        results = [(t.env, t.id, 1.0, 1.0) for t in tasks]
        if step < 2:
            record(mix, results, position)
            solved += rows
    assert len(solved) == 4 and rows != solved[:2]
    with pytest.raises(ValueError, match=r"one: task_weight\(\) gives 0 for all 6 tasks"):
        record(mix, [("one", f"train/{row}", 1.0, 1.0) for row in range(6) for _ in range(4)], 12)


def flags(env: Path, model: Path, out: Path, steps: int, *more: str) -> list[str]:
    sizes = [
        "--tasks_per_step",
        "4",
        "--group_size",
        "4",
        "--max_tokens",
        "3",
        "--max_prompt_tokens",
        "8",
    ]
    return [
        "--model",
        str(model),
        "--env_path",
        str(env),
        *sizes,
        "--num_steps",
        str(steps),
        "--out",
        str(out),
        *more,
    ]


def drawn_by(out: Path, step: int) -> list[tuple[str, str]]:
    """(group, task) of a step's episodes."""
    result = [
        t
        for file in sorted((out / "rollouts").glob(f"step_{step:06d}*"))
        for t in trajectories(file)
    ]
    return sorted({(t["group_id"], f"{t['env']}:{t['task_id']}") for t in result})


def test_a_resumed_run_draws_what_an_uninterrupted_one_does(tiny_model, tmp_path):
    (tmp_path / "a.py").write_text(COUNT + HOOK)
    (tmp_path / "b.py").write_text(COUNT)
    env, full, parts = (
        f"{tmp_path / 'a.py'},{tmp_path / 'b.py'}",
        tmp_path / "whole",
        tmp_path / "parts",
    )
    more = ["--algorithm", "dapo", "--optim.lr", "1e-3"]
    assert main(flags(env, tiny_model, full, 5, *more)) == 0
    assert main(flags(env, tiny_model, parts, 2, *more)) == 0
    assert main(flags(env, tiny_model, parts, 5, *more, "--resume")) == 0
    for step in range(1, 6):
        assert drawn_by(full, step) == drawn_by(parts, step)
    names = [n for n in metrics(full)[0] if not n.startswith("time/")]
    assert [[row.get(n) for n in names] for row in metrics(full)] == [
        [row.get(n) for n in names] for row in metrics(parts)
    ]
    rows = [
        int(task.rpartition("/")[2])
        for step in range(1, 6)
        for _, task in drawn_by(full, step)
        if "a:" in task
    ]
    assert all(row % 3 or row == 6 for row in rows) and rows.count(6) <= 2
    state = json.loads((full / "checkpoints/step_000005/state.json").read_text())["curriculum"]
    assert set(state) == {"a"} and {int(row) for row in state["a"]["tried"]} == set(rows)
    assert sum(tries for tries, _, _ in state["a"]["tried"].values()) == len(rows)


def test_two_ranks_draw_what_one_does(tiny_model, torchrun, tmp_path):
    (tmp_path / "a.py").write_text(COUNT + HOOK)
    more = ["--optim.lr", "0", "--algorithm", "dapo", "--rollout.max_concurrent", "4"]
    assert main(flags(tmp_path / "a.py", tiny_model, tmp_path / "one", 4, *more)) == 0
    torchrun(
        2, "-m", "rl_core.train", *flags(tmp_path / "a.py", tiny_model, tmp_path / "two", 4, *more)
    )
    for step in range(1, 5):
        assert drawn_by(tmp_path / "one", step) == drawn_by(tmp_path / "two", step)
    one, two = (
        json.loads((tmp_path / n / "checkpoints/step_000004/state.json").read_text())["curriculum"][
            "a"
        ]
        for n in ("one", "two")
    )
    assert one == two and any(0 < rate < 1 for _, rate, _ in one["tried"].values())


@pytest.mark.parametrize(
    "hook, message",
    [
        ("def task_weight(tries): return 0", "task_weight() gives 0 for all 12 tasks"),
        ("def task_weight(tries): return 1 / tries", "env.py:4: ZeroDivisionError"),
        (
            "def task_weight(n): return -n",
            "for task train/1 with tries=0, success_rate=0.5, mean_reward=0 gave -1",
        ),
        ("def task_weight(): return None", "gave None; it must give a finite number of at least 0"),
        ("def task_weight(): return 'much'", "gave 'much'; it must"),
        ("def task_weight(): return float('nan')", "gave nan; it must"),
        ("def task_weight(succes_rate): return 1", "asks for 'succes_rate'; "),
        (
            "def task_weight(trajectory): return 1",
            "asks for 'trajectory'; ",
        ),
        ("async def task_weight(): return 1", "drop the async"),
        ("task_weight = 3", "task_weight = 3 must be a function"),
        ("def task_weigth(tries): return 1", "did you mean 'task_weight'"),
    ],
)
def test_an_unfit_hook_is_refused_before_a_model_loads(hook, message, tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(COUNT + hook + "\n")
    with pytest.raises(ValueError) as error:
        make_plan(parse_config(flags(tmp_path / "env.py", tiny_model, tmp_path / "out", 1)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "hook, message",
    [
        ("def task_weight(tries): return 1 - tries / 0.5 if tries else 1", "with tries=1"),
        ("def task_weight(tries, n): return int(not tries and n < 8)", "gives 0 for all 12 tasks"),
    ],
)
def test_a_hook_that_becomes_unfit_stops_the_run_with_one_line(
    hook, message, tiny_model, tmp_path, capsys
):
    (tmp_path / "env.py").write_text(COUNT + hook + "\n")
    assert main(flags(tmp_path / "env.py", tiny_model, tmp_path / "out", 3)) == 1
    [line] = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert message in line


def test_the_documented_curriculum(tmp_path):
    text = (ROOT / "docs/environments.md").read_text()
    (tmp_path / "sums.py").write_text(
        re.search(r"```python\n(# sums\.py\n.*?)```", text, re.DOTALL)[1]
    )
    rows = load_env(str(tmp_path / "sums.py")).load_tasks("train")
    assert [sum(row["digits"] == n for row in rows) for n in (1, 2, 3)] == [100] * 3
    assert rl_core(["check", str(tmp_path / "sums.py")]) == 0
    hook, known = (
        load_env(str(tmp_path / "sums.py")).hooks["task_weight"],
        [(0, 0.5), (4, 0.0), (4, 0.5), (4, 1.0)],
    )
    weights = [
        task_weight(hook, "train/0", rows[0], Progress(tries=n, success_rate=rate))
        for n, rate in known
    ]
    assert weights == pytest.approx([1, 0.02, 0.27, 0.02])
