"""On-policy distillation: a frozen teacher judges each token that the student sampled
(arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.algorithms import Algorithm, sequence_sums
from rl_core.data.packing import pack_samples
from rl_core.distributed import Ranks, unsharded
from rl_core.learning.learner import Learner, LearnerExtension, mean_of
from rl_core.learning.logprobs import head_factors
from rl_core.learning.minibatches import Minibatch, to_device
from rl_core.learning.policy import PackedForward, Policy
from rl_core.metrics import Metric, add_metrics
from rl_core.plugins.divergence import (
    Factors,
    Form,
    TopTokens,
    WholeVocabulary,
    fused_divergence,
    make_form,
)
from rl_core.types import PackedBatch, RunError, TrainingSample


@dataclass(kw_only=True, slots=True)
class TeacherOutput:
    """What a teacher makes of trained tokens of a batch, of this rank's with --cp where it has
    whole distributions."""

    logprobs: Tensor  # [M] nats
    rows: Tensor | None = None  # [M] which of the batch's trained tokens these are; None: all
    # Of the teacher's head, on the CPU where the policy is on a GPU: hidden states [m, D], weight
    # [V, D], temperature, cap.
    factors: Factors | None = None
    # [m, K] ids and logprobs of the likeliest tokens, of a teacher whose head is elsewhere.
    top: tuple[Tensor, Tensor] | None = None

    def divergence(self, student: Factors, form: Form) -> Tensor:
        """[m] nats, from the student's distributions of these tokens."""
        hidden_MD, weight_VD, *how = student
        device, rows = hidden_MD.device, self.rows
        if rows is not None:
            hidden_MD = hidden_MD[rows]
        weight_SD, first, split = own_rows(weight_VD)
        num_ids = len(weight_SD)
        if self.top is not None:
            target = TopTokens(*self.top, form, first)
        else:
            theirs_MD, theirs_VD, *their_how = self.factors
            # The shorter vocabulary bounds both: rows beyond it only pad an embedding.
            num_ids = max(0, min(num_ids, len(theirs_VD) - first))
            theirs_SD = theirs_VD[first : first + num_ids].to(device)
            target = WholeVocabulary((theirs_MD.to(device), theirs_SD, *their_how), form)
        found = fused_divergence((hidden_MD, weight_SD, *how), target, num_ids, split)
        if rows is None:
            return found
        return found.new_zeros(len(student[0])).index_copy(0, rows, found)


# A batch in the place of the learner's, and which of the learner's trained tokens it has.
OwnBatch = tuple[PackedBatch, Tensor]


@dataclass(kw_only=True, slots=True)
class TeacherBatch:
    """What a batch has of each teacher."""

    own: list[OwnBatch | None]  # that it reads in the place of the batch
    readings: list[TeacherOutput] = field(default_factory=list)  # once it has read


class ModelTeacher:
    """A frozen model that reads batches."""

    is_fixed = True  # its weights stay as they are
    adapter = ""  # of the policy
    copies: tuple[Any, ...] = ()  # of the policy's weights, by which it reads

    def __init__(self, policy: Policy, temperature: float):
        self.policy, self.temperature = policy, temperature
        self.weight_VD: Tensor | None = None  # of the head, unsharded

    @property
    def models(self) -> tuple[Policy, ...]:
        return (self.policy,)

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> OwnBatch | None:
        """What it reads instead of the batch of these samples; None: the batch."""
        return None

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        if not self.is_fixed:
            self.weight_VD = None
        with self.policy.on_device():
            return [self.read(batch, is_exact) for batch in batches]

    def read(self, batch: PackedBatch, is_exact: bool = False) -> TeacherOutput:
        """`is_exact`: with what whole distributions are computed from. Every rank must call it,
        with the policy on the device. Raises RunError for a model whose head is not a product."""
        view = HeadInputs(self.policy)

        def forward(policy: Policy, *batch: Any) -> tuple[Tensor, ...]:
            return policy.forward_pass(view, *batch)

        how = self.temperature, self.adapter, forward if is_exact else None
        logprobs = self.policy(batch, *how)[0]
        if not is_exact:
            return TeacherOutput(logprobs=logprobs)
        check_factors(view)
        hidden_MD, weight_VD, *scale = view.factors
        if self.weight_VD is None:
            whole = unsharded(weight_VD.detach())
            # FSDP frees what it gathered, a learner changes what it has, and what leaves the device
            # has no memory then.
            stays = self.policy.host_copies is None and not self.policy.is_sharded
            is_kept = self.is_fixed and stays
            self.weight_VD = whole.cpu() if is_kept else whole.clone().cpu()
        factors = hidden_MD.detach().cpu(), self.weight_VD, *scale
        return TeacherOutput(logprobs=logprobs, factors=factors)


class ActorTeacher(ModelTeacher):
    """Another actor that learns, as it is when its pupil learns: before its own update of the
    step."""

    is_fixed = False

    def __init__(self, learners: Mapping[str, Learner], name: str, temperature: float):
        """`learners`: of this rank. That of the teacher may be made later."""
        self.learners, self.name, self.temperature = learners, name, temperature
        self.weight_VD = None

    @property
    def policy(self) -> Policy:
        return self.learners[self.name].policy

    @property
    def adapter(self) -> str:
        return self.learners[self.name].adapter


class TeacherRouter:
    """A teacher that reads the samples of some environments alone."""

    def __init__(self, teacher: Any, envs: list[str], ranks: Ranks):
        self.teacher, self.envs, self.ranks = teacher, envs, ranks
        self.read_all, self.copies = teacher.read_all, teacher.copies

    @property
    def models(self) -> tuple[Policy, ...]:
        return self.teacher.models

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> OwnBatch | None:
        is_own = [sample.env in self.envs for sample in samples]
        own = [sample for sample, is_here in zip(samples, is_own, strict=True) if is_here]
        rows = torch.tensor(is_own, dtype=torch.bool)[batch.sequences].nonzero()[:, 0]
        return to_device(pack_samples(own), self.ranks.device), rows.to(self.ranks.device)


class HeadInputs:
    """A policy that keeps what its head multiplies."""

    def __init__(self, policy: Policy):
        self.policy, self.hf = policy, policy.hf
        self.hidden_states, self.activations = policy.hidden_states, policy.activations
        self.factors: Factors | None = None

    def outputs(self, hidden_MD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
        self.factors = head_factors(self.hf, hidden_MD, temperature)
        return self.policy.outputs(hidden_MD, labels, temperature)


class Compared(HeadInputs):
    """A policy with a third output: [m] the divergence of trained tokens from what teachers
    read."""

    def __init__(self, policy: Policy, readings: list[TeacherOutput], form: Form):
        super().__init__(policy)
        self.readings, self.form = readings, form

    def outputs(self, hidden_MD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
        logprobs, entropy = super().outputs(hidden_MD, labels, temperature)
        divergence = torch.zeros_like(entropy)
        for reading in self.readings:
            divergence = divergence + reading.divergence(self.factors, self.form)
        return logprobs, entropy, divergence


class ComparedForward(PackedForward):
    """The policy's own forward, with the divergence from what teachers read of the batch."""

    def __init__(self, form: Form):
        self.form = form
        self.divergence: Tensor | None = None  # [M] of the last forward

    def __call__(
        self, policy: Policy, batch: PackedBatch, temperature: float
    ) -> tuple[Tensor, ...]:
        self.divergence = None
        if not batch.teacher.readings:
            return policy.forward_pass(policy, batch, temperature)
        view = Compared(policy, batch.teacher.readings, self.form)
        outputs = policy.forward_pass(view, batch, temperature)
        check_factors(view)
        # FSDP gathers weights for the backward of what a forward returns.
        self.divergence = outputs[2]
        return outputs


class SampledTeacher(LearnerExtension):
    """Adds coef * (log p_teacher - log p_student) of each sampled token to its advantage: the
    gradient is that of -coef * KL(student || teacher) of single tokens."""

    is_exact = False

    def __init__(self, teachers: list[Any], coef: float):
        self.teachers, self.coef = teachers, coef

    @property
    def models(self) -> tuple[Policy, ...]:
        return tuple(itertools.chain(*(teacher.models for teacher in self.teachers)))

    @property
    def copies(self) -> tuple[Any, ...]:
        return tuple(itertools.chain(*(teacher.copies for teacher in self.teachers)))

    def after_step(self, step: int) -> None:
        for weights in self.copies:
            weights.after_step(step)

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        own = [teacher.packed(batch, samples) for teacher in self.teachers]
        return replace(batch, teacher=TeacherBatch(own=own))

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        readings: list[list[TeacherOutput]] = [[] for _ in batches]
        for number, teacher in enumerate(self.teachers):
            own = [batch.teacher.own[number] for batch in batches]
            asked = list(map(asked_of, batches, own))
            found = teacher.read_all(asked, self.is_exact)
            for reading, mine, of_batch in zip(found, own, readings, strict=True):
                if mine is not None:
                    reading.rows = mine[1]
                of_batch.append(reading)
        for batch, of_batch in zip(batches, readings, strict=True):
            for reading in of_batch:
                rows = slice(None) if reading.rows is None else reading.rows
                kl = batch.rollout_logprobs[rows] - reading.logprobs
                add_metrics(metrics, {"teacher_kl_nats": mean_of(kl)})
                self.learn_from(batch, rows, kl)
            batch.teacher.readings = of_batch
        return metrics

    def learn_from(self, batch: PackedBatch, rows: Any, kl: Tensor) -> None:
        """`kl`: of the trained tokens of these rows."""
        advantages = batch.advantages.clone()
        advantages[rows] -= self.coef * kl
        batch.advantages = advantages


class ExactTeacher(SampledTeacher):
    """Adds coef * the divergence of the distributions of each trained token to the loss, averaged
    as the loss is."""

    is_exact = True

    def __init__(self, teachers: list[Any], algorithm: Algorithm):
        super().__init__(teachers, algorithm.teacher_coef)
        self.algorithm = algorithm
        form = make_form(algorithm.teacher_loss, algorithm.teacher_beta)
        self.forward_pass = ComparedForward(form)
        self.batch: PackedBatch | None = None  # of the last forward
        self.denominator = 1
        self.found: dict[str, Metric] = {}

    def learn_from(self, batch: PackedBatch, rows: Any, kl: Tensor) -> None:
        """Advantages stay as they are."""

    def around(self, batch: PackedBatch) -> AbstractContextManager:
        self.batch = batch
        return nullcontext()

    def before_update(self, learner: Any, minibatch: Minibatch, step: float) -> dict[str, Metric]:
        self.denominator = minibatch.denominator
        return {}

    def loss(self) -> Tensor:
        losses = self.forward_pass.divergence
        add_metrics(self.found, {"teacher_loss_nats": mean_of(losses)})
        if self.algorithm.aggregation == "sequence":
            losses = losses / sequence_sums(torch.ones_like(losses), self.batch)
        return self.coef * losses.sum() / self.denominator

    def metrics(self) -> dict[str, Metric]:
        found, self.found, self.batch = self.found, {}, None
        return found


def asked_of(batch: PackedBatch, own: OwnBatch | None) -> PackedBatch:
    """The batch that a teacher reads, by the same ids from which tokens were drawn."""
    if own is None:
        return batch
    other, rows = own
    return replace(other, labels=batch.labels[rows])


def check_factors(view: HeadInputs) -> None:
    if view.factors is None:
        raise RunError(
            f"--algo.teacher_loss: {view.hf.name_or_path} has a head of its own, whose logits "
            "cannot be compared in tiles; take sampled"
        )


def own_rows(weight_VD: Tensor) -> tuple[Tensor, int, Any]:
    """(the rows of a head's weight that are on this rank, the first one's id, what merges)."""
    if not isinstance(weight_VD, DTensor):
        return weight_VD, 0, None
    from rl_core.plugins.tensor_parallel import own_slice

    return own_slice(weight_VD)
