"""The actors of a run: the learner, the engine and the adapter of each, and how weights go from one
to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_core.config import Config
from rl_core.data.chat import Chat
from rl_core.distributed import Ranks, barrier
from rl_core.engines.engine_weights import WeightState
from rl_core.environments.options import endpoint_opener
from rl_core.learning.learner import Learner
from rl_core.metrics import Metric, add_metrics
from rl_core.models.cpu_offload import release_cached_memory
from rl_core.models.loading import compute_dtype
from rl_core.models.options import use_liger
from rl_core.models.policy import end_token_ids
from rl_core.models.weight_gathering import exhaust
from rl_core.run.options import rank_group_engines
from rl_core.run.plan.plan import Plan
from rl_core.sampling.actor import Actor, Speaker
from rl_core.sampling.engine import STALE_SUFFIX, Engine
from rl_core.types import TrainingSample

if TYPE_CHECKING:
    from rl_core.engines.lease import DeviceLease


class Device:
    """The device that this rank's learners and engines use in turns. Every rank must call its
    methods."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engines: Iterable[Engine | None],
        lease: DeviceLease | None,
    ):
        engines = list(engines)
        self.ranks, self.lease = ranks, lease  # None if engines do not share the device.
        self.engines = list(dict.fromkeys(e for e in engines if e is not None))
        # An engine is None where a neighbouring rank's engine spans this device.
        self.is_shared = bool(engines) and not ranks.rollout_ranks
        self.spans_ranks = any(config.of(name).engine_tp > 1 for name in config.actors)
        self.is_asynchronous = config.max_staleness > 0

    async def begin(self) -> None:
        """Starts the engines one after the other, so that each measures free memory correctly."""
        self.release_device()
        for engine in self.engines:
            await engine.wake()
            await engine.sleep()
        # A remote engine does not answer wake() while it receives weights.
        barrier(self.ranks)

    async def sleep(self) -> None:
        """Returns once no engine on any rank has a device."""
        for engine in self.engines:
            if self.is_asynchronous:
                await engine.pause()
            await engine.sleep()
        if self.spans_ranks:
            barrier(self.ranks)

    def release_device(self) -> None:
        """Runs the learners' work before engines get the devices."""
        if self.is_shared:
            release_cached_memory()
        if self.spans_ranks:
            barrier(self.ranks)  # an engine on another rank may take this rank's device

    async def resume(self) -> None:
        """Resumes the episodes that an update interrupted."""
        if self.is_asynchronous:
            for engine in self.engines:
                await engine.resume()


@dataclass(kw_only=True)
class ActorRuntime:
    name: str
    device: Device
    learner: Learner | None = None  # None if frozen, behind a URL, or learning on other ranks.
    engine: Engine | None = None  # None without RL, or if another rank has the engine.
    adapter: str = ""  # Adapter that the engine applies to its weights.
    speaker: Speaker | None = None  # None if the run learns from rows.
    weight_state: WeightState | None = (
        None  # State of the engine's weights; None without an engine.
    )

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[Learner]:
        """A context in which engines sleep and the learner is on the device. Engines stay asleep
        afterwards. Every rank must enter it."""
        assert self.learner is not None
        await self.device.sleep()
        with self.learner.on_device():
            yield self.learner
        self.device.release_device()

    def learn(self, samples: list[TrainingSample], step: int) -> dict[str, Metric]:
        """Runs one step of the learner, which is on the device, and returns the metrics. Every rank
        must call it."""
        assert self.learner is not None
        if self.device.ranks.device.type == "cuda":
            torch.cuda.set_device(self.device.ranks.device)  # Each thread has a current device.
        minibatches, metrics = self.learner.shard(samples)
        of_learner = self.learner.annotate(minibatches)
        add_metrics(of_learner, self.learner.step(minibatches, step))
        add_metrics(metrics, of_learner, prefix=f"learn/{self.name}/")
        return metrics

    async def sync(self, version: int) -> None:
        """Sends the learner's weights to the engine, or drops the caches of an engine that shares
        them. Every rank must call this, because gathering a weight is a collective."""
        if self.speaker is None:
            return
        assert self.learner is not None
        self.device.release_device()  # The engine allocates memory for its weights now.
        weights = self.learner.engine_weights(self.weight_state is WeightState.SHARED)
        if self.engine is None:
            exhaust(weights or ())
            return
        await self.engine.update(weights, version, adapter=self.adapter)
        if self.device.lease is not None:
            await self.engine.sleep()  # A learner has the device.


def make_actors(plan: Plan, learners: dict[str, Learner], ranks: Ranks) -> dict[str, ActorRuntime]:
    """All actors of a run on this rank. Without RL they have no engines."""
    config, lease = plan.config, None
    engines: dict[str, Engine | None] = {}
    if config.is_rl:
        if ranks.rollout_ranks and not ranks.is_engine:
            engines |= remote_engines(plan, ranks)
        else:
            engines = plan.engines.make_all(plan.chats, learners, ranks)
            if plan.engines.weights.takes_turns:
                from rl_core.engines.lease import DeviceLease

                lease = DeviceLease()
        engines |= rank_group_engines(plan, ranks)
    if config.learner.kernels == "liger":
        # Last, because later models would be of Liger's classes, which lack some models' options.
        use_liger_in(learners, engines)
    device = Device(config, ranks, engines.values(), lease)
    actors = {}
    for name in config.actors:
        actor = ActorRuntime(name=name, device=device, learner=learners.get(name))
        actors[name] = actor
        actor.speaker = plan.endpoints.get(name)
        if name in engines:
            actor.engine, actor.adapter = engines[name], plan.engines.weights.adapter_of(name)
            actor.weight_state = plan.engines.weights.state(name, ranks, actor.learner)
            actor.speaker = make_speaker(
                config,
                name,
                plan.chats[name],
                lease if name in plan.local else None,
                actor.engine,
                actor.adapter,
                engines.get(name + STALE_SUFFIX),
            )
    return actors


def remote_engines(plan: Plan, ranks: Ranks) -> dict[str, Engine]:
    """Engines of the ranks that sample."""
    from rl_core.engines.remote import connect

    names = [*plan.chats, *(name + STALE_SUFFIX for name in plan.engines.lagged)]
    return connect(names, ranks, compute_dtype(plan.config), plan.config.timeout_s)


def use_liger_in(learners: dict[str, Learner], engines: dict[str, Engine | None]) -> None:
    models = [model.hf for learner in learners.values() for model in learner.models()]
    embedded = [getattr(engine, "model", None) for engine in engines.values()]
    use_liger([*models, *filter(None, embedded)])


def make_speaker(
    config: Config,
    name: str,
    chat: Chat,
    lease: DeviceLease | None,
    engine: Engine | None,
    adapter: str,
    stale_engine: Engine | None = None,
) -> Actor:
    """The Actor that hooks receive by an actor's name."""
    settings = config.actors[name]
    assert settings.model
    ends = [*chat.stop_token_ids, *end_token_ids(settings.model)]
    return Actor(
        name=name,
        engine=engine,
        chat=chat,
        stop_token_ids=tuple(dict.fromkeys(ends)),
        max_context_tokens=config.max_context_tokens,
        max_tokens=settings.max_tokens,
        is_trainable=settings.is_trained,
        adapter=adapter,
        lease=None if config.actors[settings.lora_base or name].engine_urls else lease,
        stale_engine=stale_engine,
        stale_frac=config.rollout.stale_policy_frac,
        open_endpoint=endpoint_opener(config.agents),
    )
