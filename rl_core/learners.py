"""Builds the learner of each trained actor."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType

import torch

from rl_core.algorithms import Algorithm
from rl_core.config import Config
from rl_core.distributed import Ranks
from rl_core.learning.extensions import build_learner
from rl_core.learning.learner import Learner
from rl_core.learning.learner_context import LearnerContext
from rl_core.learning.options import OPTIMIZERS, learning_order
from rl_core.learning.padded_forward import choose_forward
from rl_core.learning.policies import Adapter, make_policy
from rl_core.models.loading import compute_dtype
from rl_core.run.plan.custom_components import CustomComponents
from rl_core.types import counter_seed


def is_sharded(config: Config) -> bool:
    """True if even a single rank holds the weights of a learner as FSDP shards."""
    for name in config.trained:
        actor_config = config.of(name)
        if compute_dtype(actor_config) != torch.float32 or actor_config.learner.offload == "always":
            return True
    return False


def make_learners(
    config: Config,
    algorithms: dict[str, Algorithm],
    ranks: Ranks,
    served: Collection[str] = (),
    custom: CustomComponents | None = None,
) -> dict[str, Learner]:
    """Builds the learner of each actor in `algorithms` with the actor's settings. Learners that
    share a model train one adapter each. `served`: Plan.served."""
    learners: dict[str, Learner] = {}
    # Owners first.
    for name in sorted(algorithms, key=lambda name: bool(config.actors[name].lora_base)):
        learners[name] = make_learner(
            config.of(name), algorithms[name], name, ranks, learners, served, custom
        )
    models = itertools.chain(*(learner.models() for learner in learners.values()))
    for model in dict.fromkeys(models):
        choose_forward(model, ranks)
    return {name: learners[name] for name in learning_order(config) if name in learners}


def make_learner(
    config: Config,
    algorithm: Algorithm,
    name: str,
    ranks: Ranks,
    learners: Mapping[str, Learner] = MappingProxyType({}),
    served: Collection[str] = (),
    custom: CustomComponents | None = None,
) -> Learner:
    """Builds an actor's learner with a new optimizer and the extensions of its algorithm. A
    reference and a critic start as the run's initial model. `learners`: those built so far, the
    owner of a shared model among them. `custom`: a script's loss and optimizer."""
    custom = custom or CustomComponents()
    load = partial(
        make_policy,
        dtype=compute_dtype(config),
        ranks=ranks,
        attention=config.attention,
        max_image_pixels=config.data.max_image_pixels,
    )
    actor, adapter = config.actors[name], f"of_{name}"
    if owner := learners.get(actor.lora_base or ""):
        policy = owner.policy
    else:
        adapters = adapters_of(config, name) if config.has_adapters else {}
        adapter = next(iter(adapters), "")
        assert actor.model
        policy = load(
            actor.model,
            learner=config.learner,
            adapters=adapters,
            is_scoring=algorithm.is_scoring,
            is_served=name in served,
        )
    context = LearnerContext(
        config=config,
        algorithm=algorithm,
        name=name,
        policy=policy,
        adapter=adapter,
        ranks=ranks,
        learners=learners,
        load=load,
        make_optimizer=custom.make_optimizer or OPTIMIZERS[config.optim.name](),
        token_loss=custom.token_loss,
    )
    return build_learner(context)


def adapters_of(config: Config, name: str) -> dict[str, Adapter]:
    """The actor's adapter, if it has one, and the adapters of actors that share its model."""
    adapters = {}
    if config.actors[name].lora.rank:
        adapters["default"] = config.actors[name].lora, counter_seed(config.seed, name)
    for other in config.sharers(name):
        if config.actors[other].is_trained:
            adapters[f"of_{other}"] = config.actors[other].lora, counter_seed(config.seed, other)
    return adapters
