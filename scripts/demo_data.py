"""Writes the data of a demonstration: sft.jsonl for a warm-up by SFT, then train.jsonl and
eval.jsonl for RL.

    python scripts/demo_data.py --out data/sort --task sort

sort         Sort five distinct digits. SFT shows a random order of the digits: the form of an
             answer, right only by chance (1 in 120). RL then teaches the task itself.
calculator   Multiply with a tool. SFT shows 25 % right calls, 30 % calls with a wrong number and
             45 % guesses; RL finds the habit with the highest reward.
referential  Two actors with one warm-up each: bob.jsonl and alice.jsonl. Bob sends a common code
             half of the time, and Alice follows the code half of the time; otherwise both draw at
             random. Tasks come from the environment.

Prompts come from load_tasks of the task's environment in envs/. SFT uses only the training split.
"""

from __future__ import annotations

import itertools
import random
import runpy
from collections.abc import Iterator
from pathlib import Path

from script_tools import ROOT, make_parser, write_rows

from rl_core.data.task_rows import make_task
from rl_core.environments.env_file import load_env
from rl_core.sampling.turn_views import merged
from rl_core.types import Message, counter_seed

ENVS = ROOT / "envs"


def sort_demonstration(prompt: str, rng: random.Random) -> list[Message]:
    return [_says("user", prompt), _says("assistant", "".join(rng.sample(prompt, len(prompt))))]


def calculator_demonstration(prompt: str, rng: random.Random) -> list[Message]:
    habit = rng.random()
    if habit >= 0.55:
        return [_says("user", prompt), _says("assistant", str(rng.randrange(20, 892)))]
    a, b = map(int, prompt.split("*"))
    if habit >= 0.25 and rng.random() < 0.5:
        a = rng.choice([x for x in range(10, 100) if x != a])
    elif habit >= 0.25:
        b = rng.choice([x for x in range(2, 10) if x != b])
    call, result = f"<call>{a}*{b}</call>", str(a * b)
    return [
        _says("user", prompt),
        _says("assistant", call),
        _says("tool", result),
        _says("assistant", result),
    ]


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


TASKS = {
    "sort": ("sort_digits.py", sort_demonstration),
    "calculator": ("calculator.py", calculator_demonstration),
}


def demo_data(
    task: str, seed: int, num_sft: int, num_train: int, num_eval: int
) -> dict[str, list[dict]]:
    """Rows of sft ({"messages"}), and rows of the environment for train and eval. sft and train
    repeat all prompts, each time in a new order; eval ends with the environment's held-out rows."""
    env, demonstration = TASKS[task]
    load_tasks = runpy.run_path(str(ENVS / env))["load_tasks"]
    train = load_tasks("train")
    rng = random.Random(counter_seed(seed, task, "demonstrations"))
    sft_tasks = itertools.islice(_shuffles(train, seed, task, "sft"), num_sft)
    return {
        "sft": [
            {"messages": demonstration(row["messages"][-1]["content"], rng)} for row in sft_tasks
        ],
        "train": list(itertools.islice(_shuffles(train, seed, task, "train"), num_train)),
        "eval": load_tasks("eval")[:num_eval],
    }


def game_data(seed: int, num_sft: int) -> dict[str, list[dict]]:
    """Rows of the referential game for bob and for alice, each as that actor sees the game."""
    path = str(ENVS / "referential_game.py")
    env, objects = load_env(path), runpy.run_path(path)["OBJECTS"]
    code = {seen: f"{(37 * n + 11) % 100:02d}" for n, seen in enumerate(objects)}
    rng = random.Random(counter_seed(seed, "referential", "demonstrations"))
    rows: dict[str, list[dict]] = {"bob": [], "alice": []}
    games = itertools.islice(_shuffles(env.load_tasks("train"), seed, "sft"), num_sft)
    for number, row in enumerate(games):
        task = make_task(row, number, env.name, "train")
        sent = code[row["object"]] if rng.random() < 0.5 else f"{rng.randrange(100):02d}"
        opening = env.turn_loop.opening(task, "bob")
        rows["bob"].append({"messages": [*opening, _says("assistant", sent)]})
        heard = code[row["object"]] if rng.random() < 0.5 else f"{rng.randrange(100):02d}"
        is_right = heard == code[row["object"]] and rng.random() < 0.5
        picked = row["object"] if is_right else rng.choice(row["candidates"])
        seen = merged([*env.turn_loop.opening(task, "alice"), _says("user", heard)])
        rows["alice"].append({"messages": [*seen, _says("assistant", picked)]})
    return rows


def _shuffles(rows: list[dict], *seed: int | str) -> Iterator[dict]:
    for epoch in itertools.count():
        yield from random.Random(counter_seed(*seed, epoch)).sample(rows, len(rows))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--task", required=True, choices=[*TASKS, "referential"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=32000, help="rows of SFT")
    parser.add_argument("--num_train", type=int, default=3200, help="rows of RL")
    parser.add_argument("--num_eval", type=int, default=200)
    args = parser.parse_args()
    if args.task == "referential":
        data = game_data(args.seed, args.num_sft)
    else:
        data = demo_data(args.task, args.seed, args.num_sft, args.num_train, args.num_eval)
    for name, rows in data.items():
        file = Path(args.out, f"{name}.jsonl")
        write_rows(file, rows)
        print(f"wrote {file}: {len(rows)} rows")


if __name__ == "__main__":
    main()
