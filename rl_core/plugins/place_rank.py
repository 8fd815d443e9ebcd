"""A rank of a place (--actors.NAME.ranks): it serves the engines of its actors to the ranks that
play episodes, as a rank that only samples does, and learns from the samples that they send.

POST /ACTOR/learn brings samples, /ACTOR/learned waits for the metrics. begin, save, export and
finish reach all ranks of the place, in the same order.
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
from rl_core.plugins.checkpoint import save_learners
from rl_core.plugins.checkpointer import Checkpointer, export_local
from rl_core.plugins.places import from_text, pairs_of
from rl_core.plugins.resume import load_checkpoint, newest_intact
from rl_core.sampling.engine import Engine
from rl_core.types import RunError, TrainingSample


class RankGroupTrainer:
    """What a Trainer is, to its plugins, without episodes and logs."""

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
        """`make_plugins`: of those that see each step of learning."""
        self.plan, self.config, self.ranks = plan, plan.config, ranks
        self.out = Path(self.config.out)
        self.signal_handler = signal_handler(self)
        self.plugins = make_plugins(self)
        self.checkpointer = Checkpointer(self)
        self.metrics: dict[str, Metric] = {}  # of the step under way
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
        num_playing = len(plan.places[0].ranks)
        num_senders = len(pairs_of(ranks.rank, ranks.size, num_playing, ranks.size))
        self.server = RankGroupServer(self, engines, self.device.lease, ranks, num_senders)

    async def fit(self) -> None:
        """Until the run ends. Raises what learning raised, which was told already."""
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

    def note(self, prefix: str, metrics: dict[str, Metric]) -> None:
        add_metrics(self.metrics, metrics, prefix=prefix)

    async def learn(self, step: int, samples: dict[str, list[TrainingSample]]) -> dict[str, Metric]:
        """The metrics of one step of each actor that has samples. Every rank of the place must call
        it."""
        timeout_s = self.config.timeout_s
        self.metrics = {}
        # In a thread, so that this one can answer: samples for other ranks of this place may still
        # be on their way.
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
            # In a thread, so that this one can answer.
            self.note("", await asyncio.to_thread(actor.learn, samples, step))
            await actor.sync(step + 1)


class RankGroupServer(EngineServer):
    def __init__(
        self,
        place: RankGroupTrainer,
        engines: dict[str, Engine | None],
        lease: Any,
        ranks: Ranks,
        num_senders: int,
    ):
        super().__init__(engines, lease, ranks, None)
        self.place, self.num_senders = place, num_senders
        self.arrived: list[dict[str, str]] = []  # samples of the step to come, by actor
        self.learned: dict[int, asyncio.Future] = {}  # metrics by step
        self.error: Exception | None = None

    async def do_begin(self, engine: Engine | None, step: int) -> None:
        if step != self.place.step:
            raise RunError(
                f"it goes on from step {self.place.step}, and the others from step {step}: all "
                "ranks must see the same checkpoints"
            )

    async def do_learn(
        self, engine: Engine | None, sender: int, step: int, samples: dict[str, str]
    ) -> None:
        """Learning begins in the background once all senders' samples are there. A sender whose
        episodes take long has the deadlines of the ranks that play."""
        self.arrived.append(samples)
        if len(self.arrived) == self.num_senders:
            arrived, self.arrived = self.arrived, []
            merged: dict[str, list[TrainingSample]] = {name: [] for name in samples}
            for part in arrived:
                for name, text in part.items():
                    merged[name] += from_text(text)
            self.task = asyncio.create_task(self.learn(step, merged))

    async def learn(self, step: int, samples: dict[str, list[TrainingSample]]) -> None:
        done = self.learning_of(step)
        try:
            done.set_result(await self.place.learn(step, samples))
        except Exception as error:  # Whoever asks for the metrics is told, and the run ends.
            self.error = error
            done.set_exception(error)

    def learning_of(self, step: int) -> asyncio.Future:
        if step not in self.learned:
            self.learned = {step: asyncio.get_running_loop().create_future()}
        return self.learned[step]

    async def do_learned(self, engine: Engine | None, sender: int, step: int) -> dict[str, list]:
        """Metrics of this rank, to one of those that ask."""
        metrics = await asyncio.shield(self.learning_of(step))
        return sent_metrics(metrics) if sender == self.ranks.rank else {}

    async def do_save(
        self, engine: Engine | None, folder: str, is_last: bool
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Writes this rank's part of each learner into a folder of its name; see save_learners."""
        place = self.place
        if is_last:
            place.checkpointer.refuse_ruined()
        await place.device.sleep()
        return save_learners(Path(folder), place.learners, place.ranks, "the checkpoint")

    async def do_export(self, engine: Engine | None, folder: str) -> None:
        await export_local(self.place, Path(folder))

    async def do_finish(self, engine: Engine | None) -> None:
        for plugin in self.place.plugins:
            await plugin.finish()

    async def do_take_metrics(self, engine: Engine) -> dict[str, list]:
        """Its ranks are idle by turns, as all that sample and learn."""
        return sent_metrics(await engine.take_metrics())
