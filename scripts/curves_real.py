"""Learning curves of a pretrained model on a CPU, without SFT before: held-out scores before and
after, for three seeds.

    python scripts/curves_real.py instructions          # one or several of CURVES; --seeds 0,1,2
    python scripts/curves_real.py instructions_random   # the control: rewards are drawn at random

--model is a folder or a hub name, SmolLM2-135M-Instruct by default. A curve that was interrupted
continues from its last checkpoint. The runs are in runs/real/NAME_SEED, figures in figures.json.
Fails if a held-out score does not rise, or if that of the control does.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from script_tools import ROOT, make_parser, read_metrics, run, write_json

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMMON = (
    "--tasks_per_step 8 --group_size 8 --optim.warmup_steps 3 --save_every 10 --keep_checkpoints 1"
)
FLAT = 0.05  # Two standard errors of a held-out mean over 64 tasks, about.
RANDOM_REWARDS = """

true_reward = reward(weight=0)(reward_fn)


def reward_fn(trajectory):
    tokens = [i for turn in trajectory.turns for i in turn.completion.token_ids]
    return zlib.crc32(repr(tokens).encode()) % 5 / 4
"""


@dataclass(kw_only=True)
class Curve:
    """Settings of one run."""

    env: str  # A file of envs/.
    flags: str
    is_control: bool = False  # Rewards are drawn at random. The score must stay.


INSTRUCTIONS = "--max_prompt_tokens 128 --max_tokens 48 --num_steps 30 --eval_every 30 "
CURVES = {
    "instructions": Curve(env="instructions", flags=INSTRUCTIONS + "--optim.lr 2e-5"),
    "instructions_lora": Curve(
        env="instructions",
        flags=INSTRUCTIONS + "--optim.lr 2e-4 --actors.policy.lora.rank 16",
    ),
    "instructions_random": Curve(
        env="instructions",
        flags=INSTRUCTIONS + "--optim.lr 2e-5",
        is_control=True,
    ),
}


def env_path(curve: Curve, folder: Path) -> str:
    """The environment's file; of a control, a copy with random rewards."""
    path = ROOT / f"envs/{curve.env}.py"
    if not curve.is_control:
        return str(path)
    copy = folder / f"{curve.env}.py"
    copy.write_text("import zlib\n" + path.read_text() + RANDOM_REWARDS)
    return str(copy)


def measure(name: str, seed: int, model: str, num_eval: int) -> dict:
    """CPU seconds of this process's children, rewards by step, held-out scores by step."""
    curve, folder = CURVES[name], ROOT / f"runs/real/{name}_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    flags = (
        f"--model {model} --env_path {env_path(curve, folder)} --out {folder}/rl --seed {seed} "
        f"--eval.num_tasks {num_eval} {COMMON} {curve.flags}"
    )
    if (folder / "rl").exists():
        flags += " --resume"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(f"-m rl_core.train {flags}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = read_metrics(folder / "rl")
    scores = {"greedy": "greedy_score", "sampled": "avg@4"}
    if curve.is_control:
        scores = {"greedy": "greedy_true_reward", "sampled": "sampled_true_reward"}
    figures: dict = {"cpu_s": round(sum(after[:2]) - sum(before[:2]))}
    reward = "rollout/policy/reward_mean"
    figures["reward"] = [row[reward] for row in rows if reward in row]
    for kind, metric in scores.items():
        key = f"eval/{curve.env}/{metric}"
        figures[kind] = [row[key] for row in rows if key in row]
    return figures


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="+", choices=CURVES, metavar="NAME", help=", ".join(CURVES))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--num_eval", type=int, default=64, help="held-out tasks")
    args = parser.parse_args()
    path = ROOT / "runs/real/figures.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    has_failed = False
    for name in args.names:
        for seed in args.seeds.split(","):
            figures = measure(name, int(seed), args.model, args.num_eval)
            results[f"{name}_{seed}"] = figures
            write_json(path, results)
            first, last = figures["sampled"][0], figures["sampled"][-1]
            is_control = CURVES[name].is_control
            is_wrong = abs(last - first) > FLAT if is_control else last < first + FLAT
            has_failed |= is_wrong
            reward = " to ".join(
                f"{statistics.mean(steps):.2f}"
                for steps in (figures["reward"][:5], figures["reward"][-5:])
            )
            problem = (", moved" if is_control else ", no rise") * is_wrong
            print(
                f"{name} seed {seed}: reward {reward}; held out: greedy {figures['greedy'][0]:.2f} "
                f"to {figures['greedy'][-1]:.2f}, avg@4 {first:.2f} to {last:.2f}{problem}; "
                f"{figures['cpu_s']} CPU s",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
