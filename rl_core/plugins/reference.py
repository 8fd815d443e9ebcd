"""The frozen model at the start of the run, to which KL penalties and DPO compare."""

from __future__ import annotations

from torch import Tensor

from rl_core.algorithms import Algorithm, kl_estimate
from rl_core.learning.learner import LearnerPart, PartSpec
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


def make_reference(learner: PartSpec) -> Reference:
    """A frozen copy of --algo.reference, by default of the actor's model at the start, in the dtype
    of compute, sharded as the policy is; of a policy with adapters itself, without them. On a GPU a
    copy is CPU-offloaded to pinned memory while it is not used."""
    model, path = learner.policy, learner.config.algo.reference
    if path or not model.adapters:
        model = frozen_model(learner, path or learner.config.actors[learner.name].model)
    temperature = learner.config.sampling.temperature if learner.algorithm.is_rl else 1.0
    return Reference(model, temperature)


def frozen_model(learner: PartSpec, path: str) -> Policy:
    """A model that a part only reads."""
    model = learner.load(path, is_frozen=True)
    with model.on_device():
        pass  # it leaves the device at the end
    return model


class KLPenalty(LearnerPart):
    """Subtracts the KL to the reference from advantages."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        for batch in batches:
            batch.advantages = kl_penalised(self.algorithm, batch)
        return {}


def kl_penalised(a: Algorithm, batch: PackedBatch) -> Tensor:
    """[M] advantages less the KL of the sampled tokens, by the logprobs that they were sampled
    with. In the reward: the sum from the token on, its return (REINFORCE++, arXiv:2501.03262),
    without a baseline. In the advantage: its own alone."""
    kl = kl_estimate(a.kl, batch.rollout_logprobs, batch.ref_logprobs)
    if a.kl_in == "reward":
        kl = sums_to_go(kl, batch.sequences)
    return batch.advantages - a.kl_coef * kl


def sums_to_go(values: Tensor, sequences: Tensor, decay: float = 1.0) -> Tensor:
    """[M] for each token the sum of its sequence's values from it on, the one l trained tokens
    later times decay^l. Without a gradient."""
    sums = values.detach().double().clone()
    reach = 1
    while reach < len(sums):
        # Sums over `reach` tokens become sums over twice as many: log2 passes over all sequences at
        # once.
        is_same = sequences[reach:] == sequences[:-reach]
        sums[:-reach] += decay**reach * sums[reach:].where(is_same, 0.0)
        reach *= 2
    return sums.to(values.dtype)
