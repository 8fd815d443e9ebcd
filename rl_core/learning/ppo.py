"""PPO's critic: its loss, advantages and metrics. A value predicts the remaining reward.

The critic is a classifier with one label, separate weights and a separate optimizer: a Learner with
the value loss.

Legend: M trained tokens.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_core.algorithms import Algorithm, kl_estimate
from rl_core.config import Config, CriticConfig
from rl_core.distributed import in_fp64
from rl_core.learning.kl import sums_to_go
from rl_core.learning.learner import Learner, mean_of
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.learning.minibatches import Minibatch
from rl_core.learning.whitening import deviation
from rl_core.metrics import Mean, Metric, add_metrics, reduce_metrics
from rl_core.types import PackedBatch

# Algorithm of the learner that trains the critic.
CRITIC = Algorithm(objective="value")


class Critic(LearnerExtension):
    def __init__(self, config: CriticConfig, algorithm: Algorithm, learner: Learner):
        """`learner`: learner of the critic. `algorithm`: algorithm of the actor."""
        self.learner, self.learners = learner, (learner,)
        self.config, self.algorithm = config, algorithm

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        """Turns the rewards of the batches into advantages by GAE."""
        sums: dict[str, Metric] = {}
        if not batches:  # Then no rank has any.
            return {}
        for batch in batches:
            rewards = token_rewards(self.algorithm, batch)
            batch.values = self.learner.forward(batch)[0]
            gamma, sequences = self.config.gamma, batch.sequences
            batch.advantages = gae_advantages(
                rewards, batch.values, sequences, gamma, self.config.gae_lambda
            )
            batch.returns = batch.advantages + batch.values
            add_metrics(sums, value_sums(batch.values, sums_to_go(rewards, sequences, gamma)))
        return value_metrics(reduce_metrics(sums, self.learner.ranks))

    def before_update(
        self, learner: Learner, minibatch: Minibatch, step: float
    ) -> dict[str, Metric]:
        of_tokens = dataclasses.replace(minibatch, denominator=minibatch.num_tokens)
        metrics: dict[str, Metric] = {}
        for _ in range(self.config.updates):
            of_update, _ = self.learner.update(of_tokens, step)
            add_metrics(metrics, of_update, prefix="critic_")
        return metrics


def make_critic(actor: LearnerContext, extensions: list[LearnerExtension]) -> Critic:
    """A critic that is sharded like the policy and trained by --optim with --critic.lr:
    --critic.model, or the actor's model with a new head that gives 0 everywhere. `extensions`:
    extensions of the critic's learner."""
    config = actor.config
    critic_config = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=config.critic.lr),
        critic=dataclasses.replace(config.critic, warmup_steps=0),
    )
    path = config.critic.model or actor.model_path
    context = dataclasses.replace(
        actor,
        config=critic_config,
        algorithm=CRITIC,
        name=f"{actor.name}_critic",
        policy=actor.load(path, learner=config.learner, is_scoring=True),
        adapter="",
    )
    learner = Learner(context, extensions, losses_of_values)
    return Critic(config.critic, actor.algorithm, learner)


def is_last(sequences: Tensor) -> Tensor:
    """[M] bool, True at the last trained token of each sequence."""
    return pad(sequences[1:], (0, 1), value=-1) != sequences


def token_rewards(a: Algorithm, batch: PackedBatch) -> Tensor:
    """[M] reward of each trained token: the sample's reward, from batch.advantages, at the last
    token, minus the coefficient times each token's KL if the KL is in the reward (Ziegler et al.
    2019, arXiv:1909.08593)."""
    rewards = torch.where(is_last(batch.sequences), batch.advantages, 0.0)
    if "reward" in a.kl_terms:
        kind, coef = a.kl_terms["reward"]
        assert batch.ref_logprobs is not None
        rewards = rewards - coef * kl_estimate(kind, batch.rollout_logprobs, batch.ref_logprobs)
    return rewards


def gae_advantages(
    rewards: Tensor, values: Tensor, sequences: Tensor, gamma: float, lam: float
) -> Tensor:
    """[M] sum over l of (gamma lam)^l d(t+l), with d(t) = r(t) + gamma V(t+1) - V(t) and V = 0
    after a sequence's last token (Schulman et al. 2016, arXiv:1506.02438, eq. 16). Only trained
    tokens are steps: the last token of a turn is followed by the first of the next turn, without
    the environment's tokens between them. values[t] is V of the state in which token t was
    chosen."""
    following = torch.where(is_last(sequences), 0.0, pad(values[1:], (0, 1)))
    return sums_to_go(rewards + gamma * following - values, sequences, gamma * lam)


def losses_of_values(
    config: Config, batch: PackedBatch, values: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    assert batch.values is not None and batch.returns is not None
    losses, is_clipped = value_losses(values, batch.values, batch.returns, config.critic.value_clip)
    return losses, {"clip_frac": mean_of(is_clipped)}


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool, True where clipping decides): max((V - R)^2, (V' - R)^2) / 2 with V' =
    V clipped to old - clip .. old + clip; clip 0 disables it. From OpenAI's PPO2 code; the paper
    does not have it."""
    losses = (values - returns).square() / 2
    if not clip:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    return torch.maximum(losses, bounded), bounded > losses


def value_sums(values: Tensor, rewards_to_go: Tensor) -> dict[str, Metric]:
    """Sums for value_metrics(), which add up over batches and ranks."""
    goal, error = in_fp64(rewards_to_go), in_fp64(rewards_to_go - values)
    numbers = {"goal": goal, "goal_square": goal.square()}
    numbers |= {"error": error, "error_square": error.square()}
    return {name: mean_of(value) for name, value in numbers.items()}


def value_metrics(means: dict[str, float]) -> dict[str, Metric]:
    """Mean value, and the explained variance 1 - Var(G - V) / Var(G): 0 for a constant V, 1 for a
    perfect V. G is the discounted sum of rewards from the token on; lambda-returns would contain V.
    The explained variance is missing if G is constant."""
    goal, error = means["goal"], means["error"]
    metrics: dict[str, Metric] = {"critic_value_mean": Mean(goal - error)}
    if of_goal := deviation(goal, means["goal_square"]):
        of_error = deviation(error, means["error_square"])
        metrics["critic_explained_variance"] = Mean(1 - (of_error / of_goal) ** 2)
    return metrics
