"""--algo.normalize batch: advantages of all tokens of a step, with mean 0 and deviation 1."""

from __future__ import annotations

import torch

from rl_core.distributed import Ranks
from rl_core.learning.advantages import global_sums, mean_and_std
from rl_core.learning.learner import LearnerPart
from rl_core.metrics import Metric
from rl_core.types import PackedBatch


class BatchNormalised(LearnerPart):
    """Advantages less their mean, over their deviation, of the tokens of all ranks; 0 where all are
    equal (REINFORCE++, arXiv:2501.03262)."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        for batch in batches:
            values = batch.advantages.double()
            powers = torch.ones_like(values), values, values.square()
            sums += torch.stack([power.sum() for power in powers])
        count, total, squares = global_sums(sums, self.ranks)
        mean, deviation = mean_and_std(total, squares, max(count, 1))
        scale = 1 / deviation if deviation else 0.0
        for batch in batches:
            batch.advantages = (batch.advantages - mean) * scale
        return {}
