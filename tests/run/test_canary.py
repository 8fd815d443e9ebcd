"""Engines that do not sample with their learner's weights stop the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import metrics

from rl_core.engines import kv_slots, weights
from rl_core.engines.embedded import EmbeddedEngine
from rl_core.models import policy
from rl_core.train import main

SIZES = ["--tasks_per_step", "4", "--group_size", "4", "--num_steps", "2", "--optim.lr", "1e-2"]
SIZES += ["--max_tokens", "8", "--max_prompt_tokens", "16"]
# Adapters, so that the engine has separate, merged weights.
COPY = ["--actors.policy.lora.rank", "4"]
FULL_COPY = ["--learner.offload", "always"]  # shards of one rank
BROKEN = "model.layers.1.mlp.up_proj.weight"


COUNT = """
def load_tasks(split): return [{"prompt": str(n)} for n in range(8)]
def reward_fn(completion): return float(sum(map(ord, completion)) % 97)
"""


def flags_of(path: Path, out: Path, *more: str) -> list[str]:
    (out.parent / "count.py").write_text(COUNT)
    return [
        "--model",
        str(path),
        "--env_path",
        str(out.parent / "count.py"),
        *SIZES,
        "--out",
        str(out),
        *more,
    ]


def metrics_of(out: Path) -> list[dict]:
    return metrics(out) if (out / "metrics.jsonl").exists() else []


def largest(out: Path) -> list[float]:
    return [row[name] for row in metrics(out) if (name := "learn/policy/canary_max_diff") in row]


@pytest.mark.parametrize("options", [COPY, FULL_COPY, [*FULL_COPY, "--learner.dtype", "bfloat16"]])
def test_a_healthy_engine_agrees_with_its_learner_after_every_update(tiny_model, tmp_path, options):
    assert main(flags_of(tiny_model, tmp_path / "run", *options)) == 0
    result = largest(tmp_path / "run")
    assert len(result) == 2 and 0 < max(result) < (0.1 if "bfloat16" in options else 1e-4)


def test_the_engine_of_each_of_two_ranks_agrees_with_the_sharded_learner(
    tiny_model, torchrun, tmp_path
):
    flags = [*flags_of(tiny_model, tmp_path / "run"), "--dp_replicate", "1"]
    torchrun(2, "-m", "rl_core.train", *flags)
    assert 0 < max(largest(tmp_path / "run")) < 1e-4


@pytest.mark.parametrize(
    "arch, weight",
    [("qwen3", BROKEN), ("qwen2_5_vl", "model.visual.blocks.1.mlp.up_proj.weight")],
)
def test_a_tensor_of_the_engine_that_is_not_the_learners_stops_the_run(
    arch, weight, make_model, tmp_path, monkeypatch, capsys
):
    tiny_model, load = make_model(arch), weights.load_weights

    def load_all_but_a_part(model, named_weights):
        load(model, named_weights)
        model.get_parameter(weight).data[0] += 1.0

    monkeypatch.setattr(weights, "load_weights", load_all_but_a_part)
    assert main(flags_of(tiny_model, tmp_path / "run", *COPY)) == 1
    printed = capsys.readouterr().err
    assert "allows 0.001\n" in printed and not metrics_of(tmp_path / "run")
    assert main(flags_of(tiny_model, tmp_path / "off", *COPY, "--canary_tolerance", "0")) == 0
    assert "learn/policy/canary_max_diff" not in metrics(tmp_path / "off")[0]


def test_an_engine_that_computes_otherwise_is_found(tiny_model, tmp_path, monkeypatch, capsys):
    assert main(flags_of(tiny_model, tmp_path / "healthy")) == 0
    assert not largest(tmp_path / "healthy"), "no step knows more of it than another"
    sample = kv_slots.sample_tokens

    def sample_too_likely(logits, uniforms, greedy):
        return sample(logits, uniforms, greedy) + torch.tensor([0, 0.01])

    monkeypatch.setattr(kv_slots, "sample_tokens", sample_too_likely)
    assert main(flags_of(tiny_model, tmp_path / "run")) == 1
    printed = capsys.readouterr().err
    assert "does not sample with its learner's weights" in printed
    assert not metrics_of(tmp_path / "run")


def test_logprobs_that_are_no_number_are_a_difference(tiny_model, tmp_path, monkeypatch, capsys):
    fused = policy.Policy.logprobs
    broken = lambda *args: (fused(*args)[0] * float("nan"), fused(*args)[1])  # noqa: E731
    monkeypatch.setattr(policy.Policy, "logprobs", staticmethod(broken))
    assert main(flags_of(tiny_model, tmp_path / "run")) == 1
    assert "differ by up to nan nats" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["1", "2"])
def test_an_update_that_did_not_arrive_is_found_the_last_one_too(
    tiny_model, tmp_path, monkeypatch, capsys, steps
):
    update = EmbeddedEngine.update

    async def lose_the_first_of_the_run(self, named_weights, version, adapter=""):
        await update(
            self, named_weights if version != 1 else list(named_weights)[:0] or None, version
        )

    monkeypatch.setattr(EmbeddedEngine, "update", lose_the_first_of_the_run)
    assert main(flags_of(tiny_model, tmp_path / "run", *COPY, "--num_steps", steps)) == 1
    printed = capsys.readouterr().err
    assert "does not sample with its learner's weights" in printed
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1]


BREAK = """
import os, sys
from rl_core.engines import weights
from rl_core.train import main
load, calls = weights.load_weights, []
def broken(model, named_weights):
    load(model, named_weights)
    calls.append(model)
    if os.environ["RANK"] == "{rank}" and len(calls) == {call}:
        model.get_parameter("{tensor}").data[0] += 1.0
weights.load_weights = broken
status = main(sys.argv[1:])
os.write(1, f"rank {{os.environ['RANK']}} ended with {{status}}\\n".encode())
# A rank that ended with an error would have torchrun kill the others before they can say the same.
os._exit(0)
"""


def run_broken(torchrun, num_ranks: int, folder: Path, flags: list[str], **options):
    (folder / "broken.py").write_text(BREAK.format(tensor=BROKEN, **options))
    return torchrun(num_ranks, folder / "broken.py", *flags)


def test_one_of_two_ranks_with_other_weights_stops_both(tiny_model, torchrun, tmp_path):
    flags = [*flags_of(tiny_model, tmp_path / "run"), "--dp_replicate", "1"]
    done = run_broken(torchrun, 2, tmp_path, flags, rank=1, call=1)
    assert "does not sample with its learner's weights" in done.stderr
    assert "rank 0 ended with 1" in done.stdout and "rank 1 ended with 1" in done.stdout


def test_a_rank_that_only_samples_with_other_weights_stops_the_run(tiny_model, torchrun, tmp_path):
    flags = [
        *flags_of(tiny_model, tmp_path / "run"),
        "--rollout_ranks",
        "2",
        "--max_staleness",
        "1",
    ]
    done = run_broken(torchrun, 3, tmp_path, flags, rank=2, call=2)
    assert "--canary_tolerance allows 0.001" in done.stderr and "rank 0 ended with 1" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1]


def test_what_a_run_samples_is_the_same_with_and_without_it(tiny_model, tmp_path):
    for name, more in {"with": [], "without": ["--canary_tolerance", "0"]}.items():
        assert main(flags_of(tiny_model, tmp_path / name, *more)) == 0
    with_it, without = metrics(tmp_path / "with"), metrics(tmp_path / "without")
    for name in ("rollout/policy/reward_mean", "learn/policy/loss", "learn/policy/grad_norm"):
        assert [row[name] for row in with_it] == [row[name] for row in without]
