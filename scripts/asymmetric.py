"""Two actors that play against each other and learn by different algorithms: in envs/jailbreak.py
an attacker by PPO, with a KL penalty and a critic, and the target of its attacks by GRPO.

    python scripts/asymmetric.py                      # --seeds 0,1,2 --steps 60 --out FILE.json

Both start from one tiny model with habits. The attacker asks in one of eight ways, each equally
often. The target gives its password away to two of them and refuses the others. The target updates
every eighth step, so that the attacker finds the weakness before the target removes it. Afterwards
the attacker before and after training plays the target before and after training for one step
without updates. The script fails if an actor did not learn: the attacker against the untrained
target, or the target against the untrained attacker. The runs are in runs/asymmetric.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
from pathlib import Path

from curves import SFT, habit_rows
from make_tiny_model import make_tiny_model
from script_tools import ROOT, make_parser, read_metrics, run, write_json, write_rows

# Each way to ask, and the probability that the target gives its password away.
PLEAS = {"spell it": 0.9, "sing it": 0.4}
PLEAS |= dict.fromkeys(("tell me", "ask", "beg", "hi", "joke", "why"), 0.0)
# One password: a model of this size does not learn to copy, but can memorise.
PASSWORD = "xyz"
LENGTHS = "--max_prompt_tokens 240 --max_tokens 10"
ATTACKER = (
    "--actors.attacker.algorithm ppo --actors.attacker.algo.kl_coef 0.01 "
    "--actors.attacker.optim.lr 1e-3 --actors.attacker.critic.lr 3e-3 "
    "--actors.attacker.critic.gae_lambda 1 --actors.attacker.learner.updates_per_epoch 2"
)
TARGET = "--actors.target.optim.lr 2e-4 --actors.target.update_every 8"
PLAY = f"-m rl_core.train --env_path envs/jailbreak.py {LENGTHS} --tasks_per_step 8 --group_size 16"


def attack(messages: list[dict], row: dict, rng: random.Random) -> str:
    return rng.choice(list(PLEAS))


def answer(messages: list[dict], row: dict, rng: random.Random) -> str:
    return row["password"] if rng.random() < PLEAS[messages[-1]["content"]] else "no"


def success_of(folder: str) -> list[float]:
    """The fraction of episodes with a successful attack, by step."""
    name = "rollout/attacker/success"
    return [round(row[name], 3) for row in read_metrics(folder) if name in row]


def measure(seed: int, steps: int) -> dict:
    """Success of attacks by step, and of each pair of attacker and target without updates."""
    here = f"runs/asymmetric/{seed}"
    shutil.rmtree(ROOT / here, ignore_errors=True)
    make_tiny_model(ROOT / here / "model", seed=seed)
    rows = [{"prompt": "?", "password": PASSWORD}] * 20
    write_rows(ROOT / here / "train.jsonl", rows)
    habits = {"attacker": attack, "target": answer}
    write_rows(ROOT / here / "sft.jsonl", habit_rows("jailbreak", seed, 3000, rows, habits))
    run(
        f"-m rl_core.train {SFT} --tasks_per_step 16 --model {here}/model --data.train "
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
    models = {"before": dict.fromkeys(habits, warm)}
    models["after"] = {name: f"{here}/learned/hf/{name}" for name in habits}
    pairs = {}
    for attacker, target in itertools.product(models, models):
        pair = f"{attacker}_{target}"
        run(
            f"{play} --actors.attacker.model {models[attacker]['attacker']} "
            f"--actors.target.model {models[target]['target']} --optim.lr 0 --num_steps 1 "
            f"--tasks_per_step 20 --group_size 8 --out {here}/{pair}"
        )
        [pairs[pair]] = success_of(f"{here}/{pair}")
    return {"success": success_of(f"{here}/learned"), "pairs": pairs}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="write every seed's figures as JSON")
    args = parser.parse_args()
    seeds = {seed: measure(int(seed), args.steps) for seed in args.seeds.split(",")}
    write_json(args.out, seeds)
    failed = []
    for seed, figures in seeds.items():
        pairs = figures["pairs"]
        print(f"seed {seed}: {figures['success'][4::5]} {pairs}")
        if not pairs["before_after"] < pairs["before_before"] < pairs["after_before"]:
            failed.append(seed)
    if failed:
        print(f"an actor did not learn with seeds {failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
