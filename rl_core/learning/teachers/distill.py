"""On-policy distillation: a frozen teacher scores each token that the student sampled
(arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.algorithms import Algorithm, sequence_sums
from rl_core.data.packing import pack_samples
from rl_core.distributed import Ranks, unsharded
from rl_core.learning.lagged_copy import WeightSnapshot
from rl_core.learning.learner import mean_of
from rl_core.learning.learner_context import ExtendedLearner
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.learning.minibatches import Minibatch, to_device
from rl_core.learning.teachers.divergence import (
    Factors,
    Form,
    TopTokens,
    WholeVocabulary,
    fused_divergence,
    make_form,
)
from rl_core.metrics import Metric, add_metrics
from rl_core.models.heads import head_factors
from rl_core.models.logprobs import VocabularySplit
from rl_core.models.policy import Outputs, Policy
from rl_core.types import PackedBatch, RunError, TrainingSample


@dataclass(kw_only=True, slots=True)
class TeacherOutput:
    """A teacher's output for trained tokens of a batch; with --cp and whole distributions for this
    rank's tokens."""

    logprobs: Tensor  # [M] nats
    rows: Tensor | None = None  # [M] indices into the batch's trained tokens; None: all
    # The teacher's head, on the CPU if the policy is on a GPU: hidden states [m, D], weight [V, D],
    # temperature, cap.
    factors: Factors | None = None
    # [m, K] ids and logprobs of the top K tokens, from a teacher without a local head.
    top: tuple[Tensor, Tensor] | None = None

    def divergence(self, student: Factors, form: Form) -> Tensor:
        """[m] nats, divergence from the student's distributions of these tokens."""
        hidden_MD, weight_VD, temperature, cap = student
        device, rows = hidden_MD.device, self.rows
        if rows is not None:
            hidden_MD = hidden_MD[rows]
        weight_SD, first, split = local_rows(weight_VD)
        num_ids = len(weight_SD)
        if self.top is not None:
            target = TopTokens(*self.top, form, first)
        else:
            assert self.factors is not None
            theirs_MD, theirs_VD, their_temperature, their_cap = self.factors
            # The shorter vocabulary bounds both: rows beyond it only pad an embedding.
            num_ids = max(0, min(num_ids, len(theirs_VD) - first))
            theirs_SD = theirs_VD[first : first + num_ids].to(device)
            theirs = theirs_MD.to(device), theirs_SD, their_temperature, their_cap
            target = WholeVocabulary(theirs, form)
        factors = hidden_MD, weight_SD, temperature, cap
        values = fused_divergence(factors, target, num_ids, split)
        if rows is None:
            return values
        return values.new_zeros(len(student[0])).index_copy(0, rows, values)


# (a batch that a teacher reads instead of the learner's, indices of its trained tokens there).
ReadBatch = tuple[PackedBatch, Tensor]


@dataclass(kw_only=True, slots=True)
class TeacherBatch:
    """The part of a batch that each teacher needs."""

    read: list[ReadBatch | None]  # Per teacher; None: the teacher reads the learner's batch.
    outputs: list[TeacherOutput] = field(default_factory=list)  # Per teacher, after annotate().


class Teacher:
    """Reads batches of a learner. The learner runs on all ranks at once, and so does read_all()."""

    copies: tuple[WeightSnapshot, ...] = ()  # Snapshots of the policy that the teacher reads with.

    @property
    def models(self) -> tuple[Policy, ...]:
        """Frozen models."""
        return ()

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> ReadBatch | None:
        """The batch that the teacher reads for these samples; None: the learner's batch."""
        return None

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        """`is_exact`: the outputs have whole distributions."""
        raise NotImplementedError


class ModelTeacher(Teacher):
    """A frozen model that reads batches."""

    is_fixed = True  # The weights never change.

    def __init__(self, policy: Policy, temperature: float, adapter: str = ""):
        self.policy, self.temperature, self.adapter = policy, temperature, adapter
        self.weight_VD: Tensor | None = None  # The head's weight, unsharded.

    @property
    def models(self) -> tuple[Policy, ...]:
        return (self.policy,)

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        if not self.is_fixed:
            self.weight_VD = None
        with self.policy.on_device():
            return [self.read(batch, is_exact) for batch in batches]

    def read(self, batch: PackedBatch, is_exact: bool = False) -> TeacherOutput:
        """`is_exact`: returns the factors of whole distributions too. Every rank must call it, with
        the policy on the device. Raises RunError for a model whose head is not a matrix product."""
        policy, factors = self.policy, []
        if is_exact:
            check_head(policy)

        def outputs(hidden_MD: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, ...]:
            factors.append(head_factors(policy.hf, hidden_MD, temperature))
            return policy.outputs(hidden_MD, labels, temperature)

        options = self.temperature, self.adapter, outputs if is_exact else None
        logprobs = policy(batch, *options)[0]
        if not is_exact:
            return TeacherOutput(logprobs=logprobs)
        [(hidden_MD, weight_VD, temperature, cap)] = factors
        if self.weight_VD is None:
            gathered = unsharded(weight_VD.detach())
            # A copy is needed where the memory changes: FSDP frees gathered weights, a learner
            # updates its weights, and weights that leave the device lose their memory.
            stays = policy.host_copies is None and not policy.is_sharded
            is_kept = self.is_fixed and stays
            self.weight_VD = gathered.cpu() if is_kept else gathered.clone().cpu()
        on_host = hidden_MD.detach().cpu(), self.weight_VD, temperature, cap
        return TeacherOutput(logprobs=logprobs, factors=on_host)


class ActorTeacher(ModelTeacher):
    """Another trained actor, with its weights from before its update of the step."""

    is_fixed = False

    def __init__(self, learners: Mapping[str, ExtendedLearner], name: str, temperature: float):
        """`learners`: learners of this rank. The teacher's may be made later."""
        self.learners, self.name, self.temperature = learners, name, temperature
        self.weight_VD = None

    @property
    def policy(self) -> Policy:
        return self.learners[self.name].policy

    @property
    def adapter(self) -> str:
        return self.learners[self.name].adapter


class TeacherRouter(Teacher):
    """A teacher that only reads the samples of some environments."""

    def __init__(self, teacher: Teacher, envs: list[str], ranks: Ranks):
        self.teacher, self.envs, self.ranks = teacher, envs, ranks
        self.copies = teacher.copies

    @property
    def models(self) -> tuple[Policy, ...]:
        return self.teacher.models

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        return self.teacher.read_all(batches, is_exact)

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> ReadBatch | None:
        is_read = [sample.env in self.envs for sample in samples]
        read = [sample for sample, is_here in zip(samples, is_read, strict=True) if is_here]
        rows = torch.tensor(is_read, dtype=torch.bool)[batch.sequences].nonzero()[:, 0]
        packed = read_like(batch, pack_samples(read))
        return to_device(packed, self.ranks.device), rows.to(self.ranks.device)


class SampledTeacher(LearnerExtension):
    """Adds coef * (log p_teacher - log p_student) of each sampled token to its advantage, whose
    gradient is that of -coef * KL(student || teacher) of single tokens."""

    is_exact = False

    def __init__(self, teachers: list[Teacher], coef: float):
        self.teachers, self.coef = teachers, coef

    @property
    def models(self) -> tuple[Policy, ...]:
        return tuple(itertools.chain(*(teacher.models for teacher in self.teachers)))

    @property
    def copies(self) -> tuple[WeightSnapshot, ...]:
        return tuple(itertools.chain(*(teacher.copies for teacher in self.teachers)))

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        read = [teacher.packed(batch, samples) for teacher in self.teachers]
        return replace(batch, teacher=TeacherBatch(read=read))

    def annotate(self, batches: list[PackedBatch]) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        outputs: list[list[TeacherOutput]] = [[] for _ in batches]
        for number, teacher in enumerate(self.teachers):
            read = [batch.teacher.read[number] for batch in batches]
            inputs = list(map(teacher_input, batches, read))
            results = teacher.read_all(inputs, self.is_exact)
            for output, pair, of_batch in zip(results, read, outputs, strict=True):
                if pair is not None:
                    output.rows = pair[1]
                of_batch.append(output)
        for batch, of_batch in zip(batches, outputs, strict=True):
            for output in of_batch:
                rows = slice(None) if output.rows is None else output.rows
                kl = batch.rollout_logprobs[rows] - output.logprobs
                add_metrics(metrics, {"teacher_kl_nats": mean_of(kl)})
                self.learn_from(batch, rows, kl)
            batch.teacher.outputs = of_batch
        return metrics

    def learn_from(self, batch: PackedBatch, rows: Tensor | slice, kl: Tensor) -> None:
        """`kl`: KL of the trained tokens in `rows`."""
        advantages = batch.advantages.clone()
        advantages[rows] -= self.coef * kl
        batch.advantages = advantages


class ExactTeacher(SampledTeacher):
    """Adds coef * the divergence of the distributions of each trained token to the loss, with the
    loss's average."""

    is_exact = True

    def __init__(self, teachers: list[Teacher], algorithm: Algorithm):
        super().__init__(teachers, algorithm.teacher_coef)
        self.algorithm = algorithm
        self.form = make_form(algorithm.teacher_loss, algorithm.teacher_beta)
        self.sums: dict[str, Metric] = {}

    def learn_from(self, batch: PackedBatch, rows: Tensor | slice, kl: Tensor) -> None:
        """Leaves advantages as they are."""

    def outputs(self, policy: Policy, batch: PackedBatch) -> Outputs | None:
        """Outputs with a third tensor: [m] divergence from the teachers' outputs. It is returned,
        because FSDP gathers weights for the backward of a forward's outputs."""
        targets: list[TeacherOutput] = batch.teacher.outputs
        if not targets:
            return None
        check_head(policy)

        def with_divergence(
            hidden_MD: Tensor, labels: Tensor, temperature: float
        ) -> tuple[Tensor, ...]:
            student = head_factors(policy.hf, hidden_MD, temperature)
            logprobs, entropy = policy.outputs(hidden_MD, labels, temperature)
            divergence = torch.zeros_like(entropy)
            for target in targets:
                divergence = divergence + target.divergence(student, self.form)
            return logprobs, entropy, divergence

        return with_divergence

    def loss(self, batch: PackedBatch, minibatch: Minibatch, outputs: tuple[Tensor, ...]) -> Tensor:
        losses = outputs[2]
        add_metrics(self.sums, {"teacher_loss_nats": mean_of(losses)})
        if self.algorithm.aggregation == "sequence":
            losses = losses / sequence_sums(torch.ones_like(losses), batch)
        return self.coef * losses.sum() / minibatch.denominator

    def metrics(self) -> dict[str, Metric]:
        sums, self.sums = self.sums, {}
        return sums


def read_like(batch: PackedBatch, read: PackedBatch) -> PackedBatch:
    """The batch that a teacher reads, marked like the learner's batch if another rank has images:
    all ranks then run the vision tower together."""
    if read.images is None and batch.images is not None:
        read = replace(read, images={})
    return read


def teacher_input(batch: PackedBatch, read: ReadBatch | None) -> PackedBatch:
    """The batch that a teacher reads, with the ids that tokens were drawn from as labels."""
    if read is None:
        return batch
    packed, rows = read
    return replace(packed, labels=batch.labels[rows])


def check_head(policy: Policy) -> None:
    if not policy.forward_pass.calls_outputs:
        raise RunError(
            f"--algo.teacher_loss: {policy.hf.name_or_path} has a custom head, whose logits cannot "
            "be computed in tiles; take sampled"
        )


def local_rows(weight_VD: Tensor) -> tuple[Tensor, int, VocabularySplit | None]:
    """(this rank's rows of a head's weight, id of the first row, object that merges ranks)."""
    if not isinstance(weight_VD, DTensor):
        return weight_VD, 0, None
    from rl_core.models.parallel.tensor_parallel import local_slice

    return local_slice(weight_VD)
