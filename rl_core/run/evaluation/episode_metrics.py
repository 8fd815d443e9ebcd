"""Metrics of episodes."""

from __future__ import annotations

from functools import cache

from rl_core.data.episodes import (
    baseline_groups,
    by_episode,
    episode_means,
    episode_rewards,
    has_spread,
    succeeded,
)
from rl_core.metrics import Mean, Metric, Percentile, Sum
from rl_core.plugin import Plugin
from rl_core.sampling.groups import Group
from rl_core.sampling.reward_parts import NOT_APPLIED, is_recorded
from rl_core.sampling.rollout import sorted_trajectories
from rl_core.types import Trajectory


class EpisodeMetrics(Plugin):
    """Metrics of the episodes of each step, and sampled and trained tokens per second."""

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        trainer, trajectories = self.trainer, sorted_trajectories(groups)
        for name in trainer.config.trained:
            of_actor = [t for t in trajectories if t.actor == name]
            trainer.add_metrics(f"rollout/{name}/", rollout_metrics(of_actor))
            if len(trainer.plan.envs) > 1:
                for env in trainer.plan.envs:
                    of_env = [t for t in of_actor if t.env == env]
                    trainer.add_metrics(f"rollout/{name}/{env}/", rollout_metrics(of_env))
        for name, endpoint in trainer.plan.endpoints.items():
            trainer.add_metrics(f"rollout/{name}/", endpoint.take_metrics())
        if trainer.device.lease is not None:
            trainer.add_metrics("rollout/", trainer.device.lease.take_metrics())
        for engine in trainer.device.engines:
            trainer.add_metrics("", await engine.take_metrics())

    async def before_log(self, step: int) -> None:
        trainer, metrics = self.trainer, self.trainer.metrics
        spoken = [f"rollout/{name}/tokens" for name in trainer.config.trained]
        for phase, names in (("generate", spoken), ("learn", ["pack/tokens"])):
            tokens = sum(metrics[name].value for name in names if name in metrics)
            if tokens:
                # Learners on separate ranks may still learn when those here are done.
                phases = (f"time/{phase}_s", "time/rank_groups_s")[: 1 + (phase == "learn")]
                seconds = sum(metrics[name].value for name in phases if name in metrics)
                speed = Sum(tokens / seconds)
                trainer.add_metrics("time/", {f"{phase}_tokens_per_s": speed})
        if trainer.ranks.rollout_ranks:
            waited = Mean(metrics["time/generate_s"].value, metrics["time/step_s"].value)
            trainer.add_metrics("time/", {"learners_idle_frac": waited})


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means over the episodes that did not fail. An episode with several conversations counts with
    their mean."""
    done = succeeded(trajectories)
    lengths = episode_means(done, lambda t: t.num_tokens)
    all_lengths = [t.num_tokens for t in done]
    groups = [[t.reward or 0.0 for t in group] for group in baseline_groups(done)]
    metrics = {
        "reward_mean": mean_of(episode_rewards(done)),
        "length_mean": mean_of(lengths),
        "length_p50": Percentile(50, lengths),
        "length_p95": Percentile(95, lengths),
        "length_max": Percentile(100, all_lengths),
        "turns_mean": mean_of(episode_means(done, lambda t: len(t.turns))),
        "truncated_frac": mean_of(episode_means(done, lambda t: float(t.status == "truncated"))),
        "failed": num_failed(trajectories),
        "tokens": Sum(sum(all_lengths)),
        "zero_signal_frac": mean_of([float(not has_spread(rewards)) for rewards in groups]),
        **part_metrics(done),
    }
    if any(t.has_state_keys for t in done):
        from rl_core.learning.gigpo import state_metrics

        metrics |= state_metrics(done)
    return metrics


def mean_of(values: list[float]) -> Mean:
    return Mean(sum(values), len(values))


def held_out_metrics(
    trajectories: list[Trajectory], score: str, passed: str, pass_reward: float, count: int = 1
) -> dict[str, Metric]:
    """Means over the tasks: `score` is the mean reward of a task's episodes, `passed` is 1 if any
    of its `count` episodes passes. `passed` leaves out tasks with fewer episodes, because some
    failed."""
    tasks = [episode_rewards(group) for group in baseline_groups(trajectories)]
    scores = [sum(rewards) / len(rewards) for rewards in tasks]
    passes = [float(max(rewards) >= pass_reward) for rewards in tasks if len(rewards) >= count]
    return {score: mean_of(scores), passed: mean_of(passes)}


def num_failed(trajectories: list[Trajectory]) -> Sum:
    """The number of episodes that failed."""
    failed = {(t.env, t.group_id, t.index) for t in trajectories if t.status == "failed"}
    return Sum(len(failed))


def part_metrics(trajectories: list[Trajectory]) -> dict[str, Metric]:
    """Means of each component of the reward and of each metric of the environment, over the
    episodes that have them; the number of episodes to which a component does not apply."""
    values: dict[str, list[float]] = {}
    for episode in by_episode(trajectories):
        of_episode: dict[str, list[float]] = {}
        for t in episode:
            parts = {f"reward/{name}": value for name, value in t.reward_parts.items()}
            metrics = {logged_name(name): value for name, value in t.metrics.items()}
            for name, value in [*parts.items(), *metrics.items()]:
                of_episode.setdefault(name, []).append(value)
        for name, of_conversations in of_episode.items():
            values.setdefault(name, []).append(sum(of_conversations) / len(of_conversations))
    means: dict[str, Metric] = {}
    for name in sorted(values):
        is_count = name.startswith(NOT_APPLIED)
        means[name] = Sum(len(values[name])) if is_count else mean_of(values[name])
    return means


@cache
def logged_name(name: str) -> str:
    """The name under which a trajectory's metric is logged: with the prefix `env_` if a metric of
    the trainer has that name in training or in evaluations."""
    if is_recorded(name):
        return name
    from rl_core.run.display.metric_table import describe

    for prefix in ("rollout/ACTOR/", "eval/SET/greedy_", "eval/SET/sampled_"):
        row = describe(prefix + name)
        if row is not None and not row.is_of_user:
            return f"env_{name}"
    return name
