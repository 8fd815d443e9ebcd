"""The engines of a run on this rank: their arguments, and the adapters that they apply next to
their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import urlsplit

from torch import Tensor

from rl_core.config import ActorConfig, Config
from rl_core.data.chat import Chat
from rl_core.distributed import MPS, Ranks
from rl_core.learning.learner import Learner
from rl_core.models.loading import compute_dtype, load_hf_model, load_model_config, on_meta
from rl_core.sampling.engine import (
    RESENT_BY_RANKS,
    STALE,
    EmbeddedSpec,
    Engine,
    EngineSpec,
    ExpertRecorder,
    NamedWeights,
    Sampler,
    ServerSpec,
    WeightOwner,
)
from rl_core.types import JSONObject, counter_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.engines.rank_groups import RankGroup

MakeEngine = Callable[[EngineSpec], Engine]
# Hosts of servers that see this machine's shared memory.
HERE = (None, "127.0.0.1", "localhost", "::1")


class EngineFactory:
    def __init__(
        self,
        config: Config,
        classes: dict[str, type[Engine]],
        choose_sampler: Callable[[PreTrainedModel], Sampler],
        local: Iterable[str],
    ):
        """`classes`: engine class of each actor whose model runs here. `local`: actors of this
        rank."""
        self.config, self.classes, self.choose_sampler = config, classes, choose_sampler
        self.local = [name for name in classes if name in local]
        # Actors with an engine on this device; actors that share a model have one engine.
        self.owners = [
            name for name in self.local if not (config.actors[name].lora_base or self.servers(name))
        ]

    def servers(self, name: str) -> list[str]:
        """URLs of engine servers that run already."""
        return self.config.actors[name].servers

    def check(
        self, num_ranks: int, is_planned: bool, rank_groups: Iterable[RankGroup] = ()
    ) -> None:
        """Raises ValueError if engines do not support the flags: on this machine or, if
        is_planned, on any."""
        sizes: dict[str, int] = {}
        for group in rank_groups:
            sizes |= dict.fromkeys(group.actors, len(group.ranks))
        for name, cls in self.classes.items():
            config, size = self.config.of(name), sizes.get(name, num_ranks)
            if config.agents.response_format == "enforce" and not cls.has_grammars:
                raise ValueError(
                    f"--agents.response_format=enforce: {cls.__name__} of actor {name} takes no "
                    "JSON schemas; take --engine embedded"
                )
            cls.check(config, name, is_planned)
            self.check_divides(f"--actors.{name}.engine_urls", len(self.servers(name)), size)
            self.check_divides("--engine_tp", config.engine_tp, size)

    @staticmethod
    def check_divides(flag: str, n: int, num_ranks: int) -> None:
        if n and num_ranks % n:
            fits = max(d for d in range(1, n) if num_ranks % d == 0)
            raise ValueError(
                f"{flag} ({n}) must divide the {num_ranks} ranks that sample; try {fits}"
            )

    @property
    def lagged(self) -> list[str]:
        """Trained actors, which have a second engine with stale weights; [] without
        --rollout.stale_policy_frac."""
        return list(self.config.trained) if self.config.rollout.stale_policy_frac else []

    @property
    def stale_names(self) -> list[str]:
        """Names of the second engines."""
        return [name + STALE for name in self.lagged]

    @property
    def takes_turns(self) -> bool:
        """True if one engine of a device is awake at a time. Otherwise engines divide
        --engine_memory_frac."""
        awake = self.config.rollout.engines_awake
        if len(self.owners) < 2 or awake == "all":
            return False
        return awake == "one" or self.has_server(self.owners[0])

    def has_server(self, name: str) -> bool:
        return self.classes[name].weight_owner is WeightOwner.SERVER

    def resender(self, ranks: Ranks) -> Literal["learner", "ranks"] | None:
        """Sender of the newest weights to a server that lost them.

        "learner": the learner of this rank, at any time, because no other rank has a shard, and
        learners are idle while engines sample. RESENT_BY_RANKS: all ranks together
        (run/weight_recovery.py). None: separate rank groups have no common collective, and engines
        that take turns would lack weights at each turn."""
        if ranks.size == 1 and not self.config.max_staleness and not ranks.rollout_ranks:
            return "learner"
        is_separate = ranks.is_engine and not ranks.rollout_ranks
        return None if is_separate or self.takes_turns else RESENT_BY_RANKS

    def may_lack_weights(self, ranks: Ranks) -> bool:
        """True if an engine here may lose weights that only all ranks together can resend."""
        keeps_none = self.config.weight_sync != "files"
        is_resent = self.resender(ranks) == RESENT_BY_RANKS
        return keeps_none and is_resent and any(map(self.has_server, self.classes))

    def adapter_of(self, name: str) -> str:
        """The adapter that the actor's engine applies to its weights: if several actors share a
        model, or if the engine serves adapters. "": the engine's weights have the adapter
        merged."""
        actor, layers = self.config.actors[name], self.classes[name].lora_layers
        if not actor.is_trained:
            return ""
        is_unmerged = actor.lora_base or self.config.sharers(name)
        # Servers that run already were not started to serve adapters.
        if layers and actor.model and actor.lora.rank and not is_unmerged and not actor.servers:
            from rl_core.learning.lora import is_served

            is_unmerged = is_served(actor.model, actor.lora, layers)
        return name if is_unmerged else ""

    def shares_weights(self, learner: Learner | None) -> bool:
        """True if this actor's engine samples with the learner's tensors."""
        if learner is None or learner.ranks.rollout_ranks:
            return False
        owner = self.classes[learner.name].weight_owner
        return owner is WeightOwner.LEARNER and learner.policy.can_share_weights

    def make_all(
        self, chats: dict[str, Chat], learners: dict[str, Learner], ranks: Ranks
    ) -> dict[str, Engine | None]:
        """Engines of the local actors by name, and second engines by name + STALE. Actors that
        share a model have one engine. None: another rank's engine uses this rank's device."""
        by_owner: dict[str, Engine | None] = {}

        def reserved() -> float:
            from rl_core.learning.optimizers import missing_state_bytes

            return sum(map(missing_state_bytes, learners.values()))

        for name in self.local:
            owner = self.config.actors[name].lora_base or name
            if owner not in by_owner:
                by_owner[owner] = self.make(
                    owner, chats[owner], learners.get(owner), ranks, reserved=reserved
                )
        engines = {
            name: by_owner[self.config.actors[name].lora_base or name] for name in self.local
        }
        for name in self.lagged:
            engines[name + STALE] = self.make(name, chats[name], None, ranks, STALE, reserved)
        return engines

    def make(
        self,
        name: str,
        chat: Chat,
        learner: Learner | None,
        ranks: Ranks,
        role: str = "",
        reserved: Callable[[], float] = lambda: 0.0,
    ) -> Engine | None:
        """`learner`: may share its weights. `role`: suffix of the actor's second engine.
        `reserved`: ServerSpec.reserved."""
        config, actor = self.config.of(name), self.config.actors[name]
        assert actor.model and config.out
        module = self.make_module(name, learner, ranks)
        # The first of --engine_tp neighbours, or of the ranks that share a running server, has the
        # engine.
        servers = actor.servers
        stride = ranks.size // len(servers) if servers else config.engine_tp
        if ranks.rank % stride:
            return None
        url = servers[ranks.rank // stride] if servers else ""
        num_slots = max_episodes(config, ranks.size // stride)
        num_awake = 1 if self.takes_turns else max(1, len(self.owners))
        if name in self.lagged:  # The second engine takes half.
            num_awake *= 2
        share = config.engine_memory_frac / num_awake
        spec = EngineSpec(
            name=name + role,
            model=actor.model,
            module=module,
            tokenizer=chat.tokenizer,
            num_slots=1 if config.deterministic else num_slots,
            max_context_tokens=config.max_context_tokens,
            memory_frac=round(actor.engine_memory_frac or share, 3),
            dtype=compute_dtype(config),
            device=ranks.device,
            seed=counter_seed(config.seed, name + role, ranks.rank) % 2**31,
            adapters=self.adapters(name, module),
            vision=None if isinstance(chat.vision, str) else chat.vision,
            log=Path(config.out) / f"engine_{name}{role}_{ranks.rank:05d}.log",
            start_timeout_s=config.timeout_s,
        )
        # An Apple GPU has the CPU's memory.
        offloads = self.takes_turns and ranks.device.type != MPS
        if self.has_server(name):
            spec.server = server_spec(config, url, reserved)
            resender = self.resender(ranks)
            if resender == "learner":
                spec.resend = resend_of(learner) if learner else None
            elif not role:
                spec.resend = resender
        else:
            spec.embedded = EmbeddedSpec(
                sampler=self.choose_sampler,
                recorder=recorder_of(actor),
                offloads_weights=offloads and not self.shares_weights(learner),
            )
        return cast(MakeEngine, self.classes[name])(spec)

    def adapters(self, name: str, module: PreTrainedModel) -> dict[str, JSONObject]:
        """adapter_config.json of each adapter that the engine applies."""
        adapters = {}
        for user in (name, *self.config.sharers(name)):
            if self.adapter_of(user):
                from rl_core.learning.lora import peft_config

                actor = self.config.actors[user]
                assert actor.model
                adapters[user] = peft_config(actor.lora, module, actor.model).to_dict()
        return adapters

    def make_module(self, name: str, learner: Learner | None, ranks: Ranks) -> PreTrainedModel:
        """The module that an engine samples with: the learner's model where it is unsharded, or its
        weights where several actors share them, else a copy in the compute dtype. Only shapes where
        the engine loads the weights itself."""
        path, policy = self.config.actors[name].model, learner and learner.policy
        assert path
        if self.has_server(name):
            return on_meta(load_model_config(path))
        if policy is not None and self.shares_weights(learner):
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


def server_spec(config: Config, url: str, reserved: Callable[[], float]) -> ServerSpec:
    assert config.out
    is_here = urlsplit(url).hostname in HERE
    return ServerSpec(
        tp=config.engine_tp,
        args=config.engine_args,
        url=url,
        folder=None if is_here else str(Path(config.out).resolve()),
        weight_sync=config.weight_sync,
        bucket_bytes=config.engine_bucket_mib << 20,
        reserved=reserved,
    )


def resend_of(learner: Learner) -> Callable[[], NamedWeights]:
    """A function that yields the learner's weights again. No other rank may have a shard of them,
    and the weights may not change while engines sample."""

    def resend() -> Iterator[tuple[str, Tensor]]:
        with learner.on_device():
            yield from learner.engine_weights(False) or ()

    return resend


def recorder_of(actor: ActorConfig) -> Callable[[PreTrainedModel], ExpertRecorder] | None:
    if not actor.router_replay:
        return None
    from rl_core.engines.router_recorder import Recorder

    return Recorder
