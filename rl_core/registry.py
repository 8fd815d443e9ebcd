"""The one file that knows what is optional: a name, or a condition, and what it brings.

Each entry is a function that imports its module when it is called, so that a run loads only what it
asks for, and an editor, a rename and the test of the house follow every edge. Nothing below this
file imports an option: the roof asks here, and passes on what a run wants.
"""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from rl_core.config import ActorConfig, Config
from rl_core.rules import nearest, require


def end_with_launcher() -> Any:
    from rl_core.plugins.under_torchrun import end_with_launcher

    return end_with_launcher


def refusing_exits() -> Any:
    from rl_core.plugins.watchdog import refusing_exits

    return refusing_exits


def leave_threads() -> Any:
    from rl_core.plugins.watchdog import leave_threads

    return leave_threads


def run_hooks() -> Any:
    from rl_core.plugins.watchdog import run_hooks

    return run_hooks


def tell_failure() -> Any:
    from rl_core.plugins.under_torchrun import tell_failure

    return tell_failure


def quiet() -> Any:
    from rl_core.plugins.terminal import quiet

    return quiet


def check_trackers() -> Any:
    from rl_core.plugins.trackers import check_trackers

    return check_trackers


def load_other(*source: Any, **rollouts: Any) -> Any:
    from rl_core.plugins.tables import load_other

    return load_other(*source, **rollouts)


def tool_calls(chat: Any) -> Any:
    from rl_core.plugins.tool_calls import ToolCalls

    return ToolCalls(chat)


def sft_dataset() -> Any:
    from rl_core.plugins.sft_dataset import SFTDataset

    return SFTDataset


def check_lengths() -> Any:
    from rl_core.plugins.row_lengths import check_lengths

    return check_lengths


def weighted_order() -> Any:
    from rl_core.plugins.curriculum import weighted_order

    return weighted_order


def apply_liger() -> Any:
    from rl_core.plugins.liger import apply_liger

    return apply_liger


def connect() -> Any:
    from rl_core.engines.remote import connect

    return connect


def engine_server() -> Any:
    from rl_core.engines.remote import EngineServer

    return EngineServer


def fixed_order_worker() -> Any:
    from rl_core.plugins.fixed_order import FixedOrderWorker

    return FixedOrderWorker


def load_env() -> Any:
    from rl_core.plugins.env_file import load_env

    return load_env


def check_environments() -> Any:
    from rl_core.plugins.env_file import check_environments

    return check_environments


def check_tools() -> Any:
    from rl_core.plugins.env_file import check_tools

    return check_tools


def check_columns() -> Any:
    from rl_core.plugins.env_file import check_columns

    return check_columns


def open_endpoint(actor: Any) -> Any:
    from rl_core.agents.rollout import open_endpoint

    return open_endpoint(actor)


def served_environment() -> Any:
    from rl_core.service.client import load_module

    return load_module


def checked_chat() -> Any:
    from rl_core.plugins.model_checks import checked_chat

    return checked_chat


def held_out() -> Any:
    from rl_core.plugins.held_out import held_out

    return held_out


def choose_forward() -> Any:
    from rl_core.plugins.padded import choose_forward

    return choose_forward


def choose_sampler() -> Any:
    from rl_core.plugins.row_sampling import choose_sampler

    return choose_sampler


def recorder() -> Any:
    from rl_core.plugins.router_replay import Recorder

    return Recorder


def make_experts() -> Any:
    from rl_core.plugins.experts import make_experts

    return make_experts


def reference() -> Any:
    from rl_core.plugins.reference import Reference

    return Reference


def newest_intact() -> Any:
    from rl_core.plugins.resume import newest_intact

    return newest_intact


def load_checkpoint() -> Any:
    from rl_core.plugins.resume import load_checkpoint

    return load_checkpoint


def kl_penalty() -> Any:
    from rl_core.plugins.reference import KLPenalty

    return KLPenalty


def batch_normalised() -> Any:
    from rl_core.plugins.normalise import BatchNormalised

    return BatchNormalised


def env_scales() -> Any:
    from rl_core.plugins.normalise import env_scales

    return env_scales


def sequence_shards() -> Any:
    from rl_core.plugins.sequence_shards import SequenceShards

    return SequenceShards


def logprob_kernel(device: Any) -> Any:
    """None: torch computes logprobs."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from rl_core.plugins import triton_logprobs

    return triton_logprobs


def pair_loss(preset: str) -> Any:
    from rl_core.plugins.preference import LOSSES

    return LOSSES[preset]


def adamw() -> Any:
    from rl_core.learning.learner import adamw

    return adamw


def sgd() -> Any:
    from rl_core.plugins.optimizers import sgd

    return sgd


def adamw8bit() -> Any:
    from rl_core.plugins.optimizers import adamw8bit

    return adamw8bit


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "adamw8bit": adamw8bit}


def replay() -> Any:
    from rl_core.plugins.router_replay import Replay

    return Replay


def attention_kernel() -> Any:
    from rl_core.plugins.attention_kernels import find_kernel

    return find_kernel


def ring_forward() -> Any:
    from rl_core.plugins.ring import RingForward

    return RingForward


def adapter_policy() -> Any:
    from rl_core.plugins.lora import AdapterPolicy

    return AdapterPolicy


def draw_adapter() -> Any:
    from rl_core.plugins.lora import draw_adapter

    return draw_adapter


def quantization() -> Any:
    from rl_core.plugins.lora import quantization

    return quantization


def load_on_meta() -> Any:
    from rl_core.plugins.shard_loading import load_on_meta

    return load_on_meta


def shard_policy() -> Any:
    from rl_core.plugins.shard_loading import shard_policy

    return shard_policy


def load_shards() -> Any:
    from rl_core.plugins.shard_loading import load_shards

    return load_shards


def tensor_parallel_policy() -> Any:
    from rl_core.plugins.tensor_parallel import TensorParallelPolicy

    return TensorParallelPolicy


def activations_on_host() -> Any:
    from rl_core.plugins.offload import activations_on_host

    return activations_on_host


def critic() -> Any:
    from rl_core.plugins.critic import Critic

    return Critic


def is_served() -> Any:
    from rl_core.plugins.lora import is_served

    return is_served


def peft_config() -> Any:
    from rl_core.plugins.lora import peft_config

    return peft_config


def second_model() -> Any:
    from rl_core.plugins.lora import second_model

    return second_model


def api_actor() -> Any:
    from rl_core.engines.api import ApiActor

    return ApiActor


def task_mix() -> Any:
    from rl_core.plugins.mix import TaskMix

    return TaskMix


def renamed_columns() -> Any:
    from rl_core.plugins.renamed_columns import RenamedColumns

    return RenamedColumns


def embedded() -> Any:
    from rl_core.engines.embedded import EmbeddedEngine

    return EmbeddedEngine


def sglang() -> Any:
    from rl_core.engines.sglang import SGLangEngine

    return SGLangEngine


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def auto_engine(must_share: bool) -> str:
    """What --engine auto stands for on this machine."""
    has_sglang = has_gpu() and importlib.util.find_spec("sglang") is not None
    return "sglang" if has_sglang and not must_share else "embedded"


ENGINES = {"embedded": embedded, "sglang": sglang}
# Flags whose values are the names of a table.
CHOICES = {"engine": ENGINES, "optim.name": OPTIMIZERS}
SERVED = sglang  # What samples at --actors.NAME.engine_urls.


def check_options(config: Config) -> None:
    """Raises ValueError for a name that no option has, and for flags of an option that contradict
    each other."""
    for flag, table in CHOICES.items():
        value = attrgetter(flag)(config)
        if value not in (*table, "auto"):
            raise ValueError(f"--{flag}={value} is unknown; {nearest(value, table)}")
    if config.optim.name == "adamw8bit":
        require("bitsandbytes", "--optim.name=adamw8bit", "bnb")
    if config.learner.kernels == "liger":
        require("liger_kernel", "--learner.kernels=liger", "liger")
    if config.actors != {"policy": ActorConfig(model=config.model)}:
        from rl_core.plugins.actor_rules import check_actors

        check_actors(config)
    if config.envs or "," in (config.env_path or ""):
        from rl_core.plugins.mix import check_flags

        check_flags(config)


def check_algorithm() -> Any:
    from rl_core.plugins.algorithm_rules import check_algorithm

    return check_algorithm


# Plugins, in the order in which they are called.


def canary(trainer: Any) -> Any:
    from rl_core.plugins.canary import Canary

    return Canary(trainer)


def stale_policy(trainer: Any) -> Any:
    from rl_core.plugins.stale_policy import StalePolicy

    return StalePolicy(trainer)


def stale_groups(trainer: Any) -> Any:
    from rl_core.plugins.stale_groups import StaleGroups

    return StaleGroups(trainer)


def terminal(trainer: Any) -> Any:
    from rl_core.plugin import Plugin
    from rl_core.plugins.terminal import Terminal

    # Other ranks say nothing.
    return Terminal(trainer) if trainer.ranks.is_writer else Plugin(trainer)


def trackers(trainer: Any) -> Any:
    from rl_core.plugins.trackers import Trackers

    return Trackers(trainer)


def curriculum(trainer: Any) -> Any:
    from rl_core.plugins.curriculum import Curriculum

    return Curriculum(trainer)


def has_curriculum(plan: Any) -> bool:
    return plan.algorithm.is_rl and any("task_weight" in env.hooks for env in plan.envs.values())


def profiler(trainer: Any) -> Any:
    from rl_core.plugins.profiler import Profiler

    return Profiler(trainer)


def mfu(trainer: Any) -> Any:
    from rl_core.plugins.mfu import Mfu

    return Mfu(trainer)


def episode_metrics(trainer: Any) -> Any:
    from rl_core.plugins.episode_metrics import EpisodeMetrics

    return EpisodeMetrics(trainer)


def run_files(trainer: Any) -> Any:
    from rl_core.plugins.run_files import RunFiles

    return RunFiles(trainer)


def failure_limit(trainer: Any) -> Any:
    from rl_core.plugins.failure_limit import FailureLimit

    return FailureLimit(trainer)


def refill(trainer: Any) -> Any:
    from rl_core.plugins.refill import Refill

    return Refill(trainer)


def best_keeper(trainer: Any) -> Any:
    from rl_core.plugins.checkpointer import BestKeeper

    return BestKeeper(trainer)


def evaluation(trainer: Any) -> Any:
    from rl_core.plugins.evaluation import Evaluation

    return Evaluation(trainer)


def on_step(trainer: Any) -> Any:
    from rl_core.plugins.on_step import OnStep

    return OnStep(trainer)


def signal_handler(trainer: Any) -> Any:
    from rl_core.plugins.signal_handler import SignalHandler

    return SignalHandler(trainer)


def run_end(trainer: Any) -> Any:
    from rl_core.plugins.run_end import RunEnd

    return RunEnd(trainer)


def checkpointer(trainer: Any) -> Any:
    from rl_core.plugins.checkpointer import Checkpointer

    return Checkpointer(trainer)


def hub(trainer: Any) -> Any:
    from rl_core.plugins.hub import Hub

    return Hub(trainer)


def always(plan: Any) -> bool:
    return True


PLUGINS = (
    # First: the files of what was played are written before the run may end by it.
    (always, run_files),
    # Before evaluations, whose lines come after their step's.
    (always, terminal),
    (lambda plan: plan.config.trackers, trackers),
    (has_curriculum, curriculum),
    (lambda plan: plan.algorithm.is_rl and plan.config.canary_tolerance != 0, canary),
    (lambda plan: plan.config.rollout.lagged[0] > 0, stale_policy),
    (lambda plan: plan.config.max_staleness or plan.config.rollout.fixed_order, stale_groups),
    (lambda plan: plan.config.profile_step, profiler),
    (lambda plan: has_gpu(), mfu),
    (lambda plan: plan.algorithm.refill_rounds, refill),
    (always, episode_metrics),
    (lambda plan: plan.config.keep_best, best_keeper),
    (lambda plan: plan.config.eval_every, evaluation),
    (lambda plan: plan.on_step, on_step),
    # Last: evaluations end before signals are caught, and what is saved is what the others have.
    (always, signal_handler),
    (always, run_end),
    (always, failure_limit),
    (always, checkpointer),
    (lambda plan: plan.config.push_to_hub, hub),
)


def make_plugins(trainer: Any) -> list[Any]:
    """A rank that only samples leaves a signal to the learners, and has no other plugin."""
    if trainer.ranks.is_engine:
        return [signal_handler(trainer)]
    return [make(trainer) for is_wanted, make in PLUGINS if is_wanted(trainer.plan)]
