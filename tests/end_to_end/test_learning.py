"""Runs that learn: short ones that show that the whole pipeline does, and behind --slow every
preset and way to sample."""

from __future__ import annotations

import json

import pytest
from kit import ROOT, SORT, metrics, run, steps, words
from transformers import AutoModelForCausalLM, AutoTokenizer

QUICK = "--optim.lr 3e-4 --optim.warmup_steps 5 --algo.clip_high 0.28"
# Name -> flags: 40 steps of each must raise the reward of sorting.
SORTING = {
    **{
        preset: f"--algorithm {preset} --optim.lr 5e-4 --learner.updates_per_epoch 2"
        for preset in ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"]
    },
    "ppo": "--algorithm ppo --optim.lr 5e-4 --critic.lr 3e-3 --learner.updates_per_epoch 2",
    "adapter": "--actors.policy.lora.rank 4 --optim.lr 5e-3",
    "4 bits": "--actors.policy.lora.rank 4 --actors.policy.lora.quantize nf4 --optim.lr 5e-3",
    "older weights": "--rollout.stale_policy_frac 0.25 --rollout.stale_policy_refresh 5 --optim.lr 5e-4",
    "stale": "--max_staleness 1 --optim.lr 5e-4",
    "stale, apart": "--max_staleness 2 --rollout_ranks 1 --optim.lr 5e-4",
}


@pytest.mark.slow
def test_grpo_teaches_the_order_that_sft_did_not(warm_model, tmp_path):
    flags = words(
        "--model", warm_model, SORT, QUICK, "--num_steps 60 --eval_every 60 --eval.num_tasks 100"
    )
    out = run(tmp_path / "run", flags)
    name = "eval/sort_digits/greedy_pass"
    before, after = (row[name] for row in metrics(out) if name in row)
    assert before < 0.1 and after > 0.8, (before, after)
    first, *_, last = steps(out)
    assert last["rollout/policy/reward_mean"] > 0.6 > 0.3 > first["rollout/policy/reward_mean"]
    # On-policy, learner and engine must agree on every token's logprob; k3 is half the square of
    # their difference.
    assert max(row["learn/policy/mismatch_kl_nats_max"] for row in steps(out)) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("case", SORTING)
def test_the_reward_of_sorting_rises(case, warm_model, tmp_path):
    flags = words(
        "--model", warm_model, SORT, QUICK, SORTING[case], "--num_steps 40 --rollout.save false"
    )
    out = run(tmp_path / "run", flags, ranks=2 if "rollout_ranks" in SORTING[case] else 1)
    rewards = [row["rollout/policy/reward_mean"] for row in steps(out)]
    first, last = (sum(item) / 5 for item in (rewards[:5], rewards[-5:]))
    assert last > first + 0.1, (first, last)


@pytest.mark.slow
def test_the_calculator_is_learnt_over_two_turns(tiny_model, tmp_path):
    from demo_data import demo_data

    rows = demo_data("calculator", 0, 25600, 64, 64)["sft"]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    lengths = "--max_tokens 24 --max_prompt_tokens 32"
    sft = (
        "--algorithm sft --max_turns 2 --tasks_per_step 64 --num_steps 400 --optim.lr 3e-3 "
        "--optim.schedule cosine"
    )
    warm = run(
        tmp_path / "warm",
        "--model",
        tiny_model,
        sft,
        lengths,
        "--data.train",
        tmp_path / "sft.jsonl",
    )
    grpo = words(
        "--env_path",
        ROOT / "envs/calculator.py",
        "--num_steps 150 --optim.lr 5e-4 --optim.warmup_steps 5",
    )
    out = run(
        tmp_path / "run",
        "--model",
        warm / "hf/policy",
        grpo,
        lengths,
        "--algo.clip_high 0.28 --eval_every 150",
    )
    before, after = (
        row["eval/calculator/avg@4"] for row in metrics(out) if "eval/calculator/avg@4" in row
    )
    assert before < 0.3 and after > 0.75, (before, after)


@pytest.mark.slow
def test_the_export_is_the_trained_model_with_its_tokenizer(warm_model):
    tokenizer, model = (
        AutoTokenizer.from_pretrained(warm_model),
        AutoModelForCausalLM.from_pretrained(warm_model),
    )
    asked = [{"role": "user", "content": "31524"}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert sorted(tokenizer.decode(reply, skip_special_tokens=True)) == list("12345")
