"""The policy and the learner of each actor that is trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from rl_core import registry
from rl_core.algorithms import Algorithm
from rl_core.config import Config, LearnerConfig, LoraConfig
from rl_core.distributed import Ranks
from rl_core.learning.learner import Learner, LearnerContext
from rl_core.models.cpu_offload import HostCopies
from rl_core.models.loading import compute_dtype, load_hf_model, load_model_config
from rl_core.models.policy import PackedForward, Policy, blocks_of, without_dropout
from rl_core.types import counter_seed

# An adapter's settings and its seed.
Adapter = tuple[LoraConfig, int]


def is_sharded(config: Config) -> bool:
    """True if a single rank holds weights of a learner as shards."""
    for name in config.trained:
        own = config.of(name)
        if compute_dtype(own) != torch.float32 or own.learner.offload == "always":
            return True
    return False


def make_learners(
    config: Config, algorithms: dict[str, Algorithm], ranks: Ranks, own_parts: Any = None
) -> dict[str, Learner]:
    """The learner of each actor that `algorithms` names, by its own settings. Those that share a
    model train an adapter of it each."""
    learners: dict[str, Learner] = {}
    # Owners first.
    for name in sorted(algorithms, key=lambda name: bool(config.actors[name].share)):
        owner = learners.get(config.actors[name].share)
        shared = owner.policy if owner else None
        own = config.of(name), algorithms[name], name
        learners[name] = make_learner(*own, ranks, shared, learners, own_parts)
    models = itertools.chain(*(learner.models() for learner in learners.values()))
    for model in dict.fromkeys(models):
        registry.choose_forward(model, ranks)
    order = registry.learning_order(config)
    return {name: learners[name] for name in order if name in learners}


def make_learner(
    config: Config,
    algorithm: Algorithm,
    name: str,
    ranks: Ranks,
    shared: Policy | None = None,
    learners: Mapping[str, Learner] | None = None,
    own_parts: Any = None,
) -> Learner:
    """The learner of an actor, with an optimizer that has not stepped yet, and with the parts that
    the algorithm asks for. A reference and a critic start as the model at the start of the run.
    `shared`: the model of which it trains an adapter. `learners`: of all actors, once they are
    made. `own_parts`: a script's loss and optimizer."""
    actor = config.actors[name]
    load = partial(
        make_policy, dtype=compute_dtype(config), ranks=ranks, attention=config.attention
    )
    policy, adapter = shared, f"of_{name}"
    if policy is None:
        adapters = adapters_of(config, name)
        policy = load(
            actor.model,
            learner=config.learner,
            adapters=adapters,
            is_scoring=algorithm.is_scoring,
            is_served=bool(
                adapters and registry.engine_maker(config, None, own_parts).adapter_of(name)
            ),
        )
        adapter = next(iter(adapters), "")
    make = learner_with(config, ranks.size)
    if own_parts:
        make = own_parts.learner(make)
    spec = LearnerContext(
        config=config,
        algorithm=algorithm,
        name=name,
        policy=policy,
        adapter=adapter,
        ranks=ranks,
        learners={} if learners is None else learners,
        load=load,
        make=make,
    )
    extensions = [extend(spec) for is_wanted, extend in registry.PARTS if is_wanted(spec)]
    loss = registry.pair_loss(config.algorithm) if algorithm.is_pairs else None
    if own_parts:
        make = own_parts.actor_learner(make)
    return make(
        config,
        algorithm,
        policy,
        ranks,
        extensions=extensions,
        loss=loss,
        name=name,
        adapter=adapter,
    )


def adapters_of(config: Config, name: str) -> dict[str, Adapter]:
    """The actor's own adapter, if it has one, and those of actors that share its model."""
    adapters = {}
    if config.actors[name].lora.rank:
        adapters["default"] = config.actors[name].lora, counter_seed(config.seed, name)
    for other in config.sharers(name):
        if config.actors[other].is_trained:
            adapters[f"of_{other}"] = config.actors[other].lora, counter_seed(config.seed, other)
    return adapters


def learner_with(config: Config, num_ranks: int) -> Callable[..., Learner]:
    """Learner() with the optimizer that the flags name."""
    learner_class = Learner
    if compute_dtype(config) == torch.float16:
        learner_class = registry.scaled_learner()
    if config.learner.inference_tokens:
        learner_class = registry.joining(learner_class)
    if num_ranks > 1:
        learner_class = registry.with_replicas(learner_class)
    return partial(learner_class, make_optimizer=registry.OPTIMIZERS[config.optim.name]())


def make_policy(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    learner: LearnerConfig | None = None,
    adapters: dict[str, Adapter] | None = None,
    *,
    is_scoring: bool = False,
    is_frozen: bool = False,
    attention: str = "auto",
    is_served: bool = False,
) -> Policy:
    """Weights that are trained in fp32, frozen ones in the dtype of compute; sharded over all ranks
    of a copy if there are several or compute is not in fp32. `learner`: memory and kernels.
    `adapters`: by name."""
    forward_pass = make_forward(
        attention, ranks
    )  # The forward pass is made before the weights are read.
    learner, adapters = learner or LearnerConfig(), adapters or {}
    checkpoint_dtype = load_model_config(path).dtype or torch.float32
    cpu_offload = learner.offload == "always"
    is_split = ranks.mesh.num_shards > 1 or dtype != torch.float32 or cpu_offload
    trains_no_weight = is_frozen or (adapters and dtype == checkpoint_dtype)
    dtype_held = dtype if trains_no_weight else torch.float32
    make, quantized, weights = Policy, {}, {}
    if adapters:
        make = partial(registry.lora().AdapterPolicy, adapters, path, is_served)
        quantized = registry.lora().quantization(adapters, dtype, ranks.device)
    elif ranks.mesh.tp > 1:
        make = registry.tensor_parallel_policy()
    if is_split and not quantized:
        hf, weights = registry.shard_loading().load_on_meta(path, dtype_held, is_scoring)
    else:
        hf = load_hf_model(path, dtype_held, ranks.device, is_scoring, **quantized)
    # Weights that an engine shares stay on the device.
    is_shared = not is_split and (not adapters or (is_served and not quantized))
    leaves_device = learner.offload == "phase" and not is_shared
    if is_frozen:
        leaves_device = ranks.device.type == "cuda"
    policy = make(
        hf,
        checkpoint_dtype,
        dtype,
        forward_pass,
        registry.activations_on_host() if learner.activations == "offload" else nullcontext,
        HostCopies(ranks.device, is_constant=is_frozen) if leaves_device else None,
        registry.logprob_kernel(ranks.device),
        registry.support_logprobs,
    )
    prepare(policy, is_frozen, recomputes=learner.activations == "recompute")
    if is_split:
        registry.shard_loading().shard_policy(policy, dtype, ranks, cpu_offload)
    if weights:
        weights_on = torch.device("cpu") if cpu_offload else ranks.device
        registry.shard_loading().load_shards(policy, weights, ranks.device, weights_on)
    for name, (_, seed) in adapters.items():
        registry.lora().draw_adapter(hf, seed, name)
    if learner.kernels == "compile":
        compile_blocks(policy)
    registry.choose_decoder(policy, learner)
    return policy


def prepare(policy: Policy, is_frozen: bool, recomputes: bool) -> None:
    policy.train()
    without_dropout(policy.hf)
    if is_frozen:
        policy.requires_grad_(False)
    if recomputes:
        # transformers 5.23 renamed it; both default to the non-reentrant form.
        older = policy.hf.gradient_checkpointing_enable
        getattr(policy.hf, "activation_checkpointing_enable", older)()


def make_forward(attention: str, ranks: Ranks) -> PackedForward:
    """The forward pass of a model with the attention kernel of this name."""
    kernel = registry.find_kernel(attention, ranks.device)
    if ranks.mesh.cp > 1:
        return registry.ring_forward(kernel, ranks.cp_group)
    return PackedForward(kernel)


def compile_blocks(policy: Policy) -> None:
    """torch compiles each block's MLP and norms at their first use, once for all blocks and sizes
    of batches. Attention is not compiled: its Python differs from batch to batch."""
    for block in blocks_of(policy.hf):
        for name, module in block.named_children():
            if name != "self_attn":
                module.compile(dynamic=True)
