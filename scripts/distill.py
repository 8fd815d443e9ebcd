"""Ways to learn from a teacher that sorts digits, with the same student and as many samples: its
judgement of the student's own samples (on-policy distillation), by the tokens that were sampled and
by whole distributions, SFT on its samples, and, for comparison, the reward alone (GRPO).

    bash scripts/quickstart.sh       # makes the student (sft) and the teacher (grpo)
    python scripts/distill.py        # --seeds 0,1,2 --steps 40 --out FILE.json

Prints a table: held-out tasks that are right (greedy, and 4 samples), the KL of the student to the
teacher on its own samples in the last step, and the samples that were drawn until it first fell
below a tenth of a nat. The runs lie in runs/distill.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs/distill"
TRAIN = "-m torch.distributed.run --standalone --nproc_per_node 1 -m rl_core.train"
LENGTHS = "--max_tokens 8 --max_prompt_tokens 16"
ENV = "--env_path envs/sort_digits.py"
TASKS, GROUP = 16, 8
NEAR_NATS = 0.1
# Those that differ in what --algo.teacher_loss compares; the first is the sampled form.
FORMS = {"opd": "sampled", "opd_exact": "reverse_kl", "opd_forward": "forward_kl", "opd_jsd": "jsd"}
WAYS = (*FORMS, "sft", "grpo")


def python(command: str) -> None:
    print(f"$ python {command}", flush=True)
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def scores(out: Path) -> dict[str, float]:
    """Of the last evaluation."""
    found = [row for row in lines_of(out) if "eval/sort_digits/greedy_pass" in row][-1]
    return {name: found[f"eval/sort_digits/{name}"] for name in ("greedy_pass", "avg@4")}


def measure(student: Path, teacher: Path, steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Way -> what it reached."""
    out = RUNS / f"seed_{seed}"
    shutil.rmtree(out, ignore_errors=True)
    rl = (
        f"{TRAIN} {ENV} {LENGTHS} --tasks_per_step {TASKS} --group_size {GROUP} --seed {seed} "
        f"--num_steps {steps} --eval_every {steps} --optim.warmup_steps 5"
    )
    judged = f"--algo.teacher {teacher}"
    for way, form in FORMS.items():
        opd = f"--algorithm opd {judged} --algo.teacher_loss {form} --optim.lr 1e-3"
        python(f"{rl} --model {student} --out {out}/{way} {opd}")
    # The reward decides; the teacher is only asked, so that the KL is known.
    grpo = f"--optim.lr 3e-4 --algo.clip_high 0.28 {judged} --algo.teacher_coef 1e-9"
    python(f"{rl} --model {student} --out {out}/grpo {grpo}")
    num_tasks = steps * TASKS
    python(
        f"-m rl_core.tools.cli collect {teacher} {ENV} {LENGTHS} --out {out}/samples --num_tasks "
        f"{num_tasks} --tasks_per_step {TASKS} --group_size {GROUP} --seed {seed}"
    )
    python(
        f"{TRAIN} --algorithm sft --model {student} --data.train {out}/samples/rollouts "
        f"{LENGTHS} --out {out}/sft --tasks_per_step 128 --num_steps {steps} --optim.lr 1e-3 "
        f"--optim.warmup_steps 5 --seed {seed}"
    )
    # One step without learning measures what SFT made.
    measured = f"{rl} --num_steps 1 --eval_every 1 --optim.lr 0 --algorithm opd {judged}"
    python(f"{measured} --model {out}/sft/hf/policy --out {out}/sft_measured")
    found = {}
    for way in WAYS:
        run = "sft_measured" if way == "sft" else way
        kl = [
            row["learn/policy/teacher_kl_nats"]
            for row in lines_of(out / run)
            if "time/step_s" in row
        ]
        near = next((step for step, value in enumerate(kl) if value < NEAR_NATS), math.nan)
        drawn = near * TASKS * GROUP
        if way == "sft":
            drawn = num_tasks * GROUP
        found[way] = scores(out / run) | {"teacher_kl_nats": kl[-1], "samples": drawn}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--student", default="runs/quickstart/sft/hf/policy")
    parser.add_argument("--teacher", default="runs/quickstart/grpo/hf/policy")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON with every seed's numbers")
    args = parser.parse_args()
    student, teacher = Path(args.student).resolve(), Path(args.teacher).resolve()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    found = {seed: measure(student, teacher, args.steps, seed) for seed in seeds}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"\n{args.steps} steps of {TASKS * GROUP} samples, seeds {args.seeds}: "
        "mean (lowest, highest)"
    )
    for way in WAYS:
        cells = []
        for name in ("greedy_pass", "avg@4", "teacher_kl_nats", "samples"):
            values = [found[seed][way][name] for seed in seeds]
            mean = statistics.mean(values)
            cells.append(f"{name} {mean:.4g} ({min(values):.4g}, {max(values):.4g})")
        print(f"{way:<11} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
