"""Several actors that train adapters of one model: one set of weights and one engine, and nothing of one in another."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from kit import ROOT, metrics, trajectories
from safetensors.torch import load_file
from test_learner import ragged_samples
from transformers import AutoModelForCausalLM

from rl_core.build import build, make_plan
from rl_core.config import parse_config
from rl_core.distributed import init_ranks
from rl_core.learning.model import make_policy
from rl_core.options.lora import adapter_parameters
from rl_core.train import main, train
from rl_core.types import SamplingParams

peft = pytest.importorskip("peft")
GREEDY = SamplingParams(max_tokens=12, temperature=0)
STOP = ["--sampling.stop", json.dumps(list("abcdefghijklmnopqrstuvwxyz")), "--max_tokens", "60"]
NF4 = ["--actors.bob.lora.quantize", "nf4"]


TALK = """
turns = "bob -> alice -> bob"
system_prompts = {"alice": "you are alice"}
def load_tasks(split): return [{"prompt": f"say {n}", "n": n} for n in range(6)]
def reward_fn(completion, actor): return float(len(completion) if actor == "bob" else -len(completion))
"""


def sizes(out: Path, steps: int) -> list[str]:
    flags = ["--tasks_per_step", "4", "--group_size", "4", "--num_steps", str(steps), "--optim.lr", "1e-3"]
    return [*flags, "--max_prompt_tokens", "60", "--eval.samples", "2", "--out", str(out)]


@pytest.fixture
def talk(tiny_model, tmp_path) -> list[str]:
    """Flags of bob and alice, who share his model, each with an adapter of its own size."""
    (tmp_path / "talk.py").write_text(TALK)
    flags = ["--actors.bob.model", str(tiny_model), "--actors.bob.lora.rank", "4", "--actors.alice.share", "bob"]
    flags += ["--actors.alice.lora.rank", "3", "--actors.alice.lora.targets", "q_proj,up_proj", "--optim.lr", "1e-2"]
    return [*flags, "--env_path", str(tmp_path / "talk.py"), *STOP]


def make_run(flags, *more):
    config = parse_config([*map(str, flags), *map(str, more)])
    ranks = init_ranks(60)
    return build(make_plan(config), ranks)


def with_random_adapters(run):
    for seed, learner in enumerate(run.learners.values()):
        for i, parameter in enumerate(p for _, p in learner.trained_parameters()):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(100 * seed + i))
    return run


@torch.no_grad()
def logprobs(learner, policy=None, adapter=None) -> torch.Tensor:
    batch = learner.shard(ragged_samples())[0][0].batches[0]
    adapter = learner.adapter if adapter is None else adapter
    return (policy or learner.policy)(batch, 1.0, adapter)[0]


def said(run, name: str) -> list[tuple[list[int], list[float]]]:
    async def gather():
        asked = (run.actors[name].generate([1, 9 + i, 20], GREEDY, i) for i in range(4))
        return [(c.token_ids, c.logprobs) for c in await asyncio.gather(*asked)]

    return asyncio.run(gather())


def test_one_set_of_weights_serves_both_learners_and_their_engine(talk, tiny_model, tmp_path):
    run = make_run(talk, *sizes(tmp_path / "run", 1))
    assert len(run.engines) == 2
    [engine] = run.all_engines
    models = [engine.model, *(model.hf for learner in run.learners.values() for model in learner.models())]
    storages = {p.data_ptr(): p.numel() for m in models for n, p in m.named_parameters() if ".lora_" not in n}
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert sum(storages.values()) == sum(p.numel() for p in plain.parameters())
    bob, alice = ({p.data_ptr() for _, p in run.learners[name].trained_parameters()} for name in ("bob", "alice"))
    assert len(bob) == 2 * 2 * 7 and len(alice) == 2 * 2 * 2 and not bob & alice
    assert all(p.requires_grad for x in run.learners.values() for _, p in x.trained_parameters())
    assert not any(p.requires_grad for p in engine.model.parameters())


def test_a_step_of_one_leaves_the_other_and_the_base_bit_for_bit(talk, tiny_model, tmp_path):
    run = with_random_adapters(make_run(talk, *sizes(tmp_path / "run", 1)))
    bob, alice = run.learners["bob"], run.learners["alice"]
    plain = logprobs(bob, make_policy(str(tiny_model), torch.float32, run.ranks, False))
    before = {name: logprobs(learner) for name, learner in run.learners.items()}
    assert torch.equal(logprobs(alice, adapter=""), plain)  # the reference
    for _ in range(2):
        alice.step(alice.shard(ragged_samples())[0], 0)
    assert torch.equal(logprobs(bob), before["bob"]) and not torch.equal(logprobs(alice), before["alice"])
    assert not torch.equal(before["alice"], before["bob"])
    for learner in run.learners.values():
        assert torch.equal(logprobs(learner, adapter=""), plain)
    assert all(p.grad is None for p in bob.policy.parameters())


@pytest.mark.parametrize("flags", [[], ["--learner.activations", "recompute"]])
def test_each_learns_as_if_it_were_alone(flags, talk, tiny_model, tmp_path):
    """With activation checkpointing a backward computes anew what the forward did, with the same adapter."""
    shared = make_run(talk, *sizes(tmp_path / "shared", 1), *flags)
    own = ["--actors.bob.model", tiny_model, "--actors.bob.lora.rank", 4, "--actors.alice.model", tiny_model]
    own += ["--actors.alice.lora.rank", 3, *talk[talk.index("--actors.alice.lora.targets") :]]
    alone = make_run(own, *sizes(tmp_path / "alone", 1), *flags)
    for runs in (shared, alone):
        for step in range(2):
            for learner in runs.learners.values():
                learner.step(learner.shard(ragged_samples())[0], step)
    for name in ("bob", "alice"):
        learners = [runs.learners[name] for runs in (shared, alone)]
        a, b = (dict(adapter_parameters(learner.policy.hf, learner.adapter)) for learner in learners)
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        assert any(value.abs().max() > 1e-3 for n, value in a.items() if ".lora_B." in n)


def test_after_training_alice_the_engine_says_for_bob_and_the_judge_what_it_said_before(talk, tmp_path):
    flags = [*talk, *sizes(tmp_path / "run", 2), "--actors.bob.lr", "0", "--actors.judge.share", "bob"]
    run = make_run(flags, "--actors.judge.train", "false", "--algo.kl_coef", "0.01", "--optim.lr", "1e-2")
    assert "judge" not in run.learners and len(run.all_engines) == 1
    for name, learner in run.learners.items():
        for i, parameter in enumerate(p for _, p in learner.trained_parameters()):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
        asyncio.run(run.engines[name].update(learner.engine_weights(True), 0, adapter=run.actors[name].adapter))
    before = {name: said(run, name) for name in run.engines}
    assert before["judge"] != before["bob"]
    asyncio.run(train(run))
    after = {name: said(run, name) for name in run.engines}
    assert {name: before[name] == after[name] for name in before} == {"bob": True, "alice": False, "judge": True}
    rows = metrics(tmp_path / "run")
    assert rows[0]["learn/alice/ref_kl_nats"] > 0 and not any("judge" in key for key in rows[0])
    # What the engine samples by is what the learner computes: a difference of 1e-5 nats is 5e-11 of KL.
    assert max(row[f"learn/{name}/mismatch_kl_nats_max"] for row in rows for name in ("bob", "alice")) < 5e-11
    versions = {
        (step, turn["completion"]["policy_version"])
        for step in (1, 2)
        for t in trajectories(tmp_path / f"run/rollouts/step_{step:06d}.jsonl.zst")
        for turn in t["turns"]
    }
    assert versions == {(1, 0), (2, 1)}


def exported(out: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(out / "hf" / name / "model.safetensors")


def test_a_resumed_run_is_the_uninterrupted_one_and_each_export_is_the_base_with_its_adapter(
    talk, tiny_model, tmp_path
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*talk, *sizes(whole, 3), "--optim.lr", "1e-2"]) == 0
    assert main([*talk, *sizes(parts, 3), "--optim.lr", "1e-2", "--num_steps", "2"]) == 0
    assert main([*talk, *sizes(parts, 3), "--optim.lr", "1e-2", "--resume"]) == 0
    names = [n for n in metrics(whole)[0] if not n.startswith("time/")]
    assert [[row[n] for n in names] for row in metrics(whole)] == [[row[n] for n in names] for row in metrics(parts)]
    ids = torch.arange(8, 60)[None]
    for name in ("bob", "alice"):
        a, b = exported(whole, name), exported(parts, name)
        assert all(torch.equal(a[key], b[key]) for key in a)
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        merged = AutoModelForCausalLM.from_pretrained(whole / "hf" / name)
        with torch.no_grad():
            before, want = base(ids).logits, merged(ids).logits
            got = peft.PeftModel.from_pretrained(base, whole / "hf" / f"{name}_adapter")(ids).logits
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert (want - before).abs().max() > 0.01
    a, b = exported(whole, "bob"), exported(whole, "alice")
    assert any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("flags", [["--engine_ranks", "1"], ["--max_staleness", "1"]], ids=["apart", "stale"])
def test_adapters_reach_engines_that_go_on_while_learners_learn(flags, talk, torchrun, tmp_path):
    more = ["--optim.lr", "1e-2", *flags]
    torchrun(2 if "--engine_ranks" in flags else 1, "-m", "rl_core.train", *talk, *sizes(tmp_path / "run", 3), *more)
    for row in metrics(tmp_path / "run"):
        for name in ("bob", "alice"):
            assert row[f"learn/{name}/grad_norm"] > 0
            if "--engine_ranks" in flags:
                assert row[f"learn/{name}/mismatch_kl_nats_max"] < 5e-11


BOB = ["--actors.bob.model", "m", "--actors.bob.lora.rank", "4", "--env_path", "x/talk.py", "--out", "x"]


def test_who_shares_takes_what_is_not_given_and_a_saved_configuration_is_the_same():
    config = parse_config([*BOB, "--actors.bob.lora.alpha", "8", "--actors.alice.share", "bob"])
    assert config.actors["alice"].model == "m" and config.actors["alice"].lora == config.actors["bob"].lora
    own = (
        parse_config([*BOB, *NF4, "--actors.alice.share", "bob", "--actors.alice.lora.rank", "2"]).actors["alice"].lora
    )
    assert (own.rank, own.alpha, own.quantize) == (2, 32.0, "nf4")


@pytest.mark.slow
def test_two_actors_over_one_model_learn_opposite_tasks_at_once(warm_model, tmp_path):
    flags = ["--actors.up.model", str(warm_model), "--actors.up.lora.rank", "16", "--actors.down.share", "up"]
    flags += ["--env_path", str(ROOT / "envs/sort_two_ways.py"), "--out", str(tmp_path / "run"), "--optim.lr", "5e-3"]
    flags += ["--tasks_per_step", "32", "--group_size", "8", "--num_steps", "60", "--optim.warmup_steps", "5"]
    assert main([*flags, "--max_tokens", "8", "--max_prompt_tokens", "16", "--algo.clip_high", "0.28"]) == 0
    rows = metrics(tmp_path / "run")
    for name in ("up", "down"):
        rewards = [row[f"rollout/{name}/reward_mean"] for row in rows if f"rollout/{name}/reward_mean" in row]
        print(name, [round(sum(rewards[n : n + 10]) / 10, 2) for n in range(0, 60, 10)])
        assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.15
        assert max(row[f"learn/{name}/mismatch_kl_nats_max"] for row in rows) < 1e-6
