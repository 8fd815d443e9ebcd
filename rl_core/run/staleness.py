"""Groups that span several policy versions (--max_staleness, --deterministic): checkpoints
keep the completions so far."""

from __future__ import annotations

from pathlib import Path

from rl_core.metrics import Max, Mean
from rl_core.plugin import Plugin, RunState
from rl_core.run.run_folder import naming
from rl_core.run.saving.run_files import write_trajectories
from rl_core.sampling.groups import Group, training_group
from rl_core.sampling.resumable_rollouts import FILE, Replays, read_groups
from rl_core.types import JSONObject, Task


class StaleGroups(Plugin):
    """Saves and restores unfinished groups."""

    @property
    def replays(self) -> Replays:
        assert self.trainer.worker.player.replays is not None
        return self.trainer.worker.player.replays

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.kept: dict[int, JSONObject] = {}  # Position -> saved group of this rank.

    def load(self, state: JSONObject) -> None:
        trainer = self.trainer
        trainer.worker.resume_groups(trainer.cursor.pending, self.restored)
        local = {position for position in trainer.cursor.pending if trainer.worker.is_own(position)}
        if local:
            assert trainer.checkpoint is not None
            oldest = trainer.first_step - trainer.config.max_staleness
            images = trainer.out / "rollouts"
            self.kept = read_groups(trainer.checkpoint, local, oldest, images)

    def restored(self, group: Group) -> Group:
        """The group with the saved completions, if an earlier process started it."""
        row = self.kept.pop(group.position, None) if not group.label else None
        task = self.task_of(row) if row else None
        if not row or not task:
            return group
        group = training_group(self.trainer.config, group.position, task)
        self.replays.restore(group, row)
        return group

    def task_of(self, row: JSONObject) -> Task | None:
        """The task of a saved group; a curriculum would now draw another for the position. None if
        the data lack the task."""
        number = int(row["task"].rpartition("/")[2])
        for source in self.trainer.plan.train.sources:
            if source.env == row["env"] and number < len(source.rows):
                return source.task_of_row(number)
        return None

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        if self.trainer.config.max_staleness:
            ages = [step - group.version for group in groups]
            staleness = Mean(sum(ages), len(ages))
            most = Max(max(ages, default=0))
            self.trainer.add_metrics("rollout/", {"staleness": staleness, "staleness_max": most})

    async def files(self, scratch: Path) -> list[Path]:
        """Writes this rank's groups; rank 0 copies the files of all ranks."""
        trainer, worker = self.trainer, self.trainer.worker
        if not worker.pending:
            return []
        for engine in trainer.device.engines:
            await engine.update_unfinished()
        names = [f"{FILE}{rank:05d}.jsonl.zst" for rank in range(trainer.ranks.size)]
        file = scratch / names[trainer.ranks.rank]
        rows = []
        for key in (*worker.done, *worker.running):
            rows.append(self.replays.row_of(worker.pending[key]))
        with naming(file):
            write_trajectories(file, rows, trainer.out / "rollouts")
        return [scratch / name for name in names]
