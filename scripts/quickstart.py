"""The quickstart's four steps as commands that can be typed one by one, and a table of its scores.
quickstart.sh installs rl_core and calls this script.

runs/quickstart/  model/  data/  sft/  grpo/  result.json

If runs/quickstart exists, the folder is runs/quickstart_2 and so on.
"""

from __future__ import annotations

import itertools
import json
import os
import time

from script_tools import ROOT, make_parser, read_metrics, run

LENGTHS = "--max_tokens 8 --max_prompt_tokens 16"
TRAIN = "-m rl_core.train"


def step(title: str, command: str, *more: str) -> None:
    print(f"\n== {title}", flush=True)
    run(command, *more)


def main() -> None:
    parser = make_parser(__doc__)
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
    step(
        "a Qwen3 with 0.1 M parameters, one token per character",
        f"scripts/make_tiny_model.py --out {here}/model --seed {seed}",
    )
    step(
        "rows that show the form of an answer: the digits in a random order",
        f"scripts/demo_data.py --out {here}/data --task sort --seed {seed} --num_sft 32000",
    )
    step(
        "warm-up: imitate these rows",
        f"{TRAIN} --algorithm sft --model {here}/model --data.train {here}/data/sft.jsonl --out "
        f"{here}/sft --seed {seed} "
        f"--tasks_per_step 64 --num_steps 500 {LENGTHS} --optim.lr 3e-3 --optim.schedule cosine "
        "--optim.min_lr_frac 0.1",
    )
    step(
        "reinforcement learning: the reward is the share of digits in their right place",
        f"{TRAIN} --algorithm grpo --model {here}/sft/hf/policy --env_path envs/sort_digits.py "
        f"--out {here}/grpo --seed {seed} "
        f"--tasks_per_step 16 --group_size 8 --num_steps 100 {LENGTHS} --optim.lr 3e-4 "
        "--optim.warmup_steps 5 "
        "--algo.clip_high 0.28 --eval_every 50",
        *more,
    )
    step("its curves", f"-m rl_core.tools.cli plot {here}/grpo")
    rows = [row for row in read_metrics(out / "grpo") if "eval/sort_digits/greedy_pass" in row]
    before, after = (row["eval/sort_digits/greedy_pass"] for row in (rows[0], rows[-1]))
    result = {
        "before": before,
        "after": after,
        "seconds": round(time.monotonic() - began, 1),
        "seed": int(seed),
    }
    (out / "result.json").write_text(json.dumps(result) + "\n")
    print("\n== share of 256 held-out tasks with all five digits in order")
    print("  step  greedy_pass  avg@4  pass@4")
    for row in rows:
        shown = (row[f"eval/sort_digits/{name}"] for name in ("greedy_pass", "avg@4", "pass@4"))
        print(
            f"  {row['step']:>4}  "
            + "  ".join(f"{v:{width}.3f}" for v, width in zip(shown, (11, 5, 6), strict=True))
        )
    print(f"  before {before:.3f}, after {after:.3f}, {result['seconds']} s, seed {seed}")
    print(f"  run: {here}/grpo, model: {here}/grpo/hf/policy, result: {here}/result.json")
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
