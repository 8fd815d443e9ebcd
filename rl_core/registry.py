"""The registry of options: the name or condition of each, and a lazy import of it.

Each entry is a function that imports its module when it is called, so that a run loads only what it
asks for, and an editor, a rename and the test of the house follow every edge. Nothing below this
file imports an option: the roof asks here, and passes on what a run wants.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from rl_core.config import ActorConfig, Config
from rl_core.errors import nearest, require

# Files of which several things are asked.


def watchdog():
    from rl_core.sampling import watchdog

    return watchdog


def torchrun_exit():
    from rl_core.run.process import torchrun_exit

    return torchrun_exit


def num_positions(model: str | None) -> int | None:
    from rl_core.plan.model_checks import num_positions

    return num_positions(model)


def env_file():
    from rl_core.environments import env_file

    return env_file


def resume():
    from rl_core.run.saving import resume

    return resume


def check_resumed(config: Config) -> None:
    from rl_core.run.saving.run_files import check_resumed

    check_resumed(config)


def lora():
    from rl_core.learning import lora

    return lora


def fsdp():
    from rl_core.parallel import fsdp

    return fsdp


# Options of a plan.


def quiet():
    from rl_core.run.display.terminal import quiet

    quiet()


def check_trackers(names: Any):
    from rl_core.run.display.trackers import check_trackers

    check_trackers(names)


def load_other(*source: Any, **rollouts: Any):
    from rl_core.data.tables import load_other

    return load_other(*source, **rollouts)


def streamed_tasks(*source: Any):
    from rl_core.tasks.streaming import streamed_tasks

    return streamed_tasks(*source)


def naming_recipes(config: Any):
    from rl_core.tools.datasets import naming_recipes

    return naming_recipes(config.data.train or "")


def renamed_columns(config: Any, rows: Any, path: str, is_train: bool):
    from rl_core.data.column_names import RenamedColumns, check_columns_exist

    if len(config.env_paths) < 2:
        check_columns_exist(rows, config.data.columns, path, is_train)
    return RenamedColumns(rows, config.data.columns)


def made_prompts(*rows: Any):
    from rl_core.tasks.prompt_hook import MadePrompts

    return MadePrompts(*rows)


def pair_rows(*rows: Any):
    from rl_core.data.preference_pairs import pair_rows

    return pair_rows(*rows)


def check_rows(*rows: Any):
    from rl_core.tasks.sft_dataset import check_rows

    check_rows(*rows)


def task_mix(*sources: Any):
    from rl_core.tasks.task_mix import TaskMix

    return TaskMix(*sources)


def held_out(*flags: Any):
    from rl_core.tasks.eval_sets import held_out

    return held_out(*flags)


def served_environment(address: str):
    if "+agentbench://" in address:
        from rl_core.service.agentbench import load_module
    else:
        from rl_core.service.client import load_module

    return load_module(address)


def checked_chat(*actor: Any):
    from rl_core.plan.model_checks import checked_chat

    return checked_chat(*actor, tool_calls)


def tool_calls(chat: Any):
    from rl_core.data.tool_calls import ToolCalls

    return ToolCalls(chat)


def api_actor(*actor: Any):
    from rl_core.engines.api import make_api_actor

    return make_api_actor(*actor)


def endpoints(config: Any):
    """Opens an endpoint for an actor. What serves it is loaded with the first."""

    @cache
    def made():
        from rl_core.environments.agents.rollout import Endpoints

        return Endpoints(config=config)

    return lambda actor: made()(actor)


def sft_dataset(*flags: Any):
    from rl_core.tasks.sft_dataset import SFTDataset

    return SFTDataset(*flags)


def check_lengths(*rows: Any):
    from rl_core.tasks.row_lengths import check_run

    check_run(*rows)


def has_curriculum(plan: Any) -> bool:
    return plan.config.is_rl and any("task_weight" in env.hooks for env in plan.envs.values())


def draw_by_weight(*tasks: Any):
    from rl_core.run.curriculum import draw_by_weight

    draw_by_weight(*tasks)


# Options of a model and a learner.


def adamw():
    from rl_core.learning.optimizers import adamw

    return adamw


def sgd():
    from rl_core.learning.optimizers import sgd

    return sgd


def adamw8bit():
    from rl_core.learning.optimizers import adamw8bit

    return adamw8bit


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "adamw8bit": adamw8bit}
# Families in Llama's layout, which a decoder and slots of this project compute.
PACKED = ("llama", "mistral", "qwen2", "qwen3")


def choose_forward(policy: Any, ranks: Any):
    from rl_core.learning.padded_forward import choose_forward

    choose_forward(policy, ranks)


def choose_decoder(policy: Any, learner: Any):
    """Uses the fast CPU decoder for unsharded fp32 models without compile or recomputation."""
    is_plain = learner.kernels != "compile" and learner.activations != "recompute"
    is_alone = policy.hf.device.type == "cpu" and not policy.is_sharded
    if is_plain and is_alone and policy.hf.config.model_type in PACKED:
        from rl_core.models.kernels.llama_cpu import LlamaDecoder
        from rl_core.models.policy import backbone

        policy.use_decoder(LlamaDecoder(backbone(policy.hf)))


def choose_sampler(model: Any):
    from rl_core.engines.hf_sampling import choose_sampler

    if model.config.model_type not in PACKED:
        return choose_sampler(model)
    if model.device.type == "cuda":
        from rl_core.engines.cuda_graphs import DecodeGraphs

        return choose_sampler(model, DecodeGraphs)
    from rl_core.engines.llama_slots import LlamaSlots

    return choose_sampler(model, LlamaSlots)


def find_kernel(name: str, device: Any):
    if device.type == "cpu" and name in ("auto", "torch"):
        from rl_core.models.kernels.cpu_attention import DENSE

        return DENSE
    from rl_core.models.kernels.gpu_attention import find_kernel

    return find_kernel(name, device)


def ring_forward(*kernel: Any):
    from rl_core.parallel.context_parallel import RingForward

    return RingForward(*kernel)


def logprob_kernel(device: Any):
    """None: torch computes logprobs."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from rl_core.models.kernels import triton_logprobs

    return triton_logprobs


def support_logprobs(*how: Any):
    from rl_core.learning.truncation import support_logprobs

    return support_logprobs(*how)


def tensor_parallel_policy():
    from rl_core.parallel.tensor_parallel import TensorParallelPolicy

    return TensorParallelPolicy


def activations_on_host():
    from rl_core.models.activation_offload import activations_on_host

    return activations_on_host


def apply_liger(*models: Any):
    from rl_core.models.kernels.liger import apply_liger_to_all

    apply_liger_to_all(*models)


def joining(learner_class: Any):
    from rl_core.learning.no_grad_batches import joining

    return joining(learner_class)


def pair_loss(preset: str):
    from rl_core.learning.preference import LOSSES

    return LOSSES[preset]


def has_signal(group: Any, algorithm: Any):
    from rl_core.run.dynamic_sampling import has_signal

    return has_signal(group, algorithm)


def normalised(algorithm: Any, ranks: Any):
    """None: advantages keep their scale."""
    if algorithm.normalize not in ("env", "task"):
        return None
    from rl_core.learning.whitening import normalised

    return partial(normalised, algorithm.normalize, ranks)


def advantages_of(algorithm: Any, groups: Any):
    """None: turns are not compared by their states."""
    if not algorithm.state_coef or not any(t.has_state_keys for group in groups for t in group):
        return None
    from rl_core.learning.gigpo import turn_advantages

    return turn_advantages


# Options that extend a learner.


def reference(learner: Any):
    from rl_core.learning.kl import make_reference

    return make_reference(learner)


def critic(learner: Any):
    from rl_core.learning.ppo import make_critic

    return make_critic(learner)


def teacher(learner: Any):
    from rl_core.learning.teachers.build_teacher import make_teacher

    return make_teacher(learner)


def learning_order(config: Config) -> list[str]:
    """The actors that learn, as they do one after the other."""
    if not any(config.of(name).algo.teacher for name in config.trained):
        return config.trained
    from rl_core.learning.teachers.build_teacher import order_by_teacher

    return order_by_teacher(config)


def kl_penalty(learner: Any):
    from rl_core.learning.kl import KLPenalty

    return KLPenalty(learner.algorithm)


def batch_normalised(learner: Any):
    from rl_core.learning.whitening import BatchWhitening

    return BatchWhitening(learner.ranks)


def experts(learner: Any):
    from rl_core.learning.moe import make_experts

    return make_experts(learner, replay)


def replay(routers: Any):
    from rl_core.learning.router_replay import Replay

    return Replay(routers)


def kept_ids(learner: Any):
    from rl_core.learning.truncation import TruncationSupport

    return TruncationSupport(learner.name)


def sequence_shards(learner: Any):
    from rl_core.learning.sequence_shards import SequenceShards

    return SequenceShards(learner.ranks)


def has_routers(learner: Any) -> bool:
    """True if router hooks work; torch.compile would trace them."""
    from rl_core.models.policy import backbone

    outputs = getattr(backbone(learner.policy.hf), "_can_record_outputs", None) or {}
    return "router_logits" in outputs and learner.config.learner.kernels != "compile"


# In the order in which they see batches.
PARTS = (
    (lambda learner: learner.algorithm.needs_reference, reference),
    (lambda learner: learner.algorithm.has_critic, critic),
    (lambda learner: learner.algorithm.penalises_advantages, kl_penalty),
    (lambda learner: learner.algorithm.teacher, teacher),
    (lambda learner: learner.algorithm.normalize == "batch", batch_normalised),
    (has_routers, experts),
    (lambda learner: learner.algorithm.is_rl and learner.config.sampling.top_k, kept_ids),
    (lambda learner: learner.ranks.mesh.cp > 1, sequence_shards),
)


# Engines.


def embedded():
    from rl_core.engines.embedded import EmbeddedEngine

    return EmbeddedEngine


def sglang():
    from rl_core.engines.sglang import SGLangEngine

    return SGLangEngine


ENGINES = {"embedded": embedded, "sglang": sglang}
# Flags whose values are the names of a table.
CHOICES = {"engine": ENGINES, "optim.name": OPTIMIZERS}


def check_options(config: Config) -> None:
    """Raises ValueError for a name that no option has, and for flags of an option that contradict
    each other."""
    for own in (config, *map(config.of, config.trained)):
        for flag, table in CHOICES.items():
            value = attrgetter(flag)(own)
            if value not in (*table, "auto"):
                raise ValueError(f"--{flag}={value} is unknown; {nearest(value, table)}")
        if own.optim.name == "adamw8bit":
            require("bitsandbytes", "--optim.name=adamw8bit", "bnb")
        if own.learner.inference_tokens:
            from rl_core.learning.no_grad_batches import check_inference

            check_inference(own)
    if config.learner.kernels == "liger":
        require("liger_kernel", "--learner.kernels=liger", "liger")
    if config.agents.response_format == "enforce":
        require("llguidance", "--agents.response_format=enforce", "grammar")
    if config.actors != {"policy": ActorConfig(model=config.model)}:
        from rl_core.plan.actor_rules import check_actors

        check_actors(config)
    if config.envs or "," in (config.env_path or ""):
        from rl_core.tasks.task_mix import check_flags

        check_flags(config)


def check_algorithm(*algorithm: Any):
    from rl_core.config.algorithm import check_algorithm

    check_algorithm(*algorithm)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def auto_engine(config: Any) -> str:
    """The engine that --engine auto chooses on this machine."""
    actors = config.actors
    owners = [actors[actor.share] for actor in actors.values() if actor.share in actors]
    in_4_bits = any(owner.lora.quantize != "none" for owner in owners)
    has_sglang = has_gpu() and find_spec("sglang") is not None
    return "sglang" if has_sglang and not in_4_bits else "embedded"


def places(config: Config, num_ranks: int) -> list[Any]:
    """Ranks with their actors, those that play episodes first; none if no actor has its own."""
    if not any(actor.ranks for actor in config.actors.values()):
        return []
    from rl_core.parallel.rank_groups import rank_groups_of

    return rank_groups_of(config, num_ranks)


def engine_maker(config: Any, local: Any = None, own_parts: Any = None):
    """`local`: the actors whose engines share a device; default: all. `own_parts`: a script's."""
    from rl_core.engines.factory import EngineFactory

    classes, own = {}, own_parts and own_parts.engine
    for name, actor in config.actors.items():
        if not actor.api:
            classes[name] = own or (sglang if actor.servers else ENGINES[config.engine])()
    return EngineFactory(config, classes, choose_sampler, classes if local is None else local)


def device_lease() -> Any:
    from rl_core.engines.lease import DeviceLease

    return DeviceLease()


def connect(*engines: Any):
    from rl_core.engines.remote import connect

    return connect(*engines)


def placed_engines(plan: Any, ranks: Any) -> dict[str, Any]:
    """The engines of actors on separate ranks, for ranks that play episodes."""
    if ranks.is_engine or not plan.places:
        return {}
    from rl_core.run.rank_group_client import connect_places

    return connect_places(plan, ranks)


def engine_rank(plan: Any, ranks: Any, make_learners: Any, make_actors: Any):
    """A rank that plays no episodes: its engines are asked by those that do."""
    if plan.places:
        from rl_core.run.rank_group_server import RankGroupTrainer

        return RankGroupTrainer(
            plan, ranks, make_learners, make_actors, signal_handler, make_checks
        )
    from rl_core.engines.remote import EngineRank

    return EngineRank(plan, ranks, make_actors, signal_handler)


def rollout_classes(config: Config):
    """(class that plays groups, class that runs them concurrently). None: the default."""
    if config.rollout.fixed_order:
        from rl_core.sampling.deterministic_rollouts import DeterministicPlayer, DeterministicWorker

        return DeterministicPlayer, DeterministicWorker
    if config.max_staleness:
        from rl_core.sampling.resumable_rollouts import ResumablePlayer, ResumableWorker

        return ResumablePlayer, ResumableWorker
    return None


def with_teacher_prompts(config: Config, player_class: Any):
    """The class, or one that also asks what the policy reads as its own teacher."""
    if not any(config.of(name).algo.teacher for name in config.trained):
        return player_class
    from rl_core.plan.model_checks import teacher_limits
    from rl_core.sampling.teacher_prompts import with_teacher_prompts

    limits = teacher_limits(config)
    return with_teacher_prompts(player_class, limits) if limits else player_class


def make_samples(plan: Any, name: str):
    """The function that makes TrainingSamples of a trajectory; None: the default."""
    algorithm = plan.algorithms[name]
    if not algorithm.teacher:
        return None
    from rl_core.learning.teachers.self_distill import samples_maker

    return samples_maker(plan.config.of(name), algorithm)


# Plugins.


def run_files(trainer: Any):
    from rl_core.run.saving.run_files import RunFiles

    return RunFiles(trainer)


def terminal(trainer: Any):
    if sys.stdout.isatty():
        from rl_core.run.display.panel import Panel

        return Panel(trainer)
    from rl_core.run.display.terminal import Terminal

    return Terminal(trainer)


def trackers(trainer: Any):
    from rl_core.run.display.trackers import Trackers

    return Trackers(trainer)


def curriculum(trainer: Any):
    from rl_core.run.curriculum import Curriculum

    return Curriculum(trainer)


def weights_again(trainer: Any):
    from rl_core.run.weight_recovery import WeightRecovery

    return WeightRecovery(trainer)


def may_lack_weights(trainer: Any) -> bool:
    config, plan = trainer.config, trainer.plan
    maker = config.is_rl and engine_maker(config, plan.local, plan.own_parts)
    return maker and maker.may_lack_weights(trainer.ranks)


def canary(trainer: Any):
    from rl_core.run.canary import Canary

    return Canary(trainer)


def stale_policy(trainer: Any):
    from rl_core.run.stale_policy import StalePolicy

    return StalePolicy(trainer)


def stale_groups(trainer: Any):
    from rl_core.run.staleness import StaleGroups

    return StaleGroups(trainer)


def profiler(trainer: Any):
    from rl_core.run.display.profiler import Profiler

    return Profiler(trainer)


def mfu(trainer: Any):
    from rl_core.run.display.mfu import Mfu

    return Mfu(trainer)


def refill(trainer: Any):
    from rl_core.run.dynamic_sampling import Refill

    return Refill(trainer)


def episode_metrics(trainer: Any):
    from rl_core.run.evaluation.episode_metrics import EpisodeMetrics

    return EpisodeMetrics(trainer)


def best_keeper(trainer: Any):
    from rl_core.run.saving.checkpointer import BestKeeper

    return BestKeeper(trainer)


def evaluation(trainer: Any):
    if trainer.config.eval.background:
        from rl_core.run.evaluation.background_evaluation import BackgroundEvaluation

        return BackgroundEvaluation(trainer)
    from rl_core.run.evaluation.evaluation import Evaluation

    return Evaluation(trainer)


def log_samples(trainer: Any):
    from rl_core.run.evaluation.print_samples import LogSamples

    return LogSamples(trainer)


def signal_handler(trainer: Any):
    from rl_core.run.process.signals import SignalHandler

    return SignalHandler(trainer)


def print_summary(trainer: Any):
    from rl_core.run.display.summary import print_summary

    print_summary(trainer)


def served_codes(trainer: Any):
    from rl_core.run.served_env_hashes import ServedCodes

    return ServedCodes(trainer)


def failure_limit(trainer: Any):
    from rl_core.run.failure_limit import FailureLimit

    return FailureLimit(trainer)


def checkpointer(trainer: Any):
    from rl_core.run.saving.checkpointer import Checkpointer

    return Checkpointer(trainer)


def num_copies(config: Any, num_ranks: int, actors: Any) -> int:
    if num_ranks < 2 and config.dp_replicate == "auto":
        return 1
    from rl_core.learning.gradient_averaging import num_copies

    return num_copies(config, num_ranks, actors)


def with_replicas(learner_class: Any):
    from rl_core.learning.gradient_averaging import with_replicas

    return with_replicas(learner_class)


def scaled_learner():
    from rl_core.learning.fp16 import ScaledLearner

    return ScaledLearner


def optimizer_start(trainer: Any):
    from rl_core.run.saving.optimizer_start import OptimizerStart

    return OptimizerStart(trainer)


def loads_optimizer(trainer: Any) -> bool:
    return any(trainer.config.of(name).optim.load for name in trainer.config.trained)


def hub(trainer: Any):
    from rl_core.run.saving.push_to_hub import Hub

    return Hub(trainer)


def stream_state(trainer: Any):
    from rl_core.tasks.streaming import StreamState

    return StreamState(trainer)


def learning_elsewhere(trainer: Any):
    from rl_core.run.rank_group_client import RankGroupClient

    return RankGroupClient(trainer)


# In the order in which they are called.
PLUGINS = (
    # First, so that rollouts use the weights that it loads.
    (lambda trainer: trainer.plan.places, learning_elsewhere),
    # Rollout files are written before a plugin may end the run.
    (lambda trainer: True, run_files),
    # Before evaluations, whose lines come after their step's.
    (lambda trainer: trainer.ranks.is_writer, terminal),
    (lambda trainer: trainer.config.trackers, trackers),
    (lambda trainer: has_curriculum(trainer.plan), curriculum),
    (lambda trainer: trainer.config.data.streaming, stream_state),
    (may_lack_weights, weights_again),
    (lambda trainer: trainer.config.is_rl and trainer.config.canary_tolerance != 0, canary),
    (lambda trainer: trainer.config.rollout.lagged[0] > 0, stale_policy),
    (
        lambda trainer: trainer.config.max_staleness or trainer.config.rollout.fixed_order,
        stale_groups,
    ),
    (lambda trainer: trainer.config.profile_step, profiler),
    (lambda trainer: has_gpu(), mfu),
    (lambda trainer: any(a.refill_rounds for a in trainer.plan.algorithms.values()), refill),
    (lambda trainer: True, episode_metrics),
    (lambda trainer: trainer.config.keep_best, best_keeper),
    (lambda trainer: trainer.config.log_samples, log_samples),
    (lambda trainer: trainer.config.eval_every, evaluation),
)
# After a script's own: evaluations end before signals are caught, and what is saved is what the
# others have.
LAST_PLUGINS = (
    (lambda trainer: True, signal_handler),
    (lambda trainer: "://" in str(trainer.config.env_path), served_codes),
    (lambda trainer: True, failure_limit),
    (lambda trainer: True, checkpointer),
    (loads_optimizer, optimizer_start),
    (lambda trainer: trainer.config.push_to_hub, hub),
)


def make_checks(rank: Any) -> list[Any]:
    """Plugins of ranks that learn without playing episodes."""
    found = [row for row in PLUGINS if row[1] in (canary, optimizer_start)]
    return [make(rank) for is_wanted, make in found if is_wanted(rank)]


def make_plugins(trainer: Any) -> list[Any]:
    own = trainer.plan.own_parts
    table = PLUGINS + (own.plugin_rows if own else ()) + LAST_PLUGINS
    return [make(trainer) for is_wanted, make in table if is_wanted(trainer)]
