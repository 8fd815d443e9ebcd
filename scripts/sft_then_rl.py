"""SFT on collected episodes and then RL, against RL alone, with equally many sampled episodes;
three seeds, on a CPU.

    python scripts/sft_then_rl.py                     # --seeds 0,1,2

The task is sums such as 7+12 (envs/math_answer.py). A tiny model is warmed up by rows that reckon,
and are right, in 5 of 100 cases, and guess wrong otherwise: rewards are rare at first. RL alone
samples 12 steps of 128 episodes. The other way spends half of these episodes on `rl-core collect`,
imitates those that were right, and samples 6 steps. Writes docs/curves/sft_then_rl.json; fails if
RL alone is as good on average, by the score of held-out sums.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from datetime import date

from curves import RL, ROOT, SFT, rows_of, run, write_rows
from make_tiny_model import make_tiny_model

STEPS, COLLECTED = 12, 6  # of 16 tasks x 8 episodes
LENGTHS = "--max_prompt_tokens 24 --max_tokens 20"
TASK = f"--env_path envs/math_answer.py {LENGTHS}"
LEARN = f"rl_core.train {TASK} {RL} --optim.lr 5e-4 --eval.samples 8"


def shown(row: dict, rng: random.Random) -> dict:
    """A row of the warm-up."""
    asked, right = row["prompt"], row["answer"]
    said = (
        f"{asked[8:-1]}={right}\n#### {right}"
        if rng.random() < 0.05
        else f"#### {right + rng.randint(1, 5)}"
    )
    return {
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    }


def score(folder: str) -> float:
    """Mean reward of the last evaluation, of 8 samples a task."""
    rows = [json.loads(line) for line in (ROOT / folder / "metrics.jsonl").read_text().splitlines()]
    return round(
        [row["eval/math_answer/avg@8"] for row in rows if "eval/math_answer/avg@8" in row][-1], 3
    )


def measure(seed: int) -> dict[str, float]:
    here, rng = f"runs/sft_then_rl/{seed}", random.Random(seed)
    out = ROOT / here
    shutil.rmtree(out, ignore_errors=True)
    make_tiny_model(out / "model", seed=seed)
    sums = {
        split: [r for r in rows_of("math_answer", split) if len(r["prompt"]) <= 13]
        for split in ("train", "eval")
    }
    for split, rows in sums.items():
        write_rows(out / f"{split}.jsonl", rows)
    write_rows(out / "sft.jsonl", [shown(rng.choice(sums["train"]), rng) for _ in range(8000)])
    imitate, rows = (
        f"rl_core.train {SFT} {LENGTHS} --seed {seed}",
        f"--data.train {here}/train.jsonl --seed {seed}",
    )
    run(
        f"{imitate} --model {here}/model --data.train {here}/sft.jsonl --out {here}/warm "
        "--num_steps 200"
    )
    learn, left = f"{LEARN} {rows} --data.eval {here}/eval.jsonl", STEPS - COLLECTED
    run(
        f"{learn} --model {here}/warm/hf/policy --out {here}/rl --num_steps {STEPS} --eval_every "
        f"{STEPS}"
    )
    sizes = f"--num_tasks {16 * COLLECTED} --tasks_per_step 16 --group_size 8 --min_reward 1"
    run(
        f"rl_core.tools.cli collect {here}/warm/hf/policy {TASK} {rows} {sizes} "
        f"--out {here}/collected"
    )
    right = (
        f"{imitate.replace('3e-3', '1e-3')} --model {here}/warm/hf/policy --data.train "
        f"{here}/collected/rollouts"
    )
    run(f"{right} --out {here}/sft --num_steps 20")
    run(
        f"{learn} --model {here}/sft/hf/policy --out {here}/then_rl --num_steps {left} "
        f"--eval_every {left}"
    )
    return {"rl_alone": score(f"{here}/rl"), "sft_then_rl": score(f"{here}/then_rl")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    found = {seed: measure(int(seed)) for seed in parser.parse_args().seeds.split(",")}
    means = {
        way: round(sum(of[way] for of in found.values()) / len(found), 3)
        for way in ("rl_alone", "sft_then_rl")
    }
    result = {"date": str(date.today()), "episodes": STEPS * 128, "held_out": found, "mean": means}
    (ROOT / "docs/curves").mkdir(exist_ok=True)
    (ROOT / "docs/curves/sft_then_rl.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 0 if means["sft_then_rl"] > means["rl_alone"] else 1


if __name__ == "__main__":
    sys.exit(main())
