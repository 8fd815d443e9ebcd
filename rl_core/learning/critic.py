"""What a critic learns, and how well it does. M trained tokens; a value is the reward that is still to come.

The critic is a classifier of one label with weights and an optimizer of its own: a Learner whose objective is "value".
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_core.learning.algorithms import mean_and_deviation
from rl_core.metrics import Mean, Metric


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool whether the bound decides): max((V - R)^2, (V' - R)^2) / 2 with V' = V clipped to
    old - clip .. old + clip; clip 0 is no bound. As in OpenAI's PPO2, whose paper does not have it."""
    losses = (values - returns).square() / 2
    if not clip:
        return losses, torch.zeros_like(losses, dtype=torch.bool)
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    return torch.maximum(losses, bounded), bounded > losses


def value_sums(values: Tensor, rewards_to_go: Tensor) -> list[float]:
    """Sums over tokens that add up over batches and ranks, from which value_metrics() are made."""
    goal, error = rewards_to_go.double(), (rewards_to_go - values).double()
    columns = (torch.ones_like(goal), goal, goal.square(), error, error.square())
    return [column.sum().item() for column in columns]


def value_metrics(sums: list[float]) -> dict[str, Metric]:
    """Mean value, and the explained variance 1 - Var(G - V) / Var(G), which is 0 for a critic that says the same of every
    token and 1 for one that knows. G is the discounted sum of rewards from the token on: lambda-returns have the
    critic's own values in them, and would praise it for these. No number where G is the same everywhere."""
    count, goal, goal_squares, error, error_squares = sums
    found: dict[str, Metric] = {"critic_value_mean": Mean(goal - error, count)}
    if count and (deviation := mean_and_deviation(goal, goal_squares, count)[1]):
        of_error = mean_and_deviation(error, error_squares, count)[1]
        found["critic_explained_variance"] = Mean(1 - (of_error / deviation) ** 2)
    return found
