"""Metrics of episodes, and the stop of a run in which too many fail."""

from __future__ import annotations

from collections import Counter

from rl_core.distributed import Ranks, all_gather_json
from rl_core.metrics import Mean, Metric, Percentile, Sum
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
    episodes = {(t.env, t.task_id, t.group_id, t.index) for t in trajectories}
    failures = {(t.env, t.task_id, t.group_id, t.index): t.error for t in trajectories if t.status == "failed"}
    num_failed = Counter((env, task) for env, task, *_ in failures)
    counts = [[*row, num_failed[row], n] for row, n in Counter((env, task) for env, task, *_ in episodes).items()]
    first = next((f"{task}: {error}" for (_, task, *_), error in failures.items()), "")
    parts = all_gather_json([counts, first], ranks)
    new = sorted(tuple(row) for part, _ in parts for row in part)
    for env, task, bad, total in new:
        rows.pop((env, task), None)
        rows[env, task] = bad / total
    for old in list(rows)[: -max(WINDOW_ROWS, len(new))]:
        del rows[old]
    failed, total = sum(row[2] for row in new), sum(row[3] for row in new)
    is_all = failed == total and limit < 1
    if failed and (is_all or sum(rows.values()) > limit * max(min_rows, len(rows))):
        raise RunError(
            f"{failed} of {total} episodes of {name} failed, and more than --rollout.max_failed_fraction={limit} of the last "
            f"{len(rows)} rows. The first: {next(text for _, text in parts if text)}"
        )


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means over the episodes that did not fail."""
    done = [t for t in trajectories if t.status != "failed"]
    n, lengths = len(done), [t.num_tokens for t in done]
    groups: dict[tuple, set[float]] = {}
    for t in done:
        groups.setdefault((t.env, t.group_id, t.actor, t.seat), set()).add(t.reward)
    return {
        "reward_mean": Mean(sum(t.reward for t in done), n),
        "length_mean": Mean(sum(lengths), n),
        "length_p50": Percentile(50, lengths),
        "length_p95": Percentile(95, lengths),
        "length_max": Percentile(100, lengths),
        "turns_mean": Mean(sum(len(t.turns) for t in done), n),
        "truncated_frac": Mean(sum(t.status == "truncated" for t in done), n),
        "failed": Sum(len(trajectories) - n),
        "tokens": Sum(sum(lengths)),
        "zero_signal_frac": Mean(sum(len(rewards) == 1 for rewards in groups.values()), len(groups)),
        **part_metrics(done),
    }


def lag_metrics(trajectories: list[Trajectory], version: int) -> dict[str, Metric]:
    """Fraction of sampled tokens by weights older than `version`, and the mean age of these in versions."""
    turns = (turn for t in trajectories if t.status != "failed" for turn in t.turns)
    lags = [version - v for turn in turns for v in turn.completion.policy_versions]
    older = [lag for lag in lags if lag > 0]
    fraction: dict[str, Metric] = {"lagged_frac": Mean(len(older), len(lags))}
    return fraction | ({"lag_versions": Mean(sum(older), len(older))} if older else {})


def part_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means of each part of the reward and of each metric that the environment gives."""
    values: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in [*((f"reward/{part}", v) for part, v in t.reward_parts.items()), *t.metrics.items()]:
            values.setdefault(name, []).append(value)
    return {name: Mean(sum(values[name]), len(values[name])) for name in sorted(values)}
