"""The frozen model at the start of the run, to which KL penalties and DPO compare."""

from __future__ import annotations

from rl_core.learning.learner import LearnerPart
from rl_core.learning.policy import Policy
from rl_core.metrics import Metric
from rl_core.types import PackedBatch


class Reference(LearnerPart):
    def __init__(self, policy: Policy, temperature: float):
        """`policy`: a frozen model, or the one that trains adapters, which is here without them."""
        self.policy, self.temperature = policy, temperature
        self.models = (policy,)

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        with self.policy.on_device():
            for batch in batches:
                batch.ref_logprobs = self.policy(batch, self.temperature)[0]
        return {}
