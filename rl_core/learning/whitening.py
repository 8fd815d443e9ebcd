"""--algo.normalize: scales advantages to mean 0 and deviation 1 over all tokens of a step (batch)
or over the tokens of each environment (task), or only divides by the environment's deviation
(env)."""

from __future__ import annotations

from rl_core.data.episodes import NO_SPREAD
from rl_core.distributed import Ranks, in_fp64
from rl_core.learning.advantages import Judged
from rl_core.learning.learner import mean_of
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.metrics import Mean, Metric, add_metrics, reduce_metrics
from rl_core.types import PackedBatch


class BatchWhitening(LearnerExtension):
    """Subtracts the mean of the advantages and divides by their deviation, over the tokens of all
    ranks; 0 if all are equal (REINFORCE++, arXiv:2501.03262)."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        sums: dict[str, Metric] = {}
        if not batches:  # Then no rank has any.
            return {}
        for batch in batches:
            values = in_fp64(batch.advantages)
            add_metrics(sums, {"mean": mean_of(values), "square": mean_of(values.square())})
        means = reduce_metrics(sums, self.ranks)
        scale = deviation(**means)
        for batch in batches:
            centred = batch.advantages - means["mean"]
            batch.advantages = centred / scale if scale else centred * 0.0
        return {}


def normalised(kind: str, ranks: Ranks, judged: Judged) -> Judged:
    """Advantages scaled over all sampled tokens of their environment in the step, on all ranks,
    groups without signal included; tokens that branches share count once. env: A / deviation, so
    that groups without signal stay 0. task: (A - mean) / deviation, and 0 if all are equal
    (AgentRL, arXiv:2510.04206)."""
    means: dict[str, Metric] = {}
    squares: dict[str, Metric] = {}
    counted: set[str] = set()
    for t, values in judged:
        for turn, a in zip(t.turns, values, strict=True):
            if turn.name in counted:
                continue
            if turn.name:
                counted.add(turn.name)
            n = len(turn.completion.token_ids)
            add_metrics(means, {t.env: Mean(n * a, n)})
            add_metrics(squares, {t.env: Mean(n * a**2, n)})
    mean_of_env = reduce_metrics(means, ranks)
    square_of_env = reduce_metrics(squares, ranks)
    scaled = []
    for t, values in judged:
        scale = 1.0
        if t.env in mean_of_env:  # An episode without turns has no tokens.
            mean = mean_of_env[t.env]
            scale = deviation(mean, square_of_env[t.env])
            if kind == "task":
                values = [a - mean if scale else 0.0 for a in values]
        scaled.append((t, [a / (scale or 1.0) for a in values]))
    return scaled


def deviation(mean: float, square: float) -> float:
    """Population deviation for a mean and a mean of squares; exactly 0 if it is rounding error."""
    value = max(square - mean**2, 0.0) ** 0.5
    return value if value > NO_SPREAD * max(abs(mean), 1.0) else 0.0
