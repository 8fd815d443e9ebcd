"""Ranks that play no episodes: they serve engines to the ranks that play them, and the ranks of a
rank group (--actors.NAME.ranks) also learn."""

from __future__ import annotations

import asyncio

from rl_core.actors import Device, make_actors
from rl_core.distributed import Ranks, barrier, explain_timeouts
from rl_core.engines.remote import EngineServer, make_weight_channel
from rl_core.learners import make_learners
from rl_core.metrics import Metric, add_metrics
from rl_core.plugin import Plugin
from rl_core.run.options import learner_plugins
from rl_core.run.plan.plan import Plan
from rl_core.run.process.signals import SignalHandler
from rl_core.run.rank_group_client import pairs_of
from rl_core.run.rank_group_server import RankGroupServer
from rl_core.run.saving.checkpointer import Checkpointer
from rl_core.run.saving.resume import load_checkpoint, newest_intact
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import STALE_SUFFIX, Engine
from rl_core.types import TrainingSample


def make_engine_rank(plan: Plan, ranks: Ranks) -> EngineRank | RankGroupTrainer:
    return RankGroupTrainer(plan, ranks) if plan.rank_groups else EngineRank(plan, ranks)


class ServingRank:
    """A rank that serves its engines until the ranks that it serves end the run."""

    signal_handler: Plugin
    server: EngineServer
    device: Device

    @property
    def signal(self) -> int:
        """The number of the signal that ended the run, 0 if none."""
        return self.server.signal

    async def close(self) -> None:
        await self.signal_handler.close()
        for engine in self.device.engines:
            await engine.close()


class EngineRank(ServingRank):
    """A rank of --rollout_ranks, which only samples."""

    def __init__(self, plan: Plan, ranks: Ranks):
        self.config, self.ranks = plan.config, ranks
        self.signal_handler = SignalHandler(self)
        actors = make_actors(plan, {}, ranks)
        self.device = next(iter(actors.values())).device
        engines: dict[str, Engine | None] = {}
        for name in plan.chats:
            speaker = actors[name].speaker
            assert isinstance(speaker, Actor)
            engines[name] = actors[name].engine
            engines[name + STALE_SUFFIX] = speaker.stale_engine
        channel = make_weight_channel(ranks, self.config.timeout_s)
        self.server = EngineServer(engines, self.device.lease, ranks, channel)

    async def fit(self) -> None:
        """Runs until the learners send stop."""
        await self.signal_handler.before_start()
        await self.server.serve()


class RankGroupTrainer(ServingRank):
    """The Trainer that plugins see on this rank, without episodes and logs."""

    def __init__(self, plan: Plan, ranks: Ranks):
        self.plan, self.config, self.ranks = plan, plan.config, ranks
        self.out = self.config.folder
        self.signal_handler = SignalHandler(self)
        self.plugins = learner_plugins(self)
        self.checkpointer = Checkpointer(self)
        self.metrics: dict[str, Metric] = {}  # Metrics of the current step.
        self.learners = make_learners(self.config, plan.local_algorithms, ranks, plan.served)
        self.checkpoint, state = None, {"step": 0}
        if self.config.resume:
            self.checkpoint = newest_intact(self.out / "checkpoints", ranks)
        if self.checkpoint:
            state = load_checkpoint(self.checkpoint, self.learners, True)
        self.step = self.first_step = state["step"]
        for plugin in (self.checkpointer, *self.plugins):
            plugin.load(state)
        self.actors = make_actors(plan, self.learners, ranks)
        self.device = next(iter(self.actors.values())).device
        engines = {name: self.actors[name].engine for name in plan.local}
        num_playing = len(plan.rank_groups[0].ranks)
        num_senders = len(pairs_of(ranks.rank, ranks.size, num_playing, ranks.size))
        self.server = RankGroupServer(self, engines, self.device.lease, ranks, num_senders)

    async def fit(self) -> None:
        """Serves until the run ends. Raises errors of learning, which clients already received."""
        await self.signal_handler.before_start()
        for learner in self.learners.values():
            learner.leave_device()
        await self.device.begin()
        for name in self.learners:
            async with self.actors[name].learning():
                await self.actors[name].sync(self.step)
        await self.server.serve()
        if self.server.error:
            raise self.server.error

    def add_metrics(self, prefix: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=prefix)

    async def learn(self, step: int, samples: dict[str, list[TrainingSample]]) -> dict[str, Metric]:
        """Learns one step from each actor's samples and returns the metrics. Every rank of the
        group must call it."""
        self.metrics = {}
        # In a thread, so that the event loop can answer: samples for other ranks of this group may
        # still be in flight.
        with explain_timeouts("generate", self.ranks):
            await asyncio.to_thread(barrier, self.ranks)
        for plugin in self.plugins:
            await plugin.before_rollout(step)
        for name in filter(samples.__contains__, self.learners):
            with explain_timeouts(f"learn of {name}", self.ranks):
                await self.learn_one(name, step, samples[name])
        self.step = step + 1
        return self.metrics

    async def learn_one(self, name: str, step: int, samples: list[TrainingSample]) -> None:
        actor = self.actors[name]
        async with actor.learning():
            for plugin in self.plugins:
                await plugin.before_learn(name, step)
            # In a thread, so that the event loop can answer.
            self.add_metrics("", await asyncio.to_thread(actor.learn, samples, step))
            await actor.sync(step + 1)
