"""Advantages and losses: one function per equation, one table of presets. M trained tokens, G episodes of a group."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_core.config import AlgoConfig


@dataclass(kw_only=True, slots=True)
class Algorithm:
    is_rl: bool = True  # samples episodes; otherwise imitates rows
    advantage: str = "group_norm"
    clip_low: float = 0.2
    clip_high: float = 0.2
    entropy_coef: float = 0.0

    @property
    def skips_zero_advantages(self) -> bool:
        """A sample whose advantages are all 0 has no gradient, and needs no forward."""
        return self.is_rl and self.entropy_coef == 0


PRESETS = {
    # Shao et al. 2024, arXiv:2402.03300; averaged over all tokens as in DAPO, and without a KL term
    "grpo": Algorithm(),
    "sft": Algorithm(is_rl=False, advantage="none"),
}


def make_algorithm(preset: str, parts: AlgoConfig) -> Algorithm:
    """The preset's row of the table with the parts that were set one by one."""
    return dataclasses.replace(PRESETS[preset], **{k: v for k, v in vars(parts).items() if v is not None})


def group_advantages(rewards: list[float], kind: str) -> list[float]:
    """[G] rewards -> [G] advantages. group_mean: R - mean(R). group_norm: that over the population's standard
    deviation. Both are exactly 0 in a group whose rewards are all equal. none: R itself."""
    values = torch.tensor(rewards, dtype=torch.float64)
    if kind == "none":
        return values.tolist()
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    centred = values - values.mean()
    return (centred if kind == "group_mean" else centred / values.std(correction=0)).tolist()


@dataclass(kw_only=True, slots=True)
class TokenLosses:
    """Per trained token; the learner sums, and divides by the global count."""

    losses: Tensor  # [M] nats times advantage, to be made small
    is_clipped: Tensor  # [M] bool


def sft_loss(logprobs: Tensor) -> TokenLosses:
    """Negative log likelihood per token in nats."""
    return TokenLosses(losses=-logprobs, is_clipped=torch.zeros_like(logprobs, dtype=torch.bool))


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> TokenLosses:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token with r = exp(logprobs - old_logprobs).
    PPO: Schulman et al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = clipped * advantages < ratio * advantages
    return TokenLosses(losses=-torch.minimum(ratio * advantages, clipped * advantages), is_clipped=is_clipped)


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token KL(policy || ref) in nats, >= 0: exp(-d) - 1 + d with d = logprobs - ref_logprobs, for tokens that the
    policy sampled (Schulman 2020, "Approximating KL Divergence")."""
    d = logprobs - ref_logprobs
    return torch.exp(-d) - 1 + d


def token_losses(
    algorithm: Algorithm, logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, entropy: Tensor
) -> TokenLosses:
    """What the preset minimises. Without old_logprobs the batch is on-policy: the ratio is 1, only its gradient counts."""
    if not algorithm.is_rl:
        return sft_loss(logprobs)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    result = clipped_loss(logprobs, old, advantages, algorithm.clip_low, algorithm.clip_high)
    if algorithm.entropy_coef:
        result.losses = result.losses - algorithm.entropy_coef * entropy
    return result
