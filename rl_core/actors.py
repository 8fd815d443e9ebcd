"""The actors of a run: the learner, the engine and the adapter of each, and how weights go from one
to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rl_core import models, registry
from rl_core.config import ActorConfig, Config
from rl_core.data.chat import Chat
from rl_core.distributed import Ranks, barrier
from rl_core.host_copies import release_cached_memory
from rl_core.learning.learner import Learner
from rl_core.learning.policy import end_token_ids
from rl_core.plan import Plan
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import DeviceLease, Engine


class Device:
    """What learners and engines of this rank have in turn. Every rank must call its methods."""

    def __init__(self, config: Config, ranks: Ranks, engines: Iterable[Engine | None]):
        engines = list(engines)
        self.ranks = ranks
        self.engines = list(dict.fromkeys(e for e in engines if e is not None))
        # None of `engines` is on this rank where a neighbour's spans its device.
        self.is_shared = bool(engines) and not ranks.engine_ranks
        self.spans_ranks = config.engine_tp > 1
        self.is_asynchronous = config.max_staleness > 0

    async def begin(self) -> None:
        """Engines start, one after the other: none takes another's memory for its own."""
        self.hand_over()
        for engine in self.engines:
            await engine.wake()
            await engine.sleep()
        # An engine elsewhere that receives the first learner's weights answers nobody's wake().
        barrier(self.ranks)

    async def sleep(self) -> None:
        """When it returns no engine has a device, on any rank."""
        for engine in self.engines:
            if self.is_asynchronous:
                await engine.pause()
            await engine.sleep()
        if self.spans_ranks:
            barrier(self.ranks)

    def hand_over(self) -> None:
        """What learners do before engines have the devices."""
        if self.is_shared:
            release_cached_memory()
        if self.spans_ranks:
            barrier(self.ranks)  # an engine on another rank may take this rank's device

    async def resume(self) -> None:
        """Episodes that an update interrupted go on."""
        if self.is_asynchronous:
            for engine in self.engines:
                await engine.resume()

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Inside, learners may have the devices. Engines stay asleep afterwards."""
        await self.sleep()
        yield
        self.hand_over()


@dataclass(kw_only=True)
class ActorRuntime:
    name: str
    config: ActorConfig
    device: Device
    learner: Learner | None = None  # None: it is frozen, behind a URL, or learns on other ranks
    engine: Engine | None = None  # None: rows are learned, or another rank has this one's engine
    stale_engine: Engine | None = None  # with weights of an earlier version
    adapter: str = ""  # that the engine applies beside its weights
    speaker: Any = None  # the Actor or ApiActor that hooks address; None: rows are learned
    lease: DeviceLease | None = None  # where engines share the device

    @property
    def shares_weights(self) -> bool:
        """Whether the engine samples with the learner's own tensors."""
        return self.engine is not None and models.is_read(self.learner)

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[Learner]:
        """Inside, engines sleep and the learner is on the device. Every rank must enter it."""
        async with self.device.asleep():
            with self.learner.on_device():
                yield self.learner

    async def sync(self, version: int) -> None:
        """The engine gets the learner's weights. One that shares them only drops what it computed
        with the old. Every rank must call it: gathering a weight is a collective."""
        if self.speaker is None:
            return
        self.device.hand_over()  # an engine takes memory for its weights now
        weights = self.learner.engine_weights(models.is_read(self.learner))
        if self.engine is None:
            for _ in weights or ():
                pass
            return
        await self.engine.update(weights, version, adapter=self.adapter)
        if self.lease is not None:
            await self.engine.sleep()  # a learner has the device


def make_lease(config: Config) -> DeviceLease | None:
    """Where engines share a device."""
    return DeviceLease() if models.takes_turns(config) else None


def make_actors(
    plan: Plan, learners: dict[str, Learner], ranks: Ranks, lease: DeviceLease | None
) -> dict[str, ActorRuntime]:
    """All actors of a run on this rank. Where rows are learned they have no engines."""
    config = plan.config
    chats = plan.chats if plan.algorithm.is_rl else {}
    stale: dict[str, Engine | None] = {}
    is_elsewhere = ranks.engine_ranks > 0 and not ranks.is_engine
    engines = {} if is_elsewhere else models.make_engines(config, chats, learners, ranks)
    if config.rollout.lagged[0]:
        for name in config.trained:
            stale[name] = models.make_engine(config, name, chats[name], None, ranks, "_older")
    if config.learner.kernels == "liger":
        apply_liger(learners, [*engines.values(), *stale.values()])
    if is_elsewhere:
        dtype = models.compute_dtype(config)
        engines = registry.connect()(list(chats), ranks, dtype, config.timeout_s)
    device = Device(config, ranks, [*engines.values(), *stale.values()])
    actors = {}
    for name, own in config.actors.items():
        actor = ActorRuntime(name=name, config=own, device=device, learner=learners.get(name))
        actors[name] = actor
        actor.lease = lease
        actor.speaker = plan.endpoints.get(name)
        if name in chats:
            actor.engine = engines[name]
            actor.stale_engine = stale.get(name)
            actor.adapter = models.adapter_of(config, name)
            engine_pair = (actor.engine, actor.stale_engine)
            actor.speaker = make_speaker(config, name, chats[name], lease, *engine_pair)
    return actors


def make_speaker(
    config: Config,
    name: str,
    chat: Chat,
    lease: DeviceLease | None,
    engine: Engine | None,
    stale_engine: Engine | None = None,
) -> Actor:
    """What hooks address."""
    own = config.actors[name]
    ends = [*chat.stop_token_ids, *end_token_ids(own.model)]
    return Actor(
        name=name,
        engine=engine,
        chat=chat,
        stop_token_ids=tuple(dict.fromkeys(ends)),
        max_context_tokens=config.max_context_tokens,
        max_tokens=own.max_tokens,
        is_trainable=own.is_trained,
        adapter=models.adapter_of(config, name),
        lease=None if config.actors[own.share or name].engine_urls else lease,
        stale_engine=stale_engine,
        stale_frac=config.rollout.lagged[0],
        open_endpoint=registry.open_endpoint,
    )


def apply_liger(learners: dict[str, Learner], engines: Iterable[Any]) -> None:
    """Last, since what is loaded after it is of Liger's classes, which lack options of some
    models."""
    found = [model.hf for learner in learners.values() for model in learner.models()]
    found += [engine.model for engine in engines if hasattr(engine, "model")]
    registry.apply_liger()(found)
