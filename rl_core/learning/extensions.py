"""Extensions of a learner: when each is used, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from rl_core.learning.fp16 import LossScale
from rl_core.learning.gradient_averaging import GradientAveraging
from rl_core.learning.kl import KLPenalty, make_reference
from rl_core.learning.learner import Learner, LearnerContext, LearnerExtension
from rl_core.learning.moe import Experts, find_routers
from rl_core.learning.options import pair_loss
from rl_core.learning.ppo import make_critic
from rl_core.learning.router_replay import RouterReplay
from rl_core.learning.sequence_shards import SequenceShards
from rl_core.learning.teachers.build_teacher import make_teacher
from rl_core.learning.truncation import TruncationSupport
from rl_core.learning.whitening import BatchWhitening
from rl_core.models.loading import compute_dtype

# (is it used?, what makes it).
ExtensionOption = tuple[
    Callable[[LearnerContext], object], Callable[[LearnerContext], LearnerExtension]
]


def has_routers(c: LearnerContext) -> bool:
    """True if hooks of the model's routers work; torch.compile would trace them."""
    return c.config.learner.kernels != "compile" and bool(find_routers(c.policy.hf)[1])


def replays_routers(c: LearnerContext) -> bool:
    return c.config.actors[c.name].router_replay and has_routers(c)


def make_experts(c: LearnerContext) -> LearnerExtension:
    return Experts(c.policy, c.ranks, c.config.actors[c.name].router_aux_loss_coef)


# Extensions see batches in this order. Critics have the common ones too.
COMMON: tuple[ExtensionOption, ...] = (
    (lambda c: c.ranks.size > 1, lambda c: GradientAveraging()),
    (lambda c: compute_dtype(c.config) == torch.float16, lambda c: LossScale()),
)
OF_ALGORITHM: tuple[ExtensionOption, ...] = (
    (lambda c: c.algorithm.needs_reference, make_reference),
    (lambda c: c.algorithm.has_critic, lambda c: make_critic(c, choose_extensions(c, COMMON))),
    (lambda c: c.algorithm.penalises_advantages, lambda c: KLPenalty(c.algorithm)),
    (lambda c: c.algorithm.teacher, make_teacher),
    (lambda c: c.algorithm.normalize == "batch", lambda c: BatchWhitening(c.ranks)),
    (
        lambda c: c.algorithm.is_rl and c.config.sampling.top_k,
        lambda c: TruncationSupport(c.name),
    ),
)
OF_MODEL: tuple[ExtensionOption, ...] = (
    (has_routers, make_experts),
    (replays_routers, lambda c: RouterReplay(c.policy.hf)),
    (lambda c: c.ranks.mesh.cp > 1, lambda c: SequenceShards(c.ranks)),
)
EXTENSIONS: tuple[ExtensionOption, ...] = (*COMMON, *OF_ALGORITHM, *OF_MODEL)


def choose_extensions(
    context: LearnerContext, options: Iterable[ExtensionOption] = EXTENSIONS
) -> list[LearnerExtension]:
    return [make(context) for is_used, make in options if is_used(context)]


def build_learner(
    context: LearnerContext,
    kept: Sequence[LearnerExtension] = (),
    options: Iterable[ExtensionOption] = EXTENSIONS,
) -> Learner:
    """A learner with a new optimizer, the extensions of `options`, and the extensions `kept`."""
    return Learner(
        context.config,
        context.algorithm,
        context.policy,
        context.ranks,
        context.make_optimizer,
        extensions=[*choose_extensions(context, options), *kept],
        loss=pair_loss(context.algorithm),
        token_loss=context.token_loss,
        name=context.name,
        adapter=context.adapter,
    )
