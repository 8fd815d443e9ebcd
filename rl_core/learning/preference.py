"""Losses of preference pairs. `replies` [M] is each token's reply: 2p for the chosen reply of pair
p, 2p + 1 for the rejected one. A loss comes with rewards [P, 2], the implicit rewards of both
replies.

Legend: M trained tokens, P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_core.config import Config, PreferenceConfig
from rl_core.metrics import Mean, Metric
from rl_core.types import PackedBatch


def losses_of_replies(
    config: Config, batch: PackedBatch, logprobs: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """DPO losses of a batch's pairs, [P], from the logprobs [M] of its tokens. Its samples
    alternate: chosen, rejected."""
    pairs = batch.sequences, len(batch.paths) // 2
    assert batch.ref_logprobs is not None
    losses, rewards = dpo_losses(logprobs, batch.ref_logprobs, *pairs, config.preference)
    return losses, pair_metrics(rewards)


def losses_of_scores(
    config: Config, batch: PackedBatch, scores: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """Reward model losses of a batch's pairs, [P], from the scores [M] of its tokens. The advantage
    of a chosen sample is the margin."""
    pairs = batch.sequences, len(batch.paths) // 2
    losses, rewards = rm_losses(scores, batch.advantages, *pairs)
    return losses, pair_metrics(rewards)


def pair_metrics(rewards: Tensor) -> dict[str, Metric]:
    """Accuracy, margin and rewards. A pair with equal rewards counts as half right."""
    chosen, rejected = rewards.detach().T
    values = {
        "accuracy": ((chosen > rejected).float() + (chosen >= rejected)) / 2,
        "margin_mean": chosen - rejected,
    }
    values |= {"chosen_reward_mean": chosen, "rejected_reward_mean": rejected}
    return {name: Mean(value.sum(), len(value)) for name, value in values.items()}


def dpo_losses(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    replies: Tensor,
    num_pairs: int,
    config: PreferenceConfig,
) -> tuple[Tensor, Tensor]:
    """With the log-ratio l = sum of logprobs - ref_logprobs over a reply (its mean in losses with
    _norm) and h = l(chosen) - l(rejected): sigmoid -log sigma(beta h) (Rafailov et al. 2023,
    arXiv:2305.18290, eq. 7), which label smoothing e makes -(1 - e) log sigma(beta h) - e log
    sigma(-beta h) (Mitchell 2023, "A note on DPO with noisy preferences"); ipo (h - 1 / (2 beta))^2
    (Azar et al. 2023, arXiv:2310.12036, eq. 17); hinge max(0, 1 - beta h) (Zhao et al. 2023,
    arXiv:2305.10425). A reply's reward is beta l."""
    logratios = logprobs - ref_logprobs
    sums = logratios.new_zeros(2 * num_pairs).index_add(0, replies, logratios)
    if config.loss.endswith("_norm"):
        sums = sums / torch.zeros_like(sums).index_add(0, replies, torch.ones_like(logratios))
    rewards = config.beta * sums.view(-1, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    if config.loss.startswith("ipo"):
        return (margin / config.beta - 1 / (2 * config.beta)) ** 2, rewards
    if config.loss == "hinge":
        return torch.relu(1 - margin), rewards
    e = config.label_smoothing
    return -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin), rewards


def rm_losses(
    scores: Tensor, margins: Tensor, replies: Tensor, num_pairs: int
) -> tuple[Tensor, Tensor]:
    """-log sigma(s(chosen) - s(rejected) - margin), all [M], with the score s at a reply's last
    token and the margin at its chosen reply (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the
    margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2)."""
    places = torch.arange(len(replies), device=replies.device)
    last = places.new_zeros(2 * num_pairs).scatter_reduce(0, replies, places, "amax")
    rewards, margin = scores[last].view(-1, 2), margins[last].view(-1, 2)[:, 0]
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - margin), rewards


# Preset -> loss.
LOSSES = {"dpo": losses_of_replies, "rm": losses_of_scores}
