"""Learning curves of environments on a CPU: SFT teaches a tiny model the form of replies, then RL
trains it, for three seeds.

    python scripts/curves.py math_answer                  # one or several of CURVES; --seeds 0,1,2

The warm-up imitates episodes of an actor with habits, which replies in the right form and is often
wrong. Any further improvement comes from the reward. Prints rewards and held-out scores; fails if a
seed's held-out score does not rise, or if that of count_shapes_blank, the control in which pictures
are white, rises above chance. The runs are in runs/curves/NAME_SEED.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from make_tiny_model import make_tiny_model
from script_tools import ROOT, make_parser, read_metrics, run, write_json, write_rows

from rl_core.config import RolloutConfig
from rl_core.data.image_columns import with_images
from rl_core.data.task_rows import make_task
from rl_core.environments.env_file import load_env
from rl_core.sampling.actor import Actor
from rl_core.sampling.episode_runner import EpisodeRunner
from rl_core.sampling.groups import Group
from rl_core.types import Completion, Message, SamplingParams, Trajectory, counter_seed

SFT = "--algorithm sft --tasks_per_step 64 --optim.lr 3e-3 --optim.schedule cosine"
RL = (
    "--group_size 8 --tasks_per_step 16 --optim.warmup_steps 5 --algo.clip_high 0.28 "
    "--rollout.save false --eval.num_tasks 64"
)
# Highest held-out score of a control: the most frequent count is right in 0.27 of its tasks.
CHANCE = 0.3
# (messages as the actor sees them, row, rng) -> text, or a message with tool calls.
Habit = Callable[[list[Message], dict, random.Random], "Message | str"]


@dataclass(kw_only=True)
class Curve:
    """Settings of one environment's two runs."""

    lengths: str  # Flags --max_prompt_tokens and --max_tokens of a turn.
    habits: dict[str, Habit]  # Actor -> habit.
    rl: str  # Flags of the second run.
    sft_steps: int = 200
    num_sft: int = 6000  # Number of episodes that the warm-up imitates.
    is_used: Callable[[dict], bool] = bool  # Rows of load_tasks to use; all by default.
    prompt: str = ""  # A shorter prompt, with the row's columns in braces.
    model: dict[str, Any] = field(default_factory=dict)  # hidden, layers, heads, arch
    is_blank: bool = False  # A control: pictures are white. The score must stay at chance.


def sums(messages: list[Message], row: dict, rng: random.Random) -> str:
    """Works the sum out digit by digit in three of ten cases, otherwise guesses."""
    if rng.random() < 0.7:
        return f"#### {max(0, row['answer'] + rng.randint(-5, 5))}"
    a, b = (int(number) for number in re.findall("[0-9]+", messages[-1]["content"]))
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    return f"{a % 10}+{b % 10}={ones}\n{tens}+{ones}={a + b}\n#### {a + b}"


def sum_of_two(messages: list[Message], row: dict, rng: random.Random) -> str:
    """Combines the two numbers in any order with any sign."""
    first, second = rng.sample(row["nums"], 2)
    return f"<answer>{first}{rng.choice('+-*/')}{second}</answer>"


def draft_or_combine(messages: list[Message], row: dict, rng: random.Random) -> str:
    """Drafts as sums() does; the answer repeats one of the drafts."""
    drafts = re.findall("#### ([0-9]+)", messages[-1]["content"])
    return f"#### {rng.choice(drafts)}" if drafts else sums(messages, row, rng)


def use_tools(messages: list[Message], row: dict, rng: random.Random) -> Message | str:
    """Calls the right tool in 35 % of the cases and the wrong one in 25 %, otherwise guesses. Then
    repeats the tool's result."""
    habit, about = rng.random(), messages[-1]["content"].rstrip("?").split()[-1]
    if messages[-1]["role"] == "tool":
        return (re.findall("[0-9]+", messages[-1]["content"]) or [str(rng.randrange(2, 100))])[0]
    if habit > 0.6:
        return str(rng.randrange(2, 500))
    calls = [tool_call("calculator", expression=about), tool_call("search", query=about)]
    return calls[(row["kind"] == "price") == (habit < 0.35)]


def call_or_guess(messages: list[Message], row: dict, rng: random.Random) -> Message | str:
    """Sends the calculator the question in 30 % of the cases and another product in 30 %, otherwise
    guesses. Then repeats the calculator's result."""
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    habit, asked = rng.random(), row["prompt"].rstrip("?")
    if habit > 0.6:
        return str(rng.randrange(20, 900))
    if habit > 0.3:
        asked = f"{rng.randrange(10, 100)}*{rng.randrange(2, 10)}"
    return tool_call("calculator", expression=asked)


def shell_commands(messages: list[Message], row: dict, rng: random.Random) -> Message | str:
    """Runs one of five commands with the task's file names, in 15 % of the cases the right one.
    Afterwards removes the first file in 30 % of the cases."""
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
    """A message with a tool call, and the call as text that the tiny model imitates."""
    function = {"name": tool, "arguments": arguments}
    calls = [{"id": "call", "type": "function", "function": function}]
    return {
        "role": "assistant",
        "content": f"<tool_call>{json.dumps(function)}</tool_call>",
        "tool_calls": calls,
    }


def one_line(messages: list[Message], row: dict, rng: random.Random) -> str:
    """Writes a function of one line with any operation, and with the task's number in six of ten
    cases."""
    number = messages[-1]["content"].split()[-1] if rng.random() < 0.6 else rng.randint(2, 9)
    return f"def f(x): return x{rng.choice('+-*')}{number}"


def guess_count(messages: list[Message], row: dict, rng: random.Random) -> str:
    """Counts right in four of ten cases, otherwise guesses."""
    return str(row["answer"] if rng.random() < 0.4 else rng.randint(1, 5))


def nearly_sorted(messages: list[Message], row: dict, rng: random.Random) -> str:
    """Sorts the digits, then swaps two of them."""
    digits = list(row["answer"])
    one, other = rng.sample(range(len(digits)), 2)
    digits[one], digits[other] = digits[other], digits[one]
    return "".join(digits)


SHAPES = Curve(
    lengths="--max_prompt_tokens 40 --max_tokens 3",
    habits={"policy": guess_count},
    rl="--num_steps 60 --optim.lr 5e-4 --eval_every 30",
    sft_steps=300,
    model={"arch": "qwen2_5_vl"},
)
CURVES = {
    "sort_digits": Curve(
        lengths="--max_prompt_tokens 16 --max_tokens 8",
        habits={"policy": nearly_sorted},
        rl="--num_steps 60 --optim.lr 5e-4 --eval_every 30",
        sft_steps=300,
    ),
    "count_shapes": SHAPES,
    "count_shapes_blank": replace(SHAPES, is_blank=True),
    "code": Curve(
        lengths="--max_prompt_tokens 24 --max_tokens 28",
        habits={"policy": one_line},
        rl=(
            "--tasks_per_step 8 --num_steps 50 --optim.lr 1e-3 --eval_every 25 "
            "--rollout.hook_timeout_s 600"
        ),
        sft_steps=150,
        num_sft=500,  # Each episode runs tests.
        is_used=lambda row: row["level"] == 1 and row["prompt"][-2] == " ",  # One digit.
    ),
    "math_answer": Curve(
        lengths="--max_prompt_tokens 32 --max_tokens 32",
        habits={"policy": sums},
        rl="--num_steps 40 --optim.lr 5e-4 --eval_every 20",
        sft_steps=300,
        is_used=lambda row: row["level"] == 1,
    ),
    "countdown": Curve(
        lengths="--max_prompt_tokens 24 --max_tokens 28",
        habits={"policy": sum_of_two},
        rl="--num_steps 40 --optim.lr 5e-4 --algo.entropy_coef 0.01 --eval_every 20",
        is_used=lambda row: row["level"] == 1,
        prompt="{target} of {nums[0]}, {nums[1]}",
    ),
    "parallel_thinking": Curve(
        lengths="--max_prompt_tokens 120 --max_tokens 32",
        habits={"policy": draft_or_combine},
        rl="--num_steps 24 --tasks_per_step 6 --optim.lr 5e-4 --eval_every 12 --eval.num_tasks 24",
        sft_steps=250,
        num_sft=2500,
        is_used=lambda row: row["level"] == 1,
    ),
    "tool_use": Curve(
        lengths="--max_prompt_tokens 40 --max_tokens 90",
        habits={"policy": use_tools},
        rl="--tasks_per_step 8 --num_steps 40 --optim.lr 5e-4 --eval_every 20 --max_turns 2",
        is_used=lambda row: row["level"] == 1 and row["kind"] in ("calc", "price"),
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


class HabitEngine:
    """An engine that replies by a habit."""

    capacity, version = 256, 0

    def __init__(self, habit: Habit, row: dict):
        self.habit, self.row = habit, row

    async def chat(
        self, messages: list[Message], tools: list | None, params: SamplingParams, seed: int
    ) -> tuple[Message, Completion]:
        reply = self.habit(messages, self.row, random.Random(seed))
        if isinstance(reply, str):
            reply = {"role": "assistant", "content": reply}
        text = reply["content"] or ""
        done = {"finish_reason": "stop", "policy_version": 0}
        return reply, Completion(token_ids=[], logprobs=[], text=text, **done)

    def end_session(self, session: str) -> None: ...


def rows_of(name: str, split: str) -> list[dict]:
    """The rows of an environment that its curve uses."""
    curve = CURVES[name]
    os.environ["COUNT_SHAPES_BLANK"] = str(int(curve.is_blank))
    loaded = load_env(env_path(name)).load_tasks(split)
    rows = [with_images(row, None) for row in loaded if curve.is_used(row)]
    return [row | {"prompt": curve.prompt.format(**row)} for row in rows] if curve.prompt else rows


def env_path(name: str) -> str:
    return str(ROOT / f"envs/{env_name(name)}.py")


def env_name(name: str) -> str:
    return name.removesuffix("_blank")


def habit_rows(
    name: str, seed: int, num: int, rows: list[dict], habits: dict[str, Habit]
) -> list[dict]:
    """Rows for SFT: the conversations of actors with habits in `num` episodes of these rows."""
    env = load_env(env_path(name))
    order = random.Random(counter_seed(seed, name, "habits"))

    async def play(number: int) -> list[Trajectory]:
        row = order.choice(rows)
        actors = {
            actor: Actor(
                name=actor, engine=HabitEngine(habit, row), chat=None, max_context_tokens=1 << 20
            )
            for actor, habit in habits.items()
        }
        task, params = make_task(row, number, env.name, "train"), SamplingParams(max_tokens=1 << 20)
        group = Group(task=task, params=params, batch="habits", number=number, size=1, seed=seed)
        return await EpisodeRunner({env.name: env}, actors, RolloutConfig()).play(group)

    async def play_all() -> list[Trajectory]:
        trajectories = []
        for first in range(0, num, 256):
            for group in await asyncio.gather(*map(play, range(first, min(num, first + 256)))):
                trajectories += group
        return trajectories

    trajectories = asyncio.run(play_all())
    failed = [t.error for t in trajectories if t.status == "failed"]
    if failed:
        raise ValueError(f"{len(failed)} episodes of {name} by habits failed: {failed[0]}")
    # The tiny model's template renders the text of a call, which each such message holds, alone.
    return [
        {"messages": [{k: v for k, v in m.items() if k != "tool_calls"} for m in t.messages]}
        for t in trajectories
    ]


def commands(name: str, seed: int) -> list[str]:
    """The commands of the two runs."""
    curve, out = CURVES[name], f"runs/curves/{name}_{seed}"
    actors = " ".join(f"--actors.{actor}.model {out}/warm/hf/policy" for actor in curve.habits)
    # A row of the warm-up is an entire conversation, in which every turn is trained.
    _, prompt_tokens, _, turn_tokens = curve.lengths.split()
    max_tokens = (int(prompt_tokens) + int(turn_tokens)) * load_env(env_path(name)).max_turns
    warm = (
        f"{SFT} --model {out}/model --data.train {out}/sft.jsonl --out {out}/warm --num_steps "
        f"{curve.sft_steps} --max_prompt_tokens {prompt_tokens} --max_tokens {max_tokens}"
    )
    data = f"--data.train {out}/train.jsonl --data.eval {out}/eval.jsonl"
    learn = f"--env_path envs/{env_name(name)}.py {actors} {data} --out {out}/rl {RL} {curve.rl}"
    flags = (warm, f"{learn} {curve.lengths}")
    return [f"-m rl_core.train {text} --seed {seed}" for text in flags]


def prepare(name: str, seed: int, out: Path) -> None:
    """Makes an empty folder with a model, rows for its warm-up, and tasks."""
    curve = CURVES[name]
    shutil.rmtree(out, ignore_errors=True)
    make_tiny_model(out / "model", seed=seed, **curve.model)
    rows = rows_of(name, "train")
    write_rows(out / "sft.jsonl", habit_rows(name, seed, curve.num_sft, rows, curve.habits))
    write_rows(out / "train.jsonl", rows)
    write_rows(out / "eval.jsonl", rows_of(name, "eval"))


def measure(name: str, seed: int) -> dict:
    """One seed's CPU seconds, and for each actor the rewards by step and the held-out scores."""
    out = f"runs/curves/{name}_{seed}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    prepare(name, seed, ROOT / out)
    for command in commands(name, seed):
        run(command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    rows = read_metrics(f"{out}/rl")
    figures: dict = {"cpu_s": round(cpu_s)}
    for actor in CURVES[name].habits:
        key = f"rollout/{actor}/reward_mean"
        # Evaluations of --data.eval or of the environment, of one actor or of several.
        env = env_name(name)
        scores = {f"eval/{prefix}avg@4" for prefix in (f"eval/{actor}/", f"{env}/{actor}/")}
        scores |= {f"eval/{env}/avg@4", "eval/eval/avg@4"}
        held_out = [row[score] for row in rows for score in scores if score in row]
        figures[actor] = {"reward": [row[key] for row in rows if key in row], "held_out": held_out}
    return figures


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="+", choices=CURVES, metavar="NAME", help=", ".join(CURVES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, help="write every seed's figures as JSON")
    args = parser.parse_args()
    results: dict[str, dict] = {}
    has_failed = False
    for name in args.names:
        for seed in args.seeds.split(","):
            figures = results[f"{name}_{seed}"] = measure(name, int(seed))
            for actor in CURVES[name].habits:
                reward, (first, *_, last) = figures[actor]["reward"], figures[actor]["held_out"]
                means = " to ".join(f"{sum(five) / 5:.2f}" for five in (reward[:5], reward[-5:]))
                scores = f"{first:.2f} to {last:.2f} held out"
                if CURVES[name].is_blank:
                    problem = ", above chance" * (last > CHANCE)
                else:
                    problem = ", no rise" * (last <= first)
                has_failed |= bool(problem)
                scores += problem
                print(f"{name} seed {seed} {actor}: {means}; {scores}; {figures['cpu_s']} CPU s")
    write_json(args.out, results)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
