"""The memory of a run, from the model's config and the flags alone.

Every episode counts as long as it may be. w bytes of a number in compute, L blocks, D hidden size,
I of the MLP, Q and K widths of all heads of queries and of keys, V vocabulary; T tokens and M
trained tokens of a microbatch on one rank. docs/parallelism.md has the largest rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rl_core.config import ActorConfig
from rl_core.errors import split
from rl_core.learning.activation_memory import Widths, activation_bytes, widths

if TYPE_CHECKING:
    from rl_core.distributed import Mesh
    from rl_core.plan.plan import Plan
    from rl_core.types import JSONObject

GIB = 2**30
LOGPROB_TILE_BYTES = 256 << 20  # logits in flight, forward and backward
NF4_BYTES = 0.5625  # a weight: 4 bits, and a scale in fp32 for every 64
# Item -> bytes on a rank's device while it samples, while it learns.
Table = dict[str, tuple[float, float]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Size(Widths):
    """A model's parameters and widths."""

    total: int
    linear: int  # parameters of matrices in blocks: LoRA freezes them, nf4 quantizes them
    adapters: int  # trained parameters of LoRA; 0: all parameters are trained
    vocabulary: int  # V


def model_size(actor: ActorConfig) -> Size:
    """Sizes of an actor's model, made from its config.json on the meta device."""
    import torch

    from rl_core.models.loading import load_model_config, on_meta

    assert actor.model
    hf = load_model_config(actor.model)
    model = on_meta(hf)
    text = hf.get_text_config()
    wanted = split(actor.lora.targets)
    linear = adapted = 0  # parameters; inputs and outputs of matrices that have an adapter
    for name, module in model.base_model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linear += module.weight.numel()
            if "all-linear" in wanted or name.rpartition(".")[2] in wanted:
                adapted += module.in_features + module.out_features
    for name, weight in model.named_parameters():
        if "experts" in wanted and "experts" in name and weight.ndim == 3:
            adapted += weight.shape[0] * sum(weight.shape[1:])
    return Size(
        total=sum(weight.numel() for weight in model.parameters()),
        linear=linear,
        adapters=actor.lora.rank * adapted,
        **asdict(widths(text)),
        vocabulary=text.vocab_size,
    )


def learner_bytes(plan: Plan, actor: ActorConfig, size: Size, mesh: Mesh) -> Table:
    """Memory of a learner on one rank. Weights, gradients and optimizer state are fp32, sharded.
    `plan`: with the settings of this actor."""
    from rl_core.learning.optimizers import state_bytes
    from rl_core.learning.teachers.build_teacher import frozen_models
    from rl_core.models.loading import compute_dtype

    config, w = plan.config, compute_dtype(plan.config).itemsize
    learner = config.learner
    shards = mesh.dp_shard * mesh.cp * mesh.tp
    trained, frozen = size.adapters or size.total, 0.0
    if size.adapters and not actor.lora_base:
        of_linear = NF4_BYTES if actor.lora.quantize == "nf4" else w
        frozen = of_linear * size.linear + w * (size.total - size.linear)
    weights = (4 * trained + frozen) / shards
    moments = state_bytes(config.optim.name) * trained / shards
    while_sampling, while_learning = learner.offload == "none", learner.offload != "always"
    tokens = learner.microbatch_tokens
    kept = activation_bytes(size, w, mesh.tp, learner.activations == "recompute")
    logits = 2 * min(LOGPROB_TILE_BYTES, 4 * tokens * size.vocabulary)
    # A rank gathers a tp-th of the matrices of the block that is computed and of the next.
    gathered = w * (size.total - size.linear + 2 * size.linear / size.layers) / mesh.tp
    table: Table = {
        "weights": (weights * while_sampling, weights * while_learning),
        "optimizer": (moments * while_sampling, moments * while_learning),
        "gradients": (0.0, 4 * trained / shards * while_learning),
        "gathered weights": (0.0, gathered * (shards > 1)),
        "activations": (0.0, tokens * kept),
        # Sums of the hidden states' gradient in fp32, and the head's gradient.
        "logprobs": (0.0, logits + size.hidden * (4 * tokens + w * size.vocabulary / mesh.tp)),
    }
    compared_with = frozen_models(config)
    algorithm = plan.algorithm
    is_renewed = algorithm.reference_every or algorithm.reference_decay  # It waits on the host.
    if algorithm.needs_reference and not size.adapters and not is_renewed:
        compared_with.setdefault("reference", actor.model or "")
    for role, path in compared_with.items():
        table[role] = (0.0, w * model_size(ActorConfig(model=path)).total / shards)
    if plan.algorithm.has_critic:
        held = (4 + state_bytes(config.optim.name)) * size.total / shards
        table["critic, its optimizer"] = (held * while_sampling, held * while_learning)
    return table


def engine_bytes(plan: Plan, name: str, size: Size, mesh: Mesh) -> Table:
    """Memory of an engine on one rank: a copy of the weights, unless the engine reads the learner's,
    and the KV cache."""
    from rl_core.engines.options import engine_factory
    from rl_core.models.loading import compute_dtype
    from rl_core.sampling.engine import WeightOwner

    config, w = plan.config, compute_dtype(plan.config).itemsize
    owner = engine_factory(config).classes[name].weight_owner
    has_copy = (
        owner is not WeightOwner.LEARNER or mesh.num_shards > 1 or w != 4 or size.adapters > 0
    )
    groups = math.ceil(config.tasks_per_step * (1 + config.max_staleness) / mesh.size)
    slots = min(config.rollout.max_concurrent, groups * config.group_size)
    cache = slots * config.max_context_tokens * 2 * size.layers * size.keys * w
    weights = has_copy * w * size.total / config.engine_tp
    stays = owner is not WeightOwner.SERVER
    return {"engine weights": (weights, weights * stays), "KV cache": (cache, 0.0)}


def facts(plan: Plan) -> JSONObject:
    """Data, tokens of a step, assumptions, and for each actor that learns its parameters and
    bytes on one rank."""
    from rl_core.models.loading import compute_dtype
    from rl_core.tasks.column_use import column_use
    from rl_core.tasks.row_lengths import left_out

    config, mesh = plan.config, plan.mesh
    meshes, num_ranks = {}, mesh.size + config.rollout_ranks
    for group in plan.rank_groups[1:]:
        meshes |= dict.fromkeys(group.actors, group.mesh)
        num_ranks += len(group.ranks)
    actors = {}
    for name in config.trained:
        actor, mesh = config.actors[name], meshes.get(name, plan.mesh)
        size = model_size(actor)
        of_actor = replace(plan, config=config.of(name), algorithms={name: plan.algorithms[name]})
        table = learner_bytes(of_actor, actor, size, mesh)
        if config.is_rl and not actor.lora_base:
            table |= engine_bytes(of_actor, name, size, mesh)
        sampling, learning = zip(*table.values(), strict=True)
        table["sum"] = sum(sampling), sum(learning)
        actors[name] = {
            "model": actor.model,
            "ranks": actor.ranks,
            "parameters": size.total,
            "adapter_parameters": size.adapters,
            "bytes_on_one_rank": {
                row: {"sample": round(sample), "learn": round(learn)}
                for row, (sample, learn) in table.items()
            },
        }
    assert plan.train is not None
    num_rows, left = 0, ""
    if not config.data.streaming:
        num_rows, left = len(plan.train), left_out(config, plan.train.sources)
    samples, each = "rows", 1
    if config.is_rl:
        samples, each = "episodes", config.group_size
    elif plan.algorithm.is_pairs:
        samples, each = "replies", 2
    sources = {f"eval/{name}": source for name, source in plan.eval.items()}
    for source in plan.train.sources:
        name = "train" if len(plan.train.sources) == 1 else f"train/{source.env}"
        sources = {name: source} | sources
    columns = {}
    for name, source in sources.items():
        use = column_use(config, source, plan.envs.get(source.env))
        columns[name] = {"prompt": use.prompt, "label": use.label, "unread": use.unread}
    return {
        "train_rows": num_rows or "streamed",
        "eval_rows": sum(map(len, plan.eval.values())),
        "left_out": {"train": left, "eval": left_out(config, plan.eval.values())},
        "columns": columns,
        "num_steps": config.num_steps,
        "tasks_per_step": config.tasks_per_step,
        "epochs": config.num_steps * config.tasks_per_step / num_rows if num_rows else 0.0,
        "ranks": {"all": num_ranks} | asdict(plan.mesh),
        "engine": config.engine if config.is_rl else None,
        "dtype": str(compute_dtype(config)).removeprefix("torch."),
        "microbatch_tokens": config.learner.microbatch_tokens,
        "samples": samples,
        "samples_per_step": config.tasks_per_step * each,
        "max_tokens_of_a_sample": config.max_context_tokens,
        "actors": actors,
    }
