"""Credit of single turns on a CPU: the same runs with and without a baseline of equal states, for
three seeds.

    python scripts/credit.py                          # --seeds 0,1,2 --steps 80 --out FILE.json

A tiny model walks through envs/maze.py. Its warm-up shows walks of which three of ten steps lead
nearer to the goal and the others go anywhere. Then it learns from the reward at the end: once with
state_key (GiGPO), once with --algo.gigpo_coef 0 (GRPO). Prints a table, and after how many episodes
the mean reward of ten steps reached the marks. The runs lie in runs/credit.
"""

from __future__ import annotations

import argparse
import json
import random
import runpy
import shutil
import sys
from datetime import date
from pathlib import Path

from curves import ROOT, SFT, run, write_rows
from make_tiny_model import make_tiny_model

MAZE = runpy.run_path(str(ROOT / "envs/maze.py"))
TASKS, GROUP, WINDOW = 8, 8, 10
MARKS = (0.6, 0.7, 0.8, 0.9)
WAYS = {"grpo": "--algo.gigpo_coef 0", "gigpo": ""}
LEARN = (
    f"rl_core.train --env_path envs/maze.py --group_size {GROUP} --tasks_per_step {TASKS} "
    "--max_tokens 4 --max_prompt_tokens 48 --optim.lr 5e-4 --optim.warmup_steps 5 "
    "--algo.clip_high 0.28 --rollout.save false"
)


def nearer(room: tuple[int, int]) -> list[str]:
    """The steps that lead nearer to the goal."""
    (row, column), (goal_row, goal_column) = room, MAZE["GOAL"]
    down = "d" * (row < goal_row) + "u" * (row > goal_row)
    return [*down, *("r" * (column < goal_column) + "l" * (column > goal_column))]


def walk(rng: random.Random) -> dict:
    """A row of the warm-up."""
    task = rng.choice(MAZE["load_tasks"]("train"))
    state, said = MAZE["start"](task["room"]), {}
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(MAZE["max_turns"]):
        step = rng.choice(nearer(state["room"]) if rng.random() < 0.3 else list(MAZE["STEPS"]))
        messages.append({"role": "assistant", "content": step})
        said = MAZE["interact"](step, state)
        if said.get("done"):
            break
        messages += said["messages"]
    return {"messages": messages if said.get("done") else messages[:-1]}


def measure(seed: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Way -> reward and turns of each step."""
    here, rng = f"runs/credit/{seed}", random.Random(seed)
    shutil.rmtree(ROOT / here, ignore_errors=True)
    make_tiny_model(ROOT / here / "model", seed=seed)
    write_rows(ROOT / here / "sft.jsonl", [walk(rng) for _ in range(4000)])
    run(
        f"rl_core.train {SFT} --tasks_per_step 32 --model {here}/model --data.train "
        f"{here}/sft.jsonl --max_prompt_tokens 48 --max_tokens 60 --num_steps 100 --seed {seed} "
        f"--out {here}/warm"
    )
    found = {}
    for way, flags in WAYS.items():
        run(
            f"{LEARN} {flags} --model {here}/warm/hf/policy --num_steps {steps} --seed {seed} "
            f"--out {here}/{way}"
        )
        lines = (ROOT / here / way / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found[way] = {
            name: [round(row[f"rollout/policy/{name}_mean"], 3) for row in rows]
            for name in ("reward", "turns")
        }
    return found


def means(values: list[float]) -> list[float]:
    """Of each ten steps."""
    found = []
    for first in range(0, len(values), WINDOW):
        part = values[first : first + WINDOW]
        found.append(sum(part) / len(part))
    return found


def episodes_to(rewards: list[float], mark: float) -> int | None:
    """Episodes until the mean reward of the last ten steps reached the mark."""
    for step in range(WINDOW, len(rewards) + 1):
        if sum(rewards[step - WINDOW : step]) / WINDOW >= mark:
            return step * TASKS * GROUP
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, help="JSON with every step's numbers")
    args = parser.parse_args()
    found = {}
    for seed in args.seeds.split(","):
        found[seed] = measure(int(seed), args.steps)
        for way, of in found[seed].items():
            rewards = " ".join(f"{mean:.2f}" for mean in means(of["reward"]))
            turns = " ".join(f"{mean:.1f}" for mean in means(of["turns"]))
            reached = [episodes_to(of["reward"], mark) for mark in MARKS]
            print(f"seed {seed} {way:<14} reward {rewards}  turns {turns}  {MARKS}: {reached}")
    if args.out:
        args.out.write_text(json.dumps({"date": str(date.today()), "seeds": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
