"""Losses of preference pairs and of labelled replies. `replies` [M] is each token's reply: 2p for
the chosen reply of pair p, 2p + 1 for the rejected one, and p for the one of a row. A loss comes
with rewards [P, 2], the implicit rewards of both replies, or [P].

Legend: M trained tokens, P pairs, or rows of one reply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_core.config import Config, PreferenceConfig
from rl_core.metrics import Mean, Metric
from rl_core.types import PackedBatch

# Defaults of --preference.beta.
BETA, SIMPO_BETA = 0.1, 2.0
MAX_MEAN = -1e-6  # Mean logprob of a reply above which the odds have no gradient.


def losses_of_replies(
    losses_of: Callable[..., tuple[Tensor, Tensor]],
    config: Config,
    batch: PackedBatch,
    logprobs: Tensor,
) -> tuple[Tensor, dict[str, Metric]]:
    """Losses of a batch's pairs, [P], from the logprobs [M] of its tokens. Its samples alternate:
    chosen, rejected. `losses_of` gets log-ratios [M], or logprobs if there is no reference."""
    pairs = batch.sequences, len(batch.paths) // 2
    values = logprobs if batch.ref_logprobs is None else logprobs - batch.ref_logprobs
    losses, rewards = losses_of(values, *pairs, config.preference)
    return losses, pair_metrics(rewards)


def losses_of_labels(
    config: Config, batch: PackedBatch, logprobs: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """KTO losses of a batch's rows, [P]. The advantages of a reply are 1 or -1; the KL is in
    values."""
    assert batch.ref_logprobs is not None and batch.values is not None
    rows = batch.sequences, len(batch.paths)
    signs = sums(batch.advantages, *rows).sign()
    losses, rewards = kto_losses(
        logprobs - batch.ref_logprobs, signs, batch.values[:1], *rows, config.preference
    )
    metrics: dict[str, Metric] = {}
    for name, is_label in {"chosen": signs > 0, "rejected": signs < 0}.items():
        total = torch.where(is_label, rewards.detach(), 0.0).sum()
        metrics[f"{name}_reward_mean"] = Mean(total, is_label.sum())
    return losses, metrics


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


def sums(values: Tensor, replies: Tensor, num_replies: int) -> Tensor:
    """[num_replies] sums over the tokens of each reply."""
    return values.new_zeros(num_replies).index_add(0, replies, values)


def reply_sums(values: Tensor, replies: Tensor, num_pairs: int) -> Tensor:
    """[P, 2] sums over the tokens of both replies."""
    return sums(values, replies, 2 * num_pairs).view(-1, 2)


def reply_means(values: Tensor, replies: Tensor, num_pairs: int) -> Tensor:
    """[P, 2] means over the tokens of both replies."""
    counts = reply_sums(torch.ones_like(values), replies, num_pairs)
    return reply_sums(values, replies, num_pairs) / counts


def sigmoid_losses(margins: Tensor, e: float) -> Tensor:
    """-(1 - e) log sigma(margin) - e log sigma(-margin), with label smoothing e (Mitchell 2023, "A
    note on DPO with noisy preferences")."""
    return -(1 - e) * logsigmoid(margins) - e * logsigmoid(-margins)


def dpo_losses(
    logratios: Tensor, replies: Tensor, num_pairs: int, config: PreferenceConfig
) -> tuple[Tensor, Tensor]:
    """With l the sum of logprobs - ref_logprobs over a reply (the mean in losses with _norm) and h
    = l(chosen) - l(rejected): sigmoid -log sigma(beta h) (Rafailov et al. 2023, arXiv:2305.18290,
    eq. 7); ipo (h - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, eq. 17); hinge max(0, 1 -
    beta h) (Zhao et al. 2023, arXiv:2305.10425). A reply's reward is beta l."""
    beta = config.beta or BETA
    reduce = reply_means if config.loss.endswith("_norm") else reply_sums
    rewards = beta * reduce(logratios, replies, num_pairs)
    margin = rewards[:, 0] - rewards[:, 1]
    if config.loss.startswith("ipo"):
        return (margin / beta - 1 / (2 * beta)) ** 2, rewards
    if config.loss == "hinge":
        return torch.relu(1 - margin), rewards
    return sigmoid_losses(margin, config.label_smoothing), rewards


def simpo_losses(
    logprobs: Tensor, replies: Tensor, num_pairs: int, config: PreferenceConfig
) -> tuple[Tensor, Tensor]:
    """-log sigma(r(chosen) - r(rejected) - gamma); a reply's reward r is beta times its mean
    logprob (Meng et al. 2024, arXiv:2405.14734, eq. 6)."""
    rewards = (config.beta or SIMPO_BETA) * reply_means(logprobs, replies, num_pairs)
    margins = rewards[:, 0] - rewards[:, 1] - config.simpo_gamma
    return sigmoid_losses(margins, config.label_smoothing), rewards


def orpo_losses(
    logprobs: Tensor, replies: Tensor, num_pairs: int, config: PreferenceConfig
) -> tuple[Tensor, Tensor]:
    """-p(chosen) - beta log sigma(o(chosen) - o(rejected)), with the mean logprob p of a reply and
    its log-odds o = p - log(1 - exp(p)) (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7). A
    reply's reward is beta p."""
    beta, means = config.beta or BETA, reply_means(logprobs, replies, num_pairs)
    odds = means - torch.log(-torch.expm1(means.clamp(max=MAX_MEAN)))
    losses = -means[:, 0] - beta * logsigmoid(odds[:, 0] - odds[:, 1])
    return losses, beta * means


def kto_losses(
    logratios: Tensor,
    signs: Tensor,
    kl: Tensor,
    replies: Tensor,
    num_rows: int,
    config: PreferenceConfig,
) -> tuple[Tensor, Tensor]:
    """w (1 - sigma(sign beta (l - z0))), with l as in DPO, sign 1 and the desirable weight w for a
    good reply, -1 and the undesirable one for a bad reply (Ethayarajh et al. 2024,
    arXiv:2402.01306, eq. 7). A reply's reward is beta l. `signs`: [P]; `kl`: z0."""
    beta = config.beta or BETA
    rewards = beta * sums(logratios, replies, num_rows)
    weights = torch.where(signs > 0, config.desirable_weight, config.undesirable_weight)
    return weights * torch.sigmoid(signs * (beta * kl - rewards)), rewards


def rm_losses(
    scores: Tensor, margins: Tensor, replies: Tensor, num_pairs: int
) -> tuple[Tensor, Tensor]:
    """-log sigma(s(chosen) - s(rejected) - margin), all [M], with the score s at a reply's last
    token and the margin at its chosen reply (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the
    margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2)."""
    indices = torch.arange(len(replies), device=replies.device)
    last = indices.new_zeros(2 * num_pairs).scatter_reduce(0, replies, indices, "amax")
    rewards, margin = scores[last].view(-1, 2), margins[last].view(-1, 2)[:, 0]
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - margin), rewards


# Preset -> loss.
LOSSES = {
    "dpo": partial(losses_of_replies, dpo_losses),
    "simpo": partial(losses_of_replies, simpo_losses),
    "orpo": partial(losses_of_replies, orpo_losses),
    "kto": losses_of_labels,
    "rm": losses_of_scores,
}
