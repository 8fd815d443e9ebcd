"""A rank of a rank group (--actors.NAME.ranks): serves its actors' engines to the ranks that play
episodes, as a rank of --rollout_ranks does, and learns from the samples that they send.

POST /ACTOR/learn brings samples, /ACTOR/learned waits for the metrics. begin, save, export and
finish reach all ranks of the group, in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_core.distributed import Ranks, barrier, explain_timeouts
from rl_core.engines.remote import EngineServer, sent_metrics
from rl_core.learning.learner import Learner
from rl_core.metrics import Metric, add_metrics
from rl_core.run.rank_group_client import from_text, pairs_of
from rl_core.run.saving.checkpoint import save_learners
from rl_core.run.saving.checkpointer import Checkpointer, export_local
from rl_core.run.saving.resume import load_checkpoint, newest_intact
from rl_core.sampling.engine import Engine
from rl_core.types import RunError, TrainingSample


class RankGroupTrainer:
    """The Trainer that plugins see on this rank, without episodes and logs."""

    signal = 0

    def __init__(
        self,
        plan: Any,
        ranks: Ranks,
        make_learners: Callable[..., dict[str, Learner]],
        make_actors: Callable[..., dict[str, Any]],
        signal_handler: Callable,
        make_plugins: Callable[[Any], list[Any]],
    ):
        """`make_plugins`: makes the plugins that observe each learning step."""
        self.plan, self.config, self.ranks = plan, plan.config, ranks
        self.out = Path(self.config.out)
        self.signal_handler = signal_handler(self)
        self.plugins = make_plugins(self)
        self.checkpointer = Checkpointer(self)
        self.metrics: dict[str, Metric] = {}  # Metrics of the current step.
        self.learners = make_learners(self.config, plan.local_algorithms, ranks)
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
        await self.signal_handler.start()
        for learner in self.learners.values():
            learner.leave_device()
        await self.device.begin()
        for name in self.learners:
            async with self.actors[name].learning():
                await self.actors[name].sync(self.step)
        await self.server.serve()
        if self.server.error:
            raise self.server.error

    async def close(self) -> None:
        await self.signal_handler.close()
        for engine in self.device.engines:
            await engine.close()

    def add_metrics(self, prefix: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=prefix)

    async def learn(self, step: int, samples: dict[str, list[TrainingSample]]) -> dict[str, Metric]:
        """Learns one step from each actor's samples and returns the metrics. Every rank of the
        group must call it."""
        timeout_s = self.config.timeout_s
        self.metrics = {}
        # In a thread, so that the event loop can answer: samples for other ranks of this group may
        # still be in flight.
        with explain_timeouts("generate", self.ranks, timeout_s):
            await asyncio.to_thread(barrier, self.ranks)
        for plugin in self.plugins:
            await plugin.before_rollout(step)
        for name in filter(samples.__contains__, self.learners):
            with explain_timeouts(f"learn of {name}", self.ranks, timeout_s):
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


class RankGroupServer(EngineServer):
    def __init__(
        self,
        group: RankGroupTrainer,
        engines: dict[str, Engine | None],
        lease: Any,
        ranks: Ranks,
        num_senders: int,
    ):
        super().__init__(engines, lease, ranks, None)
        self.group, self.num_senders = group, num_senders
        self.arrived: list[dict[str, str]] = []  # Samples of the next step, by actor.
        self.learned: dict[int, asyncio.Future] = {}  # Step -> metrics.
        self.error: Exception | None = None

    async def do_begin(self, engine: Engine | None, step: int) -> None:
        if step != self.group.step:
            raise RunError(
                f"it continues from step {self.group.step}, and the others from step {step}: all "
                "ranks must see the same checkpoints"
            )

    async def do_learn(
        self, engine: Engine | None, sender: int, step: int, samples: dict[str, str]
    ) -> None:
        """Starts learning in the background once the samples of all senders are here. A sender with
        long episodes has the deadlines of the ranks that play."""
        self.arrived.append(samples)
        if len(self.arrived) == self.num_senders:
            arrived, self.arrived = self.arrived, []
            merged: dict[str, list[TrainingSample]] = {name: [] for name in samples}
            for by_actor in arrived:
                for name, text in by_actor.items():
                    merged[name] += from_text(text)
            self.task = asyncio.create_task(self.learn(step, merged))

    async def learn(self, step: int, samples: dict[str, list[TrainingSample]]) -> None:
        done = self.learning_of(step)
        try:
            done.set_result(await self.group.learn(step, samples))
        except Exception as error:  # Requests for the metrics get the error, and the run ends.
            self.error = error
            done.set_exception(error)

    def learning_of(self, step: int) -> asyncio.Future:
        if step not in self.learned:
            self.learned = {step: asyncio.get_running_loop().create_future()}
        return self.learned[step]

    async def do_learned(self, engine: Engine | None, sender: int, step: int) -> dict[str, list]:
        """This rank's metrics, for the sender with the same number."""
        metrics = await asyncio.shield(self.learning_of(step))
        return sent_metrics(metrics) if sender == self.ranks.rank else {}

    async def do_save(
        self, engine: Engine | None, folder: str, is_last: bool
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Writes this rank's shard of each learner into a folder of its name; see save_learners."""
        group = self.group
        if is_last:
            group.checkpointer.refuse_ruined()
        await group.device.sleep()
        return save_learners(Path(folder), group.learners, group.ranks, "the checkpoint")

    async def do_export(self, engine: Engine | None, folder: str) -> None:
        await export_local(self.group, Path(folder))

    async def do_finish(self, engine: Engine | None) -> None:
        for plugin in self.group.plugins:
            await plugin.finish()

    async def do_take_metrics(self, engine: Engine) -> dict[str, list]:
        """The engine's metrics."""
        return sent_metrics(await engine.take_metrics())
