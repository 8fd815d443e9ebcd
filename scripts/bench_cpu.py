"""rl_core and TRL side by side on a CPU: the same model, prompts, lengths and number of samples,
one torch thread each.

    python scripts/bench_cpu.py                         GRPO on short and ragged completions, SFT
    python scripts/bench_cpu.py --only grpo_ragged      one task; --quick for a smoke run
    python scripts/bench_cpu.py --compare result.json   fails if a ratio is 10 % below that file's

Requires TRL: pip install -e '.[test]' in a clone. Without TRL: --sides rl_core.

The sides run one after the other, each in a separate process. The measure is the CPU time of that
process (all threads, user and system), because wall time depends on other load. Lengths are forced:
a counter sets the length of each completion, so that both sides sample equally many tokens. Each
side runs with several settings, and its best one counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from bench_work import OUR_SETTINGS, TRL_SETTINGS, WORKS, Measured, Work, make_model
from script_tools import Table, make_parser, write_json

FALLEN_FRAC = 0.1  # --compare fails if a ratio fell by more than this fraction.


def run_here(work: Work, side: str, setting: str, model: str) -> Measured:
    import torch

    torch.set_num_threads(1)
    if side == "trl":
        from bench_trl import run_trl

        return run_trl(work, TRL_SETTINGS[work.algorithm][setting], model)
    from bench_ours import run_ours

    return run_ours(work, OUR_SETTINGS[work.algorithm][setting], model)


def run_apart(work: Work, side: str, setting: str, model: str) -> Measured:
    """run_here() in a new process with one thread and without a GPU."""
    job = json.dumps({"work": asdict(work), "side": side, "setting": setting, "model": model})
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    env["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--job", job]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{side} {setting} on {work.name} ended with "
            f"{done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def summary(work: Work, side: str, setting: str, m: Measured) -> dict:
    """A line of the table: the median CPU time of a step, and rates over all measured steps."""
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
        "learned_tokens": learned,
    }


def speedups(lines: list[dict]) -> dict[str, float]:
    """TRL's CPU time over rl_core's, each in its best setting: per step for GRPO, per token for
    SFT."""
    ratios = {}
    for name in dict.fromkeys(line["work"] for line in lines):
        ours, trl = (
            [x for x in lines if x["work"] == name and x["side"] == side]
            for side in ("rl_core", "trl")
        )
        if ours and trl and WORKS[name].algorithm == "grpo":
            ours_s, trl_s = (min(x["cpu_s_per_step"] for x in side) for side in (ours, trl))
            ratios[name] = trl_s / ours_s
        elif ours and trl:
            rate = "learn_tokens_per_cpu_s"
            ratios[name] = max(x[rate] for x in ours) / max(x[rate] for x in trl)
    return ratios


def fallen(ratios: dict[str, float], before: dict[str, float]) -> list[str]:
    """A line for each task whose ratio fell by more than FALLEN_FRAC. Tasks that are in only one of
    the two are ignored."""
    lines = []
    for name, times in ratios.items():
        if name in before and times < (1 - FALLEN_FRAC) * before[name]:
            lines.append(f"{name}: {times:.2f} times, it was {before[name]:.2f}")
    return lines


COLUMNS = {
    "work": "<11",
    "side": "<7",
    "setting": "<23",
    "cpu_s_per_step": ">5.3f",
    "generate_tokens_per_cpu_s": ">5.0f",
    "learn_tokens_per_cpu_s": ">5.0f",
    "useful_frac": ">5.2f",
    "start_mib": ">5.0f",
    "peak_mib": ">5.0f",
    "tokens_per_step": ">5.0f",
}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=WORKS, nargs="+", help="default: all tasks")
    parser.add_argument(
        "--sides",
        choices=["rl_core", "trl"],
        nargs="+",
        default=["rl_core", "trl"],
        help="default: both; trl must be installed",
    )
    parser.add_argument(
        "--hidden", type=int, help="width of the model; 128 with 3 layers is 0.6M parameters"
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, help="measured steps, after 2 of warm-up")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: 2 steps after 1 of warm-up"
    )
    parser.add_argument("--out", type=Path, help="JSON file with every figure")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="an earlier file of --out; exits with 1 if a ratio fell by 10 %%",
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "trl" in args.sides and importlib.util.find_spec("trl") is None:
        parser.error(
            "--sides trl needs TRL, which is not installed: pip install -e '.[test]', or give "
            "--sides rl_core"
        )
    if args.compare and not args.compare.is_file():
        parser.error(f"--compare {args.compare}: there is no such file; --out FILE writes one")
    return args


def chosen_works(args: argparse.Namespace) -> list[Work]:
    changes = {"hidden": args.hidden, "layers": args.layers, "steps": args.steps}
    if args.quick:
        changes |= {"steps": 2, "warmup": 1}
    changes = {name: value for name, value in changes.items() if value is not None}
    return [replace(WORKS[name], **changes) for name in args.only or WORKS]


def compare(work: Work, sides: list[str]) -> list[dict]:
    settings = [("rl_core", setting) for setting in OUR_SETTINGS[work.algorithm]]
    settings += [("trl", setting) for setting in TRL_SETTINGS[work.algorithm]]
    lines = []
    with tempfile.TemporaryDirectory() as model:
        make_model(work, model)
        for side, setting in settings:
            if side in sides:
                print(f"{work.name}: {side} {setting}", file=sys.stderr, flush=True)
                lines.append(summary(work, side, setting, run_apart(work, side, setting, model)))
    return lines


def main() -> None:
    args = parse_arguments()
    if args.job:
        job = json.loads(args.job)
        measured = run_here(Work(**job["work"]), job["side"], job["setting"], job["model"])
        print("\n" + json.dumps(asdict(measured)))
        return

    # Read first: --out may name the same file.
    before = json.loads(args.compare.read_text())["speedups"] if args.compare else {}
    lines = [line for work in chosen_works(args) for line in compare(work, args.sides)]
    ratios = speedups(lines)
    table = Table(**COLUMNS)
    for line in lines:
        table.add(line)
    for name, times in ratios.items():
        unit = "step" if WORKS[name].algorithm == "grpo" else "token"
        print(f"{name}: TRL needs {times:.2f} times the CPU time per {unit}, best settings")
    write_json(args.out, {"speedups": ratios, "lines": lines})
    if worse := fallen(ratios, before):
        sys.exit("rl_core fell behind TRL:\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
