"""The owner of each actor's weights on this rank. docs/house.md has the table of states."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from rl_core.config import Config
from rl_core.distributed import Ranks
from rl_core.engines.options import engine_classes
from rl_core.learning.learner import Learner
from rl_core.models.loading import compute_dtype, load_hf_model, load_model_config, on_meta
from rl_core.sampling.engine import Engine, WeightOwner
from rl_core.types import JSONObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightState(Enum):
    """Owner of an engine's weights, and who resends them to a server that lost them."""

    SHARED = "the tensors of this rank's learner"
    COPIED = "a copy in this process"
    RESENT = "a server; this rank's learner resends them"
    AWAITED = "a server; all ranks resend them together"
    KEPT = "a server, which keeps a copy on the host"


class EngineWeights:
    """The weights and adapters of the engines of a run."""

    def __init__(
        self,
        config: Config,
        local: Iterable[str] | None = None,
        engine: type[Engine] | None = None,
    ):
        """Arguments as for EngineFactory."""
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

    def has_server(self, name: str) -> bool:
        return self.classes[name].weight_owner is WeightOwner.SERVER

    def state(self, name: str, ranks: Ranks, learner: Learner | None) -> WeightState:
        """The state of the actor's weights on this rank. `learner`: the actor's, if it is here."""
        if self.has_server(name):
            return self.server_state(ranks)
        may_share = self.classes[name].weight_owner is WeightOwner.LEARNER
        if may_share and learner and not ranks.rollout_ranks and learner.policy.is_shareable:
            return WeightState.SHARED
        return WeightState.COPIED

    def server_state(self, ranks: Ranks) -> WeightState:
        if ranks.size == 1 and not self.config.max_staleness and not ranks.rollout_ranks:
            return WeightState.RESENT  # Learners are idle while engines sample.
        # Separate rank groups have no common collective, and engines that take turns would lack
        # weights at each turn.
        is_separate = ranks.is_engine and not ranks.rollout_ranks
        return WeightState.KEPT if is_separate or self.takes_turns else WeightState.AWAITED

    def may_be_lost(self, ranks: Ranks) -> bool:
        """True if an engine may lose weights that only all ranks together can send again."""
        states = [self.state(name, ranks, None) for name in self.classes]
        return self.config.weight_sync != "files" and WeightState.AWAITED in states

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
        self, name: str, state: WeightState, learner: Learner | None, ranks: Ranks
    ) -> PreTrainedModel:
        """The module of an engine: shared or copied weights, or shapes alone for a server, which
        loads the model itself."""
        path, policy = self.config.actors[name].model, learner and learner.policy
        assert path
        if self.has_server(name):
            return on_meta(load_model_config(path))
        if policy is not None and state is WeightState.SHARED:
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
