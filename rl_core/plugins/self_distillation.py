"""Self-distillation: the policy is its own teacher, which reads more than it did when it answered,
such as the solution or what its environment said (OPSD, arXiv:2601.18734; SDPO, arXiv:2601.20802).
"""

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
from rl_core.learning.learner import LearnerContext
from rl_core.learning.minibatches import to_device
from rl_core.plugins.sequence_shards import shard_sequences
from rl_core.plugins.teacher import ModelTeacher, OwnBatch, TeacherOutput
from rl_core.plugins.teacher_prompts import self_taught, turns_as_read
from rl_core.plugins.weights_copy import WeightSnapshot
from rl_core.types import PackedBatch, TrainingSample, Trajectory


class SelfTeacher(ModelTeacher):
    """The policy of the start, the newest one, or the exponential mean over its steps."""

    is_fixed = False
    models = ()  # the learner has it

    def __init__(self, spec: LearnerContext):
        super().__init__(spec.policy, spec.config.sampling.temperature)
        algorithm, self.ranks = spec.algorithm, spec.ranks
        # A policy that trains an adapter is without it what it was at the start.
        is_start = algorithm.teacher_update == "start"
        self.adapter = "" if is_start else spec.adapter
        if algorithm.teacher_update == "ema":
            self.copies = (WeightSnapshot(spec, "teacher", 1, algorithm.teacher_decay),)
        elif is_start and not spec.policy.adapters:
            self.copies = (WeightSnapshot(spec, "teacher"),)

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> OwnBatch:
        """The samples that have a teacher, behind what it reads."""
        is_taught = [sample.teacher_ids is not None for sample in samples]
        own = [as_teacher_reads(sample) for sample in samples if sample.teacher_ids is not None]
        rows = torch.tensor(is_taught, dtype=torch.bool)[batch.sequences].nonzero()[:, 0]
        mesh, device = self.ranks.mesh, self.ranks.device
        read = pack_samples(own, mesh.cp)
        if mesh.cp > 1:
            read = shard_sequences(read, mesh.cp, self.ranks.cp_rank)
            read = dataclasses.replace(read, shard=to_device(read.shard, device))
        return to_device(read, device), rows.to(device)

    def read_all(self, batches: list[PackedBatch], is_exact: bool) -> list[TeacherOutput]:
        with ExitStack() as stack:
            for weights in self.copies:
                stack.enter_context(weights.in_place())
            return super().read_all(batches, is_exact)


def as_teacher_reads(sample: TrainingSample) -> TrainingSample:
    """The sample's trained tokens, and what stands between them, behind what its teacher reads."""
    first, before = int(sample.loss_mask.argmax()), sample.teacher_ids
    ids, mask = sample.token_ids[first:], sample.loss_mask[first:]
    zeros = np.zeros(len(before) + len(ids))
    return TrainingSample(
        token_ids=np.concatenate([before, ids]),
        loss_mask=np.concatenate([np.zeros(len(before), bool), mask]),
        rollout_logprobs=zeros,
        policy_versions=zeros,
        advantages=zeros,
    )


def samples_maker(config: Config, algorithm: Algorithm) -> MakeSamples:
    is_alone = algorithm.advantage == "zero"
    return partial(taught_samples, envs=self_taught(config), is_teacher_alone=is_alone)


def taught_samples(
    t: Trajectory,
    advantages: list[float],
    trained: set[str],
    envs: list[str],
    is_teacher_alone: bool,
) -> list[TrainingSample]:
    """The trajectory's samples, each with what its teacher reads. In `envs` the policy is its own
    teacher: where the teacher alone says what is good, an episode without one has no sample."""
    if is_teacher_alone and t.env in envs and not t.teacher_ids:
        return []
    before = set(trained)
    samples = samples_from_turns(t.turns, advantages, t.group_id, trained)
    if not t.teacher_ids:
        return samples
    found = []
    read = samples_from_turns(turns_as_read(t), 0.0, t.group_id, before)
    for sample, same in zip(samples, read, strict=True):
        ids = same.token_ids[: int(same.loss_mask.argmax())]
        found.append(dataclasses.replace(sample, teacher_ids=ids))
    return found
