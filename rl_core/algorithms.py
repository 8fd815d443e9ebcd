"""Advantages and losses, one function per equation; tables of what flags choose from, and PRESETS.

Flags are read before torch is imported: functions call methods of the tensors that they get. M
trained tokens of a microbatch, G conversations of a group. A sequence is one TrainingSample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rl_core.flags import Count, Fraction, NotNegative, OneOf, Positive, flag

if TYPE_CHECKING:
    from numpy import ndarray as Array
    from torch import Tensor

    from rl_core.types import PackedBatch


# Objectives of replies that are compared with a reference model, and their presets.
WITH_REFERENCE = ("dpo", "kto")


@dataclass(kw_only=True, slots=True)
class Algorithm:
    """The parts of an algorithm, each a flag --algo.*. Defaults are those of GRPO. In a Config
    (AlgoConfig) None keeps the part of the preset.

    Example: `Algorithm(clip_high=0.28)` is GRPO with clip-higher.
    """

    advantage: OneOf[str, ADVANTAGES] = flag(
        "group_norm",
        "baseline over the group; gae: a critic's; custom: advantage_fn; zero: a teacher's",
    )
    baseline: Literal["group", "running"] = flag(
        "group", "running: mean reward of earlier episodes, of the task where it has some"
    )
    normalize: Literal["none", "batch", "env", "task"] = flag(
        "none", "whiten advantages over a batch or each task (environment); env: scale alone"
    )
    objective: OneOf[str, OBJECTIVES] = flag("clip", "importance ratio: clip (PPO), GSPO or CISPO")
    clip_low: Fraction = flag(0.2, "PPO clip range: lower bound 1 - clip_low")
    clip_high: NotNegative = flag(0.2, "PPO clip range: upper bound 1 + clip_high")
    dual_clip: NotNegative = flag(0.0, "dual clip of negative advantages; 0 is off")
    aggregation: Literal["token", "sequence", "constant"] = flag(
        "token", "loss: token mean, sequence mean, or constant length", only=("sft",)
    )
    kl: OneOf[str, KL_ESTIMATES] = flag("k3", "estimator of the KL to the reference model")
    kl_in: Literal["reward", "loss", "advantage"] = flag("loss", "where the KL penalty goes")
    kl_coef: NotNegative = flag(0.0, "weight of the KL penalty (beta); 0: no reference model")
    kl_reward: tuple[OneOf[str, KL_ESTIMATES], NotNegative] | None = flag(
        None, "a KL penalty in the reward: its estimator and coefficient, such as k1,0.05"
    )
    kl_loss: tuple[OneOf[str, KL_ESTIMATES], NotNegative] | None = flag(
        None, "KL penalty in the loss, next to one in the reward: k3,0.001"
    )
    log_kl: bool = flag(False, "log the KL to the reference model without a penalty")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus; 0 is off")
    importance_correction: Literal["none", "tis", "mask", "sequence_mask"] = flag(
        "none", "importance sampling correction of off-policy tokens: truncated, or masked (IcePop)"
    )
    correction_range: tuple[NotNegative, NotNegative] = flag(
        (0.5, 2.0), "its bounds, such as 0.5,2"
    )
    truncation_penalty: Literal["none", "mask", "soft"] = flag(
        "none", "truncated: mask, or DAPO's penalty"
    )
    overlong_buffer: Count = flag(0, "last tokens with soft penalty; 0: a fifth")
    dynamic_sampling_rounds: Count = flag(0, "dynamic sampling: refill zero-signal groups")
    turn_discount: Fraction | None = flag(None, "advantage per turn, with this discount")
    gigpo_coef: NotNegative = flag(1.0, "GiGPO: weight of equal states' turns; default: 1")
    gigpo_discount: Fraction = flag(0.95, "GiGPO: discount of their returns; default: 0.95")
    reference: str | None = flag(
        None, "reference model of the KL, DPO and KTO: folder or hub name", only=WITH_REFERENCE
    )
    reference_every: Count = flag(
        0, "sync the reference model with the policy every N steps; 0: never", only=WITH_REFERENCE
    )
    reference_decay: Fraction = flag(
        0.0,
        "EMA of the reference: decay * reference + (1 - decay) * policy at each sync",
        only=WITH_REFERENCE,
    )
    teacher: str | None = flag(
        None, "on-policy distillation: teacher's folder, hub name, actor, server's URL, or self"
    )
    teacher_update: Literal["start", "latest", "ema"] = flag(
        "start", "self-distillation: the teacher's weights; default: those of the start"
    )
    teacher_decay: Fraction = flag(0.99, "EMA decay of the teacher self; default: 0.99")
    teacher_coef: Positive = flag(1.0, "weight of the KL to the teacher; default: 1")
    teacher_loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = flag(
        "sampled",
        "sampled: each token's logprob as advantage; exact KL or jsd (GKD) over the vocabulary",
    )
    teacher_top_k: Count = flag(
        0, "exact forms by a server: its likeliest tokens (top logprobs), all others as one"
    )
    teacher_beta: Fraction = flag(0.5, "jsd: beta, between forward and reverse KL")
    target_kl: NotNegative = flag(0.0, "early stop of a step above this KL; 0 is off")

    @property
    def is_rl(self) -> bool:
        """True if episodes are sampled; otherwise the data are rows, or pairs of replies."""
        return self.objective in OBJECTIVES

    @property
    def is_pairs(self) -> bool:
        """True for a loss of two samples a row, not of tokens: both replies of a pair, or KTO's
        reply and the mismatched one."""
        return self.objective in OF_PAIRS or self.objective == "kto"

    @property
    def reads_pairs(self) -> bool:
        """True if a row of data is a pair of replies."""
        return self.objective in OF_PAIRS

    @property
    def is_scoring(self) -> bool:
        """True if the model is a classifier of one label."""
        return self.objective == "rm"

    @property
    def has_critic(self) -> bool:
        """True if a value model is trained with the policy."""
        return self.advantage == "gae"

    @property
    def kl_terms(self) -> dict[str, tuple[str, float]]:
        """Target (reward, loss, advantage) -> (estimator, coefficient) of each KL penalty."""
        terms = {"reward": self.kl_reward, "loss": self.kl_loss}
        if self.kl_coef:
            terms[self.kl_in] = self.kl, self.kl_coef
        return {target: term for target, term in terms.items() if term and term[1]}

    @property
    def needs_reference(self) -> bool:
        """True if the policy is compared with a reference model."""
        return bool(self.kl_terms) or self.log_kl or self.objective in WITH_REFERENCE

    @property
    def penalises_advantages(self) -> bool:
        """True if the KL to the reference is subtracted from advantages. With a critic the KL is in
        the rewards."""
        terms = self.kl_terms
        return "advantage" in terms or ("reward" in terms and not self.has_critic)

    @property
    def skips_zero_advantages(self) -> bool:
        """True if a sample whose advantages are all 0 has no gradient and needs no forward."""
        is_final = self.normalize != "batch" and not self.has_critic and not self.teacher
        return self.is_rl and self.entropy_coef == 0 and not self.kl_terms and is_final


@dataclass(slots=True, frozen=True)
class Advantage:
    """A choice of --algo.advantage."""

    # (rewards, weights, episodes), all [G] -> advantages [G]. The conversations of one episode have
    # its number, from 0, and weigh 1 together. None: the environment's advantage_fn.
    of: Callable[[Array, Array, Array], Array] | None
    # It compares episodes: a group of one is refused, and equal rewards give exactly 0.
    needs_group: bool


def own_reward(rewards: Array, weights: Array, episodes: Array) -> Array:
    """[G] R"""
    return rewards


def no_reward(rewards: Array, weights: Array, episodes: Array) -> Array:
    """[G] zeros, for training only by a teacher."""
    return 0.0 * rewards


def group_mean(rewards: Array, weights: Array, episodes: Array) -> Array:
    """[G] R - mean(R)"""
    return rewards - (weights * rewards).sum() / weights.sum()


def group_norm(rewards: Array, weights: Array, episodes: Array, degrees_lost: int = 0) -> Array:
    """[G] (R - mean(R)) / standard deviation of the population."""
    centred = group_mean(rewards, weights, episodes)
    variance = weights @ centred**2 / (weights.sum() - degrees_lost)
    return centred / variance**0.5


def group_norm_unbiased(rewards: Array, weights: Array, episodes: Array) -> Array:
    """[G] (R - mean(R)) / standard deviation of the sample."""
    return group_norm(rewards, weights, episodes, degrees_lost=1)


def rloo(rewards: Array, weights: Array, episodes: Array) -> Array:
    """[G] R - mean of the other episodes' R (Kool et al. 2019; arXiv:2402.14740)."""
    is_other = episodes[:, None] != episodes  # [G, G]
    return rewards - is_other @ (weights * rewards) / (is_other @ weights)


ADVANTAGES = {
    "group_mean": Advantage(group_mean, needs_group=True),
    "group_norm": Advantage(group_norm, needs_group=True),
    "group_norm_unbiased": Advantage(group_norm_unbiased, needs_group=True),
    "rloo": Advantage(rloo, needs_group=True),
    # The learner subtracts the critic's estimate.
    "gae": Advantage(own_reward, needs_group=False),
    "none": Advantage(own_reward, needs_group=False),
    "zero": Advantage(no_reward, needs_group=False),
    "custom": Advantage(None, needs_group=False),
}


def clipped_loss(
    a: Algorithm, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool whether a bound decides): -min(r A, clip(r, 1 - clip_low, 1 +
    clip_high) A) per token with r = exp(log_ratio); at most -dual_clip A if A < 0. PPO: Schulman et
    al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10;
    dual clip: Ye et al. 2020, arXiv:1912.09729."""
    ratio = log_ratio.exp()
    free = ratio * advantages
    bounded = ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantages
    is_clipped = bounded < free
    losses = -free.minimum(bounded)
    if a.dual_clip:
        limit = -a.dual_clip * advantages
        is_above = (advantages < 0) & (losses > limit)
        is_clipped |= is_above
        losses = limit.where(is_above, losses)
    return losses, is_clipped


def cispo_loss(
    a: Algorithm, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool whether a bound decides): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A
    logprob per token, so that every token keeps its gradient (CISPO, MiniMax 2025,
    arXiv:2506.13585, eq. 4)."""
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - a.clip_low, 1 + a.clip_high)
    return -bounded * advantages * logprobs, bounded != ratio


def dro_loss(beta: float, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """[M] -(A logprob - beta/2 log_ratio^2) per token: a quadratic penalty in place of bounds (DRO,
    Richemond et al. 2024, arXiv:2405.19107, with the advantage as reward less value)."""
    return beta / 2 * log_ratio.square() - advantages * logprobs


# (algorithm, logprobs, log_ratio, advantages), all [M] -> ([M] losses to minimise, [M] bool whether
# a bound decides), with the ratio of new to old probabilities.
OBJECTIVES = {"clip": clipped_loss, "gspo": clipped_loss, "cispo": cispo_loss}
# The ratio is the geometric mean over its sequence (GSPO, arXiv:2507.18071, eq. 7).
OF_SEQUENCE = ("gspo",)
# Objectives of pairs of replies, by learning/preference.py.
OF_PAIRS = ("dpo", "simpo", "orpo", "rm")


# Per-token KL(policy || ref) in nats of tokens that the policy sampled, with d = logprobs -
# ref_logprobs (Schulman 2020, "Approximating KL Divergence").
KL_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
}


def sequence_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """[M] for each token the sum of its sequence's values; the gradient goes through all of
    them."""
    # bincount would wait for the device to learn how many sequences there are.
    sums = values.new_zeros(len(batch.paths)).index_add(0, batch.sequences, values)
    return sums[batch.sequences]


def sequence_mean(values: Tensor, batch: PackedBatch, weights: Tensor | None = None) -> Tensor:
    """[M] for each token the mean of its sequence's values; 0 where all weights are 0."""
    if weights is None:
        return sequence_sums(values, batch) / sequence_sums(values.new_ones(len(values)), batch)
    totals = sequence_sums(weights, batch)
    return sequence_sums(weights * values, batch) / totals.where(totals != 0, 1)


def loss_denominator(kind: str, num_tokens: int, num_sequences: int, max_tokens: int) -> int:
    """Divisor of the loss of a minibatch over all ranks. token: the number of trained
    tokens (global mean). sequence: the number of samples (mean of means). constant: samples times
    their largest number of tokens (Dr. GRPO, arXiv:2503.20783). pair: half of the samples."""
    denominators = {
        "token": num_tokens,
        "sequence": num_sequences,
        "constant": num_sequences * max_tokens,
        "pair": num_sequences // 2,
    }
    return denominators[kind]


def kl_estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[M] KL(policy || ref) in nats of tokens that the policy sampled: k1 of either sign, k2 and k3
    >= 0."""
    return KL_ESTIMATES[kind](logprobs - ref_logprobs)


def correction_weights(a: Algorithm, old_logprobs: Tensor, batch: PackedBatch) -> Tensor:
    """[M] for tokens that an engine sampled with other logprobs than the learner's, with c =
    exp(old - rollout). tis: min(c, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"). mask: c inside [low, high], else 0 (IcePop, Ling team 2025,
    arXiv:2510.18855). sequence_mask: 1 where the geometric mean of the sequence's c is inside, else
    0."""
    low, high = a.correction_range
    log_c = (old_logprobs - batch.rollout_logprobs).detach()
    if a.importance_correction == "sequence_mask":
        c = sequence_mean(log_c, batch).exp()
        return ((c >= low) & (c <= high)).to(c.dtype)
    c = log_c.exp()
    if a.importance_correction == "tis":
        return c.clamp(max=high)
    return c.where((c >= low) & (c <= high), 0.0)


def token_losses(
    a: Algorithm, batch: PackedBatch, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor | None]:
    """([M] losses to minimise in nats times advantage, [M] bool whether a bound decides); their
    global sum over loss_denominator() is the loss. Without old_logprobs the batch is on-policy: the
    ratio is 1, only its gradient counts. SFT: -weight logprob, without bounds."""
    if a.is_rl:
        losses, is_clipped = policy_losses(a, batch, logprobs)
    else:
        losses, is_clipped = -batch.advantages * logprobs, None
    if "loss" in a.kl_terms:
        assert batch.ref_logprobs is not None
        kind, coef = a.kl_terms["loss"]
        losses = losses + coef * kl_estimate(kind, logprobs, batch.ref_logprobs)
    if a.entropy_coef:
        losses = losses - a.entropy_coef * entropy
    if a.aggregation == "sequence":
        losses = losses / sequence_sums(logprobs.new_ones(len(logprobs)), batch)
    return losses, is_clipped


def policy_losses(
    a: Algorithm, batch: PackedBatch, logprobs: Tensor, ratio_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """([M] losses of the objective with its correction, [M] bool whether a bound decides).
    `ratio_weights` [M]: weights of tokens in the ratio of their sequence; default: equal."""
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = logprobs - old
    if a.objective in OF_SEQUENCE:
        log_ratio = sequence_mean(log_ratio, batch, ratio_weights)
    losses, is_clipped = OBJECTIVES[a.objective](a, logprobs, log_ratio, batch.advantages)
    if a.importance_correction != "none":
        losses = losses * correction_weights(a, old, batch)
    return losses, is_clipped


PRESETS = {
    # Shao et al. 2024, arXiv:2402.03300; averaged over all tokens as in DAPO, and without the KL
    # term (there 0.04)
    "grpo": Algorithm(),
    # Liu et al. 2025, arXiv:2503.20783: neither the deviation nor the length divides
    "dr_grpo": Algorithm(advantage="group_mean", aggregation="constant"),
    # Yu et al. 2025, arXiv:2503.14476: clip-higher, dynamic sampling, token mean, soft overlong
    # punishment, no KL
    "dapo": Algorithm(clip_high=0.28, truncation_penalty="soft", dynamic_sampling_rounds=10),
    # Zheng et al. 2025, arXiv:2507.18071, section 5.1: bounds of the length-normalised ratio
    "gspo": Algorithm(objective="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"),
    # MiniMax 2025, arXiv:2506.13585, eq. 4: no lower bound; the upper as in Khatri et al. 2025,
    # arXiv:2510.13786
    "cispo": Algorithm(objective="cispo", clip_low=1.0, clip_high=4.0),
    # Ahmadian et al. 2024, arXiv:2402.14740: whole sequences, so that tokens are summed; the KL
    # (there 0.03) in the reward
    "rloo": Algorithm(advantage="rloo", aggregation="constant", kl="k1", kl_in="reward"),
    # Hu et al. 2025, arXiv:2501.03262: normalised over the global batch; the KL in the reward of
    # each token
    "reinforce_pp": Algorithm(advantage="none", normalize="batch", kl="k1", kl_in="reward"),
    # Schulman et al. 2017, arXiv:1707.06347, with a separate critic model; the KL as in
    # Ouyang et al. 2022
    "ppo": Algorithm(advantage="gae", normalize="batch", kl="k1", kl_in="reward"),
    # Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation: the teacher's reverse
    # KL of each token is its advantage; whitened over the batch
    "opd": Algorithm(advantage="zero", normalize="batch"),
    "sft": Algorithm(objective="nll"),
    # Rafailov et al. 2023, arXiv:2305.18290
    "dpo": Algorithm(objective="dpo"),
    # Meng et al. 2024, arXiv:2405.14734
    "simpo": Algorithm(objective="simpo"),
    # Hong et al. 2024, arXiv:2403.07691
    "orpo": Algorithm(objective="orpo"),
    # Ethayarajh et al. 2024, arXiv:2402.01306
    "kto": Algorithm(objective="kto"),
    # Bradley-Terry on pairs of scores: Ouyang et al. 2022, arXiv:2203.02155
    "rm": Algorithm(objective="rm"),
}


def make_algorithm(preset: str, parts: object) -> Algorithm:
    """The preset with the fields of `parts` that are not None, those that --algo.* sets."""
    overrides = {name: value for name, value in vars(parts).items() if value is not None}
    return dataclasses.replace(PRESETS[preset], **overrides)
