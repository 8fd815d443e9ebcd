"""rl_core and TRL side by side on a CPU: the same model, prompts, lengths and number of samples, one torch thread each.

    python scripts/bench_cpu.py                         GRPO on short and ragged completions, SFT on ragged rows
    python scripts/bench_cpu.py --only grpo_ragged      one of them; --quick for a smoke run, --out result.json

Each side runs in a process of its own, after the other. What counts is the CPU time of that process (all threads, user
and system), since wall time depends on what else the machine does. Lengths are forced: every completion is as long as a
counter says, so that both sides sample equally many tokens. TRL gets several settings and is compared by its best one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rl_core.types import counter_seed

NUM_PROMPTS, GROUP_SIZE = 16, 8
NUM_SAMPLES = NUM_PROMPTS * GROUP_SIZE  # of a GRPO step
NUM_ROWS = 64  # of an SFT step
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
LEARNING_RATE = 1e-4


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """What both sides do. Lengths are in tokens."""

    name: str
    algorithm: str  # "grpo" or "sft"
    prompt: int  # letters of a prompt; the chat template adds three tokens
    mean: int  # of a completion, the end token included
    longest: int  # mean == longest: all are equally long
    hidden: int = 128
    layers: int = 3
    steps: int = 8  # that count
    warmup: int = 2  # steps before them
    seed: int = 0

    @property
    def all_steps(self) -> int:
        return self.steps + self.warmup


WORKS = {
    work.name: work
    for work in (
        Work(name="grpo_short", algorithm="grpo", prompt=5, mean=6, longest=6, steps=20),
        Work(name="grpo_ragged", algorithm="grpo", prompt=37, mean=24, longest=96),
        Work(name="sft_ragged", algorithm="sft", prompt=32, mean=64, longest=256, steps=12),
    )
}
# Other settings change nothing on these tasks but the number of tokens in one forward.
PACKED = {"packing": True}
TRL_SETTINGS = {
    "grpo": {
        "128 a microbatch": {"per_device_train_batch_size": 128},
        "32 a microbatch": {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4},
    },
    "sft": {
        "padded, 64 a microbatch": {"per_device_train_batch_size": 64},
        "padded, 16 a microbatch": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
        "packed, 1 row a microbatch": {
            "packing": True,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 16,
        },
        "packed, 16 rows a microbatch": {"packing": True, "per_device_train_batch_size": 16},
    },
}


OUR_SETTINGS = {
    "grpo": {"": {"learner.microbatch_tokens": 2048}},
    "sft": {"": {"learner.microbatch_tokens": 2048}},
}


def letters(work: Work, count: int, *parts: int | str) -> str:
    return "".join(random.Random(counter_seed(work.seed, *parts)).choices(LETTERS, k=count))


def completion_length(work: Work, step: int, index: int) -> int:
    """Exponential about the mean, between 2 and the longest: many short ones and a tail, as policies sample them."""
    if work.mean == work.longest:
        return work.mean
    drawn = random.Random(counter_seed(work.seed, "length", step, index)).expovariate(1 / work.mean)
    return max(2, min(work.longest, round(drawn)))


def rl_prompts(work: Work) -> list[str]:
    return [letters(work, work.prompt, "prompt", i) for i in range(work.all_steps * NUM_PROMPTS)]


def sft_rows(work: Work) -> list[tuple[str, str]]:
    """(prompt, response) of every step; prompts are as ragged as responses."""
    rows = []
    for i in range(work.all_steps * NUM_ROWS):
        prompt = letters(
            work, random.Random(counter_seed(work.seed, "size", i)).randint(1, 2 * work.prompt), "prompt", i
        )
        rows.append((prompt, letters(work, completion_length(work, 0, i) - 1, "response", i)))
    return rows


def reward_of(text: str) -> float:
    """Any value that differs within nearly every group: no side may skip samples for want of a signal."""
    return counter_seed(text) % 1000 / 1000


# What a side reports: lists by step, warm-up included.
@dataclass(kw_only=True, slots=True)
class Measured:
    cpu_s: list[float]
    generate_cpu_s: list[float]
    generated_tokens: list[int]
    learned_tokens: list[int]  # real ones in the training forwards, prompts included
    computed_tokens: list[int]  # positions of those forwards, padding included
    start_mib: float  # resident once the model is loaded
    peak_mib: float


def run_here(work: Work, side: str, setting: str, model: str) -> Measured:
    import torch

    torch.set_num_threads(1)
    if side == "trl":
        from bench_trl import run_trl

        return run_trl(work, TRL_SETTINGS[work.algorithm][setting], model)
    from bench_ours import run_ours

    return run_ours(work, OUR_SETTINGS[work.algorithm][setting], model)


def run_apart(work: Work, side: str, setting: str, model: str) -> Measured:
    """The same in a process of its own."""
    job = json.dumps({"work": asdict(work), "side": side, "setting": setting, "model": model})
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--job", job],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        sys.exit(f"{side} {setting} on {work.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def summary(work: Work, side: str, setting: str, m: Measured) -> dict:
    """One line of the table: CPU per step is the median of the steps after the warm-up, rates are over all of those."""
    kept = slice(work.warmup, None)
    cpu, generate = sum(m.cpu_s[kept]), sum(m.generate_cpu_s[kept])
    generated, learned = sum(m.generated_tokens[kept]), sum(m.learned_tokens[kept])
    return {
        "work": work.name,
        "side": side,
        "setting": setting,
        "cpu_s_per_step": statistics.median(m.cpu_s[kept]),
        "warmup_cpu_s": m.cpu_s[: work.warmup],
        "generate_tokens_per_cpu_s": generated / generate if generate else None,
        "learn_tokens_per_cpu_s": learned / (cpu - generate),
        "useful_frac": learned / sum(m.computed_tokens[kept]),
        "peak_mib": m.peak_mib,
        "start_mib": m.start_mib,
        "tokens_per_step": (generated or learned) / work.steps,
    }


def speedups(lines: list[dict]) -> dict[str, float]:
    """By how much rl_core needs less CPU than TRL's best setting: per step for GRPO, per token for SFT."""
    found = {}
    for name in dict.fromkeys(line["work"] for line in lines):
        ours = next((line for line in lines if line["work"] == name and line["side"] == "rl_core"), None)
        trl = [line for line in lines if line["work"] == name and line["side"] == "trl"]
        if ours and trl and WORKS[name].algorithm == "grpo":
            found[name] = min(line["cpu_s_per_step"] for line in trl) / ours["cpu_s_per_step"]
        elif ours and trl:
            found[name] = ours["learn_tokens_per_cpu_s"] / max(line["learn_tokens_per_cpu_s"] for line in trl)
    return found


COLUMNS = {
    "CPU s/step": ("cpu_s_per_step", "{:.3f}"),
    "generate tok/CPU s": ("generate_tokens_per_cpu_s", "{:.0f}"),
    "learn tok/CPU s": ("learn_tokens_per_cpu_s", "{:.0f}"),
    "useful": ("useful_frac", "{:.2f}"),
    "start MiB": ("start_mib", "{:.0f}"),
    "peak MiB": ("peak_mib", "{:.0f}"),
    "tokens/step": ("tokens_per_step", "{:.0f}"),
}


def table(lines: list[dict]) -> str:
    rows = [["work", "side", *COLUMNS, "warm-up CPU s"]]
    for line in lines:
        cells = [form.format(line[key]) if line[key] is not None else "-" for key, form in COLUMNS.values()]
        side = line["side"] + (f" ({line['setting']})" if line["setting"] else "")
        rows.append([line["work"], side, *cells, " ".join(f"{s:.2f}" for s in line["warmup_cpu_s"])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=WORKS, nargs="+", default=list(WORKS), help="what to measure")
    parser.add_argument("--sides", choices=["rl_core", "trl"], nargs="+", default=["rl_core", "trl"])
    parser.add_argument(
        "--hidden", type=int, default=128, help="width of the model; 128 with 3 layers is 0.6M parameters"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, help="that count, after 2 of warm-up")
    parser.add_argument("--quick", action="store_true", help="2 steps after 1 of warm-up: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file with every figure")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job = json.loads(args.job)
        measured = run_here(Work(**job["work"]), job["side"], job["setting"], job["model"])
        print("\n" + json.dumps(asdict(measured)))
        return

    from make_tiny_model import make_tiny_model

    lines = []
    with tempfile.TemporaryDirectory() as model:
        make_tiny_model(model, args.hidden, args.layers)
        for name in args.only:
            work = replace(WORKS[name], hidden=args.hidden, layers=args.layers)
            work = replace(work, steps=2, warmup=1) if args.quick else replace(work, steps=args.steps or work.steps)
            settings = [("rl_core", setting) for setting in OUR_SETTINGS[work.algorithm]]
            settings += [("trl", setting) for setting in TRL_SETTINGS[work.algorithm]]
            for side, setting in settings:
                if side in args.sides:
                    print(f"{name}: {side} {setting}", file=sys.stderr, flush=True)
                    lines.append(summary(work, side, setting, run_apart(work, side, setting, model)))
    found = speedups(lines)
    print(table(lines))
    for name, times in found.items():
        print(f"{name}: rl_core needs {times:.2f} times less CPU than TRL in its best setting")
    if args.out:
        args.out.write_text(json.dumps({"speedups": found, "lines": lines}, indent=1))


if __name__ == "__main__":
    main()
