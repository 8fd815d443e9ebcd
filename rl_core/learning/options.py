"""Options of learners: optimizer, loss, learning order, and the samples of a step. extensions.py
has the extensions.

Each function imports its module when the option is used.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rl_core.algorithms import Algorithm
from rl_core.config import Config
from rl_core.data.episodes import baseline_groups

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.learning.advantages import AdvantageFn
    from rl_core.learning.learner_context import Loss, MakeOptimizer
    from rl_core.types import TrainingSample, Trajectory


def adamw() -> MakeOptimizer:
    from rl_core.learning.optimizers import adamw

    return adamw


def sgd() -> MakeOptimizer:
    from rl_core.learning.optimizers import sgd

    return sgd


def adamw8bit() -> MakeOptimizer:
    from rl_core.learning.adamw8bit import adamw8bit

    return adamw8bit


def muon() -> MakeOptimizer:
    from rl_core.learning.muon import muon

    return muon


# Values of --optim.name.
OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "adamw8bit": adamw8bit, "muon": muon}


def pair_loss(algorithm: Algorithm) -> Loss | None:
    """The loss of pairs and labelled replies; None if tokens are trained."""
    if not algorithm.is_pairs:
        return None
    from rl_core.learning.preference import LOSSES

    return LOSSES[algorithm.objective]


def learning_order(config: Config) -> list[str]:
    """The trained actors in the order in which they learn: students before their teachers."""
    if not any(config.of(name).algo.teacher for name in config.trained):
        return config.trained
    from rl_core.learning.teachers.build_teacher import order_by_teacher

    return order_by_teacher(config)


def step_samples(
    config: Config,
    algorithms: dict[str, Algorithm],
    trajectories: list[Trajectory],
    advantage_fns: dict[str, AdvantageFn | None],
    ranks: Ranks,
) -> dict[str, list[TrainingSample]]:
    """This rank's training samples from the episodes of a step, by trained actor. `advantage_fns`:
    by environment. Every rank must call it."""
    samples = {}
    for name, algorithm in algorithms.items():
        groups = baseline_groups([t for t in trajectories if t.actor == name])
        longest = config.actors[name].max_tokens or config.max_tokens
        samples[name] = actor_samples(
            config.of(name), algorithm, groups, advantage_fns, longest, ranks
        )
    return samples


def actor_samples(
    config: Config,
    algorithm: Algorithm,
    groups: list[list[Trajectory]],
    advantage_fns: dict[str, AdvantageFn | None],
    max_tokens: int,
    ranks: Ranks,
) -> list[TrainingSample]:
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
