"""The reference model of KL penalties, DPO and KTO: frozen as at the start of the run, or updated
from the policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_core.algorithms import Algorithm, kl_estimate
from rl_core.distributed import in_fp64
from rl_core.learning.lagged_copy import WeightSnapshot
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.metrics import Mean, Metric, add_metrics, reduce_metrics
from rl_core.models.policy import Policy
from rl_core.types import PackedBatch


class Reference(LearnerExtension):
    def __init__(self, policy: Policy, temperature: float):
        """`policy`: a frozen model, or the policy itself without its adapters."""
        self.policy, self.temperature = policy, temperature
        self.models = (policy,)

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        with self.policy.on_device():
            for batch in with_mismatched(batches):
                batch.ref_logprobs = self.policy(batch, self.temperature)[0]
        return {}


class RenewedReference(LearnerExtension):
    """The policy of some steps ago, or an exponential moving average (EMA) over its steps."""

    def __init__(self, copy: WeightSnapshot, temperature: float):
        self.copy, self.temperature = copy, temperature
        self.copies = (copy,)

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        with self.copy.in_place():
            for batch in with_mismatched(batches):
                batch.ref_logprobs = self.copy.read(batch, self.temperature)
        return {}


def with_mismatched(batches: list[PackedBatch]) -> Iterator[PackedBatch]:
    for batch in batches:
        yield batch
        if batch.mismatched is not None:
            yield batch.mismatched


def make_reference(context: LearnerContext) -> LearnerExtension:
    """A frozen copy of --algo.reference, by default of the actor's initial model, in the compute
    dtype, sharded like the policy; for a policy with adapters the policy itself, without them. On a
    GPU a copy is CPU-offloaded to pinned memory while it is not used. --algo.reference_every and
    reference_decay update a snapshot of the trained weights."""
    model, path, algorithm = context.policy, context.config.algo.reference, context.algorithm
    # An EMA is updated after each step.
    if every := algorithm.reference_every or int(algorithm.reference_decay > 0):
        snapshot = context.snapshot("reference", every, algorithm.reference_decay)
        return RenewedReference(snapshot, context.temperature)
    if path or not model.adapters:
        model = frozen_model(context, path or context.model_path)
    return Reference(model, context.temperature)


def frozen_model(context: LearnerContext, path: str) -> Policy:
    """A model that an extension only reads."""
    model = context.load(path, is_frozen=True)
    with model.on_device():
        pass  # The model leaves the device at the end.
    return model


class MismatchedKL(LearnerExtension):
    """KTO's reference point z0 = max(0, mean of l) over the rows of the step, on all ranks: l is
    logprobs - ref_logprobs, summed over a reply that stands behind another row's prompt, by the
    policy at the start of the step (Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1)."""

    def __init__(self, context: LearnerContext):
        self.context = context

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        c, sums = self.context, {}
        if not batches:  # Then no rank has any.
            return {}
        for batch in batches:
            other = batch.mismatched
            assert other is not None and other.ref_logprobs is not None
            logratios = c.policy(other, c.temperature, c.adapter)[0] - other.ref_logprobs
            add_metrics(sums, {"kl": Mean(logratios.sum(), len(other.paths))})
        kl = max(0.0, reduce_metrics(sums, c.ranks)["kl"])
        for batch in batches:
            batch.values = torch.full_like(batch.advantages, kl)
        return {"mismatched_kl_nats": Mean(kl)}


class KLPenalty(LearnerExtension):
    """Subtracts the KL to the reference from advantages."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        for batch in batches:
            batch.advantages = kl_penalised(self.algorithm, batch)
        return {}


def kl_penalised(a: Algorithm, batch: PackedBatch) -> Tensor:
    """[M] advantages minus the KL of the sampled tokens, by the logprobs of the engine. KL in the
    reward: the sum from the token on, its return (REINFORCE++, arXiv:2501.03262), without a
    baseline; a critic's rewards have the KL already. KL in the advantage: the token's KL alone."""
    advantages = batch.advantages
    for target, (kind, coef) in a.kl_terms.items():
        assert batch.ref_logprobs is not None
        kl = kl_estimate(kind, batch.rollout_logprobs, batch.ref_logprobs)
        if target == "reward" and not a.has_critic:
            advantages = advantages - coef * sums_to_go(kl, batch.sequences)
        elif target == "advantage":
            advantages = advantages - coef * kl
    return advantages


def sums_to_go(values: Tensor, sequences: Tensor, decay: float = 1.0) -> Tensor:
    """[M] for each token the sum of its sequence's values from that token on, where the value l
    trained tokens later is weighted by decay^l. Without a gradient."""
    sums = in_fp64(values.detach()).clone()
    sequences = sequences.to(sums.device)
    reach = 1
    while reach < len(sums):
        # Sums over `reach` tokens become sums over twice as many, in log2 passes over all sequences
        # at once.
        is_same = sequences[reach:] == sequences[:-reach]
        sums[:-reach] += decay**reach * sums[reach:].where(is_same, 0.0)
        reach *= 2
    return sums.to(values.dtype).to(values.device)
