"""Options of a run: its plugins, in the order in which they are called, and ranks that only sample.

Each function imports its module when the option is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rl_core.engines.options import engine_factory
from rl_core.run.curriculum import has_task_weight

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.plugin import Plugin, RunState
    from rl_core.sampling.engine import Engine


def rank_groups(trainer: RunState) -> Plugin:
    from rl_core.run.rank_group_client import RankGroupClient

    return RankGroupClient(trainer)


def run_files(trainer: RunState) -> Plugin:
    from rl_core.run.saving.run_files import RunFiles

    return RunFiles(trainer)


def terminal(trainer: RunState) -> Plugin:
    if sys.stdout.isatty():
        from rl_core.run.display.panel import Panel

        return Panel(trainer)
    from rl_core.run.display.terminal import Terminal

    return Terminal(trainer)


def trackers(trainer: RunState) -> Plugin:
    from rl_core.run.display.trackers import Trackers

    return Trackers(trainer)


def curriculum(trainer: RunState) -> Plugin:
    from rl_core.run.curriculum import Curriculum

    return Curriculum(trainer)


def stream_state(trainer: RunState) -> Plugin:
    from rl_core.run.stream_state import StreamState

    return StreamState(trainer)


def may_lack_weights(trainer: RunState) -> bool:
    config, plan = trainer.config, trainer.plan
    if not config.is_rl:
        return False
    factory = engine_factory(config, plan.local, plan.custom.engine)
    return factory.may_lack_weights(trainer.ranks)


def weight_recovery(trainer: RunState) -> Plugin:
    from rl_core.run.weight_recovery import WeightRecovery

    return WeightRecovery(trainer)


def canary(trainer: RunState) -> Plugin:
    from rl_core.run.canary import Canary

    return Canary(trainer)


def stale_policy(trainer: RunState) -> Plugin:
    from rl_core.run.stale_policy import StalePolicy

    return StalePolicy(trainer)


def staleness(trainer: RunState) -> Plugin:
    from rl_core.run.staleness import StaleGroups

    return StaleGroups(trainer)


def profiler(trainer: RunState) -> Plugin:
    from rl_core.run.display.profiler import Profiler

    return Profiler(trainer)


def mfu(trainer: RunState) -> Plugin:
    from rl_core.run.display.mfu import Mfu

    return Mfu(trainer)


def dynamic_sampling(trainer: RunState) -> Plugin:
    from rl_core.run.dynamic_sampling import Refill

    return Refill(trainer)


def episode_metrics(trainer: RunState) -> Plugin:
    from rl_core.run.evaluation.episode_metrics import EpisodeMetrics

    return EpisodeMetrics(trainer)


def best_keeper(trainer: RunState) -> Plugin:
    from rl_core.run.saving.checkpointer import BestKeeper

    return BestKeeper(trainer)


def print_samples(trainer: RunState) -> Plugin:
    from rl_core.run.evaluation.print_samples import LogSamples

    return LogSamples(trainer)


def evaluation(trainer: RunState) -> Plugin:
    if trainer.config.eval.background:
        from rl_core.run.evaluation.background_evaluation import BackgroundEvaluation

        return BackgroundEvaluation(trainer)
    from rl_core.run.evaluation.evaluation import Evaluation

    return Evaluation(trainer)


def signals(trainer: RunState) -> Plugin:
    from rl_core.run.process.signals import SignalHandler

    return SignalHandler(trainer)


def served_env_hashes(trainer: RunState) -> Plugin:
    from rl_core.run.served_env_hashes import ServedCodes

    return ServedCodes(trainer)


def failure_limit(trainer: RunState) -> Plugin:
    from rl_core.run.failure_limit import FailureLimit

    return FailureLimit(trainer)


def checkpointer(trainer: RunState) -> Plugin:
    from rl_core.run.saving.checkpointer import Checkpointer

    return Checkpointer(trainer)


def loads_optimizer(trainer: RunState) -> bool:
    return any(trainer.config.of(name).optim.init_from for name in trainer.config.trained)


def optimizer_start(trainer: RunState) -> Plugin:
    from rl_core.run.saving.optimizer_start import OptimizerStart

    return OptimizerStart(trainer)


def push_to_hub(trainer: RunState) -> Plugin:
    from rl_core.run.saving.push_to_hub import PushToHub

    return PushToHub(trainer)


# (is it used?, what makes it), in the order in which plugins are called.
PLUGINS = (
    # First, so that rollouts use the weights that it loads.
    (lambda trainer: trainer.plan.rank_groups, rank_groups),
    # Writes the episodes of a step before the run may end because of them.
    (lambda trainer: True, run_files),
    # Before evaluations, whose lines follow the line of their step.
    (lambda trainer: trainer.ranks.is_writer, terminal),
    (lambda trainer: trainer.config.trackers, trackers),
    (lambda trainer: has_task_weight(trainer.config, trainer.plan.envs), curriculum),
    (lambda trainer: trainer.config.data.streaming, stream_state),
    (may_lack_weights, weight_recovery),
    (lambda trainer: trainer.config.is_rl and trainer.config.canary_tolerance != 0, canary),
    (lambda trainer: trainer.config.rollout.stale_policy_frac > 0, stale_policy),
    (
        lambda trainer: trainer.config.max_staleness or trainer.config.deterministic,
        staleness,
    ),
    (lambda trainer: trainer.config.profile_step, profiler),
    (lambda trainer: torch.cuda.is_available(), mfu),
    (
        lambda trainer: any(a.dynamic_sampling_rounds for a in trainer.plan.algorithms.values()),
        dynamic_sampling,
    ),
    (lambda trainer: True, episode_metrics),
    (lambda trainer: trainer.config.keep_best, best_keeper),
    (lambda trainer: trainer.config.print_samples, print_samples),
    (lambda trainer: trainer.config.eval_every, evaluation),
)
# After the plugins of a script: evaluations end before signals are caught, and a checkpoint has the
# state of all plugins.
LAST_PLUGINS = (
    (lambda trainer: True, signals),
    (lambda trainer: "://" in str(trainer.config.env_path), served_env_hashes),
    (lambda trainer: True, failure_limit),
    (lambda trainer: True, checkpointer),
    (loads_optimizer, optimizer_start),
    (lambda trainer: trainer.config.push_to_hub, push_to_hub),
)


def make_plugins(trainer: RunState) -> list[Plugin]:
    custom = tuple((bool, make) for make in trainer.plan.custom.plugins)
    rows = PLUGINS + custom + LAST_PLUGINS
    return [make(trainer) for is_used, make in rows if is_used(trainer)]


def learner_plugins(rank: Any) -> list[Plugin]:
    """Plugins of ranks that learn without playing episodes."""
    rows = [row for row in PLUGINS + LAST_PLUGINS if row[1] in (canary, optimizer_start)]
    return [make(rank) for is_used, make in rows if is_used(rank)]


def make_engine_rank(
    plan: Any, ranks: Ranks, make_learners: Callable, make_actors: Callable
) -> Any:
    """A rank that plays no episodes: ranks that play them send requests to its engines."""
    if plan.rank_groups:
        from rl_core.run.rank_group_server import RankGroupTrainer

        return RankGroupTrainer(plan, ranks, make_learners, make_actors, signals, learner_plugins)
    from rl_core.engines.remote import EngineRank

    return EngineRank(plan, ranks, make_actors, signals)


def rank_group_engines(plan: Any, ranks: Ranks) -> dict[str, Engine]:
    """Engines of actors on other rank groups, as ranks that play episodes see them."""
    if ranks.is_engine or not plan.rank_groups:
        return {}
    from rl_core.run.rank_group_client import connect_rank_groups

    return connect_rank_groups(plan, ranks)
