"""PPO's critic: advantages and losses against the papers' formulas, and runs with a critic."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import numpy as np
import pytest
import torch
from kit import SORT, metrics, part_of, words
from oracle import gae
from safetensors.torch import load_file
from test_algorithms import episode
from test_learner import FLAGS, make_learner, ragged_samples

from rl_core import learners
from rl_core.algorithms import PRESETS
from rl_core.config import parse_config
from rl_core.data.packing import pack_samples
from rl_core.learning.advantages import samples_of
from rl_core.learning.learner import Learner
from rl_core.learning.ppo import gae_advantages, value_losses, value_metrics, value_sums
from rl_core.learning.whitening import normalised
from rl_core.metrics import add_metrics, reduce_metrics
from rl_core.models.policy import Policy
from rl_core.run.process.joining import init_ranks
from rl_core.tools.cli import main as command
from rl_core.train import main
from rl_core.types import Trajectory


def critic_of(learner: Learner) -> Policy:
    return part_of(learner, "Critic").learner.policy


def with_critic(learner: Learner) -> Learner:
    """The learner, whose critic's head is no more 0."""
    torch.manual_seed(0)
    torch.nn.init.normal_(critic_of(learner).hf.score.weight, std=0.1)
    return learner


def make_ppo(model, *flags) -> Learner:
    return with_critic(make_learner(model, *flags, algorithm="ppo"))


@pytest.mark.parametrize(
    "gamma, lam", [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0), (0.0, 0.5)]
)
def test_advantages_of_ragged_sequences_are_the_papers_recursion(gamma, lam):
    draw, lengths = random.Random(0), [1, 7, 1, 1, 130, 2, 33]
    rewards, values = ([[draw.gauss(0, 1) for _ in range(n)] for n in lengths] for _ in range(2))
    sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (rewards, values)]
    want = [a for r, v in zip(rewards, values, strict=True) for a in gae(r, v, gamma, lam)]
    torch.testing.assert_close(
        gae_advantages(*flat, sequences, gamma, lam), torch.tensor(want), atol=1e-5, rtol=1e-5
    )
    nothing = torch.zeros(0)
    assert (
        gae_advantages(nothing, nothing, torch.zeros(0, dtype=torch.int64), gamma, lam).numel() == 0
    )


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_value_loss_is_ppo2s(clip):
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 50).double()
    values.requires_grad_()
    losses, is_clipped = value_losses(values, old, returns, clip)
    losses.sum().backward()
    for i, (v, o, r) in enumerate(
        zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)
    ):
        bounded = min(max(v, o - clip), o + clip) if clip else v
        plain, other = 0.5 * (v - r) ** 2, 0.5 * (bounded - r) ** 2
        assert losses[i].item() == pytest.approx(max(plain, other))
        assert bool(is_clipped[i]) == (other > plain)
        assert values.grad[i].item() == pytest.approx(
            0.0 if other > plain and bounded != v else v - r
        )
    assert is_clipped.any() == bool(clip)


def test_explained_variance_is_one_less_the_share_of_what_is_left():
    torch.manual_seed(0)
    goal, values = torch.randn(200), torch.randn(200)
    halves = {}
    for half in (slice(0, 30), slice(30, None)):
        add_metrics(halves, value_sums(values[half], goal[half]))
    metrics_of = value_metrics(reduce_metrics(halves, init_ranks(60)))
    want = 1 - (goal - values).var() / goal.var()
    assert metrics_of["critic_explained_variance"].value == pytest.approx(want.item(), rel=1e-5)
    assert metrics_of["critic_value_mean"].value == pytest.approx(values.mean().item(), abs=1e-6)
    for same, expected in ((goal, 1.0), (torch.full((200,), 3.0), 0.0)):
        means = reduce_metrics(value_sums(same, goal), init_ranks(60))
        metrics_of = value_metrics(means)["critic_explained_variance"]
        assert metrics_of.value == pytest.approx(expected, abs=1e-5)
    for size in (200, 0):
        constant = value_sums(values[:size], torch.ones(size))
        means = reduce_metrics(constant, init_ranks(60))
        assert "critic_explained_variance" not in value_metrics(means)


@pytest.mark.parametrize("preset", ["ppo", "reinforce_pp"])
def test_a_step_without_samples_has_nothing_to_annotate(preset, tiny_model):
    learner = make_learner(tiny_model, algorithm=preset)
    minibatches, _ = learner.shard([])
    assert learner.annotate(minibatches) == {}
    assert learner.step(minibatches, 0).keys() == {"skipped_updates"}


def test_advantages_are_normalised_over_all_tokens_of_the_step(tiny_model):
    learner = make_ppo(tiny_model, "--learner.updates_per_epoch", "2")
    minibatches, _ = learner.shard(ragged_samples())
    learner.annotate(minibatches)
    every = torch.cat([b.advantages for m in minibatches for b in m.batches])
    assert every.mean().item() == pytest.approx(0, abs=1e-6)
    assert every.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(tiny_model):
    learner = make_ppo(
        tiny_model, "--critic.warmup_steps 2 --optim.lr 0.01 --optim.weight_decay 0.1"
    )
    actor, critic = learner.policy, critic_of(learner)
    start, values = (
        [p.clone() for p in actor.parameters()],
        [p.clone() for p in critic.parameters()],
    )
    for step in range(3):
        minibatches, _ = learner.shard(ragged_samples(seed=step))
        learner.annotate(minibatches)
        row = learner.step(minibatches, step)
        is_same = all(torch.equal(a, b) for a, b in zip(start, actor.parameters(), strict=True))
        assert is_same == (step < 2) == ("loss" not in row)
        assert not any(torch.equal(a, b) for a, b in zip(values, critic.parameters(), strict=True))
        values = [p.clone() for p in critic.parameters()]
    assert learner.optimizer.state[next(actor.parameters())]["step"] == 1


def test_a_critic_may_take_several_updates_for_one_of_the_policy(tiny_model):
    one, two = make_ppo(tiny_model), make_ppo(tiny_model, "--critic.updates", "2")
    batches = []
    for learner in (one, two):
        minibatches, _ = learner.shard(ragged_samples())
        learner.annotate(minibatches)
        batches.append(minibatches)
    part_of(one, "Critic").before_update(one, batches[0][0], 0.0)
    rows = [learner.step(b, 0) for learner, b in zip((one, two), batches, strict=True)]
    assert rows[1]["critic_updates"].value == 2 * rows[0]["critic_updates"].value
    for a, b in zip(critic_of(one).parameters(), critic_of(two).parameters(), strict=True):
        assert torch.equal(a, b)
    assert [learner.num_updates for learner in (one, two)] == [1, 1]


def test_a_critic_starts_from_a_reward_model_or_at_zero(tiny_model, tmp_path):
    learner, batch = make_ppo(tiny_model), pack_samples(ragged_samples())
    critic_of(learner).hf.save_pretrained(tmp_path)
    config = parse_config(
        ["--model", str(tiny_model), "--algorithm", "ppo", *FLAGS, "--critic.model", str(tmp_path)]
    )

    def new_critic(*args):
        fresh_learner = learners.make_learner(config, learner.algorithm, "policy", learner.ranks)
        return critic_of(fresh_learner)(*args)

    with torch.no_grad():
        want, _ = critic_of(learner)(batch, 1.0)
        got, _ = new_critic(batch, 1.0)
        config.critic.model = None
        fresh, _ = new_critic(batch, 1.0)
    assert torch.equal(got, want) and want.any() and not fresh.any()


def groups_of_two_envs() -> list[list[Trajectory]]:
    """One environment's rewards are a hundred times the other's; some groups have no signal, one
    environment has none."""
    draw = random.Random(0)
    groups = []
    for env, scale in (("small", 0.1), ("large", 10.0), ("flat", 0.0)):
        for g in range(4):
            rewards = [scale * (draw.random() if g else 0.7) for _ in range(3)]
            groups.append(
                [episode(r, draw.randint(1, 9), env=env, group=f"{env}{g}") for r in rewards]
            )
    return groups


@pytest.mark.parametrize("advantage", ["group_mean", "none"])
@pytest.mark.parametrize("kind", ["env", "task"])
def test_advantages_are_normalised_within_each_environment(kind, advantage):
    """By the deviation, or as AgentRL (arXiv:2510.04206), (A - mean) / deviation, over all tokens
    of an environment in the batch."""
    row = dataclasses.replace(PRESETS["grpo"], advantage=advantage)
    groups, ranks = groups_of_two_envs(), init_ranks(60)
    plain = samples_of(groups, row, 10)
    scaled = samples_of(groups, row, 10, normalised=partial(normalised, kind, ranks))
    envs = np.array([t.env for g in groups for t in g])
    for env in ("small", "large", "flat"):
        before, after = (
            np.concatenate([samples[n].advantages[samples[n].loss_mask.astype(bool)] for n in of])
            for samples in (plain, scaled)
            for of in [np.flatnonzero(envs == env)]
        )
        before = before.astype(np.float64)
        mean = before.mean() if kind == "task" else 0.0
        wanted = (before - mean) / (before.std() if env != "flat" else 1.0)
        assert after == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def branches(env: str, group: int, rewards: list[float], num: int) -> list[Trajectory]:
    """An episode of a turn of `num` tokens, and a branch of 3 tokens for each reward."""
    root = episode(0.0, num).turns[0]
    root.name = f"{env}{group}#0"
    episodes = []
    for number, reward in enumerate(rewards):
        t = episode(reward, 3, env=env, group=f"{env}{group}")
        [leaf] = t.turns
        leaf.name, leaf.is_fresh = f"{env}{group}#1.{number}", False
        t.turns = [root, leaf]
        episodes.append(t)
    return episodes


@pytest.mark.parametrize("order", [1, -1])
def test_shared_tokens_count_once_with_their_mean_advantage(order):
    """Advantages are rewards: 6 shared tokens of (1 + 0 + 5) / 3, then 3 of each branch."""
    groups = [branches("tree", 0, [1.0, 0.0, 5.0], 6)[::order]]
    row, ranks = dataclasses.replace(PRESETS["grpo"], advantage="none"), init_ranks(60)
    tokens = np.array([2.0] * 6 + [1.0] * 3 + [0.0] * 3 + [5.0] * 3)
    expected = {
        None: tokens,
        "env": tokens / tokens.std(),
        "task": (tokens - tokens.mean()) / tokens.std(),
    }
    for name, wanted in expected.items():
        scale = partial(normalised, name, ranks) if name else None
        samples = samples_of(groups, row, 10, normalised=scale)
        advantages = np.concatenate([s.advantages[s.loss_mask.astype(bool)] for s in samples])
        assert np.sort(advantages) == pytest.approx(np.sort(wanted))


def critic_weights(out, step: int) -> dict[str, torch.Tensor]:
    return load_file(
        out
        / f"checkpoints/step_{step:06d}/policy_critic/shard-00001-model-00001-of-00001.safetensors"
    )


def test_a_policy_with_adapters_has_a_whole_critic(places, tmp_path):
    sizes = "--algorithm ppo --tasks_per_step 4 --max_tokens 8 --num_steps 2 --env_path"
    flags = words("--model", places["model"], sizes, places["dir"] + "/letters.py")
    flags += ["--actors.policy.lora.rank", "4", "--optim.lr", "1e-3", "--critic.lr", "1e-3"]
    assert main([*flags, "--out", str(tmp_path / "run")]) == 0
    saved = critic_weights(tmp_path / "run", 2)
    assert not any("lora" in n for n in saved) and saved["param/hf.score.weight"].any()
    assert metrics(tmp_path / "run")[0]["learn/policy/critic_value_mean"] == 0


def test_the_plan_counts_the_critic(tiny_model, sort_data, capsys):
    flags = words("plan --model", tiny_model, SORT, "--data.train", sort_data / "train.jsonl")
    assert command([*flags, "--algorithm", "ppo"]) == 0
    assert "critic, its optimizer" in capsys.readouterr().out
    assert command([*flags, "--algorithm", "grpo"]) == 0
    assert "critic" not in capsys.readouterr().out


@pytest.mark.slow
def test_ppo_teaches_the_order_and_its_critic_learns_what_to_expect(warm_model, tmp_path):
    flags = words("--num_steps 60 --optim.lr 2e-4 --optim.warmup_steps 5 --rollout.save false")
    flags += ["--critic.lr", "3e-3", "--critic.warmup_steps", "10", "--critic.gae_lambda", "1"]
    flags += ["--learner.updates_per_epoch", "4", "--learner.epochs", "2", "--algorithm", "ppo"]
    assert main(["--model", str(warm_model), *SORT, *flags, "--out", str(tmp_path / "o")]) == 0
    rows = metrics(tmp_path / "o")
    rewards = [row["rollout/policy/reward_mean"] for row in rows]
    explained = [row["learn/policy/critic_explained_variance"] for row in rows]
    first, last = (sum(window) / 5 for window in (rewards[:5], rewards[-5:]))
    assert last > first + 0.3, (first, last)
    assert explained[0] == 0 and sum(explained[10:]) / 50 > 0.05, explained
