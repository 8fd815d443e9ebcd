"""Options of a run: its plugins, in the order in which they are called, and ranks that only sample.

A plugin's module is imported when its option is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

import torch

from rl_core.config import Config

if TYPE_CHECKING:
    from rl_core.distributed import Ranks
    from rl_core.plugin import Plugin, RunState
    from rl_core.run.plan.plan import Plan
    from rl_core.sampling.engine import Engine

# (true if the plugin is used, its module in rl_core.run and its class). c: the configuration,
# p: the plan, t: the trainer.
Rows: TypeAlias = "list[tuple[Callable[[Config, Plan, RunState], object], str]]"

CANARY: Rows = [(lambda c, p, t: c.is_rl and c.canary_tolerance != 0, "canary.Canary")]
OPTIMIZER_START: Rows = [
    (
        lambda c, p, t: any(c.of(name).optim.init_from for name in c.trained),
        "saving.optimizer_start.OptimizerStart",
    )
]
BEFORE_SCRIPT: Rows = [
    # First, so that rollouts use the weights that it loads.
    (lambda c, p, t: p.rank_groups, "rank_group_client.RankGroupClient"),
    # Before the episodes are written, with their baselines.
    (
        lambda c, p, t: any(a.baseline == "running" for a in p.algorithms.values()),
        "running_baseline.RunningBaseline",
    ),
    # Writes the episodes of a step before the run may end because of them.
    (lambda c, p, t: True, "saving.run_files.RunFiles"),
    # Before evaluations, whose lines follow the line of their step.
    (lambda c, p, t: display(t) == "panel", "display.panel.Panel"),
    (lambda c, p, t: display(t) == "notebook", "display.notebook.Chart"),
    (lambda c, p, t: display(t) == "lines", "display.terminal.Terminal"),
    (lambda c, p, t: c.trackers, "display.trackers.Trackers"),
    (lambda c, p, t: p.has_task_weight, "curriculum.Curriculum"),
    (lambda c, p, t: c.data.streaming, "stream_state.StreamState"),
    (
        lambda c, p, t: c.is_rl and p.engines.weights.may_be_lost(t.ranks),
        "weight_recovery.WeightRecovery",
    ),
    *CANARY,
    (lambda c, p, t: c.rollout.stale_policy_frac > 0, "stale_policy.StalePolicy"),
    (lambda c, p, t: c.max_staleness or c.deterministic, "staleness.StaleGroups"),
    (lambda c, p, t: c.profile_step, "display.profiler.Profiler"),
    (lambda c, p, t: torch.cuda.is_available(), "display.mfu.Mfu"),
    (lambda c, p, t: c.online.on, "online.Online"),
    (
        lambda c, p, t: any(a.dynamic_sampling_rounds for a in p.algorithms.values()),
        "dynamic_sampling.Refill",
    ),
    (lambda c, p, t: True, "evaluation.episode_metrics.EpisodeMetrics"),
    (lambda c, p, t: c.keep_best, "saving.best_keeper.BestKeeper"),
    (lambda c, p, t: c.print_samples, "evaluation.print_samples.LogSamples"),
    (lambda c, p, t: c.eval_every, "evaluation.evaluation.Evaluation"),
]
# Evaluations, and plugins of a script, end before a signal ends the run, and a checkpoint has the
# state of all plugins.
AFTER_SCRIPT: Rows = [
    (lambda c, p, t: True, "process.signals.SignalHandler"),
    (lambda c, p, t: True, "failure_limit.FailureLimit"),
    (lambda c, p, t: True, "saving.checkpointer.Checkpointer"),
    *OPTIMIZER_START,
    (lambda c, p, t: c.push_to_hub, "saving.push_to_hub.PushToHub"),
]


def make_plugins(trainer: RunState) -> list[Plugin]:
    """The run's plugins, in the order in which they are called."""
    return [
        *made(BEFORE_SCRIPT, trainer),
        *(make(trainer) for make in trainer.plan.custom.plugins),
        *made(AFTER_SCRIPT, trainer),
    ]


def learner_plugins(trainer: RunState) -> list[Plugin]:
    """Plugins of ranks that learn without playing episodes."""
    return [*made(CANARY + OPTIMIZER_START, trainer)]


def made(rows: Rows, trainer: RunState) -> Iterator[Plugin]:
    for is_used, path in rows:
        if is_used(trainer.config, trainer.plan, trainer):
            module, _, name = path.rpartition(".")
            yield getattr(import_module(f"rl_core.run.{module}"), name)(trainer)


def display(trainer: RunState) -> str:
    """The kind of the run's terminal output on this rank. IPython on a terminal has no kernel."""
    if not trainer.ranks.is_writer:
        return ""
    if sys.stdout.isatty():
        return "panel"
    ipython = sys.modules.get("IPython")
    return "notebook" if ipython and hasattr(ipython.get_ipython(), "kernel") else "lines"


def rank_group_engines(plan: Plan, ranks: Ranks) -> Mapping[str, Engine]:
    """Engines of actors on other rank groups, as ranks that play episodes see them."""
    if ranks.is_engine or not plan.rank_groups:
        return {}
    from rl_core.run.rank_group_client import connect_rank_groups

    return connect_rank_groups(plan.rank_groups, ranks, plan.config.timeout_s)
