"""Learners and engines: a learner for each trained actor, an engine for each actor or shared
model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import nn

from rl_core import registry
from rl_core.algorithms import Algorithm
from rl_core.config import Config, LearnerConfig, LoraConfig
from rl_core.data.chat import Chat
from rl_core.distributed import Ranks
from rl_core.host_copies import HostCopies
from rl_core.learning.learner import Learner, LearnerPart
from rl_core.learning.loading import (
    load_hf_model,
    load_model_config,
    on_meta,
)
from rl_core.learning.policy import (
    PackedForward,
    Policy,
    backbone,
    blocks_of,
    without_dropout,
)
from rl_core.sampling.engine import Engine, EngineSpec
from rl_core.sampling.weights import load_weights
from rl_core.types import counter_seed

# Hosts of servers that see this machine's shared memory.
HERE = (None, "127.0.0.1", "localhost", "::1")


def choose_engine(config: Config, num_ranks: int, is_planned: bool = False) -> Config:
    """--engine auto becomes what it stands for here. Raises ValueError if that cannot be done, here
    or, if it is only planned, anywhere."""
    if config.engine == "auto":
        actors = config.actors
        owners = [actors[actor.share] for actor in actors.values() if actor.share in actors]
        in_4_bits = any(owner.lora.quantize != "none" for owner in owners)
        config = replace(config, engine=registry.auto_engine(must_share=in_4_bits))
    registry.check_options(config)
    if config.is_rl:
        for name, actor in config.actors.items():
            if not actor.api:
                engine_class(config, name).check(config, name, is_planned)
    servers = {
        f"--actors.{name}.engine_urls": len(actor.servers) for name, actor in config.actors.items()
    }
    for flag, n in ({"--engine_tp": config.engine_tp} | servers).items():
        if n and num_ranks % n:
            fits = max(d for d in range(1, n) if num_ranks % d == 0)
            raise ValueError(
                f"{flag} ({n}) must divide the {num_ranks} ranks that sample; try {fits}"
            )
    return config


def engine_class(config: Config, name: str) -> type[Engine]:
    """What samples for an actor whose model is here."""
    if config.actors[name].servers:
        return registry.SERVED()
    return registry.ENGINES[config.engine]()


def compute_dtype(config: Config) -> torch.dtype:
    if config.learner.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, config.learner.dtype)


def is_sharded(config: Config) -> bool:
    """Whether one rank alone holds its weights as shards."""
    return compute_dtype(config) != torch.float32 or config.learner.offload == "always"


def make_learners(config: Config, algorithm: Algorithm, ranks: Ranks) -> dict[str, Learner]:
    """The learner of each actor that is trained. Those that share a model train an adapter of it
    each. Each model computes packed batches, or rows of its own if those differ."""
    learners = {}
    # Owners first.
    for name in sorted(config.trained, key=lambda name: bool(config.actors[name].share)):
        owner = config.actors[name].share
        learners[name] = make_learner(
            config, algorithm, name, ranks, owner and learners[owner].policy
        )
    for model in {
        id(model): model for learner in learners.values() for model in learner.models()
    }.values():
        registry.choose_forward()(model, ranks)
    return {name: learners[name] for name in config.trained}


def make_learner(
    config: Config, algorithm: Algorithm, name: str, ranks: Ranks, shared: Policy | None = None
) -> Learner:
    """The learner of an actor, with an optimizer that has not stepped yet, and with the reference
    and the critic that the algorithm asks for. Both start as the model at the start of the run.
    `shared`: the model of which it trains an adapter."""
    actor, policy, dtype = config.actors[name], shared, compute_dtype(config)
    if actor.lr is not None:
        config = replace(config, optim=replace(config.optim, lr=actor.lr))
    if policy is None:
        names = {name: "default"} if actor.lora.rank else {}
        names |= {n: f"of_{n}" for n in config.sharers(name) if config.actors[n].is_trained}
        adapters = {names[n]: (config.actors[n].lora, counter_seed(config.seed, n)) for n in names}
        policy = make_policy(
            actor.model,
            dtype,
            ranks,
            config.learner,
            adapters,
            is_scoring=algorithm.is_scoring,
            attention=config.attention,
            is_served=bool(adapter_of(config, name)),
        )
    make = learner_with(config)
    parts = []
    if algorithm.needs_reference:
        parts.append(make_reference_part(config, algorithm, actor.model, policy, ranks))
    if algorithm.has_critic:
        parts.append(make_critic(config, algorithm, actor.model, ranks, name))
    parts += advantage_parts(algorithm, ranks)
    parts += make_experts(config, name, policy, ranks)
    if ranks.mesh.cp > 1:
        parts.append(registry.sequence_shards()(ranks))
    adapter = next(iter(policy.adapters), "") if shared is None else f"of_{name}"
    loss = registry.pair_loss(config.algorithm) if algorithm.is_pairs else None
    return make(
        config, algorithm, policy, ranks, parts=parts, loss=loss, name=name, adapter=adapter
    )


def advantage_parts(algorithm: Algorithm, ranks: Ranks) -> list[LearnerPart]:
    """What changes advantages once they are those of tokens, in this order."""
    parts = []
    if algorithm.penalises_advantages:
        parts.append(registry.kl_penalty()(algorithm))
    if algorithm.normalize == "batch":
        parts.append(registry.batch_normalised()(ranks))
    return parts


def learner_with(config: Config) -> Callable[..., Learner]:
    """Learner() with the optimizer that the flags name."""
    return partial(Learner, make_optimizer=registry.OPTIMIZERS[config.optim.name]())


def make_experts(config: Config, name: str, policy: Policy, ranks: Ranks) -> list[LearnerPart]:
    """What tells the load of a model's experts, and evens it; [] for a model without some."""
    outputs = getattr(backbone(policy.hf), "_can_record_outputs", None) or {}
    compiled = config.learner.kernels == "compile"  # would trace what is put around routers
    if compiled or "router_logits" not in outputs:
        return []
    actor = config.actors[name]
    replay = registry.replay() if actor.router_replay else None
    return registry.make_experts()(policy, ranks, actor.router_aux_loss_coef, replay)


def make_reference_part(
    config: Config, algorithm: Algorithm, path: str, policy: Policy, ranks: Ranks
) -> LearnerPart:
    """The model at `path` as a reference; of a policy with adapters itself, without them."""
    model = policy
    if not policy.adapters:
        model = make_reference(path, compute_dtype(config), ranks, config.attention)
    temperature = config.sampling.temperature if algorithm.is_rl else 1.0
    return registry.reference()(model, temperature)


def make_critic(
    config: Config, algorithm: Algorithm, path: str, ranks: Ranks, name: str = "policy"
) -> LearnerPart:
    """A critic, sharded as the policy is: --critic.model, or the model at `path` with a value of 0
    everywhere."""
    how = {"is_scoring": True, "attention": config.attention}
    path = config.critic.model or path
    model = make_policy(path, compute_dtype(config), ranks, config.learner, **how)
    return registry.critic()(config, algorithm, model, ranks, learner_with(config), name)


def make_policy(
    path: str,
    dtype: torch.dtype,
    ranks: Ranks,
    learner: LearnerConfig | None = None,
    adapters: dict[str, tuple[LoraConfig, int]] | None = None,
    *,
    is_scoring: bool = False,
    is_frozen: bool = False,
    attention: str = "auto",
    is_served: bool = False,
) -> Policy:
    """Weights that are trained in fp32, frozen ones in the dtype of compute; sharded over all ranks
    if there are several or compute is not in fp32. `learner`: memory and kernels. `adapters`: by
    name, each with its seed."""
    forward_pass = make_forward(attention, ranks)  # before the weights are read
    learner, adapters = learner or LearnerConfig(), adapters or {}
    loras = {name: lora for name, (lora, _) in adapters.items()}
    checkpoint_dtype = load_model_config(path).dtype or torch.float32
    cpu_offload = learner.offload == "always"
    is_split = ranks.size > 1 or dtype != torch.float32 or cpu_offload
    # FSDP moves a block at a time from the CPU.
    device = torch.device("cpu") if is_split else ranks.device
    trains_no_weight = is_frozen or (loras and dtype == checkpoint_dtype)
    dtype_held = dtype if trains_no_weight else torch.float32
    quantized = {}
    if loras:
        quantized = registry.quantization()(loras["default"], dtype, ranks.device)
    weights = {}
    if is_split and not quantized:
        hf, weights = registry.load_on_meta()(path, dtype_held, is_scoring)
    else:
        hf = load_hf_model(path, dtype_held, device, is_scoring, **quantized)
    # What an engine shares stays on the device.
    is_shared = not is_split and (not loras or (is_served and not quantized))
    leaves_device = learner.offload == "phase" and not is_shared
    if is_frozen:
        leaves_device = ranks.device.type == "cuda"
    policy = policy_class(loras, path, is_served, ranks)(
        hf,
        checkpoint_dtype,
        dtype,
        forward_pass,
        registry.activations_on_host() if learner.activations == "offload" else nullcontext,
        HostCopies(ranks.device, is_constant=is_frozen) if leaves_device else None,
        registry.logprob_kernel(ranks.device),
    )
    prepare(policy, is_frozen, recomputes=learner.activations == "recompute")
    if is_split:
        registry.shard_policy()(policy, dtype, ranks, cpu_offload)
    if weights:
        weights_on = torch.device("cpu") if cpu_offload else ranks.device
        registry.load_shards()(policy, weights, ranks.device, weights_on)
    for name, (_, seed) in adapters.items():
        registry.draw_adapter()(hf, seed, name)
    if learner.kernels == "compile":
        compile_blocks(policy)
    return policy


def prepare(policy: Policy, is_frozen: bool, recomputes: bool) -> None:
    policy.train()
    if is_frozen:
        policy.requires_grad_(False)
    without_dropout(policy.hf)
    if recomputes:
        # transformers 5.23 renamed it; both default to the non-reentrant form.
        older = policy.hf.gradient_checkpointing_enable
        getattr(policy.hf, "activation_checkpointing_enable", older)()


def make_forward(attention: str, ranks: Ranks) -> PackedForward:
    """How a model computes a batch, with the kernel of this name."""
    kernel = registry.attention_kernel()(attention, ranks.device)
    if ranks.mesh.cp > 1:
        return registry.ring_forward()(kernel, ranks.cp_group)
    return PackedForward(kernel)


def policy_class(
    loras: dict[str, LoraConfig], path: str, is_served: bool, ranks: Ranks
) -> Callable[..., Policy]:
    if loras:
        kwargs = {"loras": loras, "path": path, "is_served": is_served}
        return partial(registry.adapter_policy(), **kwargs)
    return registry.tensor_parallel_policy() if ranks.mesh.tp > 1 else Policy


def make_reference(path: str, dtype: torch.dtype, ranks: Ranks, attention: str) -> Policy:
    """A frozen copy of the model at the start, in the dtype of compute, sharded as the policy is.
    On a GPU it is CPU-offloaded to pinned memory while it is not used."""
    policy = make_policy(path, dtype, ranks, is_frozen=True, attention=attention)
    with policy.on_device():
        pass  # it leaves the device at the end
    return policy


def compile_blocks(policy: Policy) -> None:
    """torch compiles each block's MLP and norms at their first use, once for all blocks and sizes
    of batches. Attention is not compiled: its Python differs from batch to batch."""
    for block in blocks_of(policy.hf):
        for name, module in block.named_children():
            if name != "self_attn":
                module.compile(dynamic=True)


def is_read(learner: Learner) -> bool:
    """Whether this actor's engine samples with the learner's own tensors."""
    if learner.ranks.engine_ranks or not learner.policy.shares_weights:
        return False
    return engine_class(learner.config, learner.name).shares_weights


def num_engines(config: Config) -> int:
    """Models that have an engine of their own on this device."""
    return len(
        {a.share or name for name, a in config.actors.items() if not (a.api or a.engine_urls)}
    )


def takes_turns(config: Config) -> bool:
    """Whether one engine of a device is awake at a time. Otherwise they divide
    --engine_memory_frac."""
    awake = config.rollout.engines_awake
    if num_engines(config) < 2 or awake == "all":
        return False
    return awake == "one" or registry.ENGINES[config.engine]().is_elsewhere


def adapter_of(config: Config, name: str) -> str:
    """The adapter with which an actor samples beside its engine's weights: where several share a
    model, and where the engine serves adapters. "": the engine has its weights merged."""
    actor = config.actors[name]
    if not actor.is_trained:
        return ""
    is_beside = actor.share or config.sharers(name)
    # Servers that run already were not told to serve adapters.
    if actor.lora.rank and not is_beside and not actor.servers:
        layers = engine_class(config, name).serves_lora
        is_beside = layers and registry.is_served()(actor.model, actor.lora, layers)
    return name if is_beside else ""


def make_engines(
    config: Config, chats: dict[str, Chat], learners: dict[str, Learner], ranks: Ranks
) -> dict[str, Engine | None]:
    """Each actor's engine in this process. Actors that share a model have one. None: another rank's
    engine has this one's device."""
    engines, by_owner = {}, {}
    for name in chats:
        owner = config.actors[name].share or name
        if owner not in by_owner:
            learner = learners.get(owner)
            by_owner[owner] = make_engine(config, owner, chats[owner], learner, ranks)
        engines[name] = by_owner[owner]
    return engines


def make_engine(
    config: Config, name: str, chat: Chat, learner: Learner | None, ranks: Ranks, role: str = ""
) -> Engine | None:
    """`learner`: whose weights it may read. `role`: which of several engines of the actor."""
    actor, module = config.actors[name], make_module(config, name, learner, ranks)
    # The first of each --engine_tp neighbours, or of those that share a server that runs already,
    # has the engine.
    stride = ranks.size // len(actor.servers) if actor.servers else config.engine_tp
    if ranks.rank % stride:
        return None
    url = actor.servers[ranks.rank // stride] if actor.servers else ""
    # A rank has at most its share at once, of all that may be under way.
    groups = -(-config.tasks_per_step * (1 + config.max_staleness) * stride // ranks.size)
    num_slots = min(config.rollout.max_concurrent, groups * config.group_size)
    adapters = {}
    for user in (name, *config.sharers(name)):
        if adapter_of(config, user):
            lora = config.actors[user].lora
            adapters[user] = registry.peft_config()(lora, module, actor.model).to_dict()
    num_awake = 1 if takes_turns(config) else max(1, num_engines(config))
    has_two = config.rollout.lagged[0] > 0 and actor.is_trained
    spec = EngineSpec(
        name=name + role,
        model=actor.model,
        module=module,
        tokenizer=chat.tokenizer,
        num_slots=1 if config.rollout.fixed_order else num_slots,
        max_context_tokens=config.max_context_tokens,
        dtype=compute_dtype(config),
        device=ranks.device,
        seed=counter_seed(config.seed, name + role, ranks.rank) % 2**31,
        adapters=adapters,
        sampler=registry.choose_sampler(),
        recorder=registry.recorder() if actor.router_replay else None,
        owns_weights=takes_turns(config) and not (learner and is_read(learner)),
        log=Path(config.out) / f"engine_{name}{role}_{ranks.rank:05d}.log",
        start_timeout_s=config.timeout_s,
        tp=config.engine_tp,
        args=config.engine_args,
        memory_frac=round(config.engine_memory_frac / num_awake / (1 + has_two), 3),
        url=url,
        folder=str(Path(config.out).resolve()) if urlsplit(url).hostname not in HERE else None,
    )
    return engine_class(config, name)(spec)


def make_module(config: Config, name: str, learner: Learner | None, ranks: Ranks) -> nn.Module:
    """What an engine samples with: the learner's own model where it is unsharded, or its weights
    where several actors share them, else a copy in the dtype of compute. Shapes alone where the
    engine loads the weights itself."""
    path, policy = config.actors[name].model, learner and learner.policy
    if engine_class(config, name).wants_shapes:
        return on_meta(load_model_config(path))
    if learner and is_read(learner):
        return registry.second_model()(policy.hf) if policy.adapters else policy.hf
    module = load_hf_model(path, compute_dtype(config), ranks.device)
    if policy is not None and policy.is_served and policy.is_quantized:
        load_weights(module, policy.named_weights())  # what its adapters learn beside
    return module
