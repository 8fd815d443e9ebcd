"""What a step is said to cost, beside what is counted while one runs; and plans that do not fit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import bench_costs
import pytest
import torch
from bench_costs import (
    CHECKPOINTING,
    EPOCHS,
    EVEN,
    FORMULAS,
    LORA,
    RAGGED,
    TOGETHER,
    Case,
    Counter,
    compare,
    make_model,
    make_samples,
    qwen3,
)
from test_train import SORT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core import costs
from rl_core.command_line import parse_config
from rl_core.data.packing import pack_samples
from rl_core.distributed import init_ranks
from rl_core.learning.algorithms import make_algorithm
from rl_core.learning.model import make_policy
from rl_core.train import main

WITHIN = {"B": 0.01, "FLOP": 0.02, "activations, B": 0.05}
WITHIN_PADDED = {
    "B": 0.01,
    "FLOP": 0.1,
    "activations, B": 0.25,
}  # pieces padded to one length see more than they need to


def assert_predicted(rows: list[dict], within: dict[str, float] = WITHIN) -> None:
    for row in rows:
        if "what" in row:
            bound = within.get(row["what"]) or within[row["what"].split()[-1]]
            assert row["predicted"] == pytest.approx(row["measured"], rel=bound), row


def check(name, arch="qwen3", lengths=EVEN, flags=(), folder=None) -> None:
    case = Case(name=name, arch=arch, lengths=lengths, flags=flags)
    rows = compare(case, make_model(folder, case.shape, arch), init_ranks(60))
    is_padded = lengths is RAGGED
    assert_predicted(
        [r for r in rows if not is_padded or r["what"] != "attention, FLOP"], WITHIN_PADDED if is_padded else WITHIN
    )
    assert {row["what"] for row in rows} > {"weights, B", "optimizer, B", "activations, B", "all, FLOP"}


@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama"])
def test_an_update_costs_what_is_predicted(arch, tmp_path):
    check(arch, arch, folder=tmp_path)


@pytest.mark.parametrize("lengths", [RAGGED, (1500,)])
def test_so_does_one_of_other_lengths(lengths, tmp_path):
    check("lengths", lengths=lengths, folder=tmp_path)


@pytest.mark.parametrize("flags", [CHECKPOINTING, EPOCHS, LORA, ("--optim.name", "sgd")])
def test_so_does_one_with_other_flags(flags, tmp_path):
    check("flags", flags=flags, folder=tmp_path)


@pytest.mark.slow
def test_ranks_hold_compute_and_send_what_is_predicted(torchrun, tmp_path):
    for shape in ("tiny", "small"):
        make_model(tmp_path, shape, "qwen3")
    torchrun(2, bench_costs.__file__, "--rank_of", tmp_path)
    rows = json.loads((tmp_path / "2.json").read_text())
    assert {row["case"] for row in rows} == {case.name for case in TOGETHER if case.mesh.size == 2}
    assert {"sent to update, B", "sent to sync, B"} < {row.get("what") for row in rows}
    assert_predicted(rows)


def test_the_counter_counts_as_torchs_does(tmp_path):
    policy = make_policy(str(make_model(tmp_path, "tiny", "qwen3")), torch.float32, init_ranks(60), False)
    batch = pack_samples(make_samples((50, 60)))
    with Counter() as ours:
        policy(batch, 1.0)[0].sum().backward()
    for formula in FORMULAS.values():
        formula._get_raw = True  # they take tensors
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as torchs:
        policy(batch, 1.0)[0].sum().backward()
    assert sum(ours.flops.values()) == torchs.get_total_flops() > 1e6


SFT = ["--algorithm", "sft", "--max_tokens", "500", "--max_prompt_tokens", "500", "--learner.microbatch_tokens"]
# gib: of the device; part: of the advice. The tiny model, in bf16, is 0.2 MiB a copy.
TOO_LARGE = {
    "activations": ([*SFT, "64000"], 0.1, "--learner.activation_checkpointing"),
    "activations, few tokens": ([*SFT, "4000"], 0.008, "--learner.microbatch_tokens"),
    "KV cache": ([*SORT, "--tasks_per_step", "512", "--max_tokens", "2000"], 0.1, "--rollout.max_concurrent"),
}


def shown(capsys, *flags) -> str:
    assert main([*map(str, flags), "--dry_run"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def few_rows(sort_data, tmp_path) -> dict[str, Path]:
    for name in ("sft", "train"):
        lines = (sort_data / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:20]))
    return {name: tmp_path / f"{name}.jsonl" for name in ("sft", "train")}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_plan_that_does_not_fit_is_warned_of_with_flags_that_make_it_fit(case, tiny_model, few_rows, capsys):
    flags, gib, part = TOO_LARGE[case]
    data = few_rows["sft" if flags[0] == "--algorithm" else "train"]
    flags = ["--model", tiny_model, "--data.train", data, *flags]
    assert "warning" not in shown(capsys, *flags, "--device_memory_gib", 80)
    warning = shown(capsys, *flags, "--device_memory_gib", gib).split("warning: ")[1]
    advice = re.search(r"it fits with (.*) \(", warning)[1]
    assert part in advice and case.split(",")[0] in warning, warning
    changed = dict(zip(*[iter(map(str, flags))] * 2, strict=True))
    for name, value in re.findall(r"(--\S+)(?: ([^-]\S*))?", advice):
        changed[name] = value or "true"
    assert "warning" not in shown(capsys, *(x for pair in changed.items() for x in pair), "--device_memory_gib", gib)


def test_a_run_that_will_not_fit_is_warned_of_and_runs(tiny_model, tmp_path, capsys):
    flags = ["--model", tiny_model, *SORT, "--tasks_per_step", 2, "--num_steps", 1, "--out", tmp_path / "run"]
    assert main([*map(str, flags), "--device_memory_gib", "0.0001"]) == 0
    assert "warning: this plan will not fit" in capsys.readouterr().err


def big(num_ranks: int = 8, **flags) -> costs.Setup:
    given = {"model": "8B", "out": "x", "algorithm": "sft", "max_prompt_tokens": 4096, "max_tokens": 4096}
    given |= {"learner.microbatch_tokens": 8192, "device_memory_gib": 80} | flags
    config = parse_config([f"--{name}={value}" for name, value in given.items()])
    return costs.make_setup(config, make_algorithm(config.algorithm, config.algo), num_ranks, qwen3("8B"))


def test_public_models_have_their_public_numbers_of_parameters():
    size = big().model
    assert size.total == 8_190_735_360  # Qwen3-8B's model.safetensors.index.json: 16,381,470,720 bytes in bf16


def test_weights_and_their_state_are_split_over_one_copy():
    whole, halves = sum(costs.held_bytes(big(), big().model)), big(dp_replicate=2)
    assert whole == 16 * big().model.total / 8
    assert sum(costs.held_bytes(halves, halves.model)) == 2 * whole
    split = big(**{"tp": 2, "cp": 2})
    assert sum(costs.held_bytes(split, split.model)) == whole


def test_offloading_moves_what_it_says_to_the_host():
    rl = {"algorithm": "grpo", "env_path": "x.py"}
    tables = {}
    for offload in ("none", "phase", "always"):
        s = big(**rl, **{"learner.offload": offload})
        tables[offload] = costs.memory(s, costs.most_work(s.config, s.algorithm))
    assert not tables["none"][1]
    assert "generate" in tables["none"][0]["optimizer"] and "generate" not in tables["phase"][0]["optimizer"]
    assert tables["phase"][1]["optimizer"].keys() == {"generate"} and "update" in tables["phase"][0]["optimizer"]
    assert not tables["always"][0].get("optimizer") and tables["always"][1]["optimizer"]["update"] > 0


def test_work_counts_shared_prompts_once():
    shared = costs.work_of([(100, 0), (50, 100), (50, 100)], 100)
    apart = costs.work_of([(150, 0), (150, 0)], 100)
    assert (shared.tokens, apart.tokens) == (200, 300)
    assert apart.pairs - shared.pairs == 100 * 101 / 2


def test_seconds_are_those_of_the_slower_of_products_and_what_is_sent():
    s, device = big(), costs.DEVICES["H100"]
    work = costs.most_work(s.config, s.algorithm)
    slow = dataclasses.replace(device, link=device.link / 1000)
    assert costs.seconds(s, work, slow)["learn"] > 5 * costs.seconds(s, work, device)["learn"]
    faster = dataclasses.replace(device, link=device.link * 10)
    assert costs.seconds(s, work, faster) == costs.seconds(s, work, device)


def test_a_plan_for_64_ranks_needs_no_gpu_and_no_ranks(tiny_model, few_rows, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "64")
    flags = ["--model", tiny_model, *SORT, "--data.train", few_rows["train"], "--device_memory_gib", 80]
    out = shown(capsys, *flags, "--cp", 2, "--tp", 2)
    assert "dp_shard 16 x cp 2 x tp 2" in out and "H100 data sheet" in out and "ring" in out


def test_a_reference_is_asked_whether_it_is_a_model_or_the_policy_without_adapters(tiny_model):
    config = parse_config(["--model", str(tiny_model), "--algorithm", "dpo", "--out", "x"])
    given = make_algorithm("dpo", config.algo), 2, qwen3("0.6B")
    apart = costs.make_setup(config, *given, reference=True)
    config.actors["policy"].lora.rank = 8
    adapters = costs.make_setup(config, *given, reference=True)
    assert (apart.annotations, adapters.annotations) == (1, 1)
    held = [costs.memory(s, costs.most_work(config, s.algorithm))[0] for s in (apart, adapters)]
    assert "reference" in held[0] and "reference" not in held[1]


@pytest.mark.parametrize("family", ["gpt2", "gemma", "mixtral"])
def test_other_families_are_planned_too(family, tiny_model):
    config = parse_config(["--model", str(tiny_model), "--algorithm", "sft", "--out", "x"])
    hf = AutoConfig.for_model(family, num_hidden_layers=2)
    s = costs.make_setup(config, make_algorithm("sft", config.algo), 2, hf)
    with torch.device("meta"):
        assert s.model.total == sum(p.numel() for p in AutoModelForCausalLM.from_config(hf).parameters())
    assert costs.peak_of(s)[0] > 16 * s.model.total / 2
