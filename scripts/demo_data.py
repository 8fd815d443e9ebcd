"""Writes the data of a demonstration: sft.jsonl to warm a model up, then train.jsonl and eval.jsonl
to reinforce.

    python scripts/demo_data.py --out data/sort --task sort

sort         Sort five distinct digits. SFT shows a random order of them: the form of an answer,
right only by chance
             (1 in 120), so that what the model can do afterwards, reinforcement learning taught it.
calculator   Multiply with a tool. SFT shows 25 % right calls, 30 % calls with a wrong number and 45
% blind guesses;
             reinforcement learning finds out which of these habits pays.
referential  Two actors, one warm-up each: bob.jsonl and alice.jsonl. Bob is shown to send a common
code half of the time, and
             Alice to heed it half of the time that she hears it; else both draw at random. Tasks
             come from the environment.
tic_tac_toe  sft.jsonl: both seats of games in which every move is legal and drawn at random;
train.jsonl: games against the
             random player. The environment evaluates, and has tasks of self-play.

Prompts come from the load_tasks of the task's environment in envs/; SFT uses only those of its
training split.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import runpy
from collections.abc import Iterator
from pathlib import Path

from rl_core.data.tasks import make_task
from rl_core.environments.env_file import load_env
from rl_core.sampling.episode import merged
from rl_core.types import Message, counter_seed

ENVS = Path(__file__).resolve().parent.parent / "envs"


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
GAME = "tic_tac_toe"


def demo_data(
    task: str, seed: int, num_sft: int, num_train: int, num_eval: int
) -> dict[str, list[dict]]:
    """Rows of sft ({"messages"}), train and eval (as the environment gives them). sft and train
    repeat prompts once all were used, each time in a new order; eval has at most as many rows as
    the environment holds out."""
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
    found: dict[str, list[dict]] = {"bob": [], "alice": []}
    for number, row in enumerate(
        itertools.islice(_shuffles(env.load_tasks("train"), seed, "sft"), num_sft)
    ):
        task = make_task(row, number, env.name, "train")
        sent = code[row["object"]] if rng.random() < 0.5 else f"{rng.randrange(100):02d}"
        found["bob"].append(
            {"messages": [*env.turn_loop.opening(task, "bob"), _says("assistant", sent)]}
        )
        heard = code[row["object"]] if rng.random() < 0.5 else f"{rng.randrange(100):02d}"
        is_right = heard == code[row["object"]] and rng.random() < 0.5
        picked = row["object"] if is_right else rng.choice(row["candidates"])
        seen = merged([*env.turn_loop.opening(task, "alice"), _says("user", heard)])
        found["alice"].append({"messages": [*seen, _says("assistant", picked)]})
    return found


class RandomMover:
    """An actor that draws a free cell of the board."""

    truncated = False

    def __init__(self, rng: random.Random):
        self.rng, self.answer, self.messages = rng, "", []

    async def respond(self, shown: str) -> RandomMover:
        # A first reply begins a conversation, as of other actors.
        seat = self if self.messages else RandomMover(self.rng)
        seat.answer = self.rng.choice([cell for cell in shown[-11:] if cell.isdigit()])
        seat.messages += [_says("user", shown), _says("assistant", seat.answer)]
        return seat


def random_games(seed: int, num_sft: int, num_train: int) -> dict[str, list[dict]]:
    """Rows of sft (a seat's conversation in a random game) and train (games against the random
    player)."""
    env = runpy.run_path(str(ENVS / f"{GAME}.py"))
    mover = RandomMover(random.Random(counter_seed(seed, GAME, "demonstrations")))
    starts = [row for row in env["load_tasks"]("train") if not row.get("opening")]
    deal, found = random.Random(counter_seed(seed, GAME, "starts")), []
    while len(found) < num_sft:
        start = make_task(deal.choice(starts), 0, GAME, "train")
        replies, *_ = asyncio.run(env["play"](start, dict.fromkeys(env["SEATS"], mover)))
        found += [{"messages": reply.messages} for reply in replies.values()]
    train = [starts[n % len(starts)] | {"opponent": "random"} for n in range(num_train)]
    return {"sft": found[:num_sft], "train": train}


def _shuffles(rows: list[dict], *seed: int | str) -> Iterator[dict]:
    for epoch in itertools.count():
        yield from random.Random(counter_seed(*seed, epoch)).sample(rows, len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--task", required=True, choices=[*TASKS, "referential", GAME])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--num_sft", type=int, default=32000, help="500 steps of 64 see each row once"
    )
    parser.add_argument(
        "--num_train", type=int, default=3200, help="200 steps of 16 see each row once"
    )
    parser.add_argument("--num_eval", type=int, default=200)
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.task == "referential":
        data = game_data(args.seed, args.num_sft)
    elif args.task == GAME:
        data = random_games(args.seed, args.num_sft, args.num_train)
    else:
        data = demo_data(args.task, args.seed, args.num_sft, args.num_train, args.num_eval)
    for name, rows in data.items():
        (out / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
        print(f"wrote {out / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
