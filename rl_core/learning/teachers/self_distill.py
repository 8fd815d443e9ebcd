"""Self-distillation: the policy is its own teacher and reads a longer prompt than the student, such
as one with the solution or the environment's feedback (OPSD, arXiv:2601.18734; SDPO,
arXiv:2601.20802)."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from rl_core.algorithms import Algorithm
from rl_core.config import Config
from rl_core.data.packing import pack_samples
from rl_core.data.samples import samples_from_turns
from rl_core.learning.advantages import MakeSamples
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.minibatches import to_device
from rl_core.learning.sequence_shards import shard_sequences
from rl_core.learning.teachers.distill import ModelTeacher, ReadBatch, TeacherOutput, read_like
from rl_core.models.policy import Policy
from rl_core.sampling.teacher_prompts import turns_as_read
from rl_core.types import PackedBatch, TrainingSample, Trajectory


class SelfTeacher(ModelTeacher):
    """The initial policy, the newest one, or an exponential moving average (EMA) over its steps."""

    is_fixed = False

    def __init__(self, context: LearnerContext):
        algorithm, self.ranks = context.algorithm, context.ranks
        # A policy with adapters is the initial policy without them.
        is_start = algorithm.teacher_update == "start"
        adapter = "" if is_start else context.adapter
        super().__init__(context.policy, context.config.sampling.temperature, adapter)
        if algorithm.teacher_update == "ema":
            self.copies = (context.snapshot("teacher", 1, algorithm.teacher_decay),)
        elif is_start and not context.policy.adapters:
            self.copies = (context.snapshot("teacher"),)

    @property
    def models(self) -> tuple[Policy, ...]:
        """None: the learner has the model."""
        return ()

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> ReadBatch:
        """The samples that have a teacher's prompt, with that prompt."""
        is_taught = [sample.teacher_ids is not None for sample in samples]
        read_samples = [as_teacher_reads(s) for s in samples if s.teacher_ids is not None]
        rows = torch.tensor(is_taught, dtype=torch.bool)[batch.sequences].nonzero()[:, 0]
        mesh, device = self.ranks.mesh, self.ranks.device
        read = read_like(batch, pack_samples(read_samples, mesh.cp))
        if mesh.cp > 1:
            read = shard_sequences(read, self.ranks)
        return to_device(read, device), rows.to(device)

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        with ExitStack() as stack:
            for weights in self.copies:
                stack.enter_context(weights.in_place())
            return super().read_all(batches, is_exact)


def as_teacher_reads(sample: TrainingSample) -> TrainingSample:
    """The sample with the teacher's prompt before its trained tokens and the tokens between
    them."""
    first, before = int(sample.loss_mask.argmax()), sample.teacher_ids
    assert before is not None
    ids, mask = sample.token_ids[first:], sample.loss_mask[first:]
    zeros = np.zeros(len(before) + len(ids))
    return TrainingSample(
        token_ids=np.concatenate([before, ids]),
        loss_mask=np.concatenate([np.zeros(len(before), bool), mask]),
        rollout_logprobs=zeros,
        policy_versions=zeros,
        advantages=zeros,
        images=sample.images,
    )


def samples_maker(config: Config, algorithm: Algorithm) -> MakeSamples:
    is_alone = algorithm.advantage == "zero"
    return partial(taught_samples, envs=config.self_taught, is_teacher_alone=is_alone)


def taught_samples(
    t: Trajectory,
    advantages: list[float],
    trained: set[str],
    envs: list[str],
    is_teacher_alone: bool,
) -> list[TrainingSample]:
    """The trajectory's samples, each with the prompt of its teacher. In `envs` the policy is its
    own teacher: if the loss is the teacher's alone, an episode without a teacher's prompt has no
    sample."""
    if is_teacher_alone and t.env in envs and not t.teacher_ids:
        return []
    before = set(trained)
    samples = samples_from_turns(t.turns, advantages, t.group_id, trained)
    if not t.teacher_ids:
        return samples
    taught = []
    read = samples_from_turns(turns_as_read(t), 0.0, t.group_id, before)
    for sample, same in zip(samples, read, strict=True):
        ids = same.token_ids[: int(same.loss_mask.argmax())]
        taught.append(dataclasses.replace(sample, teacher_ids=ids, images=same.images))
    return taught
