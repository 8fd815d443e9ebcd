"""Advantages and losses: one function per equation, one table of presets. M trained tokens, G
episodes of a group.

A sequence is one TrainingSample; an algorithm is a row of independent parts (docs/algorithms.md
lists them all).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_core.config import AlgoConfig, OptimConfig
from rl_core.data.episodes import NO_SPREAD, has_spread
from rl_core.types import PackedBatch


@dataclass(kw_only=True, slots=True)
class Algorithm:
    advantage: str = "group_norm"
    normalize: str = "none"
    objective: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    aggregation: str = "token"
    kl: str = "k3"
    kl_in: str = "loss"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    correction: str = "none"
    correction_range: tuple[float, float] = (0.5, 2.0)
    overlong: str = "none"
    overlong_buffer: int = 0
    refill_rounds: int = 0
    target_kl: float = 0.0
    turn_discount: float | None = None
    # What is no policy gradient, each function as "module:attribute"
    # (chat, row, *sft.weights) -> TrainingSamples of a row of data; "": samples episodes.
    rows: str = ""
    # (config, batch, outputs of the model) -> (losses, metrics); "": of the parts above.
    loss: str = ""
    is_scoring: bool = False  # the model is a classifier of one label
    has_reference: bool = False  # whatever kl_coef is

    @property
    def is_rl(self) -> bool:
        """Samples episodes; otherwise learns from rows."""
        return not (self.rows or self.loss)

    @property
    def is_pairs(self) -> bool:
        """Learns from preference pairs; its loss is of a pair, not of a token."""
        return self.aggregation == "pair"

    @property
    def has_critic(self) -> bool:
        """A second model estimates the reward still to come, and is trained beside the policy."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Compares with the model at the start of the run."""
        return self.kl_coef > 0 or self.has_reference

    @property
    def skips_zero_advantages(self) -> bool:
        """A sample whose advantages are all 0 has no gradient, and needs no forward, if nothing
        else moves it."""
        is_final = self.normalize != "batch" and not self.has_critic
        return self.is_rl and self.entropy_coef == 0 and self.kl_coef == 0 and is_final


ROWS, LOSSES = "rl_core.plugins.pairs", "rl_core.plugins.preference"
PRESETS = {
    # Shao et al. 2024, arXiv:2402.03300; averaged over all tokens as in DAPO, and without the KL
    # term (there 0.04)
    "grpo": Algorithm(),
    # Liu et al. 2025, arXiv:2503.20783: neither the deviation nor the length divides
    "dr_grpo": Algorithm(advantage="group_mean", aggregation="constant"),
    # Yu et al. 2025, arXiv:2503.14476: clip-higher, dynamic sampling, token mean, soft overlong
    # punishment, no KL
    "dapo": Algorithm(clip_high=0.28, overlong="soft", refill_rounds=10),
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
    # Schulman et al. 2017, arXiv:1707.06347, with a critic that is a model of its own; the KL as in
    # Ouyang et al. 2022
    "ppo": Algorithm(advantage="gae", normalize="batch", kl="k1", kl_in="reward"),
    "sft": Algorithm(rows="rl_core.plugins.sft:imitation_samples"),
    # Rafailov et al. 2023, arXiv:2305.18290
    "dpo": Algorithm(
        rows=f"{ROWS}:reply_pair",
        loss=f"{LOSSES}:losses_of_replies",
        aggregation="pair",
        has_reference=True,
    ),
    # Bradley-Terry on pairs of scores: Ouyang et al. 2022, arXiv:2203.02155
    "rm": Algorithm(
        rows=f"{ROWS}:scored_pair",
        loss=f"{LOSSES}:losses_of_scores",
        aggregation="pair",
        is_scoring=True,
    ),
}
WSD_DECAY_FRAC = 0.2


def make_algorithm(preset: str, parts: AlgoConfig) -> Algorithm:
    """The preset's row of the table with the parts that were set one by one."""
    return dataclasses.replace(
        PRESETS[preset], **{k: v for k, v in vars(parts).items() if v is not None}
    )


def group_advantages(
    rewards: list[float],
    kind: str,
    advantage_fn: Callable[[list[float]], list[float]] | None = None,
    episodes: list[int] | None = None,
    weights: list[float] | None = None,
) -> list[float]:
    """[G] rewards -> [G] advantages; all but none, gae and custom are exactly 0 in a group whose
    rewards differ by rounding alone. group_mean: R - mean(R). group_norm: that over the
    population's standard deviation; group_norm_unbiased: over the sample's. rloo: R - mean of the
    others' (Kool et al. 2019; arXiv:2402.14740). none: R itself; gae the same, from which the
    learner subtracts the critic's estimate. custom: what advantage_fn says of the episodes'
    rewards. `episodes`: [G] from 0, of which episode each reward is, and `weights`: [G] its part of
    that. By default, and in a group of one episode, each reward is an episode."""
    if kind in ("none", "gae"):
        return [float(reward) for reward in rewards]
    if episodes is None or len(set(episodes)) == 1:
        episodes, weights = list(range(len(rewards))), [1.0] * len(rewards)
    values, shares = (
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(weights, dtype=torch.float64),
    )
    of_episode = torch.tensor(episodes)
    per_episode = values.new_zeros(max(episodes, default=-1) + 1)
    sums = per_episode.index_add(0, of_episode, shares * values)
    if kind == "custom":
        advantages = advantage_fn(sums.tolist())
        return [advantages[number] for number in episodes]
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    total, count = sums.sum(), shares.sum()
    if kind == "rloo":
        counts = per_episode.index_add(0, of_episode, shares)
        baselines = (total - sums) / (count - counts)
        return (values - baselines[of_episode]).tolist()
    centred = values - total / count
    if kind == "group_mean":
        return centred.tolist()
    degrees = count - int(kind == "group_norm_unbiased")
    deviation = ((shares * centred**2).sum() / degrees).sqrt()
    return (centred / deviation).tolist()


def mean_and_std(total: float, squares: float, count: float) -> tuple[float, float]:
    """Of a population whose sum, sum of squares and number are given; the deviation is exactly 0 if
    it is rounding."""
    mean = total / count
    deviation = max(squares / count - mean**2, 0.0) ** 0.5
    return mean, deviation if deviation > NO_SPREAD * max(abs(mean), 1.0) else 0.0


def overlong_penalty(length: int, max_tokens: int, buffer: int) -> float:
    """Added to a reward, in -1..0: it falls linearly over the last `buffer` of max_tokens (DAPO,
    arXiv:2503.14476, eq. 13). buffer 0 is a fifth of max_tokens, as there."""
    buffer = buffer or max(1, max_tokens // 5)
    return min(0.0, (max_tokens - buffer - length) / buffer)


def sequence_sums(values: Tensor, sequences: Tensor, num: int) -> Tensor:
    """[M] for each token the sum of its sequence's values, of `num` sequences; the gradient goes
    through all of them."""
    # bincount would wait for the device to learn how many sequences there are.
    return values.new_zeros(num).index_add(0, sequences, values)[sequences]


def sequence_mean(values: Tensor, sequences: Tensor, num: int) -> Tensor:
    """[M] for each token the mean of its sequence's values."""
    return sequence_sums(values, sequences, num) / sequence_sums(
        torch.ones_like(values), sequences, num
    )


def sums_to_go(values: Tensor, sequences: Tensor, decay: float = 1.0) -> Tensor:
    """[M] for each token the sum of its sequence's values from it on, the one l trained tokens
    later times decay^l."""
    sums, reach = values.double(), 1
    while reach < len(sums):
        # Sums over `reach` tokens become sums over twice as many: log2 passes over all sequences at
        # once.
        is_same = sequences[reach:] == sequences[:-reach]
        sums = sums + decay**reach * pad(torch.where(is_same, sums[reach:], 0.0), (0, reach))
        reach *= 2
    return sums.to(values.dtype)


def loss_denominator(kind: str, num_tokens: int, num_sequences: int, max_tokens: int) -> int:
    """Of all samples of a minibatch on all ranks. token: their trained tokens (global mean).
    sequence: their number (mean of means). constant: their number times the tokens one may have
    (Dr. GRPO, arXiv:2503.20783). pair: half of it."""
    counts = {
        "token": num_tokens,
        "sequence": num_sequences,
        "constant": num_sequences * max_tokens,
    }
    return (counts | {"pair": num_sequences // 2})[kind]


def clipped_loss(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool whether a bound decides): -min(r A, clip(r, 1 - clip_low, 1 +
    clip_high) A) per token with r = exp(log_ratio); at most -dual_clip A if A < 0. PPO: Schulman et
    al. 2017, arXiv:1707.06347, eq. 7; two bounds: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 10;
    dual clip: Ye et al. 2020, arXiv:1912.09729."""
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = clipped * advantages < ratio * advantages
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        limit = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        is_clipped |= losses > limit
        losses = torch.minimum(losses, limit)
    return losses, is_clipped


def cispo_loss(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """([M] losses, [M] bool whether a bound decides): -sg(clip(r, 1 - clip_low, 1 + clip_high)) A
    logprob per token, so that every token keeps its gradient (CISPO, MiniMax 2025,
    arXiv:2506.13585, eq. 4)."""
    ratio = torch.exp(log_ratio.detach())
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -clipped * advantages * logprobs, clipped != ratio


def kl_estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token KL(policy || ref) in nats of tokens that the policy sampled, with d = logprobs -
    ref_logprobs. k1: d, of either sign. k2: d^2 / 2. k3: exp(-d) - 1 + d, >= 0 (Schulman 2020,
    "Approximating KL Divergence")."""
    d = logprobs - ref_logprobs
    return d if kind == "k1" else d.square() / 2 if kind == "k2" else torch.exp(-d) - 1 + d


def kl_penalised(algorithm: Algorithm, batch: PackedBatch) -> Tensor:
    """[M] advantages less the KL of the sampled tokens, by the logprobs that they were sampled
    with. In the reward: the sum from the token on, its return (REINFORCE++, arXiv:2501.03262),
    without a baseline. In the advantage: its own alone."""
    kl = kl_estimate(algorithm.kl, batch.rollout_logprobs, batch.ref_logprobs)
    if algorithm.kl_in == "reward":
        kl = sums_to_go(kl, batch.sequences)
    return batch.advantages - algorithm.kl_coef * kl


def correction_weights(algorithm: Algorithm, old_logprobs: Tensor, batch: PackedBatch) -> Tensor:
    """[M] for tokens that an engine sampled with other logprobs than the learner's, with c =
    exp(old - rollout). tis: min(c, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"). mask: c inside [low, high], else 0 (IcePop, Ling team 2025,
    arXiv:2510.18855). sequence_mask: 1 where the geometric mean of the sequence's c is inside, else
    0."""
    log_c = (old_logprobs - batch.rollout_logprobs).detach()
    if algorithm.correction == "sequence_mask":
        log_c = sequence_mean(log_c, batch.sequences, len(batch.order))
    c = torch.exp(log_c)
    low, high = algorithm.correction_range
    if algorithm.correction == "tis":
        return c.clamp(max=high)
    return torch.where((c >= low) & (c <= high), c if algorithm.correction == "mask" else 1.0, 0.0)


def token_losses(
    a: Algorithm, batch: PackedBatch, logprobs: Tensor, entropy: Tensor
) -> tuple[Tensor, Tensor]:
    """([M] losses to minimise in nats times advantage, [M] bool whether a bound decides); their
    global sum over loss_denominator() is the loss. Without old_logprobs the batch is on-policy: the
    ratio is 1, only its gradient counts. With objective "gspo" it is the geometric mean over the
    sequence (GSPO, arXiv:2507.18071, eq. 7). Aggregation "sequence" divides by the sequence's
    trained tokens. Imitation: -weight logprob."""
    num = len(batch.order)
    if a.is_rl:
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        log_ratio = logprobs - old
        if a.objective == "gspo":
            log_ratio = sequence_mean(log_ratio, batch.sequences, num)
        if a.objective == "cispo":
            losses, is_clipped = cispo_loss(
                logprobs, log_ratio, batch.advantages, a.clip_low, a.clip_high
            )
        else:
            losses, is_clipped = clipped_loss(
                log_ratio, batch.advantages, a.clip_low, a.clip_high, a.dual_clip
            )
        if a.correction != "none":
            losses = losses * correction_weights(a, old, batch)
        if a.kl_coef and a.kl_in == "loss":
            losses = losses + a.kl_coef * kl_estimate(a.kl, logprobs, batch.ref_logprobs)
        if a.entropy_coef:
            losses = losses - a.entropy_coef * entropy
    else:
        losses, is_clipped = (
            -batch.advantages * logprobs,
            torch.zeros_like(logprobs, dtype=torch.bool),
        )
    if a.aggregation == "sequence":
        losses = losses / sequence_sums(torch.ones_like(logprobs), batch.sequences, num)
    return losses, is_clipped


def learning_rate(config: OptimConfig, step: float, num_steps: int) -> float:
    """The learning rate of an update that starts `step` (a fraction for later minibatches) of
    num_steps. wsd: constant until the last fifth of the run, then linear (Hu et al. 2024,
    arXiv:2404.06395, section 4)."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    height = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "wsd": min(1.0, (num_steps - step) / (WSD_DECAY_FRAC * max(1, num_steps))),
    }[config.schedule]
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * height)
