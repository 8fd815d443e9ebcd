"""Self-distillation without rewards: a tiny model learns to sort digits from itself with the
solution in its prompt.

    python scripts/self_distill.py        # --seeds 0,1,2 --steps 40 --update start --out FILE.json

First SFT teaches two habits: to answer `31524` with its digits in random order, and to copy the
text after `=` in `31524=24135`, also in random order. Neither shows how to sort. Then the teacher
reads `31524=12345` (teacher_prompt in envs/sort_digits.py) before the student's answer to `31524`.
Prints a table of held-out tasks that are right. The runs are in runs/self_distill.
"""

from __future__ import annotations

import random
import shutil
from itertools import permutations
from pathlib import Path

from distill import ENV, TRAIN, spread
from make_tiny_model import make_tiny_model
from script_tools import ROOT, make_parser, read_metrics, run, write_json, write_rows

LENGTHS = "--max_tokens 8 --max_prompt_tokens 24"


def habits(num_rows: int, seed: int) -> list[dict]:
    """Rows for SFT, every second with a text to copy. Digits are sorted only by chance."""
    draw, rows = random.Random(seed), []
    every = list(permutations("0123456789", 5))
    for number in range(num_rows):
        digits = list(draw.choice(every))
        prompt, reply = "".join(digits), "".join(draw.sample(digits, 5))
        if number % 2:
            prompt += f"={reply}"
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        rows.append({"messages": messages})
    return rows


def measure(steps: int, seed: int, update: str) -> list[dict[str, float]]:
    """Evaluations of a run: step, greedy_pass, avg@4."""
    out = f"runs/self_distill/seed_{seed}"
    model = f"{out}/sft/hf/policy"
    if not (ROOT / model).exists():
        shutil.rmtree(ROOT / out, ignore_errors=True)
        make_tiny_model(ROOT / out / "model", seed=seed)
        write_rows(ROOT / out / "sft.jsonl", habits(64000, seed))
        run(
            f"{TRAIN} --algorithm sft --model {out}/model --data.train {out}/sft.jsonl --out "
            f"{out}/sft --seed {seed} --tasks_per_step 64 --num_steps 1000 {LENGTHS} "
            "--optim.lr 3e-3 --optim.schedule cosine --optim.min_lr_frac 0.1"
        )
    shutil.rmtree(ROOT / out / update, ignore_errors=True)
    run(
        f"{TRAIN} --algorithm opd --model {model} {ENV} {LENGTHS} --out {out}/{update} "
        f"--seed {seed} --algo.teacher self --algo.teacher_update {update} --tasks_per_step 16 "
        f"--group_size 8 --num_steps {steps} --eval_every {max(1, steps // 5)} --optim.lr 5e-4 "
        "--optim.warmup_steps 5"
    )
    evaluations = []
    for row in read_metrics(f"{out}/{update}"):
        if "eval/sort_digits/greedy_pass" in row:
            scores = {name: row[f"eval/sort_digits/{name}"] for name in ("greedy_pass", "avg@4")}
            evaluations.append({"step": row["step"]} | scores)
    return evaluations


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--update", default="start", help="start, latest or ema")
    parser.add_argument("--out", type=Path, help="write every seed's figures as JSON")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    results = {seed: measure(args.steps, seed, args.update) for seed in seeds}
    write_json(args.out, results)
    print(f"\nteacher: {args.update}; seeds {args.seeds}: mean (min, max)")
    for rows in zip(*results.values(), strict=True):
        print(spread(list(rows)))


if __name__ == "__main__":
    main()
