"""--rollout.max_failed_fraction: ends a run in which too many episodes fail."""

from __future__ import annotations

from collections import Counter

from rl_core.data.episodes import CUT_OFF, failure_reason
from rl_core.distributed import Ranks, all_gather_json
from rl_core.errors import keep_ends
from rl_core.plugin import Plugin, RunState
from rl_core.types import RunError, Trajectory

MAX_REASONS, MAX_REASON_CHARS = 20, 600  # Limits of the reasons that ranks exchange.
# max_failed_fraction applies to the newest WINDOW_ROWS rows, and to at least MIN_ROWS.
WINDOW_ROWS, MIN_ROWS = 200, 50


class FailureLimit(Plugin):
    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.rows: dict[tuple[str, str], float] = {}  # See refuse_failures().
        # Numbers of episodes, and of failed ones, in this process.
        self.tallies: dict[str, Counter[str]] = {"train": Counter(), "eval": Counter()}

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        """Reports the reasons of failures to plugins. Raises RunError if too many failed, after the
        plugins saved."""
        trainer, config = self.trainer, self.trainer.config.rollout
        limit, rows, min_rows, tally = config.max_failed_fraction, self.rows, MIN_ROWS, "train"
        if name.startswith("eval/"):
            rows, min_rows, tally = {}, 1, "eval"
        tally = self.tallies[tally]
        try:
            reasons = refuse_failures(
                trajectories, rows, limit, name, trainer.ranks, min_rows, tally
            )
        except RunError as error:
            await trainer.call("give_up")
            if not config.save:
                raise
            raise RunError(f"{error}; all reasons: {self.show_command(name)}") from error
        await trainer.call("on_failures", step, reasons)

    def show_command(self, name: str) -> str:
        """The command that counts the reasons of a step, or of an evaluation."""
        flags = "--reasons --eval" if name.startswith("eval") else "--reasons"
        return f"rl-core show {self.trainer.out} {flags}"

    def after_run(self) -> None:
        """Logs the number of failed episodes, and the command that counts the reasons."""
        for kind, tally in self.tallies.items():
            if not tally["failed"]:
                continue
            kinds = " of evaluations" if kind == "eval" else ""
            line = f"  {tally['failed']} of {tally['episodes']} episodes{kinds} failed"
            if self.trainer.config.rollout.save:
                line += f": {self.show_command(kind)}"
            self.trainer.log.say(line)


def refuse_failures(
    trajectories: list[Trajectory],
    rows: dict[tuple[str, str], float],
    limit: float,
    name: str,
    ranks: Ranks,
    min_rows: int = MIN_ROWS,
    tally: Counter[str] | None = None,
) -> dict[str, int]:
    """Reason -> number of episodes that failed for it, on all ranks. Raises RunError on all ranks
    if all of these episodes failed, or a larger fraction than the limit among the newest rows.
    `rows` holds the failed fraction of each row's last group, newest last, and is updated. A row
    counts once, even if it was drawn often: one bad row in twenty is a twentieth. Adds the numbers
    of "episodes" and of "failed" to `tally`."""
    counts, firsts = [], []
    reasons: Counter[str] = Counter()
    for of_rank, first, commonest in all_gather_json(count_failures(trajectories), ranks):
        counts += of_rank
        firsts += [first] if first else []
        reasons.update(dict(commonest))
    failed = sum(row[2] for row in counts)
    total = sum(row[3] for row in counts)
    for env, task, bad, num in sorted(counts):
        rows.pop((env, task), None)
        rows[env, task] = bad / num
    for old in list(rows)[: -max(WINDOW_ROWS, len(counts))]:
        del rows[old]
    if tally is not None:
        tally.update(failed=failed, episodes=total)
    if failed and (failed == total or sum(rows.values()) > limit * max(min_rows, len(rows))):
        rule = "" if failed == total else limit_text(rows, limit, min_rows)
        raise RunError(
            f"{failed} of {total} episodes of {name} failed. The first: {firsts[0]}{rule}"
        )
    return dict(reasons.most_common(MAX_REASONS))


def limit_text(rows: dict[tuple[str, str], float], limit: float, min_rows: int) -> str:
    counted = max(min_rows, len(rows))
    text = (
        f". It is more than --rollout.max_failed_fraction={limit} allows: of the last "
        f"{len(rows)} rows {sum(rows.values()):.4g} failed, where a row counts by its failed "
        f"fraction, and {limit * counted:.4g} may"
    )
    if counted > len(rows):
        text += f", {limit} of {counted} rows, the least number that the limit applies to"
    return text


def count_failures(trajectories: list[Trajectory]) -> tuple[list[list], str, list[tuple[str, int]]]:
    """([[environment, task, number of failed episodes, number of episodes] of each row, the first
    failure, the commonest reasons)."""
    episodes: dict[tuple, str | None] = {}
    for t in trajectories:
        episode = t.env, t.task_id, t.group_id, t.index
        episodes.setdefault(episode, None)
        if t.status == "failed":
            episodes[episode] = t.error
    totals, failed = Counter(), Counter()
    for (env, task, *_), error in episodes.items():
        totals[env, task] += 1
        failed[env, task] += error is not None
    counts = [[*row, failed[row], total] for row, total in totals.items()]
    first, reasons = "", Counter()
    if failed.total():
        errors = {key: error for key, error in episodes.items() if error is not None}
        first, reasons = count_reasons(errors)
    return counts, first, reasons.most_common(MAX_REASONS)


def count_reasons(failed: dict[tuple, str]) -> tuple[str, Counter[str]]:
    """(the first failure, reason -> number of episodes). `failed`: errors of episodes."""
    untruncated = {failure_reason(error, task) for (_, task, *_), error in failed.items() if error}
    first, reasons = "", Counter()
    for (_, task, *_), error in failed.items():
        reason, note, _ = error.partition(CUT_OFF)
        if note and failure_reason(reason, task) in untruncated:  # It is not the truncation.
            error = reason
        first = first or f"{task}: {error.replace(f' for task {task}', '')}"
        reasons[keep_ends(failure_reason(error, task), MAX_REASON_CHARS)] += 1
    return first, reasons
