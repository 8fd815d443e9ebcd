"""Options of a run: its plugins, in the order in which they are called, and ranks that only sample.

Each module is imported when its option is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.plugin import Plugin, RunState
    from rl_core.run.plan.plan import Plan
    from rl_core.sampling.engine import Engine


def make_plugins(trainer: RunState) -> list[Plugin]:
    """The run's plugins, in the order in which they are called."""
    return [
        *first_plugins(trainer),
        *rollout_plugins(trainer),
        *evaluation_plugins(trainer),
        *(make(trainer) for make in trainer.plan.custom.plugins),  # A script's.
        *last_plugins(trainer),
    ]


def first_plugins(trainer: RunState) -> Iterator[Plugin]:
    config = trainer.config
    if trainer.plan.rank_groups:
        # First, so that rollouts use the weights that it loads.
        from rl_core.run.rank_group_client import RankGroupClient

        yield RankGroupClient(trainer)
    if any(algorithm.baseline == "running" for algorithm in trainer.plan.algorithms.values()):
        # Before the episodes are written, with their baselines.
        from rl_core.run.running_baseline import RunningBaseline

        yield RunningBaseline(trainer)
    # Writes the episodes of a step before the run may end because of them.
    from rl_core.run.saving.run_files import RunFiles

    yield RunFiles(trainer)
    # Before evaluations, whose lines follow the line of their step.
    if trainer.ranks.is_writer and sys.stdout.isatty():
        from rl_core.run.display.panel import Panel

        yield Panel(trainer)
    elif trainer.ranks.is_writer:
        from rl_core.run.display.terminal import Terminal

        if in_kernel():
            from rl_core.run.display.notebook import Chart as Terminal

        yield Terminal(trainer)
    if config.trackers:
        from rl_core.run.display.trackers import Trackers

        yield Trackers(trainer)
    if trainer.plan.has_task_weight:
        from rl_core.run.curriculum import Curriculum

        yield Curriculum(trainer)
    if config.data.streaming:
        from rl_core.run.stream_state import StreamState

        yield StreamState(trainer)


def in_kernel() -> bool:
    """True in a process of Jupyter. IPython on a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def rollout_plugins(trainer: RunState) -> Iterator[Plugin]:
    config, plan = trainer.config, trainer.plan
    if config.is_rl and plan.engines.may_lack_weights(trainer.ranks):
        from rl_core.run.weight_recovery import WeightRecovery

        yield WeightRecovery(trainer)
    yield from canary(trainer)
    if config.rollout.stale_policy_frac > 0:
        from rl_core.run.stale_policy import StalePolicy

        yield StalePolicy(trainer)
    if config.max_staleness or config.deterministic:
        from rl_core.run.staleness import StaleGroups

        yield StaleGroups(trainer)
    if config.profile_step:
        from rl_core.run.display.profiler import Profiler

        yield Profiler(trainer)
    if torch.cuda.is_available():
        from rl_core.run.display.mfu import Mfu

        yield Mfu(trainer)
    if config.online.on:
        from rl_core.run.online import Online

        yield Online(trainer)
    if any(algorithm.dynamic_sampling_rounds for algorithm in plan.algorithms.values()):
        from rl_core.run.dynamic_sampling import Refill

        yield Refill(trainer)


def evaluation_plugins(trainer: RunState) -> Iterator[Plugin]:
    config = trainer.config
    from rl_core.run.evaluation.episode_metrics import EpisodeMetrics

    yield EpisodeMetrics(trainer)
    if config.keep_best:
        from rl_core.run.saving.best_keeper import BestKeeper

        yield BestKeeper(trainer)
    if config.print_samples:
        from rl_core.run.evaluation.print_samples import LogSamples

        yield LogSamples(trainer)
    if config.eval_every:
        from rl_core.run.evaluation.evaluation import Evaluation

        yield Evaluation(trainer)


def last_plugins(trainer: RunState) -> Iterator[Plugin]:
    """Called after a script's plugins: evaluations end before a signal ends the run, and a
    checkpoint has the state of all plugins."""
    from rl_core.run.failure_limit import FailureLimit
    from rl_core.run.saving.checkpointer import Checkpointer

    yield signals(trainer)
    yield FailureLimit(trainer)
    yield Checkpointer(trainer)
    yield from optimizer_start(trainer)
    if trainer.config.push_to_hub:
        from rl_core.run.saving.push_to_hub import PushToHub

        yield PushToHub(trainer)


def canary(trainer: RunState) -> Iterator[Plugin]:
    if trainer.config.is_rl and trainer.config.canary_tolerance != 0:
        from rl_core.run.canary import Canary

        yield Canary(trainer)


def optimizer_start(trainer: RunState) -> Iterator[Plugin]:
    if any(trainer.config.of(name).optim.init_from for name in trainer.config.trained):
        from rl_core.run.saving.optimizer_start import OptimizerStart

        yield OptimizerStart(trainer)


def signals(trainer: RunState) -> Plugin:
    from rl_core.run.process.signals import SignalHandler

    return SignalHandler(trainer)


def learner_plugins(trainer: RunState) -> list[Plugin]:
    """Plugins of ranks that learn without playing episodes."""
    return [*canary(trainer), *optimizer_start(trainer)]


def rank_group_engines(plan: Plan, ranks: Ranks) -> Mapping[str, Engine]:
    """Engines of actors on other rank groups, as ranks that play episodes see them."""
    if ranks.is_engine or not plan.rank_groups:
        return {}
    from rl_core.run.rank_group_client import connect_rank_groups

    return connect_rank_groups(plan.rank_groups, ranks, plan.config.timeout_s)
