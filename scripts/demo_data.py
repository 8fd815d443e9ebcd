"""Writes the data of a demonstration: sft.jsonl to warm a model up, then train.jsonl and eval.jsonl to reinforce.

    python scripts/demo_data.py --out data/sort --task sort

sort         Sort five distinct digits. SFT shows a random order of them: the form of an answer, right only by chance
             (1 in 120), so that what the model can do afterwards, reinforcement learning taught it.
calculator   Multiply with a tool. SFT shows 25 % right calls, 30 % calls with a wrong number and 45 % blind guesses;
             reinforcement learning finds out which of these habits pays.

No prompt of eval.jsonl occurs in the other two files, whatever the seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from rl_core.types import Message, counter_seed


def sort_prompts() -> list[str]:
    return ["".join(digits) for digits in itertools.permutations("0123456789", 5)]


def sort_answer(prompt: str) -> str:
    return "".join(sorted(prompt))


def sort_demonstration(prompt: str, rng: random.Random) -> list[Message]:
    return [_says("user", prompt), _says("assistant", "".join(rng.sample(prompt, len(prompt))))]


def calculator_prompts() -> list[str]:
    return [f"{a}*{b}" for a in range(10, 100) for b in range(2, 10)]


def calculator_answer(prompt: str) -> str:
    a, b = map(int, prompt.split("*"))
    return str(a * b)


def calculator_demonstration(prompt: str, rng: random.Random) -> list[Message]:
    habit = rng.random()
    if habit >= 0.55:
        return [_says("user", prompt), _says("assistant", str(rng.randrange(20, 892)))]
    call = prompt if habit < 0.25 else _another(prompt, rng)
    result = calculator_answer(call)
    return [
        _says("user", prompt),
        _says("assistant", f"<call>{call}</call>"),
        _says("tool", result),
        _says("assistant", result),
    ]


def _another(prompt: str, rng: random.Random) -> str:
    a, b = map(int, prompt.split("*"))
    if rng.random() < 0.5:
        return f"{rng.choice([x for x in range(10, 100) if x != a])}*{b}"
    return f"{a}*{rng.choice([x for x in range(2, 10) if x != b])}"


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}


TASKS = {
    "sort": (sort_prompts, sort_answer, sort_demonstration),
    "calculator": (calculator_prompts, calculator_answer, calculator_demonstration),
}


def is_held_out(prompt: str) -> bool:
    """One prompt in ten, the same ones in every run."""
    return counter_seed("held out", prompt) % 10 == 0


def demo_data(task: str, seed: int, num_sft: int, num_train: int, num_eval: int) -> dict[str, list[dict]]:
    """Rows of sft ({"messages"}), train and eval ({"messages", "answer"}). train and sft repeat prompts once all were
    used, each time in a new order; eval has at most as many rows as there are held-out prompts."""
    prompts, answer, demonstration = TASKS[task]
    held_out = [prompt for prompt in prompts() if is_held_out(prompt)]
    known = [prompt for prompt in prompts() if not is_held_out(prompt)]

    def questions(part: str, pool: list[str], count: int) -> list[dict]:
        drawn = itertools.islice(_shuffles(pool, seed, task, part), count)
        return [{"messages": [_says("user", prompt)], "answer": answer(prompt)} for prompt in drawn]

    rng = random.Random(counter_seed(seed, task, "demonstrations"))
    sft_prompts = itertools.islice(_shuffles(known, seed, task, "sft"), num_sft)
    return {
        "sft": [{"messages": demonstration(prompt, rng)} for prompt in sft_prompts],
        "train": questions("train", known, num_train),
        "eval": questions("eval", held_out, min(num_eval, len(held_out))),
    }


def _shuffles(pool: list[str], *seed: int | str) -> Iterator[str]:
    for epoch in itertools.count():
        yield from random.Random(counter_seed(*seed, epoch)).sample(pool, len(pool))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_sft", type=int, default=32000, help="500 steps of 64 see each row once")
    parser.add_argument("--num_train", type=int, default=3200, help="200 steps of 16 see each row once")
    parser.add_argument("--num_eval", type=int, default=200)
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    data = demo_data(args.task, args.seed, args.num_sft, args.num_train, args.num_eval)
    for name, rows in data.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"wrote {out / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main()
