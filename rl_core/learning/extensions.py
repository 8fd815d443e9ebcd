"""Extensions of a learner: when each is used, and how it is made. Modules of unused extensions are
not imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.options import pair_loss
from rl_core.models.loading import compute_dtype
from rl_core.models.routers import find_routers

if TYPE_CHECKING:
    from rl_core.learning.learner_extension import LearnerExtension


def common(c: LearnerContext) -> Iterator[LearnerExtension]:
    """Extensions of policies and critics."""
    if c.ranks.size > 1:
        from rl_core.learning.gradient_averaging import GradientAveraging

        yield GradientAveraging()
    if compute_dtype(c.config) == torch.float16:
        from rl_core.learning.fp16 import LossScale

        yield LossScale()


def of_algorithm(c: LearnerContext) -> Iterator[LearnerExtension]:
    algorithm = c.algorithm
    if algorithm.needs_reference:
        from rl_core.learning.kl import make_reference

        yield make_reference(c)
    if algorithm.objective == "kto":
        from rl_core.learning.kl import MismatchedKL

        yield MismatchedKL(c)
    if algorithm.has_critic:
        from rl_core.learning.ppo import make_critic

        yield make_critic(c, list(common(c)))
    if algorithm.penalises_advantages:
        from rl_core.learning.kl import KLPenalty

        yield KLPenalty(algorithm)
    if algorithm.teacher:
        from rl_core.learning.teachers.build_teacher import make_teacher

        yield make_teacher(c)
    if algorithm.normalize == "batch":
        from rl_core.learning.whitening import BatchWhitening

        yield BatchWhitening(c.ranks)
    if algorithm.is_rl and c.config.sampling.top_k:
        from rl_core.learning.truncation import TruncationSupport

        yield TruncationSupport(c.name)


def of_model(c: LearnerContext) -> Iterator[LearnerExtension]:
    # torch.compile would trace hooks of routers.
    if c.config.learner.kernels != "compile" and find_routers(c.policy.hf)[1]:
        from rl_core.learning.moe import Experts

        actor = c.config.actors[c.name]
        yield Experts(c.policy, c.ranks, actor.router_aux_loss_coef)
        if actor.router_replay:
            from rl_core.learning.router_replay import RouterReplay

            yield RouterReplay(c.policy.hf)
    if c.ranks.mesh.cp > 1:
        from rl_core.learning.sequence_shards import SequenceShards

        yield SequenceShards(c.ranks)


def build_learner(context: LearnerContext) -> Learner:
    """A learner with a new optimizer and its extensions, which see batches in the order of this
    file."""
    extensions = [*common(context), *of_algorithm(context), *of_model(context)]
    return Learner(context, extensions, pair_loss(context.algorithm))
