"""One tiny model learns in two environments at once."""

from __future__ import annotations

import json

import pytest
from demo_data import demo_data
from kit import ROOT, metrics

from rl_core.train import main


@pytest.mark.slow
def test_both_environments_of_a_mix_rise(tiny_model, tmp_path):
    rows = [
        row for task in ("sort", "calculator") for row in demo_data(task, 0, 12800, 64, 64)["sft"]
    ]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = ["--max_tokens", "24", "--max_prompt_tokens", "32"]
    sft = ["--algorithm", "sft", "--data.train", str(tmp_path / "sft.jsonl"), "--max_turns", "2"]
    sft += [
        "--tasks_per_step",
        "64",
        "--num_steps",
        "400",
        "--optim.lr",
        "3e-3",
        "--optim.schedule",
        "cosine",
    ]
    assert main(["--model", str(tiny_model), *sft, *lengths, "--out", str(tmp_path / "warm")]) == 0
    envs = ["--env_path", f"{ROOT / 'envs/sort_digits.py'},{ROOT / 'envs/calculator.py'}"]
    grpo = [
        "--envs.sort_digits.max_tokens",
        "8",
        "--num_steps",
        "80",
        "--optim.lr",
        "4e-4",
        "--optim.warmup_steps",
        "5",
    ]
    grpo += ["--algo.clip_high", "0.28", "--out", str(tmp_path / "run")]
    assert main(["--model", str(tmp_path / "warm/hf/policy"), *envs, *grpo, *lengths]) == 0
    curves = {
        name: [row[f"rollout/policy/{name}/reward_mean"] for row in metrics(tmp_path / "run")]
        for name in ("sort_digits", "calculator")
    }
    tens = {
        name: [round(sum(c[n : n + 10]) / 10, 2) for n in range(0, 80, 10)]
        for name, c in curves.items()
    }
    print(tens)
    first = {name: sum(curve[:3]) / 3 for name, curve in curves.items()}
    assert (
        max(first.values()) < 0.45
        and tens["sort_digits"][-1] > 0.65
        and tens["calculator"][-1] > 0.8
    ), (first, tens)
