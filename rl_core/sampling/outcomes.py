"""Metrics of episodes, and the stop of a run in which too many fail."""

from __future__ import annotations

from collections import Counter

from rl_core.data.episodes import (
    baseline_groups,
    by_episode,
    episode_means,
    episode_rewards,
    failure_reason,
    has_spread,
)
from rl_core.distributed import Ranks, all_gather_json
from rl_core.metrics import Mean, Metric, Percentile, Sum
from rl_core.types import RunError, Trajectory

MAX_REASONS, MAX_REASON_CHARS = 20, 600  # that ranks tell each other of one step
# Max_failed_fraction is of the newest WINDOW_ROWS rows, and of at least MIN_ROWS.
WINDOW_ROWS, MIN_ROWS = 200, 50


def refuse_failures(
    trajectories: list[Trajectory],
    rows: dict[tuple[str, str], float],
    limit: float,
    name: str,
    ranks: Ranks,
    min_rows: int = MIN_ROWS,
    tally: Counter[str] | None = None,
) -> dict[str, int]:
    """Reason -> how many of these episodes failed for it, on all ranks. Raises RunError on all
    ranks alike if all of these episodes failed, or more than the limit among the newest rows.
    `rows` holds the failed part of each row's last group, the newest last, and is updated. A row
    counts once, however often it was drawn: one bad row of twenty is a twentieth. Adds to `tally`
    how many "episodes" there were, and how many "failed"."""
    episodes = {(t.env, t.task_id, t.group_id, t.index) for t in trajectories}
    failures = {
        (t.env, t.task_id, t.group_id, t.index): t.error
        for t in trajectories
        if t.status == "failed"
    }
    num_failed = Counter((env, task) for env, task, *_ in failures)
    counts = [
        [*row, num_failed[row], n]
        for row, n in Counter((env, task) for env, task, *_ in episodes).items()
    ]
    first = next((f"{task}: {error}" for (_, task, *_), error in failures.items()), "")
    reasons = Counter(
        failure_reason(error, task)[:MAX_REASON_CHARS] for (_, task, *_), error in failures.items()
    )
    parts = all_gather_json([counts, first, reasons.most_common(MAX_REASONS)], ranks)
    new = sorted(tuple(row) for part, _, _ in parts for row in part)
    for env, task, bad, total in new:
        rows.pop((env, task), None)
        rows[env, task] = bad / total
    for old in list(rows)[: -max(WINDOW_ROWS, len(new))]:
        del rows[old]
    failed, total = sum(row[2] for row in new), sum(row[3] for row in new)
    if tally is not None:
        tally.update(failed=failed, episodes=total)
    bad_rows = sum(rows.values())
    counted = max(min_rows, len(rows))
    are_too_many = bad_rows > limit * counted
    if failed and (failed == total or are_too_many):
        rule = ", all that there were"
        if are_too_many:
            rule = (
                f", and more than --rollout.max_failed_fraction={limit} of the last {len(rows)} "
                "rows"
            )
            if counted > len(rows):
                rule += f", which count as {counted}"
            rule += f" ({bad_rows:.4g} failed, {limit * counted:.4g} may)"
        first = next(text for _, text, _ in parts if text)
        raise RunError(f"{failed} of {total} episodes of {name} failed{rule}. The first: {first}")
    all_reasons: Counter[str] = Counter()
    for _, _, own in parts:
        all_reasons.update(dict(own))
    return dict(all_reasons.most_common(MAX_REASONS))


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means over the episodes that did not fail. One that returned several conversations counts
    with their mean."""
    done = [t for t in trajectories if t.status != "failed"]
    lengths = episode_means(done, lambda t: t.num_tokens)
    all_lengths = [t.num_tokens for t in done]
    groups = [[t.reward for t in group] for group in baseline_groups(done)]
    failed = {(t.env, t.group_id, t.index) for t in trajectories if t.status == "failed"}
    return {
        "reward_mean": mean_of(episode_rewards(done)),
        "length_mean": mean_of(lengths),
        "length_p50": Percentile(50, lengths),
        "length_p95": Percentile(95, lengths),
        "length_max": Percentile(100, all_lengths),
        "turns_mean": mean_of(episode_means(done, lambda t: len(t.turns))),
        "truncated_frac": mean_of(episode_means(done, lambda t: float(t.status == "truncated"))),
        "failed": Sum(len(failed)),
        "tokens": Sum(sum(all_lengths)),
        "zero_signal_frac": mean_of([float(not has_spread(rewards)) for rewards in groups]),
        **part_metrics(done),
    }


def mean_of(values: list[float]) -> Mean:
    return Mean(sum(values), len(values))


def held_out_metrics(
    trajectories: list[Trajectory], score: str, passed: str, pass_reward: float
) -> dict[str, Metric]:
    """Means over the tasks: `score` is the mean reward of a task's episodes, `passed` whether any
    of them passes."""
    tasks = [episode_rewards(group) for group in baseline_groups(trajectories)]
    scores = [sum(rewards) / len(rewards) for rewards in tasks]
    passes = [float(max(rewards) >= pass_reward) for rewards in tasks]
    return {score: mean_of(scores), passed: mean_of(passes)}


def part_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means of each part of the reward and of each metric that the environment gives, over the
    episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in by_episode(trajectories):
        own: dict[str, list[float]] = {}
        for t in episode:
            parts = {f"reward/{part}": value for part, value in t.reward_parts.items()}
            for name, value in [*parts.items(), *t.metrics.items()]:
                own.setdefault(name, []).append(value)
        for name, of_conversations in own.items():
            values.setdefault(name, []).append(sum(of_conversations) / len(of_conversations))
    return {name: mean_of(values[name]) for name in sorted(values)}
