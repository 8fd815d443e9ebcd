"""The engines of a run on this rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import cast

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.distributed import MPS, Ranks
from rl_core.engines.engine_weights import EngineWeights, WeightState
from rl_core.engines.options import make_recorder, make_sampler
from rl_core.learning.learner import Learner
from rl_core.models.loading import compute_dtype
from rl_core.sampling.engine import (
    RESENT_BY_RANKS,
    STALE_SUFFIX,
    EmbeddedSpec,
    Engine,
    EngineSpec,
)
from rl_core.types import counter_seed

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
        self.config, self.weights = config, EngineWeights(config, local, engine)
        # Trained actors, which have a second engine with stale weights.
        self.lagged = list(config.trained) if config.rollout.stale_policy_frac else []

    def make_all(
        self, chats: dict[str, Chat], learners: dict[str, Learner], ranks: Ranks
    ) -> dict[str, Engine | None]:
        """Engines of the local actors by name, and second engines by name + STALE_SUFFIX. Actors
        that share a model have one engine. None: another rank's engine uses this rank's device."""
        engines: dict[str, Engine | None] = {}
        for name in self.weights.local:
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
        state = self.weights.state(name, ranks, learner)
        module = self.weights.module(name, state, learner, ranks)
        # The second engine takes half.
        num_awake = 1 if self.weights.takes_turns else max(1, len(self.weights.owners))
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
            adapters=self.weights.adapters(name, module) if config.has_adapters else {},
            vision=None if isinstance(chat.vision, str) else chat.vision,
            log=config.folder / f"engine_{name}{role}_{ranks.rank:05d}.log",
            start_timeout_s=config.timeout_s,
        )
        if self.weights.has_server(name):
            from rl_core.engines.server_spec import resend_of, server_spec

            url = actor.servers[ranks.rank // stride] if actor.servers else ""
            spec.server = server_spec(config, url, learners)
            if state is WeightState.RESENT and learner:
                spec.resend = resend_of(learner)
            elif state is WeightState.AWAITED and not role:
                spec.resend = RESENT_BY_RANKS
        else:
            # An Apple GPU shares the CPU's memory.
            offloads = self.weights.takes_turns and ranks.device.type != MPS
            spec.embedded = EmbeddedSpec(
                sampler=make_sampler,
                recorder=make_recorder if actor.router_replay else None,
                offloads_weights=offloads and state is WeightState.COPIED,
            )
        return cast(MakeEngine, self.weights.classes[name])(spec)


def max_episodes(config: Config, num_engines: int) -> int:
    """Most episodes that one of `num_engines` engines samples at once."""
    groups = math.ceil(config.tasks_per_step * (1 + config.max_staleness) / num_engines)
    return min(config.rollout.max_concurrent, groups * config.group_size)
