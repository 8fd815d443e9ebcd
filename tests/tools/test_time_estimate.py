"""rl-core plan --gpus: estimates against values worked out by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_plan import flags  # noqa: F401

from rl_core.distributed import Mesh
from rl_core.tools.cli import main
from rl_core.tools.memory_estimate import Size
from rl_core.tools.time_estimate import GPUS, Work, gather_s, learn_s, parse_gpus, sample_s

H100 = GPUS["H100"]
# 8 G parameters in bf16: 16 GB; 144 kB of keys and values a token.
SIZE = Size(
    total=8_000_000_000,
    linear=7_000_000_000,
    adapters=0,
    layers=36,
    hidden=4096,
    intermediate=12288,
    queries=4096,
    keys=1000,
    vocabulary=152_000,
)
WORK = Work(
    size=SIZE,
    active=8e9,
    itemsize=2,
    num_tasks=128,
    group_size=8,
    prompt_tokens=1000,
    context_tokens=5000,
    forwards=0,
    epochs=1,
    is_recomputed=False,
    microbatch_tokens=20_000,
    is_sampled=True,
)


def test_gathering_takes_the_slower_of_the_links():
    # 7/8 of 16 GB from the other GPUs of a node, at 80 % of 450 GB/s.
    assert gather_s(16e9, 8, H100) == pytest.approx(14e9 / 360e9)
    # Half of 16 GB comes over the eight cards of a node, at 80 % of 50 GB/s each: faster.
    assert gather_s(16e9, 16, H100) == pytest.approx(14e9 / 360e9)
    # A single card for each node would be the bottleneck: 15/16 of 16 GB at 80 % of 8 * 5 GB/s.
    slow = replace(H100, network_gbs=5)
    assert gather_s(16e9, 128, slow) == pytest.approx(15e9 / 32e9)
    assert gather_s(16e9, 1, H100) == 0


def test_decode_reads_weights_and_keys_of_every_row():
    result = sample_s(WORK, 8, 1, 256, H100)
    # 16 groups of 8 on an engine, mean length 1000 + 4000 / 2, 2 * 36 * 1000 * 2 bytes a token.
    read = 16e9 + 128 * 3000 * 144e3
    assert result["decode"] == pytest.approx(4000 * read / (0.6 * 3350e9))
    # 16 prompts of 1,000 tokens: 2 * 8e9 FLOPs, and 2 * 36 * 4096 * 5000 of attention.
    flops = 16_000 * (16e9 + 1_474_560_000)
    assert result["prefill"] == pytest.approx(flops / (0.4 * 989e12))
    half = sample_s(WORK, 8, 1, 64, H100)  # room for 64 of the 128: two rounds
    read = 16e9 + 64 * 3000 * 144e3
    assert half["decode"] == pytest.approx(2 * 4000 * read / (0.6 * 3350e9))


@pytest.mark.parametrize("name", GPUS)
def test_the_figures_of_a_gpu_are_in_proportion(name):
    """A figure that is wrong by ten gives a quotient far from those of all data sheets."""
    gpu = GPUS[name]
    assert 100 < gpu.tflops * 1e12 / (gpu.memory_gbs * 1e9) < 400  # FLOPs a byte
    assert 20 < gpu.memory_gbs / gpu.memory_gib < 50
    assert 3 < gpu.memory_gbs / gpu.nvlink_gbs < 15
    assert 5 < gpu.nvlink_gbs / gpu.network_gbs < 25


def test_more_engines_than_groups_are_no_faster():
    assert sample_s(WORK, 128, 1, 256, H100) == sample_s(WORK, 1024, 1, 256, H100)


def test_a_learner_computes_three_forwards_and_gathers_twice_a_microbatch():
    plan = SimpleNamespace(mesh=Mesh(dp_shard=64))
    result = learn_s(WORK, plan, H100)
    # 16 samples of 5,000 tokens on a rank.
    assert result["compute"] == pytest.approx(80_000 * 3 * 17_474_560_000 / (0.4 * 989e12))
    # 4 microbatches: 2 * 2 bytes of a weight gathered, 4 of a gradient scattered.
    within = 4 * 8 * 8e9 * (7 / 8) / 450e9
    between = 4 * 8 * 8e9 * (7 / 8) / 400e9
    assert result["traffic"] == pytest.approx(max(within, between) / 0.8)
    both = learn_s(replace(WORK, forwards=1, is_recomputed=True), plan, H100)
    assert both["compute"] == pytest.approx(result["compute"] * 5 / 3)
    # Ranks that split a sequence compute half of each of twice as many samples.
    split = learn_s(WORK, SimpleNamespace(mesh=Mesh(dp_shard=32, cp=2)), H100)
    assert split["compute"] == pytest.approx(result["compute"])


def test_one_row_for_each_number_of_gpus_says_what_limits_it(flags, capsys):  # noqa: F811
    assert main(["plan", *flags, "--gpus", "8,1", "--gpu", "h200", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["gpus"] for row in rows] == [1, 8]
    assert rows[0]["efficiency"] == 1 > rows[1]["efficiency"]
    assert rows[1]["limit"] == "4 of 8 engines have no group: more --tasks_per_step"
    seconds = rows[0]["seconds"]
    assert rows[0]["step_s"] == pytest.approx(sum(seconds.values()))  # no traffic on one GPU
    assert "WORLD_SIZE" not in os.environ
    assert main(["plan", *flags, "--gpus", "1"]) == 0
    assert "not measured" in capsys.readouterr().out


def test_a_named_gpu_computes_in_its_own_dtype_whatever_this_machine_has(flags, capsys):  # noqa: F811
    assert main(["plan", *flags, "--gpus", "1"]) == 0
    on_gpu = capsys.readouterr().out
    assert "assumed          embedded engine, bfloat16" in on_gpu
    assert "decode, s" in on_gpu
    assert main(["plan", *flags, "--gpus", "1", "--learner.dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == on_gpu
    assert main(["plan", *flags, "--gpus", "1", "--learner.dtype", "float32"]) == 0
    assert "embedded engine, float32" in capsys.readouterr().out


def test_a_row_that_does_not_fit_says_so_and_has_no_efficiency(flags, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setitem(GPUS, "tiny", replace(H100, memory_gib=0.001))
    assert main(["plan", *flags, "--gpus", "1", "--gpu", "tiny", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert row["limit"].startswith("does not fit: ") and row["efficiency"] is None
    assert main(["plan", *flags, "--gpus", "1", "--gpu", "tiny"]) == 0
    assert "%" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, output",
    [
        (("8", "H10"), "--gpu=H10 is not known; did you mean 'H100'?"),
        (("8,x", "H100"), "--gpus=8,x must be numbers of GPUs"),
        (("0", "H100"), "--gpus=0 must be numbers of GPUs"),
    ],
)
def test_what_is_no_gpu_is_refused(arguments, output):
    with pytest.raises(ValueError, match=output.replace("?", r"\?")):
        parse_gpus(*arguments)


def test_a_kind_of_gpu_without_numbers_is_refused(flags, capsys):  # noqa: F811
    assert main(["plan", *flags, "--gpu", "H100"]) != 0
    assert "--gpu=H100 needs --gpus" in capsys.readouterr().err
