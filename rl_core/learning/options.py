"""Options of learners: optimizer, extensions, loss, learning order, and the samples of a step.

Each function imports its module when the option is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rl_core.algorithms import Algorithm
from rl_core.config import Config

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.learning.advantages import AdvantageFn
    from rl_core.learning.learner import Learner, LearnerContext, LearnerExtension, Loss
    from rl_core.models.policy import Policy
    from rl_core.types import TrainingSample, Trajectory


def adamw() -> Callable:
    from rl_core.learning.optimizers import adamw

    return adamw


def sgd() -> Callable:
    from rl_core.learning.optimizers import sgd

    return sgd


def adamw8bit() -> Callable:
    from rl_core.learning.optimizers import adamw8bit

    return adamw8bit


# Values of --optim.name.
OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "adamw8bit": adamw8bit}


def reference(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.kl import make_reference

    return make_reference(context)


def critic(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.ppo import make_critic

    return make_critic(context)


def kl_penalty(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.kl import KLPenalty

    return KLPenalty(context.algorithm)


def teacher(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.teachers.build_teacher import make_teacher

    return make_teacher(context)


def batch_whitening(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.whitening import BatchWhitening

    return BatchWhitening(context.ranks)


def experts(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.moe import make_experts
    from rl_core.learning.router_replay import Replay

    return make_experts(context, Replay)


def truncation_support(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.truncation import TruncationSupport

    return TruncationSupport(context.name)


def sequence_shards(context: LearnerContext) -> LearnerExtension:
    from rl_core.learning.sequence_shards import SequenceShards

    return SequenceShards(context.ranks)


def has_routers(context: LearnerContext) -> bool:
    """True if hooks of the model's routers work; torch.compile would trace them."""
    from rl_core.models.policy import backbone

    outputs = getattr(backbone(context.policy.hf), "_can_record_outputs", None) or {}
    return "router_logits" in outputs and context.config.learner.kernels != "compile"


# (is it used?, what makes it), in the order in which extensions see batches.
EXTENSIONS = (
    (lambda context: context.algorithm.needs_reference, reference),
    (lambda context: context.algorithm.has_critic, critic),
    (lambda context: context.algorithm.penalises_advantages, kl_penalty),
    (lambda context: context.algorithm.teacher, teacher),
    (lambda context: context.algorithm.normalize == "batch", batch_whitening),
    (has_routers, experts),
    (lambda context: context.algorithm.is_rl and context.config.sampling.top_k, truncation_support),
    (lambda context: context.ranks.mesh.cp > 1, sequence_shards),
)


def choose_extensions(
    context: LearnerContext, without: Sequence[Callable] = ()
) -> list[LearnerExtension]:
    """The extensions of a learner. `without`: rows of EXTENSIONS that are left out."""
    return [
        make(context) for is_used, make in EXTENSIONS if make not in without and is_used(context)
    ]


def learner_factory(
    config: Config, num_ranks: int, make_optimizer: Callable | None = None
) -> Callable[..., Learner]:
    """Makes learners as Learner() does, with the optimizer that --optim.name names, or a script's,
    and with the extensions that actors and critics have in common."""
    import torch

    from rl_core.learning.learner import Learner
    from rl_core.models.loading import compute_dtype

    make_optimizer = make_optimizer or OPTIMIZERS[config.optim.name]()
    common: list[type[LearnerExtension]] = []
    if config.learner.logprob_microbatch_tokens:
        from rl_core.learning.no_grad_batches import JoinedBatches

        common.append(JoinedBatches)
    if num_ranks > 1:
        from rl_core.learning.gradient_averaging import GradientAveraging

        common.append(GradientAveraging)
    if compute_dtype(config) == torch.float16:
        from rl_core.learning.fp16 import LossScale

        common.append(LossScale)

    def make(
        config: Config,
        algorithm: Algorithm,
        policy: Policy,
        ranks: Ranks,
        extensions: Iterable[LearnerExtension] = (),
        **settings: Any,
    ) -> Learner:
        return Learner(
            config,
            algorithm,
            policy,
            ranks,
            make_optimizer,
            extensions=[*(make_extension() for make_extension in common), *extensions],
            **settings,
        )

    return make


def pair_loss(config: Config, algorithm: Algorithm) -> Loss | None:
    """The loss of DPO and reward models; None if tokens are trained."""
    if not algorithm.is_pairs:
        return None
    from rl_core.learning.preference import LOSSES

    return LOSSES[config.algorithm]


def learning_order(config: Config) -> list[str]:
    """The trained actors in the order in which they learn: students before their teachers."""
    if not any(config.of(name).algo.teacher for name in config.trained):
        return config.trained
    from rl_core.learning.teachers.build_teacher import order_by_teacher

    return order_by_teacher(config)


def step_samples(
    config: Config,
    algorithm: Algorithm,
    groups: list[list[Trajectory]],
    advantage_fns: dict[str, AdvantageFn | None],
    max_tokens: int,
    ranks: Ranks,
) -> list[TrainingSample]:
    """Training samples of one actor's groups of a step. `config`: with the actor's own settings.
    Every rank must call it."""
    from rl_core.learning.advantages import samples_of

    normalised = advantages_of = make_samples = None
    if algorithm.dynamic_sampling_rounds:
        from rl_core.learning.signal import has_signal

        groups = [group for group in groups if has_signal(group, algorithm)]
    if algorithm.gigpo_coef and any(t.has_state_keys for group in groups for t in group):
        from rl_core.learning import gigpo

        advantages_of = gigpo.turn_advantages
    if algorithm.normalize in ("env", "task"):
        from rl_core.learning import whitening

        normalised = partial(whitening.normalised, algorithm.normalize, ranks)
    if algorithm.teacher:
        from rl_core.learning.teachers.self_distill import samples_maker

        make_samples = samples_maker(config, algorithm)
    return samples_of(
        groups,
        algorithm,
        max_tokens,
        advantage_fns,
        normalised=normalised,
        advantages_of=advantages_of,
        make_samples=make_samples,
    )
