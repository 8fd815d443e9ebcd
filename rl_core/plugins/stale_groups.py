"""Groups that go on over several versions of the weights (--max_staleness, --rollout.fixed_order):
a checkpoint keeps what they were answered so far."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_core.metrics import Max, Mean
from rl_core.plugin import Plugin
from rl_core.plugins import under_way
from rl_core.run_folder import naming
from rl_core.sampling.rollout import Group
from rl_core.types import Task


class StaleGroups(Plugin):
    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.kept: dict[int, dict[str, Any]] = {}  # by position, of this rank's groups

    def load(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        if trainer.checkpoint is None:
            return
        own = set()
        for number, position in enumerate(trainer.pending, state.get("collected", 0)):
            if trainer.worker.is_own(number):
                own.add(position)
        oldest = trainer.first_step - trainer.config.max_staleness
        self.kept = under_way.read_groups(trainer.checkpoint, own, oldest)

    def on_draw(self, group: Group) -> None:
        group.under_way = under_way.GroupUnderWay()
        kept = self.kept.pop(group.position, None)
        task = kept and self.task_of(kept)
        if task:
            # The position may have been another environment's, whose turns have other limits.
            config = self.trainer.config
            max_tokens = config.env(task.env).max_tokens or config.max_tokens
            group.params = replace(group.params, max_tokens=max_tokens)
            group.task = task
            under_way.restore(group, kept)

    def task_of(self, kept: dict[str, Any]) -> Task | None:
        """The task of a group that was under way: a curriculum draws another for the same position
        by now. None if the data no longer have it."""
        row = int(kept["task"].rpartition("/")[2])
        for source in self.trainer.plan.train.sources:
            if source.env == kept["env"] and row < len(source.rows):
                return source.task_of_row(row)
        return None

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        if self.trainer.config.max_staleness:
            ages = [step - group.version for group in groups]
            staleness = Mean(sum(ages), len(ages))
            most = Max(max(ages, default=0))
            self.trainer.note("rollout/", {"staleness": staleness, "staleness_max": most})

    async def files(self, scratch: Path) -> list[Path]:
        """Each rank writes its own, and rank 0 copies them all."""
        trainer, worker = self.trainer, self.trainer.worker
        if not trainer.config.max_staleness or not worker.pending:
            return []
        for engine in trainer.device.engines:
            await engine.catch_up()
        names = [f"{under_way.FILE}{rank:05d}.jsonl.zst" for rank in range(trainer.ranks.size)]
        own = scratch / names[trainer.ranks.rank]
        with naming(own):
            begun = (*worker.done, *worker.running)
            under_way.write_groups(own, [worker.pending[number] for number in begun])
        return [scratch / name for name in names]
