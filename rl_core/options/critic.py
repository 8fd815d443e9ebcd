"""PPO's critic: its loss, advantages and metrics. M trained tokens; a value is the reward still to come.

The critic is a classifier of one label with weights and an optimizer of its own: a Learner whose objective is "value".
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from rl_core.config import Config
from rl_core.learning.algorithms import (
    Algorithm,
    gae_advantages,
    mean_and_deviation,
    sums_to_go,
    token_rewards,
)
from rl_core.learning.learner import Learner
from rl_core.learning.minibatches import Minibatch
from rl_core.metrics import Mean, Metric
from rl_core.types import PackedBatch

CRITIC = Algorithm(is_rl=False, advantage="none", objective="value")  # of the learner that trains the critic


class Critic:
    def __init__(self, config: Config, policy, ranks, name: str = "policy"):
        """`policy`: a classifier. --optim with --critic.lr trains it."""
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=config.critic.lr))
        self.learner = Learner(config, CRITIC, policy, ranks, name=f"{name}_critic")
        self.config = config.critic

    def annotate(self, algorithm: Algorithm, batches: list[PackedBatch]) -> dict[str, Metric]:
        """Turns the batches' rewards into advantages by GAE."""
        sums = torch.zeros(5, dtype=torch.float64, device=self.learner.ranks.device)
        for batch in batches:
            rewards = token_rewards(algorithm, batch)
            batch.values = self.learner.forward(batch)[0]
            gamma, sequences = self.config.gamma, batch.sequences
            batch.advantages = gae_advantages(rewards, batch.values, sequences, gamma, self.config.gae_lambda)
            batch.returns = batch.advantages + batch.values
            sums += value_sums(batch.values, sums_to_go(rewards, sequences, gamma))
        return value_metrics(self.learner.global_sums(sums))

    def update(self, minibatch: Minibatch, step: float) -> dict[str, Metric]:
        of_tokens = dataclasses.replace(minibatch, denominator=minibatch.num_tokens)
        return {f"critic_{name}": metric for name, metric in self.learner.update(of_tokens, step)[0].items()}


def losses_of_values(config: Config, batch: PackedBatch, values: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    losses, is_clipped = value_losses(values, batch.values, batch.returns, config.critic.value_clip)
    return losses, {"clip_frac": Mean(is_clipped.sum(), losses.numel())}


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool whether the bound decides): max((V - R)^2, (V' - R)^2) / 2 with V' = V clipped to
    old - clip .. old + clip; clip 0 is no bound. As in OpenAI's PPO2, whose paper does not have it."""
    losses = (values - returns).square() / 2
    if not clip:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    return torch.maximum(losses, bounded), bounded > losses


def value_sums(values: Tensor, rewards_to_go: Tensor) -> Tensor:
    """[5] sums over tokens for value_metrics(); they add up over batches and ranks."""
    goal, error = rewards_to_go.double(), (rewards_to_go - values).double()
    return torch.stack([x.sum() for x in (torch.ones_like(goal), goal, goal.square(), error, error.square())])


def value_metrics(sums: list[float]) -> dict[str, Metric]:
    """Mean value, and the explained variance 1 - Var(G - V) / Var(G): 0 for a constant V, 1 for a perfect one. G is the
    discounted sum of rewards from the token on; lambda-returns contain V itself. Missing if G is constant."""
    count, goal, goal_squares, error, error_squares = sums
    found: dict[str, Metric] = {"critic_value_mean": Mean(goal - error, count)}
    if count and (deviation := mean_and_deviation(goal, goal_squares, count)[1]):
        of_error = mean_and_deviation(error, error_squares, count)[1]
        found["critic_explained_variance"] = Mean(1 - (of_error / deviation) ** 2)
    return found
