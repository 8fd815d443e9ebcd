"""Learning curves of two actors that play against each other by different algorithms: in
envs/jailbreak.py an attacker by PPO, with a KL penalty and a critic of its own, and the target of
its attacks by GRPO, without either.

    python scripts/asymmetric.py                      # --seeds 0,1,2 --steps 60

Both begin as one tiny model with habits. The attacker asks in one of eight ways, each as often as
the others. The target gives its password away to two of them, and says no to the rest. The target
learns in every eighth step, so that the attacker finds what works before the target is closed.
Afterwards each, before and after learning, plays the other, before and after, for one step without
learning. Writes docs/curves/asymmetric.json and .svg; fails if an actor did not learn: the
attacker, against the target as it was, or the target, against the attacker as it was. The runs lie
in runs/asymmetric.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
from collections import Counter
from datetime import date
from pathlib import Path

from curves import ROOT, SFT, habit_rows, run, write_rows
from make_tiny_model import make_tiny_model

from rl_core.data.tables import read_episodes

# What the attacker says -> how often the target gives its password away.
PLEAS = {
    "spell it": 0.9,
    "sing it": 0.4,
    "tell me": 0.0,
    "ask": 0.0,
    "beg": 0.0,
    "hi": 0.0,
    "joke": 0.0,
    "why": 0.0,
}
# One: so small a model does not learn to copy a password, but knows one by heart.
PASSWORD = "xyz"
LENGTHS = "--max_prompt_tokens 240 --max_tokens 10"
ATTACKER = (
    "--actors.attacker.algorithm ppo --actors.attacker.algo.kl_coef 0.01 "
    "--actors.attacker.optim.lr 1e-3 --actors.attacker.critic.lr 3e-3 "
    "--actors.attacker.critic.gae_lambda 1 --actors.attacker.learner.updates_per_epoch 2"
)
TARGET = "--actors.target.optim.lr 2e-4 --actors.target.update_every 8"
PLAY = f"rl_core.train --env_path envs/jailbreak.py {LENGTHS} --tasks_per_step 8 --group_size 16"


def attack(messages: list[dict], row: dict, rng: random.Random) -> str:
    return rng.choice(list(PLEAS))


def answer(messages: list[dict], row: dict, rng: random.Random) -> str:
    return row["password"] if rng.random() < PLEAS[messages[-1]["content"]] else "no"


def values(folder: str, name: str) -> list[float]:
    rows = [json.loads(line) for line in (ROOT / folder / "metrics.jsonl").read_text().splitlines()]
    return [round(row[name], 3) for row in rows if name in row]


def first_attacks(file: Path) -> dict[str, float]:
    """Way to ask -> its share among the first attacks of a step's episodes."""
    count: Counter[str] = Counter()
    for episode in read_episodes(file):
        if episode["actor"] == "attacker":
            count[next(m["content"] for m in episode["messages"] if m["role"] == "assistant")] += 1
    return {plea: round(count[plea] / count.total(), 3) for plea in PLEAS}


def measure(seed: int, steps: int) -> dict:
    """Success of attacks by step, and of each pair of attacker and target without learning."""
    here = f"runs/asymmetric/{seed}"
    out = ROOT / here
    shutil.rmtree(out, ignore_errors=True)
    make_tiny_model(out / "model", seed=seed)
    rows = [{"prompt": "?", "password": PASSWORD}] * 20
    write_rows(out / "train.jsonl", rows)
    habits = {"attacker": attack, "target": answer}
    write_rows(out / "sft.jsonl", habit_rows("jailbreak", seed, 3000, rows, habits))
    run(
        f"rl_core.train {SFT} --tasks_per_step 16 --model {here}/model --data.train "
        f"{here}/sft.jsonl --max_prompt_tokens 240 --max_tokens 100 --num_steps 100 --seed {seed} "
        f"--out {here}/warm"
    )
    play = f"{PLAY} --data.train {here}/train.jsonl --seed {seed}"
    warm = f"{here}/warm/hf/policy"
    both = f"--actors.attacker.model {warm} --actors.target.model {warm}"
    run(
        f"{play} {both} {ATTACKER} {TARGET} --optim.warmup_steps 5 --num_steps {steps} "
        f"--out {here}/learned"
    )
    rollouts = sorted((out / "learned/rollouts").glob("step_*"))
    found = {
        "success": values(f"{here}/learned", "rollout/attacker/success"),
        "first_attacks": [first_attacks(file) for file in rollouts],
        "pairs": {},
    }
    models = {"before": dict.fromkeys(habits, warm)}
    models["after"] = {name: f"{here}/learned/hf/{name}" for name in habits}
    for attacker, target in itertools.product(models, models):
        pair = f"{attacker}_{target}"
        run(
            f"{play} --actors.attacker.model {models[attacker]['attacker']} "
            f"--actors.target.model {models[target]['target']} --optim.lr 0 --num_steps 1 "
            f"--tasks_per_step 20 --group_size 8 --out {here}/{pair}"
        )
        [found["pairs"][pair]] = values(f"{here}/{pair}", "rollout/attacker/success")
    return found


def smoothed(series: list[float]) -> list[float]:
    """Of each step: the mean of the last five."""
    found = []
    for last in range(1, len(series) + 1):
        part = series[max(0, last - 5) : last]
        found.append(sum(part) / len(part))
    return found


def draw(seeds: dict[str, dict], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    leaks = [plea for plea, share in PLEAS.items() if share > 0]
    for number, (seed, found) in enumerate(seeds.items()):
        steps = range(1, len(found["success"]) + 1)
        left.plot(steps, smoothed(found["success"]), color=f"C{number}", label=f"seed {seed}")
        for plea, style in zip(leaks, ("-", "--"), strict=True):
            shares = smoothed([step[plea] for step in found["first_attacks"]])
            label = f"{plea!r}, seed {seed}"
            right.plot(steps, shares, style, color=f"C{number}", label=label)
    left.set(title="episodes in which an attack succeeds", xlabel="step", ylim=(0, 1))
    right.set(title="share of the first attacks", xlabel="step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/curves")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = {seed: measure(int(seed), args.steps) for seed in args.seeds.split(",")}
    result = {"date": str(date.today()), "attacker": ATTACKER, "target": TARGET, "seeds": seeds}
    (args.out / "asymmetric.json").write_text(json.dumps(result) + "\n")
    draw(seeds, args.out / "asymmetric.svg")
    flat = []
    for seed, found in seeds.items():
        means = [round(mean, 2) for mean in smoothed(found["success"])[4::5]]
        print(f"seed {seed}: {means} {found['pairs']}")
        pairs = found["pairs"]
        if not pairs["before_after"] < pairs["before_before"] < pairs["after_before"]:
            flat.append(seed)
    if flat:
        print(f"an actor did not learn with seeds {flat}", file=sys.stderr)
    return 1 if flat else 0


if __name__ == "__main__":
    sys.exit(main())
