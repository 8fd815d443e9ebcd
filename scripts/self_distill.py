"""Self-distillation without rewards: a tiny model learns to sort digits from itself with the
solution in its prompt.

    python scripts/self_distill.py        # --seeds 0,1,2 --steps 40 --update start --out FILE.json

Before, SFT teaches two habits: to answer `31524` by a random order of its digits, and to copy what
follows `=` in `31524=24135`, a random order too. Neither shows how to sort. Then the teacher reads
`31524=12345` (teacher_prompt in envs/sort_digits.py) before what the student has answered to
`31524`. Prints a table of held-out tasks that are right. The runs lie in runs/self_distill.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
from itertools import permutations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs/self_distill"
TRAIN = "-m torch.distributed.run --standalone --nproc_per_node 1 -m rl_core.train"
LENGTHS = "--max_tokens 8 --max_prompt_tokens 24"
ENV = "--env_path envs/sort_digits.py"


def python(command: str) -> None:
    print(f"$ python {command}", flush=True)
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)


def habits(num_rows: int, seed: int) -> list[dict]:
    """Rows for SFT: half of them with something to copy. None shows sorted digits but by chance."""
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


def warm_up(out: Path, seed: int) -> Path:
    """The folder of a model with the two habits."""
    python(f"scripts/make_tiny_model.py --out {out}/model --seed {seed}")
    rows = "".join(json.dumps(row) + "\n" for row in habits(64000, seed))
    (out / "sft.jsonl").write_text(rows)
    python(
        f"{TRAIN} --algorithm sft --model {out}/model --data.train {out}/sft.jsonl --out {out}/sft "
        f"--seed {seed} --tasks_per_step 64 --num_steps 1000 {LENGTHS} --optim.lr 3e-3 "
        "--optim.schedule cosine --optim.min_lr_frac 0.1"
    )
    return out / "sft/hf/policy"


def measure(steps: int, seed: int, update: str) -> list[dict]:
    """Evaluations of a run: step, greedy_pass, avg@4."""
    out = RUNS / f"seed_{seed}"
    model = out / "sft/hf/policy"
    if not model.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        model = warm_up(out, seed)
    run = out / update
    shutil.rmtree(run, ignore_errors=True)
    python(
        f"{TRAIN} --algorithm opd --model {model} {ENV} {LENGTHS} --out {run} --seed {seed} "
        f"--algo.teacher self --algo.teacher_update {update} --tasks_per_step 16 --group_size 8 "
        f"--num_steps {steps} --eval_every {max(1, steps // 5)} --optim.lr 5e-4 "
        "--optim.warmup_steps 5"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = []
    for row in lines:
        if "eval/sort_digits/greedy_pass" in row:
            shown = {name: row[f"eval/sort_digits/{name}"] for name in ("greedy_pass", "avg@4")}
            found.append({"step": row["step"]} | shown)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--update", default="start", help="start, latest or ema")
    parser.add_argument("--out", type=Path, help="JSON with every seed's numbers")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    found = {seed: measure(args.steps, seed, args.update) for seed in seeds}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nteacher: {args.update}; seeds {args.seeds}: mean (lowest, highest)")
    for rows in zip(*found.values(), strict=True):
        cells = [f"step {rows[0]['step']:>4}"]
        for name in ("greedy_pass", "avg@4"):
            values = [row[name] for row in rows]
            mean = statistics.mean(values)
            cells.append(f"{name} {mean:.3f} ({min(values):.3f}, {max(values):.3f})")
        print("  ".join(cells))


if __name__ == "__main__":
    main()
