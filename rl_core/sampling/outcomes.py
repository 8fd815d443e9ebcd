"""Metrics of episodes, and the stop of a run in which too many fail."""

from __future__ import annotations

from rl_core.distributed import Ranks, all_gather_json
from rl_core.metrics import Mean, Metric, Sum
from rl_core.types import RunError, Trajectory

WINDOW_ROWS, MIN_ROWS = 200, 50  # max_failed_fraction is of the newest WINDOW_ROWS rows, and of at least MIN_ROWS


def refuse_failures(
    trajectories: list[Trajectory],
    rows: dict[tuple[str, str], float],
    limit: float,
    name: str,
    ranks: Ranks,
    min_rows: int = MIN_ROWS,
) -> None:
    """Raises RunError on all ranks alike if all of these episodes failed, or more than the limit among the newest rows. `rows`
    holds the failed part of each row's last group, the newest last, and is updated. A row counts once, however often it was
    drawn: one bad row of twenty is a twentieth."""
    episodes: dict[tuple, dict[tuple, bool]] = {}
    for t in trajectories:
        own = episodes.setdefault((t.env, t.task_id), {})
        own[t.group_id, t.index] = own.get((t.group_id, t.index), False) or t.status == "failed"
    found = [[env, task, sum(failed.values()), len(failed)] for (env, task), failed in episodes.items()]
    reason = next((f"{t.task_id}: {t.error}" for t in trajectories if t.status == "failed"), "")
    parts = all_gather_json([found, reason], ranks)
    new = sorted(tuple(row) for part, _ in parts for row in part)
    for env, task, num_failed, total in new:
        rows.pop((env, task), None)
        rows[env, task] = num_failed / total
    for old in list(rows)[: -max(WINDOW_ROWS, len(new))]:
        del rows[old]
    failed, total = sum(row[2] for row in new), sum(row[3] for row in new)
    is_all = failed == total and limit < 1
    if failed and (is_all or sum(rows.values()) > limit * max(min_rows, len(rows))):
        raise RunError(
            f"{failed} of {total} episodes of {name} failed, and more than --rollout.max_failed_fraction={limit} of the last "
            f"{len(rows)} rows. The first: {next(r for _, r in parts if r)}"
        )


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means over the episodes that did not fail."""
    done = [t for t in trajectories if t.status != "failed"]
    n = len(done)
    metrics: dict[str, Metric] = {
        "reward_mean": Mean(sum(t.reward for t in done), n),
        "length_mean": Mean(sum(t.num_tokens for t in done), n),
        "turns_mean": Mean(sum(len(t.turns) for t in done), n),
        "truncated_frac": Mean(sum(t.status == "truncated" for t in done), n),
        "failed": Sum(len(trajectories) - n),
        "tokens": Sum(sum(t.num_tokens for t in done)),
    }
    groups: dict[tuple, list[float]] = {}
    for t in done:
        groups.setdefault((t.env, t.group_id, t.actor, t.seat), []).append(t.reward)
    metrics["zero_signal_frac"] = Mean(sum(len(set(g)) == 1 for g in groups.values()), len(groups))
    return metrics | part_metrics(done)


def lag_metrics(trajectories: list[Trajectory], version: int) -> dict[str, Metric]:
    """Fraction of sampled tokens by weights older than `version`, and the mean age of these in versions."""
    turns = (turn for t in trajectories if t.status != "failed" for turn in t.turns)
    lags = [version - v for turn in turns for v in turn.completion.policy_versions]
    older = [lag for lag in lags if lag > 0]
    found: dict[str, Metric] = {"lagged_frac": Mean(len(older), len(lags))}
    return found | ({"lag_versions": Mean(sum(older), len(older))} if older else {})


def part_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means of each part of the reward and of each metric that the environment gives."""
    metrics: dict[str, Metric] = {}
    for kind in ("reward_parts", "metrics"):
        for name in sorted({k for t in trajectories for k in getattr(t, kind)}):
            values = [getattr(t, kind)[name] for t in trajectories if name in getattr(t, kind)]
            metrics[f"{'reward/' if kind == 'reward_parts' else ''}{name}"] = Mean(sum(values), len(values))
    return metrics
