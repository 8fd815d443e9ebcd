"""Learning curves of environments on a CPU: a tiny model is warmed up on the form of replies, then
reinforced, for three seeds.

    python scripts/curves.py math_answer                  # one or several of CURVES; --seeds 0,1,2
    python scripts/curves.py math_answer --out DIR        # instead of docs/curves

The warm-up imitates episodes of an actor with habits: it replies in the right form, and knows
little of what is right. What the model can do afterwards beyond these habits, the reward taught it.
Writes NAME.json and NAME.png, where seeds that were measured by the same commands are kept; fails
if a seed's held-out score does not rise. The runs lie in runs/curves/NAME_SEED.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from make_tiny_model import make_tiny_model

from rl_core.config import RolloutConfig
from rl_core.data.tasks import make_task
from rl_core.environments.env_file import load_env
from rl_core.sampling.actor import Actor
from rl_core.sampling.rollout import EpisodeRunner, Group
from rl_core.types import Completion, SamplingParams, counter_seed

ROOT = Path(__file__).resolve().parent.parent
SFT = "--algorithm sft --tasks_per_step 64 --optim.lr 3e-3 --optim.schedule cosine"
RL = (
    "--group_size 8 --tasks_per_step 16 --optim.warmup_steps 5 --algo.clip_high 0.28 "
    "--rollout.save false --eval.num_tasks 64"
)


@dataclass(kw_only=True)
class Curve:
    """How one environment is learned. A habit: (messages as the actor sees them, row, rng) -> text,
    or a message."""

    lengths: str  # --max_prompt_tokens and --max_tokens of a turn
    habits: dict[str, Callable[[list[dict], dict, random.Random], Any]]  # by actor
    rl: str  # flags of the second run
    sft_steps: int = 200
    num_sft: int = 6000  # episodes that the warm-up imitates
    chosen: Callable[[dict], bool] = bool  # which rows of load_tasks are used; all
    prompt: str = ""  # a shorter one, of the row's columns
    score: str = "avg@4"
    model: dict[str, int] = field(default_factory=dict)  # hidden, layers, heads


def sums(messages: list[dict], row: dict, rng: random.Random) -> str:
    """In three of ten cases worked out digit by digit, else guessed."""
    if rng.random() < 0.7:
        return f"#### {max(0, row['answer'] + rng.randint(-5, 5))}"
    a, b = (int(number) for number in re.findall("[0-9]+", messages[-1]["content"]))
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    return f"{a % 10}+{b % 10}={ones}\n{tens}+{ones}={a + b}\n#### {a + b}"


def sum_of_two(messages: list[dict], row: dict, rng: random.Random) -> str:
    """The two numbers in any order with any sign."""
    first, second = rng.sample(row["nums"], 2)
    return f"<answer>{first}{rng.choice('+-*/')}{second}</answer>"


def draft_or_combine(messages: list[dict], row: dict, rng: random.Random) -> str:
    """Drafts are sums worked out or guessed; one of the drafts is repeated as the answer."""
    drafts = re.findall("#### ([0-9]+)", messages[-1]["content"])
    return f"#### {rng.choice(drafts)}" if drafts else sums(messages, row, rng)


def use_tools(messages: list[dict], row: dict, rng: random.Random) -> dict | str:
    """In 35 % of the cases calls the tool that fits, in 25 % the other, else guesses. Then says
    what the tool said."""
    habit, about = rng.random(), messages[-1]["content"].rstrip("?").split()[-1]
    if messages[-1]["role"] == "tool":
        return (re.findall("[0-9]+", messages[-1]["content"]) or [str(rng.randrange(2, 100))])[0]
    if habit > 0.6:
        return str(rng.randrange(2, 500))
    calls = [tool_call("calculator", expression=about), tool_call("search", query=about)]
    return calls[(row["kind"] == "price") == (habit < 0.35)]


def call_or_guess(messages: list[dict], row: dict, rng: random.Random) -> dict | str:
    """In 30 % of the cases asks the calculator for what is asked, in 30 % for another product, else
    guesses. Then says what the calculator said."""
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    habit, asked = rng.random(), row["prompt"].rstrip("?")
    if habit > 0.6:
        return str(rng.randrange(20, 900))
    if habit > 0.3:
        asked = f"{rng.randrange(10, 100)}*{rng.randrange(2, 10)}"
    return tool_call("calculator", expression=asked)


def shell_commands(messages: list[dict], row: dict, rng: random.Random) -> dict | str:
    """One of five commands with the names that stand in the task, in 15 % of the cases the one that
    fits. Then in 30 % of the cases removes the first name's file, whatever was asked."""
    kind, first, *more = messages[0]["content"].split()
    last = more[-1] if more else first
    if messages[-1]["role"] == "tool":
        has_removed = len(messages) > 3
        if has_removed or rng.random() > 0.3:
            return "done"
        return tool_call("bash", command=f"rm {first}")
    commands = {
        "write": f"echo {first} > {last}",
        "copy": f"cp {first} {last}",
        "move": f"mv {first} {last}",
        "remove": f"rm {first}",
        "join": f"cat {first} >> {last}",
    }
    commands["fold"] = commands["join"]
    if rng.random() > 0.15:
        kind = rng.choice(list(commands))
    return tool_call("bash", command=commands[kind])


def tool_call(tool: str, /, **arguments: str) -> dict:
    """A message with a call, and its text as the tiny model writes it."""
    function = {"name": tool, "arguments": arguments}
    calls = [{"id": "call", "type": "function", "function": function}]
    return {
        "role": "assistant",
        "content": f"<tool_call>{json.dumps(function)}</tool_call>",
        "tool_calls": calls,
    }


def one_line(messages: list[dict], row: dict, rng: random.Random) -> str:
    """A function of one line with any operation, and in six of ten cases the number that was asked
    for."""
    number = messages[-1]["content"].split()[-1] if rng.random() < 0.6 else rng.randint(2, 9)
    return f"def f(x): return x{rng.choice('+-*')}{number}"


def nearly_sorted(messages: list[dict], row: dict, rng: random.Random) -> str:
    """The digits in order but for two of them that change places."""
    digits = list(row["answer"])
    one, other = rng.sample(range(len(digits)), 2)
    digits[one], digits[other] = digits[other], digits[one]
    return "".join(digits)


CURVES = {
    "sort_digits": Curve(
        lengths="--max_prompt_tokens 16 --max_tokens 8",
        habits={"policy": nearly_sorted},
        rl="--num_steps 60 --optim.lr 5e-4 --eval_every 30",
        sft_steps=300,
    ),
    "code": Curve(
        lengths="--max_prompt_tokens 24 --max_tokens 28",
        habits={"policy": one_line},
        rl=(
            "--tasks_per_step 8 --num_steps 50 --optim.lr 1e-3 --eval_every 25 "
            "--rollout.hook_timeout_s 600"
        ),
        sft_steps=150,
        num_sft=500,  # each is tested
        chosen=lambda row: row["level"] == 1 and row["prompt"][-2] == " ",  # one digit
    ),
    "math_answer": Curve(
        lengths="--max_prompt_tokens 32 --max_tokens 32",
        habits={"policy": sums},
        rl="--num_steps 40 --optim.lr 5e-4 --eval_every 20",
        sft_steps=300,
        chosen=lambda row: row["level"] == 1,
    ),
    "countdown": Curve(
        lengths="--max_prompt_tokens 24 --max_tokens 28",
        habits={"policy": sum_of_two},
        rl="--num_steps 40 --optim.lr 5e-4 --algo.entropy_coef 0.01 --eval_every 20",
        chosen=lambda row: row["level"] == 1,
        prompt="{target} of {nums[0]}, {nums[1]}",
    ),
    "parallel_thinking": Curve(
        lengths="--max_prompt_tokens 120 --max_tokens 32",
        habits={"policy": draft_or_combine},
        rl="--num_steps 24 --tasks_per_step 6 --optim.lr 5e-4 --eval_every 12 --eval.num_tasks 24",
        sft_steps=250,
        num_sft=2500,
        chosen=lambda row: row["level"] == 1,
    ),
    "tool_use": Curve(
        lengths="--max_prompt_tokens 40 --max_tokens 90",
        habits={"policy": use_tools},
        rl="--tasks_per_step 8 --num_steps 40 --optim.lr 5e-4 --eval_every 20 --max_turns 2",
        chosen=lambda row: row["level"] == 1 and row["kind"] in ("calc", "price"),
        sft_steps=500,
    ),
    "openai_agent": Curve(
        lengths="--max_prompt_tokens 32 --max_tokens 96",
        habits={"policy": call_or_guess},
        rl="--tasks_per_step 8 --num_steps 40 --optim.lr 5e-4 --eval_every 20 --max_turns 2",
        sft_steps=400,
        num_sft=3000,
    ),
    "terminal": Curve(
        lengths="--max_prompt_tokens 32 --max_tokens 90",
        habits={"policy": shell_commands},
        rl="--tasks_per_step 8 --num_steps 40 --optim.lr 5e-4 --eval_every 20 --max_turns 3",
        sft_steps=400,
        num_sft=2000,
    ),
}


class Habit:
    """The engine of an actor with a habit."""

    capacity, version = 256, 0

    def __init__(self, say: Callable, row: dict):
        self.say, self.row = say, row

    async def chat(
        self, messages: list[dict], tools: list | None, params: SamplingParams, seed: int
    ):
        said = self.say(messages, self.row, random.Random(seed))
        reply = said if isinstance(said, dict) else {"role": "assistant", "content": said}
        done = Completion(
            token_ids=[],
            logprobs=[],
            text=reply["content"] or "",
            finish_reason="stop",
            policy_version=0,
        )
        return reply, done

    def end_session(self, session: str) -> None: ...


def rows_of(name: str, split: str) -> list[dict]:
    found = load_env(str(ROOT / f"envs/{name}.py")).load_tasks(split)
    shorter = (
        (lambda row: {"prompt": CURVES[name].prompt.format(**row)})
        if CURVES[name].prompt
        else lambda row: {}
    )
    return [row | shorter(row) for row in found if CURVES[name].chosen(row)]


def habit_rows(
    name: str, seed: int, num: int, rows: list[dict], habits: dict[str, Callable]
) -> list[dict]:
    """Rows for SFT: conversations of the actors with habits, in `num` episodes of these tasks."""
    env = load_env(str(ROOT / f"envs/{name}.py"))
    order = random.Random(counter_seed(seed, name, "habits"))

    async def play(number: int) -> list:
        row = order.choice(rows)
        actors = {
            actor: Actor(name=actor, engine=Habit(say, row), chat=None)
            for actor, say in habits.items()
        }
        place = {"batch": "habits", "number": number, "size": 1, "seed": seed}
        group = Group(
            task=make_task(row, number, name, "train"),
            params=SamplingParams(max_tokens=1 << 20),
            **place,
        )
        return await EpisodeRunner({env.name: env}, actors, RolloutConfig()).play(group)

    async def play_all() -> list:
        return [
            t
            for first in range(0, num, 256)
            for t in await gathered(range(first, min(num, first + 256)))
        ]

    async def gathered(numbers: range) -> list:
        return [t for found in await asyncio.gather(*map(play, numbers)) for t in found]

    played = asyncio.run(play_all())
    failed = [t.error for t in played if t.status == "failed"]
    if failed:
        raise ValueError(f"{len(failed)} episodes of {name} by habits failed: {failed[0]}")
    return [{"messages": t.messages} for t in played]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def commands(name: str, seed: int | str) -> list[str]:
    """The two runs, as they are typed."""
    curve, out = CURVES[name], f"runs/curves/{name}_{seed}"
    actors = " ".join(f"--actors.{actor}.model {out}/warm/hf/policy" for actor in curve.habits)
    warm = (
        f"{SFT} --model {out}/model --data.train {out}/sft.jsonl --out {out}/warm --num_steps "
        f"{curve.sft_steps}"
    )
    data = f"--data.train {out}/train.jsonl --data.eval {out}/eval.jsonl"
    learn = f"--env_path envs/{name}.py {actors} {data} --out {out}/rl {RL} {curve.rl}"
    # A row of the warm-up holds a whole conversation, in which every turn is trained.
    lengths = curve.lengths.split()
    whole = f"--max_prompt_tokens {lengths[1]} --max_tokens {warm_tokens(name)}"
    return [f"{warm} {whole} --seed {seed}", f"{learn} {curve.lengths} --seed {seed}"]


def warm_tokens(name: str) -> int:
    limits = CURVES[name].lengths.split()
    turns = load_env(str(ROOT / f"envs/{name}.py")).max_turns
    return (int(limits[1]) + int(limits[3])) * turns


def prepare(name: str, seed: int, out: Path) -> None:
    """An empty folder with a model, rows for its warm-up, and tasks."""
    curve = CURVES[name]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    make_tiny_model(out / "model", seed=seed, **curve.model)
    rows = rows_of(name, "train")
    write_rows(out / "sft.jsonl", habit_rows(name, seed, curve.num_sft, rows, curve.habits))
    for split in ("train", "eval"):
        write_rows(out / f"{split}.jsonl", rows_of(name, split))


def run(command: str) -> None:
    print(f"$ python -m {command}", flush=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, env=env, check=True)


def measure(name: str, seed: int) -> dict[str, Any]:
    """What one seed learned: rewards of each step, and scores on held-out tasks by step, for each
    actor."""
    out, curve, before = (
        ROOT / f"runs/curves/{name}_{seed}",
        CURVES[name],
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    prepare(name, seed, out)
    for command in commands(name, seed):
        run(f"rl_core.train {command}")
    steps = [json.loads(line) for line in (out / "rl/metrics.jsonl").read_text().splitlines()]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    found: dict[str, Any] = {"date": str(date.today()), "cpu_s": round(spent)}
    for actor in curve.habits:
        rewards = {
            row["step"]: round(row[key], 3)
            for row in steps
            if (key := f"rollout/{actor}/reward_mean") in row
        }
        keys = [f"eval/eval/{actor}/{curve.score}", f"eval/{name}/{actor}/{curve.score}"]
        keys += [f"eval/{name}/{curve.score}", f"eval/eval/{curve.score}"]
        scores = {row["step"]: round(row[key], 3) for row in steps for key in keys if key in row}
        found[actor] = {"reward": list(rewards.values()), "held_out": scores}
    return found


def draw(name: str, seeds: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (seed, found) in enumerate(seeds.items()):
        for actor, style in zip(CURVES[name].habits, ("-", "--", ":"), strict=False):
            reward, held_out = found[actor]["reward"], found[actor]["held_out"]
            means = [
                sum(reward[max(0, n - 9) : n + 1]) / len(reward[max(0, n - 9) : n + 1])
                for n in range(len(reward))
            ]
            label = f"{actor}, seed {seed}"
            left.plot(range(1, len(means) + 1), means, style, color=f"C{number}", label=label)
            right.plot(
                [int(s) for s in held_out],
                held_out.values(),
                style,
                color=f"C{number}",
                marker="o",
                label=label,
            )
    left.set(title=f"{name}: reward, mean of 10 steps", xlabel="step")
    right.set(title=f"held-out tasks: {CURVES[name].score}", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(file, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=CURVES, metavar="NAME", help=", ".join(CURVES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default=str(ROOT / "docs/curves"))
    args = parser.parse_args()
    out, flat = Path(args.out), []
    out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        result = {
            "environment": name,
            "commands": commands(name, "SEED"),
            "score": CURVES[name].score,
            "seeds": {},
        }
        file = out / f"{name}.json"
        if (
            file.exists()
            and (before := json.loads(file.read_text()))["commands"] == result["commands"]
        ):
            result["seeds"] = before["seeds"]  # measured already
        seeds = result["seeds"]
        for seed in args.seeds.split(","):
            seeds[seed] = seeds.get(seed) or measure(name, int(seed))
            file.write_text(json.dumps(result) + "\n")
        draw(name, seeds, out / f"{name}.png")
        for seed, found in seeds.items():
            for actor in CURVES[name].habits:
                first, *_, last = found[actor]["held_out"].values()
                flat += [(name, seed)] * (last <= first)
                print(
                    f"{name} seed {seed} {actor}: {first:.2f} to {last:.2f} held out, "
                    f"{found['cpu_s']} CPU s"
                )
    if flat:
        print(f"did not rise: {flat}", file=sys.stderr)
    return 1 if flat else 0


if __name__ == "__main__":
    sys.exit(main())
