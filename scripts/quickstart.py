"""The quickstart's four steps as commands that can be typed one by one, and its table. See
quickstart.sh.

runs/quickstart/  model/  data/  sft/  grpo/  result.json

Where that is there already, runs/quickstart_2/ and so on.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = "--max_tokens 8 --max_prompt_tokens 16"
TRAIN = "-m rl_core.train"


def run(title: str, command: str, *more: str) -> None:
    words = [*command.split(), *more]
    print(f"\n== {title}\n$ python {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, *words], cwd=ROOT).returncode
    if code:
        sys.exit(code)


def evaluations(out: Path) -> list[dict]:
    lines = (out / "grpo/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "eval/sort_digits/greedy_pass" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", default="0")
    args, more = parser.parse_known_args()
    if any(word.partition("=")[0] == "--out" for word in more):
        parser.error("--out: its folders are runs/quickstart, runs/quickstart_2 and so on")
    seed = args.seed
    began = time.monotonic()
    names = itertools.chain(
        ["quickstart"], (f"quickstart_{number}" for number in itertools.count(2))
    )
    out = next(folder for folder in (ROOT / "runs" / name for name in names) if not folder.exists())
    here = out.relative_to(ROOT)
    run(
        "a Qwen3 with 0.1 M parameters, one token per character",
        f"scripts/make_tiny_model.py --out {here}/model --seed {seed}",
    )
    run(
        "rows that show the form of an answer, a random order of the digits, and not the order "
        "that is asked for",
        f"scripts/demo_data.py --out {here}/data --task sort --seed {seed} --num_sft 32000",
    )
    run(
        "warm-up: imitate these rows",
        f"{TRAIN} --algorithm sft --model {here}/model --data.train {here}/data/sft.jsonl --out "
        f"{here}/sft --seed {seed} "
        f"--tasks_per_step 64 --num_steps 500 {LENGTHS} --optim.lr 3e-3 --optim.schedule cosine "
        "--optim.min_lr_frac 0.1",
    )
    run(
        "reinforcement learning: the reward is the share of digits in their right place",
        f"{TRAIN} --algorithm grpo --model {here}/sft/hf/policy --env_path envs/sort_digits.py "
        f"--out {here}/grpo --seed {seed} "
        f"--tasks_per_step 16 --group_size 8 --num_steps 100 {LENGTHS} --optim.lr 3e-4 "
        "--optim.warmup_steps 5 "
        "--algo.clip_high 0.28 --eval_every 50",
        *more,
    )
    run("its curves", f"-m rl_core.tools.cli plot {here}/grpo")
    found = evaluations(out)
    before, after = (row["eval/sort_digits/greedy_pass"] for row in (found[0], found[-1]))
    result = {
        "before": before,
        "after": after,
        "seconds": round(time.monotonic() - began, 1),
        "seed": int(seed),
    }
    (out / "result.json").write_text(json.dumps(result) + "\n")
    print("\n== five digits in the right order, of 256 that were held out (greedy)")
    print("  step   exact   avg@4   pass@4")
    for row in found:
        shown = (row[f"eval/sort_digits/{name}"] for name in ("greedy_pass", "avg@4", "pass@4"))
        print(f"  {row['step']:>4}  " + "  ".join(f"{v:6.3f}" for v in shown))
    print(f"  before {before:.3f}, after {after:.3f}, {result['seconds']} s, seed {seed}")
    print(
        f"  the run lies in {here}/grpo, the model in {here}/grpo/hf/policy, this result in "
        f"{here}/result.json"
    )
    activate = "" if "VIRTUAL_ENV" in os.environ else "  source .venv/bin/activate\n"
    print(
        f"\n== what to try next\n{activate}"
        f"  rl-core view {here}/grpo\n"
        f"  rl-core show {here}/grpo --eval --worst\n"
        f"  rl-core eval {here}/grpo {here}/sft/hf/policy\n"
        "  rl-core init mine"
    )


if __name__ == "__main__":
    main()
