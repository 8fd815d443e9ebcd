"""DAPO's dynamic sampling: replaces groups whose rewards are all equal, which teach nothing
(arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from rl_core.data.episodes import baseline_groups
from rl_core.distributed import all_gather_json
from rl_core.learning.signal import has_signal
from rl_core.metrics import Mean
from rl_core.plugin import Plugin
from rl_core.sampling.groups import Group
from rl_core.sampling.rollout import sorted_trajectories


class Refill(Plugin):
    async def refill(self, groups: list[Group]) -> list[Group]:
        trainer, rounds = self.trainer, 0
        max_rounds = max(a.dynamic_sampling_rounds for a in trainer.plan.algorithms.values())
        more: list[Group] = []
        missing = self.num_missing(groups)
        while missing and rounds < max_rounds:
            rounds += 1
            trainer.worker.submit(trainer.draw_groups(missing))
            if not trainer.worker.pending:
                break  # No rows are left of --num_epochs.
            more += await trainer.collect(missing)
            missing = self.num_missing([*groups, *more])
        counts = {"dynamic_sampling_rounds": Mean(rounds), "groups_missing": Mean(missing)}
        trainer.add_metrics("rollout/", {**counts})
        return more

    def num_missing(self, groups: list[Group]) -> int:
        """Number of groups with signal that the step lacks, over all ranks."""
        trainer, with_signal = self.trainer, set()
        asking = {
            name: a for name, a in trainer.plan.algorithms.items() if a.dynamic_sampling_rounds
        }
        learned = [t for t in sorted_trajectories(groups) if t.actor in asking]
        for group in baseline_groups(learned):
            if has_signal(group, asking[group[0].actor]):
                with_signal.add(group[0].group_id)
        num = sum(all_gather_json(len(with_signal), trainer.ranks))
        return max(0, trainer.config.tasks_per_step - num)
