"""Whole steps against the same written out in plain torch: padded forward, formulas token by token,
torch's optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kit import STOP, learn, make_learner, run, sample, steps, trajectories, words
from oracle import logprobs
from transformers import AutoModelForCausalLM

from rl_core.types import TrainingSample

BASE = (
    "--optim.max_grad_norm 0 --learner.updates_per_epoch 2 --optim.lr 0.01 --optim.betas 0.9,0.95 "
    "--optim.eps 1e-4"
)


@dataclass
class Case:
    flags: str
    rates: list[list[float]]  # Learning rates of the updates of each step.
    make: Callable = torch.optim.AdamW
    options: dict | None = None  # Arguments of the optimizer.
    epochs: int = 1
    temperature: float = 1.0
    clip: tuple[float, float] = (0.2, 0.2)
    kl: float = 0.0
    target_kl: float = 0.0
    max_norm: float = 0.0


ADAMW = {"betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.0}
SGD = {"momentum": 0.9}
FLAT = [[0.01, 0.01]] * 2
CASES = {
    # Half a step on, the rate is half a step further on its way.
    "warm-up": Case(
        "--optim.warmup_steps 3",
        [[0.01 / 4, 0.015 / 4], [0.02 / 4, 0.025 / 4], [0.03 / 4, 0.035 / 4], [0.01, 0.01]],
    ),
    "linear": Case("--optim.schedule linear --num_steps 4", [[0.01, 0.00875], [0.0075, 0.00625]]),
    "beta2": Case(
        "--optim.betas 0.8,0.6 --optim.eps 1e-4", FLAT, options=ADAMW | {"betas": (0.8, 0.6)}
    ),
    "sgd": Case("--optim.name sgd", FLAT, torch.optim.SGD, SGD),
    "norm": Case(
        "--optim.name sgd --optim.max_grad_norm 0.1", FLAT, torch.optim.SGD, SGD, max_norm=0.1
    ),
    "clip": Case(
        "--learner.epochs 3 --algo.clip_low 0.05 --algo.clip_high 0.1",
        [[0.01] * 6],
        epochs=3,
        clip=(0.05, 0.1),
    ),
    "kl": Case("--algo.kl_coef 0.5 --sampling.temperature 0.5", FLAT, kl=0.5, temperature=0.5),
    "target": Case(
        "--learner.epochs 3 --algo.target_kl 0.02 --optim.lr 0.003",
        [[0.003] * 6] * 2,
        epochs=3,
        target_kl=0.02,
    ),
    "epochs, hot": Case(
        "--learner.epochs 2 --sampling.temperature 2", [[0.01] * 4], epochs=2, temperature=2.0
    ),
}


def make_samples(seed: int, num: int = 8) -> list[TrainingSample]:
    """Two to a task, with two turns each, of different lengths. Each has one advantage, by which it
    is known."""
    draw, samples = random.Random(seed), []
    for i in range(num):
        lengths = 5, draw.randint(2, 30), 3, draw.randint(1, 9)
        mask = [turn % 2 for turn, length in enumerate(lengths) for _ in range(length)]
        advantage = draw.gauss(0, 1)
        samples.append(
            sample([draw.randrange(8, 104) for _ in mask], mask, advantage, f"{i // 2:04d}")
        )
    return samples


def step_by_hand(
    case: Case, model, reference, optimizer, parts: list[list[TrainingSample]], rates: list[float]
) -> None:
    """One step of GRPO on these minibatches, over and over as there are rates."""
    with torch.no_grad():
        old = {
            id(s): logprobs(model, s, case.temperature) for minibatch in parts for s in minibatch
        }
        ref = {
            id(s): logprobs(reference, s, case.temperature)
            for minibatch in parts
            for s in minibatch
        }
    for update, rate in enumerate(rates):
        minibatch, losses, drift = parts[update % len(parts)], [], []
        for s in minibatch:
            new, advantage = (
                logprobs(model, s, case.temperature),
                float(s.advantages.max() + s.advantages.min()),
            )
            ratio = (new - old[id(s)]).exp()
            bounded = ratio.clamp(1 - case.clip[0], 1 + case.clip[1])
            above = ref[id(s)] - new
            losses.append(
                case.kl * (above.exp() - 1 - above)
                - torch.minimum(ratio * advantage, bounded * advantage)
            )
            drift.append((ratio - 1 - ratio.log()).detach())
        if case.target_kl and torch.cat(drift).mean() > case.target_kl:
            return
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        if case.max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_what_the_formulas_say(name, tiny_model):
    case = CASES[name]
    learner = make_learner(tiny_model, BASE, case.flags)
    model, reference = (AutoModelForCausalLM.from_pretrained(tiny_model) for _ in "ab")
    optimizer = case.make(model.parameters(), lr=0.0, **(case.options or ADAMW))
    made = 0.0
    for step, rates in enumerate(case.rates):
        samples = make_samples(step)
        plan, _ = learner.shard(samples)
        known = [
            {round(a, 4) for b in minibatch.batches for a in b.advantages.tolist()}
            for minibatch in plan
        ]
        parts = [
            [s for s in samples if round(float(s.advantages.max() + s.advantages.min()), 4) in of]
            for of in known
        ]
        assert [len(minibatch) for minibatch in parts] == [4, 4]
        [row] = learn(learner, samples, first=step)
        made += row["updates"]
        step_by_hand(case, model, reference, optimizer, parts, rates)
        for key, weight in learner.named_weights():
            torch.testing.assert_close(weight, model.get_parameter(key), atol=3e-5, rtol=1e-3)
    all_updates = sum(map(len, case.rates))
    assert made == all_updates if not case.target_kl else 2 < made < all_updates, (
        "the target is to be met on the way"
    )


def test_dr_grpos_constant_counts_the_tokens_of_all_turns(places, tmp_path):
    flags = words(
        "--model {model} --env_path {dir}/ask.py --algorithm dr_grpo --num_steps 1".format(
            **places
        ),
        STOP,
    )
    out = run(
        tmp_path / "run",
        flags,
        "--max_tokens 10 --max_prompt_tokens 24 --tasks_per_step 4 --group_size 4",
    )
    rows, total = trajectories(out / "rollouts/step_000001.jsonl.zst"), 0.0
    assert max(len(t["turns"]) for t in rows) == 3
    for t in rows:
        rewards = [other["reward"] for other in rows if other["group_id"] == t["group_id"]]
        num_tokens = sum(len(turn["completion"]["token_ids"]) for turn in t["turns"])
        total -= (t["reward"] - sum(rewards) / 4) * num_tokens
    [row] = steps(out)
    assert (
        row["learn/policy/loss"] == pytest.approx(total / (16 * 10 * 3), rel=1e-4)
        and abs(total) > 0.1
    )


def test_weight_decay_is_of_matrices_alone(tiny_model):
    learner = make_learner(
        tiny_model,
        BASE,
        "--optim.weight_decay 1 --optim.lr 1e-4 --optim.betas 0.9,0.95 --optim.eps 1e9",
    )
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    learn(learner, make_samples(0))
    for name, weight in learner.named_weights():
        factor = (1 - 1e-4) ** 2 if weight.ndim > 1 else 1.0
        torch.testing.assert_close(weight, before[name] * factor, atol=1e-7, rtol=1e-6)
