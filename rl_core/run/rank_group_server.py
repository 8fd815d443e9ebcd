"""A rank of a rank group (--actors.NAME.ranks): serves its actors' engines to the ranks that play
episodes, as a rank of --rollout_ranks does, and learns from the samples that they send.

POST /ACTOR/learn brings samples, /ACTOR/learned waits for the metrics. begin, save, export and
finish reach all ranks of the group, in the same order.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.distributed import Ranks
from rl_core.engines.remote import EngineServer, sent_metrics
from rl_core.run.rank_group_client import from_text
from rl_core.run.saving.checkpoint import save_learners
from rl_core.run.saving.checkpointer import export_local
from rl_core.sampling.engine import Engine
from rl_core.types import JSONObject, RunError, TrainingSample

if TYPE_CHECKING:
    from rl_core.engines.engine_ranks import RankGroupTrainer
    from rl_core.engines.lease import DeviceLease


class RankGroupServer(EngineServer):
    def __init__(
        self,
        group: RankGroupTrainer,
        engines: dict[str, Engine | None],
        lease: DeviceLease | None,
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
    ) -> tuple[dict[str, JSONObject], list[str]]:
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
