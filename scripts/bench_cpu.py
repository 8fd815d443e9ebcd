"""rl_core and TRL side by side on a CPU: the same model, prompts, lengths and number of samples,
one torch thread each.

    python scripts/bench_cpu.py                         GRPO on short and ragged completions, SFT on
    ragged rows
    python scripts/bench_cpu.py --only grpo_ragged      one of them; --quick for a smoke run, --out
    result.json
    python scripts/bench_cpu.py --compare result.json   fails if a ratio is 10 % below that file's
    python scripts/bench_cpu.py --only sft_file --sft_file gsm8k_train.jsonl.gz
                                                        SFT of 3M parameters on rows {"question",
                                                        "answer"}

TRL must be installed: pip install '.[test]' in a clone. Without it: --sides rl_core.

Each side runs in a process of its own, after the other. What counts is the CPU time of that process
(all threads, user and system), since wall time depends on what else the machine does. Lengths are
forced: every completion is as long as a counter says, so that both sides sample equally many
tokens. Each side gets several settings and counts by its best.
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

FALLEN_FRAC = 0.1  # of a ratio, beyond which --compare fails


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
    """One line of the table: CPU per step is the median of the steps after the warm-up, rates are
    over all of those."""
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
    """How many times less CPU rl_core needs than TRL, each at its best: per step for GRPO, per
    token for SFT."""
    found = {}
    for name in dict.fromkeys(line["work"] for line in lines):
        ours, trl = (
            [x for x in lines if x["work"] == name and x["side"] == side]
            for side in ("rl_core", "trl")
        )
        if ours and trl and WORKS[name].algorithm == "grpo":
            found[name] = min(x["cpu_s_per_step"] for x in trl) / min(
                x["cpu_s_per_step"] for x in ours
            )
        elif ours and trl:
            rate = "learn_tokens_per_cpu_s"
            found[name] = max(x[rate] for x in ours) / max(x[rate] for x in trl)
    return found


def fallen(found: dict[str, float], before: dict[str, float]) -> list[str]:
    """A line for each work whose ratio is FALLEN_FRAC below what it was. A work that only one of
    both measured is left out."""
    lines = []
    for name, times in found.items():
        if name in before and times < (1 - FALLEN_FRAC) * before[name]:
            lines.append(f"{name}: {times:.2f} times, it was {before[name]:.2f}")
    return lines


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
        cells = [
            form.format(line[key]) if line[key] is not None else "-"
            for key, form in COLUMNS.values()
        ]
        side = line["side"] + (f" ({line['setting']})" if line["setting"] else "")
        rows.append(
            [line["work"], side, *cells, " ".join(f"{s:.2f}" for s in line["warmup_cpu_s"])]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=WORKS, nargs="+", help="what to measure; default: all that can be"
    )
    parser.add_argument(
        "--sft_file", type=Path, help='.jsonl or .jsonl.gz with rows {"question", "answer"}'
    )
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
    parser.add_argument("--steps", type=int, help="that count, after 2 of warm-up")
    parser.add_argument(
        "--quick", action="store_true", help="2 steps after 1 of warm-up: does it run at all?"
    )
    parser.add_argument("--out", type=Path, help="JSON file with every figure")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="what --out wrote before; ends with 1 if a ratio fell by 10 %%",
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "sft_file" in (args.only or []) and not args.sft_file:
        parser.error("--only sft_file needs --sft_file FILE")
    if "trl" in args.sides and importlib.util.find_spec("trl") is None:
        parser.error(
            "--sides trl needs TRL, which is not installed: pip install '.[test]', or give "
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
    names = args.only or [name for name in WORKS if name != "sft_file" or args.sft_file]
    works = [replace(WORKS[name], **changes) for name in names]
    return [
        replace(w, file=str(args.sft_file.resolve())) if w.name == "sft_file" else w for w in works
    ]


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
    found = speedups(lines)
    print(table(lines))
    for name, times in found.items():
        unit = "step" if WORKS[name].algorithm == "grpo" else "token"
        print(
            f"{name}: rl_core needs {times:.2f} times less CPU per {unit} than TRL, each in its "
            "best setting"
        )
    if args.out:
        args.out.write_text(json.dumps({"speedups": found, "lines": lines}, indent=1))
    if worse := fallen(found, before):
        sys.exit("rl_core fell behind TRL:\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
