"""Every part of an algorithm against the paper's formula, written here sequence by sequence and
token by token."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from kit import metrics, part_of, trajectories, words
from test_critic import naive_gae, plain_values, with_critic
from test_learner import assert_same, make_learner, ragged_samples

from rl_core.algorithms import PRESETS, kl_estimate, sequence_mean, token_losses
from rl_core.data.episodes import baseline_groups
from rl_core.learning.advantages import (
    group_advantages,
    overlong_penalty,
    samples_of,
    turn_advantages,
    turn_returns,
)
from rl_core.learning.kl import sums_to_go
from rl_core.learning.learner import Learner
from rl_core.learning.signal import has_signal
from rl_core.train import main
from rl_core.types import Completion, TrainingSample, Trajectory, Turn

RL = [name for name, row in PRESETS.items() if row.is_rl]
MISMATCH = ("--algo.importance_correction", "mask", "--algo.correction_range", "0.5,1.5")
CASES = [  # preset, flags that change parts of it
    *((name, ()) for name in RL),
    ("grpo", ("--algo.aggregation", "sequence")),
    ("grpo", ("--algo.aggregation", "constant", "--algo.dual_clip", "1.2")),
    ("grpo", ("--algo.kl_coef", "0.3", "--algo.kl", "k1")),
    ("grpo", ("--algo.kl_coef", "0.3", "--algo.kl", "k2", "--algo.entropy_coef", "0.1")),
    ("gspo", ("--algo.kl_coef", "0.3", "--algo.clip_low", "0.02", "--algo.clip_high", "0.03")),
    ("gspo", ("--algo.kl_coef", "0.3", "--algo.kl_in", "advantage", "--algo.clip_high", "0.05")),
    ("rloo", ("--algo.kl_coef", "0.1")),
    ("reinforce_pp", ("--algo.kl_coef", "0.1")),
    ("ppo", ("--algo.kl_coef", "0.1", "--critic.gamma", "0.98")),
    ("ppo", ("--algo.kl_coef", "0.1", "--algo.kl_in", "advantage", "--algo.normalize", "none")),
    ("cispo", ("--algo.advantage", "gae", "--algo.entropy_coef", "0.01")),
    ("grpo", ("--algo.kl_coef", "0.1", "--algo.kl_in", "advantage")),
    ("grpo", ("--algo.importance_correction", "tis", "--algo.correction_range", "0.5,1.1")),
    ("cispo", MISMATCH),
    ("gspo", ("--algo.importance_correction", "sequence_mask", "--algo.correction_range", "0.9,2")),
]
NAMES = [" ".join([preset, *flags]) for preset, flags in CASES]


DEFAULTS = {
    "advantage": "group_norm",
    "normalize": "none",
    "objective": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 0.0,
    "aggregation": "token",
    "kl": "k3",
    "kl_in": "loss",
    "kl_coef": 0.0,
    "kl_reward": None,
    "kl_loss": None,
    "log_kl": False,
    "entropy_coef": 0.0,
    "importance_correction": "none",
    "correction_range": (0.5, 2.0),
    "truncation_penalty": "none",
    "overlong_buffer": 0,
    "dynamic_sampling_rounds": 0,
    "target_kl": 0.0,
    "turn_discount": None,
    "gigpo_coef": 1.0,
    "gigpo_discount": 0.95,
    "reference": None,
    "reference_every": 0,
    "reference_decay": 0.0,
    "teacher": None,
    "teacher_coef": 1.0,
    "teacher_loss": "sampled",
    "teacher_beta": 0.5,
    "teacher_top_k": 0,
    "teacher_update": "start",
    "teacher_decay": 0.99,
}
TABLE = {
    "grpo": {},
    "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
    "dapo": {"clip_high": 0.28, "truncation_penalty": "soft", "dynamic_sampling_rounds": 10},
    "gspo": {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"},
    "cispo": {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"advantage": "rloo", "aggregation": "constant", "kl": "k1", "kl_in": "reward"},
    "reinforce_pp": {"advantage": "none", "normalize": "batch", "kl": "k1", "kl_in": "reward"},
    "ppo": {"advantage": "gae", "normalize": "batch", "kl": "k1", "kl_in": "reward"},
    "opd": {"advantage": "zero", "normalize": "batch"},
    "sft": {"objective": "nll"},
    "dpo": {"objective": "dpo"},
    "rm": {"objective": "rm"},
}


def test_presets_are_the_papers_settings():
    assert {name: dataclasses.asdict(row) for name, row in PRESETS.items()} == {
        name: DEFAULTS | parts for name, parts in TABLE.items()
    }


def make_pair(model_path, preset: str, *flags) -> Learner:
    """A learner whose reference, if it has one, has other weights; a critic, if it has one, knows
    something."""
    learner = make_learner(model_path, *flags, algorithm=preset)
    if learner.algorithm.has_critic:
        with_critic(learner)
    if reference := part_of(learner, "Reference"):
        torch.manual_seed(0)
        for p in reference.policy.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return learner


def annotated(learner: Learner, samples: list[TrainingSample]):
    """The minibatch, with old logprobs and an engine's that differ from the learner's, by an amount
    that hangs on the token alone: any layout of the batch gets the same."""
    (minibatch,), _ = learner.shard(samples)
    with torch.no_grad():
        current = [learner.policy(b, 1.0)[0] for b in minibatch.batches]
    for batch, logprobs in zip(minibatch.batches, current, strict=True):
        batch.rollout_logprobs = logprobs + (0.5 * torch.sin(5 * batch.labels.double())).float()
    learner.annotate([minibatch])
    for batch, logprobs in zip(minibatch.batches, current, strict=True):
        batch.old_logprobs = logprobs + (0.5 * torch.sin(3 * batch.labels.double())).float()
    return minibatch


def learner_gradients(learner: Learner, samples) -> tuple[dict[str, torch.Tensor], float]:
    minibatch, total = annotated(learner, samples), 0.0
    for batch in minibatch.batches:
        loss = (
            token_losses(learner.algorithm, batch, *learner.policy(batch, 1.0))[0].sum()
            / minibatch.denominator
        )
        loss.backward()
        total += loss.item()
    grads = {n: p.grad.clone() for n, p in learner.policy.hf.named_parameters()}
    learner.policy.zero_grad()
    return grads, total


def reference_logprobs(learner: Learner, ids_BL: torch.Tensor) -> torch.Tensor:
    """[B, L-1] of each token but the first, by the plain Hugging Face model."""
    model = part_of(learner, "Reference").policy.hf
    model.set_attn_implementation("sdpa")
    logprobs = model(ids_BL, use_cache=False).logits[:, :-1].log_softmax(-1)
    model.set_attn_implementation("rl_core_packed")
    return logprobs.gather(-1, ids_BL[:, 1:, None])[..., 0]


def naive_kl(kind: str, d):
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def naive_advantages(learner: Learner, s, kl: list[float]) -> list[float]:
    """Advantages of the trained tokens, minus a KL that is not in the loss."""
    a = learner.algorithm
    advantages = [s.advantages[i] for i, m in enumerate(s.loss_mask) if m]
    if a.kl_in == "reward" and not a.has_critic:
        kl = [sum(kl[t:]) for t in range(len(kl))]
    penalty = [0.0] * len(advantages)
    if a.kl_coef and a.kl_in != "loss":
        penalty = [a.kl_coef * x for x in kl]
    if a.has_critic:
        critic = learner.config.critic
        rewards = [0.0] * (len(advantages) - 1) + advantages[-1:]
        if a.kl_in == "reward":
            rewards = [r - p for r, p in zip(rewards, penalty, strict=True)]
            penalty = [0.0] * len(advantages)
        values = plain_values(learner, s)
        advantages = naive_gae(rewards, values, critic.gamma, critic.gae_lambda)
    return [x - p for x, p in zip(advantages, penalty, strict=True)]


def naive_sequence(learner: Learner, s) -> tuple:
    """(new, old, rollout and reference logprobs, entropy, advantages) of its trained tokens."""
    a, ids = learner.algorithm, torch.tensor(s.token_ids[None])
    logits = learner.policy.hf(ids, use_cache=False).logits[0].log_softmax(-1)
    at = [i for i, m in enumerate(s.loss_mask) if m]
    new = torch.stack([logits[i - 1, s.token_ids[i]] for i in at])
    entropy = torch.stack([-(logits[i - 1].exp() * logits[i - 1]).sum() for i in at])
    old, rollout = (
        new.detach() + torch.tensor([0.5 * math.sin(rate * s.token_ids[i]) for i in at])
        for rate in (3, 5)
    )
    ref, kl = None, []
    if a.kl_coef:
        ref = reference_logprobs(learner, ids)[0, [i - 1 for i in at]]
        kl = naive_kl(a.kl, rollout - ref).tolist()
    return new, old, rollout, ref, entropy, naive_advantages(learner, s, kl)


def naive_correction(a, of_token: float, of_sequence: float) -> float:
    low, high = a.correction_range
    if a.importance_correction == "tis":
        return min(of_token, high)
    if a.importance_correction == "mask":
        return of_token if low <= of_token <= high else 0.0
    if a.importance_correction == "sequence_mask":
        return float(low <= of_sequence <= high)
    return 1.0


def naive_objective(a, ratio, advantage: float, new):
    if a.objective == "cispo":
        return -min(max(ratio.item(), 1 - a.clip_low), 1 + a.clip_high) * advantage * new
    clipped = torch.clamp(ratio, 1 - a.clip_low, 1 + a.clip_high)
    gain = torch.min(ratio * advantage, clipped * advantage)
    if a.dual_clip and advantage < 0:
        gain = torch.max(gain, torch.tensor(a.dual_clip * advantage))
    return -gain


def naive_loss(a, new, old, rollout, ref, entropy, advantages):
    """The sum over the tokens of a sequence."""
    whole_ratio = torch.exp((new - old).sum() / len(new))
    whole_correction = math.exp((old - rollout).mean().item())
    total = 0.0
    for t, advantage in enumerate(advantages):
        ratio = whole_ratio if a.objective == "gspo" else torch.exp(new[t] - old[t])
        of_token = math.exp((old[t] - rollout[t]).item())
        correction = naive_correction(a, of_token, whole_correction)
        loss = naive_objective(a, ratio, advantage, new[t]) * correction
        if a.kl_coef and a.kl_in == "loss":
            loss = loss + a.kl_coef * naive_kl(a.kl, new[t] - ref[t])
        total = total + loss - a.entropy_coef * entropy[t]
    return total


def naive_gradients(learner: Learner, samples, longest=60) -> tuple[dict[str, torch.Tensor], float]:
    """The papers' sums, one sequence after the other through the plain Hugging Face model."""
    a, model = learner.algorithm, learner.policy.hf
    model.set_attn_implementation("sdpa")
    sequences = [naive_sequence(learner, s) for s in samples]
    model.set_attn_implementation("rl_core_packed")
    if a.normalize == "batch":
        every = [x for *_, advantages in sequences for x in advantages]
        mean = sum(every) / len(every)
        deviation = (sum((x - mean) ** 2 for x in every) / len(every)) ** 0.5
        sequences = [
            (*rest, [(x - mean) / deviation for x in advantages]) for *rest, advantages in sequences
        ]
    total, num_tokens = 0.0, sum(len(s[0]) for s in sequences)
    for *rest, advantages in sequences:
        denominator = {
            "token": num_tokens,
            "sequence": len(advantages) * len(samples),
            "constant": longest * len(samples),
        }[a.aggregation]
        total = total + naive_loss(a, *rest, advantages) / denominator
    total.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    learner.policy.zero_grad()
    return grads, total.item()


@pytest.mark.parametrize("preset, flags", CASES, ids=NAMES)
def test_the_loss_is_the_papers_formula_however_the_batch_is_split(preset, flags, tiny_model):
    samples = ragged_samples(12, shared_prompt=12)
    learner = make_pair(tiny_model, preset, *flags)
    want, want_loss = naive_gradients(learner, samples)
    for tokens in (8192, 100):
        learner.budget = dataclasses.replace(learner.budget, max_tokens=tokens)
        assert (len(learner.shard(samples)[0][0].batches) > 1) == (tokens < 8192)
        got, loss = learner_gradients(learner, samples)
        assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
        assert_same(got, want, tolerance=1e-5)


def trl_gradients(
    learner: Learner, model_path, samples, loss_type: str, level: str, delta: float | None, folder
):
    """The gradient and loss of TRL's GRPOTrainer on one batch made by hand."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    low, high = (
        (0.02, 0.03) if level == "sequence" else (0.2, 5.0 if loss_type == "cispo" else 0.28)
    )
    config = trl.GRPOConfig(
        output_dir=str(folder),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=low,
        epsilon_high=high,
        delta=delta,
        beta=learner.algorithm.kl_coef,
        max_completion_length=60,
        num_generations=2,
        use_bias_correction_kl=False,  # ours is not weighted by the ratio
        per_device_train_batch_size=len(samples),
        gradient_accumulation_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    longest = max(len(s.token_ids) for s in samples)
    columns = [(s.token_ids, s.loss_mask, [1] * len(s.token_ids)) for s in samples]
    ids, mask, is_token = (
        torch.tensor([[*map(int, column), *[0] * (longest - len(column))] for column in rows])
        for rows in zip(*columns, strict=True)
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": is_token[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": is_token[:, 1:],
        "tool_mask": mask[:, 1:],
        "num_items_in_batch": mask.sum(),
        "advantages": torch.tensor([max(s.advantages, key=abs) for s in samples]),
    }
    trainer.model.train()
    with torch.no_grad():
        current, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, is_token, longest - 1
        )
    inputs["old_per_token_logps"] = current + (0.5 * torch.sin(3 * ids[:, 1:].double())).float()
    if part_of(learner, "Reference"):
        # Padding stands last and is masked.
        inputs["ref_per_token_logps"] = reference_logprobs(learner, ids)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return {n: p.grad.clone() for n, p in trainer.model.named_parameters()}, loss.item()


HIGH = ("--algo.clip_high", "0.28")


@pytest.mark.parametrize(
    "loss_type, level, delta, beta, preset, flags",
    [
        ("grpo", "token", None, 0.0, "grpo", (*HIGH, "--algo.aggregation", "sequence")),
        (
            "grpo",
            "token",
            1.4,
            0.3,
            "grpo",
            (*HIGH, "--algo.aggregation", "sequence", "--algo.dual_clip", "1.4"),
        ),
        ("bnpo", "token", None, 0.3, "grpo", HIGH),
        ("dapo", "token", None, 0.0, "dapo", ()),
        ("dr_grpo", "token", None, 0.0, "dr_grpo", HIGH),
        ("cispo", "token", None, 0.0, "cispo", ()),
        (
            "grpo",
            "sequence",
            None,
            0.0,
            "gspo",
            ("--algo.clip_low", "0.02", "--algo.clip_high", "0.03"),
        ),
    ],
)
def test_the_loss_is_trls_where_it_computes_the_same(
    loss_type, level, delta, beta, preset, flags, tiny_model, tmp_path
):
    samples = ragged_samples(8)
    learner = make_pair(
        tiny_model, preset, *flags, *(["--algo.kl_coef", str(beta)] if beta else [])
    )
    want, want_loss = trl_gradients(learner, tiny_model, samples, loss_type, level, delta, tmp_path)
    got, loss = learner_gradients(learner, samples)
    assert loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
    assert_same(got, want, tolerance=1e-5)


def test_advantages_are_the_papers_formulas():
    draw = random.Random(0)
    for rewards in ([1.0, 0.0, 0.5, 0.25], [draw.gauss(0, 2) for _ in range(7)], [3.0, -1.0]):
        n, mean = len(rewards), sum(rewards) / len(rewards)
        squares = sum((r - mean) ** 2 for r in rewards)
        others = [sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i in range(n)]
        want = {
            "group_mean": [r - mean for r in rewards],
            "group_norm": [(r - mean) / math.sqrt(squares / n) for r in rewards],
            "group_norm_unbiased": [(r - mean) / math.sqrt(squares / (n - 1)) for r in rewards],
            "rloo": [r - o for r, o in zip(rewards, others, strict=True)],
            "none": rewards,
            "gae": rewards,
        }
        for kind, expected in want.items():
            assert group_advantages(rewards, kind) == pytest.approx(expected), kind
    for kind in ("group_mean", "group_norm", "group_norm_unbiased", "rloo"):
        assert group_advantages([0.1] * 3, kind) == [0.0] * 3
        assert group_advantages([0.7], kind) == [0.0]


def test_equal_rewards_are_normalised_over_the_batch_to_nothing(tiny_model):
    learner = make_learner(tiny_model, algorithm="reinforce_pp")
    samples = [
        dataclasses.replace(s, advantages=[0.1 * m for m in s.loss_mask]) for s in ragged_samples()
    ]
    minibatches, _ = learner.shard(samples)
    learner.annotate(minibatches)
    assert not any(b.advantages.any() for m in minibatches for b in m.batches)


def test_estimators_of_the_kl_have_its_mean():
    torch.manual_seed(0)
    policy, ref = (torch.randn(6).double().log_softmax(0) for _ in range(2))
    exact = (policy.exp() * (policy - ref)).sum()
    means = [(policy.exp() * kl_estimate(kind, policy, ref)).sum() for kind in ("k1", "k3")]
    torch.testing.assert_close(torch.stack(means), exact.expand(2))
    near = policy + 0.01 * (ref - policy)
    near = near.log_softmax(0)
    exact = (policy.exp() * (policy - near)).sum()
    assert (policy.exp() * kl_estimate("k2", policy, near)).sum() == pytest.approx(
        exact.item(), rel=0.02
    )


def test_means_and_sums_over_sequences_stay_inside_them():
    values, sequences = (
        torch.tensor([1.0, 2.0, 3.0, 10.0, -4.0, 6.0]),
        torch.tensor([0, 0, 0, 1, 2, 2]),
    )
    batch = SimpleNamespace(sequences=sequences, paths=[None] * 3)
    assert sequence_mean(values, batch).tolist() == [2, 2, 2, 10, 1, 1]
    assert sums_to_go(values, sequences).tolist() == [6, 5, 3, 10, 2, 6]
    nothing = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert sums_to_go(*nothing).numel() == 0


def test_the_overlong_penalty_is_dapos():
    longest, buffer = 20, 5
    for length in range(1, 21):
        want = 0.0 if length <= 15 else (15 - length) / 5
        assert overlong_penalty(episode(0.0, length), longest, buffer) == want
    fifth = [overlong_penalty(episode(0.0, n), 20, 0) for n in (16, 18, 20)]
    assert fifth == [0.0, -0.5, -1.0]


@pytest.mark.parametrize(
    "limits, lengths, buffer, penalty",
    [
        ([10], [8], 0, 0.0),  # a fifth of the environment's 10, not of the run's 100
        ([10], [10], 0, -1.0),
        ([10, 40], [9, 36], 0, -0.5),
        ([10, 40], [8, 39], 0, -7 / 8),
        ([4], [3], 8, -3 / 4),  # a buffer above the limit
        ([0], [98], 4, -0.5),  # An older rollout has no limit.
    ],
)
def test_the_overlong_penalty_uses_the_limit_of_each_turn(limits, lengths, buffer, penalty):
    t = episode(0.0, 1)
    t.turns = []
    for limit, length in zip(limits, lengths, strict=True):
        t.turns += [dataclasses.replace(episode(0.0, length).turns[0], max_tokens=limit)]
    assert overlong_penalty(t, 100, buffer) == penalty


def episode(reward: float, length: int, status="ok") -> Trajectory:
    done = Completion(
        token_ids=[9] * length,
        logprobs=[-1.0] * length,
        text="",
        finish_reason="",
        policy_version=0,
    )
    turns = [Turn(new_ids=[8, 8], is_fresh=True, completion=done)]
    return Trajectory(task_id="t", env="e", group_id="g", turns=turns, reward=reward, status=status)


def test_the_overlong_penalty_is_of_an_episodes_longest_turn():
    def advantages(*lengths: int) -> list[float]:
        long = episode(1.0, lengths[0])
        long.turns = [
            dataclasses.replace(episode(1.0, n).turns[0], is_fresh=not i)
            for i, n in enumerate(lengths)
        ]
        row = dataclasses.replace(PRESETS["dr_grpo"], truncation_penalty="soft", overlong_buffer=4)
        return [max(s.advantages, key=abs) for s in samples_of([[long, episode(0.0, 1)]], row, 10)]

    assert advantages(6, 6) == advantages(5) == pytest.approx([0.5, -0.5])
    assert advantages(2, 9) == pytest.approx([0.125, -0.125])


def test_failed_episodes_are_in_no_baseline():
    group = [episode(1.0, 4), episode(None, 4, "failed"), episode(0.5, 4)]
    assert baseline_groups(group) == [[group[0], group[2]]]


def test_overlong_episodes_are_penalised_or_left_out_but_count_in_the_baseline():
    group = [episode(1.0, 4), episode(0.0, 6), episode(0.5, 10, "truncated")]

    def advantages(overlong):
        row = dataclasses.replace(PRESETS["dr_grpo"], truncation_penalty=overlong)
        return [max(s.advantages, key=abs) for s in samples_of([group], row, 10)]

    assert advantages("none") == pytest.approx([0.5, -0.5, 0.0])
    assert advantages("mask") == pytest.approx([0.5, -0.5])
    assert advantages("soft") == pytest.approx([5 / 6, -1 / 6, -4 / 6])


def test_updates_stop_when_the_mean_kl_to_the_steps_start_is_above_the_target(tiny_model):
    def run(*more):
        learner = make_learner(tiny_model, "--learner.epochs", "2", "--optim.lr", "0.01", *more)
        minibatches, _ = learner.shard(ragged_samples())
        learner.annotate(minibatches)
        return learner.step(minibatches, 0), [p.clone() for p in learner.policy.parameters()]

    unbounded, after_two = run()
    assert unbounded["updates"].value == 2
    kl = 2 * unbounded["step_kl_nats"].value  # Only the second update has a KL.
    assert kl > 1e-4
    below, after_one = run("--algo.target_kl", str(0.7 * kl))
    assert (below["updates"].value, below["kl_stopped_updates"].value) == (1, 1)
    assert not all(map(torch.equal, after_one, after_two))
    above, after = run("--algo.target_kl", str(1.4 * kl))
    assert above["updates"].value == 2 and all(map(torch.equal, after, after_two))


CUSTOM = """
def load_tasks(split): return [{{'prompt': str(n)}} for n in range(4)]
def reward_fn(completion): return float(len(completion))
def advantage_fn(rewards): return {0}
"""


def run_custom(returned: str, tiny_model, folder, *flags) -> int:
    (folder / "env.py").write_text(CUSTOM.format(returned))
    flags = [
        "--max_tokens",
        "6",
        "--tasks_per_step",
        "4",
        "--num_steps",
        "1",
        "--group_size",
        "4",
        *flags,
    ]
    return main(
        [
            "--model",
            str(tiny_model),
            "--env_path",
            str(folder / "env.py"),
            *flags,
            "--out",
            str(folder / "o"),
        ]
    )


def test_an_environments_own_advantages_are_used(tiny_model, tmp_path, capsys):
    assert run_custom("[0.0 for r in rewards]", tiny_model, tmp_path) == 0
    assert "none of 1 steps made an update" in capsys.readouterr().err
    assert metrics(tmp_path / "o")[0]["learn/policy/skipped_updates"] == 1


def test_a_preset_part_given_by_flag_overrides_the_environments_advantages(tiny_model, tmp_path):
    assert run_custom("1 / 0", tiny_model, tmp_path, "--algo.advantage", "group_mean") == 0


@pytest.mark.parametrize(
    "returned, message",
    [
        ("1 / 0", "ZeroDivisionError"),
        ("rewards[1:]", "gave 3 values"),
        ("[float('nan')] * 4", "finite"),
    ],
)
def test_wrong_advantages_of_an_environment_stop_the_run_with_its_name(
    returned, message, tiny_model, tmp_path, capsys
):
    assert run_custom(returned, tiny_model, tmp_path) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (
        len(error) == 1
        and message in error[0]
        and "env.py" in error[0]
        and "advantage_fn" in error[0]
    )


SOME_SIGNAL = """
def load_tasks(split): return [{'prompt': str(n), 'n': n} for n in range(40)]
def reward_fn(completion, n): return float(len(completion)) + hash(completion) % 97 if n % 3 == 0 else 1.0
"""


def test_groups_without_signal_are_refilled(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(
        SOME_SIGNAL.replace("hash(completion)", "sum(map(ord, completion))")
    )
    flags = [
        "--model",
        str(tiny_model),
        "--env_path",
        str(tmp_path / "env.py"),
        "--max_tokens",
        "12",
    ]
    flags += [
        "--tasks_per_step",
        "3",
        "--group_size",
        "4",
        "--data.shuffle",
        "false",
        "--optim.lr",
        "1e-3",
    ]
    flags += ["--algo.dynamic_sampling_rounds", "9"]
    flags += ["--sampling.stop", '["a","b","c","d","e","f","g"]']  # replies of many lengths
    out = tmp_path / "whole"
    assert main([*flags, "--num_steps", "1", "--out", str(out)]) == 0

    # Tasks 0, 3 and 6 have a signal: the first three, then replacements for two, until there are
    # three.
    rows = trajectories(out / "rollouts/step_000001.jsonl.zst")
    drawn = [t["task_id"] for t in rows if t["index"] == 0]
    assert sorted(drawn, key=lambda name: int(name.split("/")[1])) == [
        f"train/{n}" for n in range(len(drawn))
    ]
    assert sum(int(name.split("/")[1]) % 3 == 0 for name in drawn) == 3
    state = json.loads((out / "checkpoints/step_000001/state.json").read_text())
    assert state["position"] == len(drawn) > 3
    row = metrics(out)[0]
    assert row["rollout/dynamic_sampling_rounds"] > 0 and row["rollout/groups_missing"] == 0

    # The loss is the mean over the tokens of groups with a signal alone.
    groups: dict[str, list[tuple[float, int]]] = {}
    for t in rows:
        num_tokens = sum(len(turn["completion"]["token_ids"]) for turn in t["turns"])
        groups.setdefault(t["group_id"], []).append((t["reward"], num_tokens))
    groups = {name: g for name, g in groups.items() if len({reward for reward, _ in g}) > 1}
    advantages = [
        a
        for g in groups.values()
        for a in group_advantages([reward for reward, _ in g], "group_norm")
    ]
    lengths = [n for g in groups.values() for _, n in g]
    loss = -sum(a * n for a, n in zip(advantages, lengths, strict=True)) / sum(lengths)
    assert row["learn/policy/loss"] == pytest.approx(loss, rel=1e-4) and abs(loss) > 1e-3


def test_refilling_ends_at_its_cap(tiny_model, tmp_path):
    (tmp_path / "env.py").write_text(SOME_SIGNAL.replace("n % 3 == 0", "n == 1"))
    flags = [
        "--model",
        str(tiny_model),
        "--env_path",
        str(tmp_path / "env.py"),
        "--max_tokens",
        "8",
    ]
    flags += [
        "--tasks_per_step",
        "3",
        "--group_size",
        "4",
        "--data.shuffle",
        "false",
        "--num_steps",
        "1",
    ]
    assert (
        main([*flags, "--algo.dynamic_sampling_rounds", "2", "--out", str(tmp_path / "run")]) == 0
    )
    row = metrics(tmp_path / "run")[0]
    assert row["rollout/dynamic_sampling_rounds"] == 2 and row["rollout/groups_missing"] == 2
    assert len(trajectories(tmp_path / "run/rollouts/step_000001.jsonl.zst")) == 4 * (3 + 2 + 2)


def test_the_reference_is_the_model_at_the_start(places, tmp_path):
    letters = "--env_path {dir}/letters.py --max_tokens 8 --tasks_per_step 4".format(**places)
    flags = words("--model", places["model"], letters, "--optim.lr 1e-3 --num_steps 3")
    kls = {}
    for coef in ("0.001", "10"):
        out = tmp_path / coef
        assert main([*flags, "--algo.kl_coef", coef, "--out", str(out)]) == 0
        kls[coef] = [row["learn/policy/ref_kl_nats"] for row in metrics(out)]
        assert abs(kls[coef][0]) < 1e-7 < kls[coef][1]
    assert kls["10"][2] < kls["0.001"][2]


def episode_of(rewards: list[float]) -> Trajectory:
    turn = Turn(
        new_ids=[1],
        is_fresh=True,
        completion=Completion(
            token_ids=[2, 3], logprobs=[-1.0, -1.0], text="", finish_reason="stop", policy_version=0
        ),
    )
    return Trajectory(
        task_id="t",
        env="e",
        group_id="g",
        turns=[turn] * len(rewards),
        reward=sum(rewards),
        turn_rewards=rewards,
    )


def test_turns_have_the_discounted_return_from_each_on_over_all_turns_of_the_group():
    group, discount = [episode_of([1.0, 0.0, 2.0]), episode_of([0.0, 3.0])], 0.5
    expected = [[1 + 0.5 * 0 + 0.25 * 2, 0 + 0.5 * 2, 2.0], [0 + 0.5 * 3, 3.0]]
    assert [turn_returns(t, 0.0, discount) for t in group] == expected
    flat = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    centred = iter((flat - flat.mean()).tolist())
    row = dataclasses.replace(PRESETS["dr_grpo"], turn_discount=discount)
    got = turn_advantages(group, [0.0, 0.0], row, None)
    for advantages, returns in zip(got, expected, strict=True):
        assert advantages == pytest.approx([next(centred) for _ in returns])
    of_episodes = turn_advantages(group, [0.0, 0.0], PRESETS["dr_grpo"], None)
    assert of_episodes == [[0.0] * 3, [0.0] * 2]  # Both episodes earned 3.


def test_a_group_has_signal_where_turns_differ_if_turns_have_advantages_of_their_own():
    episodes, turns = PRESETS["dapo"], dataclasses.replace(PRESETS["dapo"], turn_discount=0.9)
    groups = {
        "equal": [episode_of([1.0, 0.0]), episode_of([1.0, 0.0])],
        "only in turns": [episode_of([1.0, 0.0]), episode_of([0.0, 1.0])],
        "in all": [episode_of([1.0, 0.0]), episode_of([0.0, 0.0])],
    }
    signals = {
        name: (has_signal(group, episodes), has_signal(group, turns))
        for name, group in groups.items()
    }
    assert signals == {
        "equal": (False, False),
        "only in turns": (False, True),
        "in all": (True, True),
    }
    late, soon = groups["only in turns"]
    late.turn_rewards = soon.turn_rewards = []
    assert not has_signal([late, soon], turns)
