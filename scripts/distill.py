"""Ways to learn from a teacher that sorts digits, with the same student and number of samples:
on-policy distillation by the sampled tokens and by whole distributions, SFT on the teacher's
samples, and, for comparison, the reward alone (GRPO).

    bash scripts/quickstart.sh       # makes the student (sft) and the teacher (grpo)
    python scripts/distill.py        # --seeds 0,1,2 --steps 40 --out FILE.json

Prints a table: the fraction of held-out tasks that are right (greedy, and of 4 samples), the KL of
the student to the teacher on its own samples in the last step, and the number of samples until
this KL first fell below 0.1 nats. The runs are in runs/distill.
"""

from __future__ import annotations

import math
import shutil
import statistics
from pathlib import Path

from script_tools import ROOT, make_parser, read_metrics, run, write_json

TRAIN = "-m torch.distributed.run --standalone --nproc_per_node 1 -m rl_core.train"
LENGTHS = "--max_tokens 8 --max_prompt_tokens 16"
ENV = "--env_path envs/sort_digits.py"
TASKS, GROUP = 16, 8
NEAR_NATS = 0.1
# Runs that differ in --algo.teacher_loss; the first compares sampled tokens only.
FORMS = {"opd": "sampled", "opd_exact": "reverse_kl", "opd_forward": "forward_kl", "opd_jsd": "jsd"}
RUNS = (*FORMS, "sft", "grpo")


def last_scores(out: str) -> dict[str, float]:
    """Scores of the last evaluation."""
    row = [row for row in read_metrics(out) if "eval/sort_digits/greedy_pass" in row][-1]
    return {name: row[f"eval/sort_digits/{name}"] for name in ("greedy_pass", "avg@4")}


def measure(student: Path, teacher: Path, steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Run -> scores, KL and number of samples."""
    out = f"runs/distill/seed_{seed}"
    shutil.rmtree(ROOT / out, ignore_errors=True)
    rl = (
        f"{TRAIN} {ENV} {LENGTHS} --tasks_per_step {TASKS} --group_size {GROUP} --seed {seed} "
        f"--num_steps {steps} --eval_every {steps} --optim.warmup_steps 5"
    )
    judged = f"--algo.teacher {teacher}"
    for name, form in FORMS.items():
        opd = f"--algorithm opd {judged} --algo.teacher_loss {form} --optim.lr 1e-3"
        run(f"{rl} --model {student} --out {out}/{name} {opd}")
    # The reward decides; the tiny coefficient only makes the run log its KL to the teacher.
    grpo = f"--optim.lr 3e-4 --algo.clip_high 0.28 {judged} --algo.teacher_coef 1e-9"
    run(f"{rl} --model {student} --out {out}/grpo {grpo}")
    num_tasks = steps * TASKS
    run(
        f"-m rl_core.tools.cli collect {teacher} {ENV} {LENGTHS} --out {out}/samples --num_tasks "
        f"{num_tasks} --tasks_per_step {TASKS} --group_size {GROUP} --seed {seed}"
    )
    run(
        f"{TRAIN} --algorithm sft --model {student} --data.train {out}/samples/rollouts "
        f"{LENGTHS} --out {out}/sft --tasks_per_step 128 --num_steps {steps} --optim.lr 1e-3 "
        f"--optim.warmup_steps 5 --seed {seed}"
    )
    # One step without updates measures the model of SFT.
    measured = f"{rl} --num_steps 1 --eval_every 1 --optim.lr 0 --algorithm opd {judged}"
    run(f"{measured} --model {out}/sft/hf/policy --out {out}/sft_measured")
    results = {}
    for name in RUNS:
        folder = f"{out}/sft_measured" if name == "sft" else f"{out}/{name}"
        steps_of_run = [row for row in read_metrics(folder) if "time/step_s" in row]
        kl = [row["learn/policy/teacher_kl_nats"] for row in steps_of_run]
        near = next((step for step, value in enumerate(kl) if value < NEAR_NATS), math.nan)
        samples = (num_tasks if name == "sft" else near * TASKS) * GROUP
        results[name] = last_scores(folder) | {"teacher_kl_nats": kl[-1], "samples": samples}
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--student", default="runs/quickstart/sft/hf/policy")
    parser.add_argument("--teacher", default="runs/quickstart/grpo/hf/policy")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write every seed's figures as JSON")
    args = parser.parse_args()
    student, teacher = Path(args.student).resolve(), Path(args.teacher).resolve()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    results = {seed: measure(student, teacher, args.steps, seed) for seed in seeds}
    write_json(args.out, results)
    print(f"\n{args.steps} steps of {TASKS * GROUP} samples, seeds {args.seeds}: mean (min, max)")
    for name in RUNS:
        print(f"{name:<11}", spread([results[seed][name] for seed in seeds]))


def spread(rows: list[dict[str, float]]) -> str:
    """Mean, least and most of each figure."""
    cells = []
    for name in rows[0]:
        values = [row[name] for row in rows]
        mean = statistics.mean(values)
        cells.append(f"{name} {mean:.4g} ({min(values):.4g}, {max(values):.4g})")
    return "  ".join(cells)


if __name__ == "__main__":
    main()
