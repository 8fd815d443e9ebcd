"""Golden runs: short seeded runs whose numbers are kept in tests/golden/, so that a change that
alters them is seen.

`pytest tests/end_to_end/test_golden.py --golden-write -k NAME` writes them anew where a change is
meant to alter them.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from kit import metrics
from kit import run as run_command

GOLDEN = Path(__file__).parents[1] / "golden"
# Names of metrics that are compared. Not those of times, packing and agreement of two
# implementations.
STABLE = re.compile(
    r"(loss|grad_norm|lr|kl\w*nats|entropy_nats|reward_mean|length_mean|turns_mean|avg@\d|greedy_score|accuracy"
    r"|weighted_frac|correction\w*|value_loss|explained_variance|margin|score_mean|nll\w*)$"
)
UNSTABLE = re.compile(r"^time/|mismatch|canary")
RELATIVE, ABSOLUTE = 1e-4, 1e-6
# Tolerance of a loss: a mean of terms of about 1, of either sign, with rounding of kernels.
ABSOLUTE_LOSS = 1e-5

RL = (
    "--model {model} --env_path {dir}/letters.py --max_tokens 10 --max_prompt_tokens 24 "
    "--tasks_per_step 4 --group_size 4"
)
FIT = "--model {model} --max_tokens 40 --max_prompt_tokens 24 --max_turns 3 --tasks_per_step 4"
STOP = ' --sampling.stop ["a","b","c","d","e","f","g","h"]'
LORA = " --actors.policy.lora.rank 4"
TWO = (
    "--actors.bob.model {model} --actors.alice.model {other} --env_path {dir}/talk.py --max_tokens "
    "20"
    f" --max_prompt_tokens 60 --tasks_per_step 4 --group_size 4{STOP}"
)
SHARED = (
    TWO.replace(".alice.model {other}", ".alice.lora_base bob")
    + " --actors.bob.lora.rank 4 --actors.alice.lora.rank 2"
)
SEVERAL = RL.replace("letters.py", "letters.py,{dir}/digits.py") + " --envs.digits.weight 0.5"
# A part of the turns is spoken by older weights, so that there is something to correct.
OLDER = " --rollout.stale_policy_frac 0.5 --rollout.stale_policy_refresh 3 --num_steps 3"
FIRST = RL.replace("letters", "ask") + STOP + " --num_steps 1 --optim.lr 1e-2"

# Name -> flags of the run. "A; B" is two runs, of which A writes to {first} and B to {out}: with
# --resume in B both to {out}.
RUNS = {
    "smoke-grpo": f"{RL} --eval_every 2 --eval.samples 2",
    "smoke-sft": f"{FIT} --algorithm sft --data.train {{dir}}/rows.jsonl",
    "smoke-minibatches": f"{RL} --learner.updates_per_epoch 2 --learner.epochs 2 --learner.microbatch_tokens 100",
    "dr_grpo": f"{RL} --algorithm dr_grpo",
    "dapo": f"{RL} --algorithm dapo --learner.updates_per_epoch 2",
    "gspo": f"{RL} --algorithm gspo --learner.epochs 2",
    "cispo": f"{RL} --algorithm cispo --learner.epochs 2",
    "rloo": f"{RL} --algorithm rloo",
    "reinforce_pp": f"{RL} --algorithm reinforce_pp --algo.kl_coef 0.1",
    "ppo": f"{RL} --algorithm ppo --learner.updates_per_epoch 2 --critic.lr 1e-2",
    "ppo-turns": f"{RL.replace('letters', 'ask')}{STOP} --algorithm ppo --critic.gamma 0.9 --critic.warmup_steps 1",
    "kl_in_reward": f"{RL} --algo.kl_coef 0.1 --algo.kl_in reward --algo.kl k1",
    "kl_in_loss": f"{RL} --algo.kl_coef 0.1 --algo.kl_in loss --algo.kl k3 --learner.epochs 2 --sampling.temperature 0.8",
    "kl_in_advantage": f"{RL} --algo.kl_coef 0.1 --algo.kl_in advantage --algo.kl k2",
    "entropy": f"{RL} --algo.entropy_coef 0.01 --algo.truncation_penalty soft --optim.schedule cosine --optim.warmup_steps 2",
    "sgd": f"{RL} --optim.name sgd --optim.lr 0.1 --optim.weight_decay 0.1 --sampling.temperature 0.7",
    "tis": f"{RL} --algo.importance_correction tis --algo.correction_range 0.5,1.1{OLDER}",
    "mask": f"{RL} --algo.importance_correction mask --algo.correction_range 0.9,1.1{OLDER}",
    "sequence_mask": f"{RL} --algo.importance_correction sequence_mask --algo.correction_range 0.99,1.01{OLDER}",
    "lora": f"{RL}{LORA} --algo.kl_coef 0.1",
    "qlora": f"{RL.replace('{model}', '{wide}')}{LORA} --actors.policy.lora.quantize nf4",
    "sft-rollouts": f"{FIRST}; {FIT} --algorithm sft --data.train {{first}}/rollouts --max_prompt_tokens 200",
    "sft-world": f"{FIT} --max_tokens 80 --algorithm sft --data.train {{dir}}/dialogs.jsonl --sft.weights 1,0.5",
    "dpo": f"{FIT} --algorithm dpo --data.train {{dir}}/pairs.jsonl",
    "rm": f"{FIT} --algorithm rm --data.train {{dir}}/pairs.jsonl",
    "turns": f"{RL.replace('letters', 'ask')}{STOP} --algo.turn_discount 0.9",
    "actors": f"{TWO} --actors.alice.optim.lr 3e-3",
    "shared": SHARED,
    "environments": f"{SEVERAL} --algo.normalize env --eval_every 2 --eval.samples 2",
    # One group at a time and weights that stay, so that it does not matter how long anything takes.
    "staleness": f"{RL} --max_staleness 1 --rollout.max_concurrent 4 --optim.lr 1e-9 --num_steps 3",
    "resumed": f"{RL} --num_steps 1; {RL} --resume --num_steps 3",
    "two_copies": f"{RL} --learner.epochs 2 --dp_replicate auto",
    "engine_rank": f"{RL} --rollout_ranks 1",
}
RANKS = {"two_copies": 2, "engine_rank": 2}  # Others are those of one: test_runs.py.


def numbers(out: Path) -> list[dict[str, float]]:
    """The compared metrics of each line."""
    return [
        {
            k: v
            for k, v in row.items()
            if k == "step" or (STABLE.search(k) and not UNSTABLE.search(k))
        }
        for row in metrics(out)
    ]


def run(name: str, places: dict[str, str], folder: Path) -> Path:
    parts = RUNS[name].split("; ")
    for i, item in enumerate(parts):
        is_last = i == len(parts) - 1
        out = folder / ("out" if is_last or "--resume" in parts[-1] else "first")
        defaults = [] if "--optim.lr" in item else ["--optim.lr", "1e-2"]
        defaults += [] if "--num_steps" in item else ["--num_steps", "2"]
        run_command(
            out, item.format(**places, first=folder / "first"), defaults, ranks=RANKS.get(name, 1)
        )
    return folder / "out"


@pytest.mark.parametrize("name", RUNS)
def test_golden(name, places, tmp_path, request):
    got, file = (
        numbers(run(name, places, tmp_path)),
        GOLDEN / f"{name.removeprefix('smoke-')}.jsonl",
    )
    norms = [v for row in got for k, v in row.items() if k.endswith("/grad_norm")]
    assert norms and min(norms) > 1e-4, "a step that learns nothing compares nothing"
    if request.config.option.golden_write:
        GOLDEN.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in got))
    want = [json.loads(line) for line in file.read_text().splitlines()]
    wrong = [
        f"line {i} {k}: {a.get(k)} instead of {b.get(k)}"
        for i, (a, b) in enumerate(zip(got, want, strict=True))
        for k in sorted(a.keys() | b.keys())
        if not is_close(k, a.get(k), b.get(k))
    ]
    assert not wrong, "\n".join(wrong)


def is_close(name: str, a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    absolute = ABSOLUTE_LOSS if name.endswith("loss") else ABSOLUTE
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=absolute)
