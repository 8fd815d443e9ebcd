"""The source of episodes of a run that stays open: it waits for sessions that programs have
rated."""

from __future__ import annotations

import time
from collections import defaultdict

from rl_core.config import Config
from rl_core.environments.agents.sessions import OnlineSession, Sessions
from rl_core.types import Row

# The run reads no rows. Hooks of an environment's file may name this column.
ROWS: list[Row] = [{"prompt": "A session of a program.", "info": None}]


class SessionSource:
    """Chooses the sessions of a step: the oldest --tasks_per_step, or as many groups of
    --group_size sessions with one task id."""

    def __init__(self, config: Config, sessions: Sessions):
        self.config, self.sessions = config, sessions
        self.began_s = time.monotonic()  # End of the last step.

    def groups(self, is_due: bool) -> list[list[OnlineSession]]:
        """The groups that can begin a step. `is_due`: those that lack sessions too, but for a
        single one that a group needs."""
        size = self.config.group_size
        if size == 1:
            return [[session] for session in self.sessions.rated]
        by_task: dict[str, list[OnlineSession]] = defaultdict(list)
        for session in self.sessions.rated:
            by_task[session.task_id].append(session)
        groups = []
        for of_task in by_task.values():
            for start in range(0, len(of_task), size):
                groups.append(of_task[start : start + size])
        least = 2 if is_due else size
        return [group for group in groups if len(group) >= least]

    def take(self, step: int, is_last: bool) -> list[list[OnlineSession]] | None:
        """The groups of a step, or None if there are too few sessions. `is_last`: the run ends,
        and takes what there is. Leaves out sessions whose tokens are too old."""
        online, most = self.config.online, self.config.tasks_per_step
        for session in self.sessions.rated:
            if step - session.oldest_version > self.config.max_staleness:
                self.sessions.leave_out(session, "older than --max_staleness")
        waited_s = time.monotonic() - self.began_s
        is_due = is_last or 0 < 60 * online.step_minutes <= waited_s
        groups = self.groups(is_due)
        if len(groups) < most and not (is_due and sum(map(len, groups)) >= online.min_sessions):
            return None
        for session in (each for group in groups[:most] for each in group):
            self.sessions.take(session, step + 1)
        return groups[:most]
