"""The benchmark is fair only if both sides do the same work."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from bench_cpu import fallen, parse_arguments
from bench_work import WORKS, completion_length
from kit import ROOT


def test_ragged_lengths_have_the_mean_and_the_tail_that_their_work_names():
    work = WORKS["grpo_ragged"]
    lengths = [completion_length(work, step, i) for step in range(20) for i in range(128)]
    assert abs(sum(lengths) / len(lengths) - work.mean) < 2
    assert min(lengths) >= 2 and max(lengths) == work.longest
    assert lengths[:128] != lengths[128:256] and lengths[0] == completion_length(work, 0, 0)


def test_a_ratio_that_fell_by_more_than_a_tenth_is_told():
    before = {"grpo_short": 2.0, "grpo_ragged": 3.0, "sft_ragged": 1.5, "rm_ragged": 1.5}
    result = {"grpo_short": 1.79, "grpo_ragged": 2.71, "sft_ragged": 1.9, "sft_new": 0.1}
    assert fallen(result, before) == ["grpo_short: 1.79 times, it was 2.00"]


def test_without_trl_nothing_runs_and_what_to_do_is_said(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench_cpu.py", "--quick"])
    with pytest.raises(SystemExit):
        parse_arguments()
    output = "--sides trl needs TRL, which is not installed: pip install -e '.[test]', or give"
    assert output in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["bench_cpu.py", "--quick", "--sides", "rl_core"])
    assert parse_arguments().sides == ["rl_core"]


@pytest.mark.slow
def test_both_sides_sample_equally_many_tokens_and_learn_from_all_of_them(tmp_path):
    pytest.importorskip("trl")
    out = tmp_path / "result.json"
    command = [
        sys.executable,
        ROOT / "scripts/bench_cpu.py",
        "--quick",
        "--only",
        "grpo_ragged",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    lines = {(line["side"], line["setting"]): line for line in result["lines"]}
    assert len({line["tokens_per_step"] for line in lines.values()}) == 1
    assert len({line["learned_tokens"] for line in lines.values()}) == 1
    assert result["speedups"]["grpo_ragged"] > 0
    assert "grpo_ragged" in done.stdout
