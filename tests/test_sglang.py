"""Runs that sample with SGLang: bash scripts/test_sglang.sh installs it where there is no GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from rl_core.build import make_plan
from rl_core.command_line import parse_config

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
ENV = Path(__file__).parent.parent / "envs/sort_digits.py"


def flags(model, data, out, *more) -> list[str]:
    found = ["--model", model, "--env_path", ENV, "--data.train", data / "train.jsonl", "--out", out, *more]
    lengths = ["--max_tokens", 8, "--max_prompt_tokens", 16, "--tasks_per_step", 16, "--group_size", 8]
    return [str(f) for f in (*found, *lengths)]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SGLANG, reason="sglang is not installed: bash scripts/test_sglang.sh")
def test_reward_rises_with_sglang_and_nothing_of_it_is_left(torchrun, warm_model, sort_data, tmp_path):
    learn = ["--num_steps", "30", "--optim.lr", "6e-4", "--optim.warmup_steps", "3", "--algo.clip_high", "0.28"]
    out = tmp_path / "run"
    torchrun(1, "-m", "rl_core.train", "--engine", "sglang", *flags(warm_model, sort_data, out, *learn), timeout_s=900)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/policy/reward_mean"] for row in rows]
    assert len(rewards) == 30 and sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert max(row["learn/policy/mismatch_kl_nats"] for row in rows) < 1e-3
    assert "policy" in (out / "config.yaml").read_text() and (out / "engine_policy_00000.log").stat().st_size
    running = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert str(out) not in running


@pytest.mark.skipif(HAS_SGLANG, reason="sglang is installed")
def test_an_engine_that_is_not_installed_is_refused_with_its_extra(tiny_model, sort_data, tmp_path):
    with pytest.raises(
        ValueError, match=r"--engine=sglang needs sglang, which is not installed: pip install \.\[sglang\]"
    ):
        parse_config([*flags(tiny_model, sort_data, tmp_path / "run"), "--engine", "sglang"])


def test_auto_is_the_embedded_engine_without_a_gpu(tiny_model, sort_data, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = make_plan(parse_config(flags(tiny_model, sort_data, tmp_path / "run")))
    assert plan.config.engine == "embedded"
    config = parse_config([*flags(tiny_model, sort_data, tmp_path / "run"), "--engine_tp", "2"])
    with pytest.raises(ValueError, match="--engine_tp=2: the embedded engine is on each rank by itself"):
        make_plan(config)
