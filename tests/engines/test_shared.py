"""Several actors that train adapters of one model: one set of weights and one engine, and nothing
of one in another."""

from __future__ import annotations

import asyncio
import itertools

import peft
import pytest
import torch
from kit import ROOT, STOP, metrics, run, trajectories, words
from test_learner import ragged_samples
from transformers import AutoModelForCausalLM

from rl_core.config import parse_config
from rl_core.learning.lora import adapter_parameters
from rl_core.learning.policies import make_policy
from rl_core.run.plan.plan import make_plan
from rl_core.run.process.joining import init_ranks
from rl_core.trainer import Trainer
from rl_core.types import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0)
TALK = """
turns = "bob -> alice -> bob"
system_prompts = {"alice": "you are alice"}
def load_tasks(split): return [{"prompt": f"say {n}", "n": n} for n in range(6)]
def reward_fn(completion, actor): return float(len(completion) if actor == "bob" else -len(completion))
"""
SIZES = (
    "--max_tokens 60 --max_prompt_tokens 60 --tasks_per_step 4 --group_size 4 --eval.samples 2 "
    "--optim.lr 1e-2"
)
ALICE = "--actors.alice.lora.rank 3 --actors.alice.lora.targets q_proj,up_proj"


@pytest.fixture
def talk(tiny_model, tmp_path) -> list[str]:
    """Flags of bob and alice, who share his model, with adapters of different sizes."""
    (tmp_path / "talk.py").write_text(TALK)
    flags = words(
        "--actors.bob.model",
        tiny_model,
        "--actors.bob.lora.rank 4 --actors.alice.lora_base bob",
        ALICE,
    )
    return words(flags, STOP, SIZES, "--env_path", tmp_path / "talk.py")


def make_run(out, *flags):
    return Trainer(
        make_plan(parse_config(words(*flags, "--num_steps 2 --out", out))), init_ranks(60)
    )


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


def sampled_by(run, name: str) -> list[tuple[list[int], list[float]]]:
    async def gather():
        asked = (run.actors[name].speaker.generate([1, 9 + i, 20], GREEDY, i) for i in range(4))
        return [(c.token_ids, c.logprobs) for c in await asyncio.gather(*asked)]

    return asyncio.run(gather())


def test_one_set_of_weights_serves_both_learners_and_their_engine(talk, tiny_model, tmp_path):
    run = make_run(tmp_path / "run", talk)
    assert len(run.actors) == 2
    [engine] = run.device.engines
    models = [
        engine.model,
        *(model.hf for learner in run.learners.values() for model in learner.models()),
    ]
    storages = {
        p.data_ptr(): p.numel()
        for m in models
        for n, p in m.named_parameters()
        if ".lora_" not in n
    }
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert sum(storages.values()) == sum(p.numel() for p in plain.parameters())
    bob, alice = (
        {p.data_ptr() for _, p in run.learners[name].trained_parameters()}
        for name in ("bob", "alice")
    )
    assert len(bob) == 2 * 2 * 7 and len(alice) == 2 * 2 * 2 and not bob & alice
    assert all(p.requires_grad for x in run.learners.values() for _, p in x.trained_parameters())
    assert not any(p.requires_grad for p in engine.model.parameters())


def test_a_step_of_one_leaves_the_other_and_the_base_bit_for_bit(talk, tiny_model, tmp_path):
    run = with_random_adapters(make_run(tmp_path / "run", talk))
    bob, alice = run.learners["bob"], run.learners["alice"]
    plain = logprobs(bob, make_policy(str(tiny_model), torch.float32, run.ranks))
    before = {name: logprobs(learner) for name, learner in run.learners.items()}
    assert torch.equal(logprobs(alice, adapter=""), plain)  # the reference
    for _ in range(2):
        alice.step(alice.shard(ragged_samples())[0], 0)
    assert torch.equal(logprobs(bob), before["bob"]) and not torch.equal(
        logprobs(alice), before["alice"]
    )
    assert not torch.equal(before["alice"], before["bob"])
    for learner in run.learners.values():
        assert torch.equal(logprobs(learner, adapter=""), plain)
    assert all(p.grad is None for p in bob.policy.parameters())


@pytest.mark.parametrize("flags", ["", "--learner.activations recompute"])
def test_each_learns_as_if_it_were_alone(flags, talk, tiny_model, tmp_path):
    """With activation checkpointing the backward recomputes the forward with the same adapter."""
    shared = make_run(tmp_path / "shared", talk, flags)
    changed = words(
        "--actors.bob.model",
        tiny_model,
        "--actors.bob.lora.rank 4 --actors.alice.model",
        tiny_model,
    )
    alone = make_run(
        tmp_path / "alone", changed, talk[talk.index("--actors.alice.lora.rank") :], flags
    )
    for runs in (shared, alone):
        for step in range(4):
            for learner in runs.learners.values():
                learner.step(learner.shard(ragged_samples())[0], step)
    for name in ("bob", "alice"):
        learners = [runs.learners[name] for runs in (shared, alone)]
        a, b = (
            dict(adapter_parameters(learner.policy.hf, learner.adapter)) for learner in learners
        )
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
        assert any(value.abs().max() > 1e-3 for n, value in a.items() if ".lora_B." in n)


def test_training_alice_changes_nothing_for_bob_and_the_judge(talk, tmp_path):
    judge = "--actors.judge.lora_base bob --actors.judge.train false"
    shared = make_run(tmp_path / "run", talk, judge, "--actors.bob.optim.lr 0 --algo.kl_coef 0.01")
    assert "judge" not in shared.learners and len(shared.device.engines) == 1
    for name, learner in shared.learners.items():
        for i, parameter in enumerate(p for _, p in learner.trained_parameters()):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
        asyncio.run(
            shared.actors[name].engine.update(
                learner.engine_weights(True), 0, adapter=shared.actors[name].adapter
            )
        )
    before = {name: sampled_by(shared, name) for name in shared.actors}
    assert before["judge"] != before["bob"]
    asyncio.run(shared.fit())
    after = {name: sampled_by(shared, name) for name in shared.actors}
    assert {name: before[name] == after[name] for name in before} == {
        "bob": True,
        "alice": False,
        "judge": True,
    }
    rows = metrics(tmp_path / "run")
    assert rows[0]["learn/alice/ref_kl_nats"] > 0 and not any("judge" in key for key in rows[0])
    # The engine samples with the learner's logprobs: a difference of 1e-5 nats is 5e-11 of
    # KL.
    assert (
        max(row[f"learn/{name}/mismatch_kl_nats_max"] for row in rows for name in ("bob", "alice"))
        < 5e-11
    )
    versions = {
        (step, turn["completion"]["policy_version"])
        for step in (1, 2)
        for t in trajectories(tmp_path / f"run/rollouts/step_{step:06d}.jsonl.zst")
        for turn in t["turns"]
    }
    assert versions == {(1, 0), (2, 1)}


def test_each_export_is_the_base_with_its_adapter(talk, tiny_model, tmp_path):
    out = run(tmp_path / "run", talk, "--num_steps 2")
    ids, logits = torch.arange(8, 60)[None], []
    for name in ("bob", "alice"):
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        with torch.no_grad():
            before, want = (
                base(ids).logits,
                AutoModelForCausalLM.from_pretrained(out / "hf" / name)(ids).logits,
            )
            got = peft.PeftModel.from_pretrained(base, out / "hf" / f"{name}_adapter")(ids).logits
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert (want - before).abs().max() > 0.01
        logits.append(want)
    assert not torch.equal(*logits)


@pytest.mark.parametrize("flags", ["--rollout_ranks 1", "--max_staleness 1"])
def test_adapters_reach_engines_that_go_on_while_learners_learn(flags, talk, tmp_path):
    out = run(tmp_path / "run", talk, flags, "--num_steps 3", ranks=2 if "ranks" in flags else 1)
    for row, name in itertools.product(metrics(out), ("bob", "alice")):
        assert row[f"learn/{name}/grad_norm"] > 0
        assert row[f"learn/{name}/mismatch_kl_nats_max"] < 5e-11 or "stale" in flags


def test_sharers_take_what_is_not_given():
    bob = (
        "--actors.bob.model m --actors.bob.lora.rank 4 --env_path x/talk.py --out x "
        "--actors.alice.lora_base bob"
    )
    alice = parse_config(words(bob, "--actors.bob.lora.alpha 8")).actors["alice"]
    assert alice.model == "m" and (alice.lora.rank, alice.lora.alpha) == (4, 8)
    more = "--actors.bob.lora.quantize nf4 --actors.alice.lora.rank 2"
    alices = parse_config(words(bob, more)).actors["alice"].lora
    assert (alices.rank, alices.alpha, alices.quantize) == (2, 32.0, "nf4")


@pytest.mark.slow
def test_two_actors_over_one_model_learn_opposite_tasks_at_once(warm_model, tmp_path):
    flags = words(
        "--actors.up.model",
        warm_model,
        "--actors.up.lora.rank 16 --actors.down.lora_base up --num_steps 60",
    )
    flags += words(
        "--env_path",
        ROOT / "envs/sort_two_ways.py",
        "--max_tokens 8 --max_prompt_tokens 16 --optim.lr 5e-3",
    )
    flags += words(
        "--tasks_per_step 32 --group_size 8 --optim.warmup_steps 5 --algo.clip_high 0.28"
    )
    rows = metrics(run(tmp_path / "run", flags))
    for name in ("up", "down"):
        rewards = [
            row[f"rollout/{name}/reward_mean"]
            for row in rows
            if f"rollout/{name}/reward_mean" in row
        ]
        assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.15
        assert max(row[f"learn/{name}/mismatch_kl_nats_max"] for row in rows) < 1e-6
