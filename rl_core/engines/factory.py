"""The engines of a run on this rank, and the owner of the weights of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.distributed import MPS, Ranks
from rl_core.engines.options import engine_classes, make_recorder, make_sampler
from rl_core.learning.learner import Learner
from rl_core.models.loading import compute_dtype, load_hf_model, load_model_config, on_meta
from rl_core.sampling.engine import (
    RESENT_BY_RANKS,
    STALE_SUFFIX,
    EmbeddedSpec,
    Engine,
    EngineSpec,
    WeightOwner,
    Weights,
)
from rl_core.types import JSONObject, counter_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MakeEngine = Callable[[EngineSpec], Engine]


class EngineFactory:
    def __init__(
        self,
        config: Config,
        local: Iterable[str] | None = None,
        engine: type[Engine] | None = None,
    ):
        """`local`: actors whose engines share this rank's device; default: all. `engine`: the class
        of a script, for all actors."""
        self.config, self.classes = config, engine_classes(config, engine)
        self.local = [name for name in self.classes if local is None or name in local]
        # Actors with an engine on this device; actors that share a model have one engine.
        self.owners = []
        for name in self.local:
            if not (config.actors[name].lora_base or config.actors[name].servers):
                self.owners.append(name)
        # True if one engine of a device is awake at a time. Otherwise engines divide
        # --engine_memory_frac.
        awake, owners = config.rollout.engines_awake, self.owners
        self.takes_turns = len(owners) > 1 and (
            awake == "one" or (awake == "auto" and self.has_server(owners[0]))
        )
        # Trained actors, which have a second engine with stale weights.
        self.lagged = list(config.trained) if config.rollout.stale_policy_frac else []

    def has_server(self, name: str) -> bool:
        return self.classes[name].weight_owner is WeightOwner.SERVER

    def weights(self, name: str, ranks: Ranks, learner: Learner | None) -> Weights:
        """The state of the actor's weights on this rank. `learner`: the actor's, if it is here."""
        if self.has_server(name):
            return self.server_weights(ranks)
        may_share = self.classes[name].weight_owner is WeightOwner.LEARNER
        if may_share and learner and not ranks.rollout_ranks and learner.policy.is_shareable:
            return Weights.SHARED
        return Weights.COPIED

    def server_weights(self, ranks: Ranks) -> Weights:
        if ranks.size == 1 and not self.config.max_staleness and not ranks.rollout_ranks:
            return Weights.RESENT  # Learners are idle while engines sample.
        # Separate rank groups have no common collective, and engines that take turns would lack
        # weights at each turn.
        is_separate = ranks.is_engine and not ranks.rollout_ranks
        return Weights.KEPT if is_separate or self.takes_turns else Weights.AWAITED

    def may_lack_weights(self, ranks: Ranks) -> bool:
        """True if an engine may lose weights that only all ranks together can send again."""
        states = [self.weights(name, ranks, None) for name in self.classes]
        return self.config.weight_sync != "files" and Weights.AWAITED in states

    def adapter_of(self, name: str) -> str:
        """Name of the adapter that the actor's engine applies: several actors share a model, or the
        engine serves adapters. "": the adapter is merged into the engine's weights."""
        actor = self.config.actors[name]
        if not actor.is_trained:
            return ""
        layers = self.classes[name].lora_layers
        is_unmerged = actor.lora_base or self.config.sharers(name)
        # Servers that run already were not started to serve adapters.
        if layers and actor.model and actor.lora.rank and not is_unmerged and not actor.servers:
            from rl_core.learning.lora import is_served

            is_unmerged = is_served(actor.model, actor.lora, layers)
        return name if is_unmerged else ""

    def make_all(
        self, chats: dict[str, Chat], learners: dict[str, Learner], ranks: Ranks
    ) -> dict[str, Engine | None]:
        """Engines of the local actors by name, and second engines by name + STALE_SUFFIX. Actors
        that share a model have one engine. None: another rank's engine uses this rank's device."""
        engines: dict[str, Engine | None] = {}
        for name in self.local:
            owner = self.config.actors[name].lora_base or name
            if owner not in engines:
                engines[owner] = self.make(owner, chats[owner], learners, ranks)
            engines[name] = engines[owner]
        for name in self.lagged:
            stale = self.make(name, chats[name], learners, ranks, STALE_SUFFIX)
            engines[name + STALE_SUFFIX] = stale
        return engines

    def make(
        self, name: str, chat: Chat, learners: dict[str, Learner], ranks: Ranks, role: str = ""
    ) -> Engine | None:
        """`learners`: those of this device; the actor's may share its weights. `role`: suffix of
        the actor's second engine."""
        config, actor = self.config.of(name), self.config.actors[name]
        learner = None if role else learners.get(name)
        assert actor.model
        # The first of --engine_tp neighbours, or of the ranks that share a running server, has the
        # engine.
        stride = ranks.size // len(actor.servers) if actor.servers else config.engine_tp
        if ranks.rank % stride:
            return None
        state = self.weights(name, ranks, learner)
        module = self.module(name, state, learner, ranks)
        # The second engine takes half.
        num_awake = 1 if self.takes_turns else max(1, len(self.owners))
        share = config.engine_memory_frac / num_awake / (2 if name in self.lagged else 1)
        spec = EngineSpec(
            name=name + role,
            model=actor.model,
            module=module,
            tokenizer=chat.tokenizer,
            num_slots=1 if config.deterministic else max_episodes(config, ranks.size // stride),
            max_context_tokens=config.max_context_tokens,
            memory_frac=round(actor.engine_memory_frac or share, 3),
            dtype=compute_dtype(config),
            device=ranks.device,
            seed=counter_seed(config.seed, name + role, ranks.rank) % 2**31,
            adapters=self.adapters(name, module) if config.has_adapters else {},
            vision=None if isinstance(chat.vision, str) else chat.vision,
            log=config.folder / f"engine_{name}{role}_{ranks.rank:05d}.log",
            start_timeout_s=config.timeout_s,
        )
        if self.has_server(name):
            from rl_core.engines.server_spec import resend_of, server_spec

            url = actor.servers[ranks.rank // stride] if actor.servers else ""
            spec.server = server_spec(config, url, learners)
            if state is Weights.RESENT and learner:
                spec.resend = resend_of(learner)
            elif state is Weights.AWAITED and not role:
                spec.resend = RESENT_BY_RANKS
        else:
            # An Apple GPU shares the CPU's memory.
            offloads = self.takes_turns and ranks.device.type != MPS
            spec.embedded = EmbeddedSpec(
                sampler=make_sampler,
                recorder=make_recorder if actor.router_replay else None,
                offloads_weights=offloads and state is Weights.COPIED,
            )
        return cast(MakeEngine, self.classes[name])(spec)

    def adapters(self, name: str, module: PreTrainedModel) -> dict[str, JSONObject]:
        """adapter_config.json of each adapter that the engine applies."""
        adapters = {}
        for user in filter(self.adapter_of, (name, *self.config.sharers(name))):
            from rl_core.learning.lora import peft_config

            actor = self.config.actors[user]
            assert actor.model
            adapters[user] = peft_config(actor.lora, module, actor.model).to_dict()
        return adapters

    def module(
        self, name: str, state: Weights, learner: Learner | None, ranks: Ranks
    ) -> PreTrainedModel:
        """The module of an engine: shared or copied weights, or shapes alone for a server, which
        loads the model itself."""
        path, policy = self.config.actors[name].model, learner and learner.policy
        assert path
        if self.has_server(name):
            return on_meta(load_model_config(path))
        if policy is not None and state is Weights.SHARED:
            if not policy.adapters:
                return policy.hf
            from rl_core.learning.lora import second_model

            return second_model(policy.hf)
        module = load_hf_model(path, compute_dtype(self.config.of(name)), ranks.device)
        if policy is not None and policy.is_served and policy.is_quantized:
            # The adapters are trained on the dequantized weights.
            from rl_core.engines.weights import load_weights

            load_weights(module, policy.named_weights())
        return module


def max_episodes(config: Config, num_engines: int) -> int:
    """Most episodes that one of `num_engines` engines samples at once."""
    groups = math.ceil(config.tasks_per_step * (1 + config.max_staleness) / num_engines)
    return min(config.rollout.max_concurrent, groups * config.group_size)
