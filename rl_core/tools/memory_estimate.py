"""The memory of a run, from the model's config and the flags alone.

Every episode counts as long as it may be. w bytes of a number in compute, L blocks, D hidden size,
I of the MLP, Q and K widths of all heads of queries and of keys, V vocabulary; T tokens and M
trained tokens of a microbatch on one rank. docs/parallelism.md has the largest rows.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from rl_core.config import ActorConfig, Config
from rl_core.errors import split
from rl_core.learning.activation_memory import (
    Widths,
    activation_bytes,
    around_blocks,
    block_bytes,
    tower_widths,
    widths,
)

if TYPE_CHECKING:
    from rl_core.distributed import Mesh
    from rl_core.run.plan.plan import Plan
    from rl_core.types import JSONObject

GIB = 2**30
LOGPROB_TILE_BYTES = 256 << 20  # logits in flight, forward and backward
KEPT_LOGIT_BYTES = 1 << 30  # logits in fp16 that the forward keeps for the backward
# Estimates: the CUDA context of a process; SGLang's own reserve for CUDA graphs, for a row of the
# largest decode graph and for graphs of 58 lengths of prompts; the longest piece of a prompt in one
# forward.
CONTEXT_BYTES = 512 << 20
ROW_GRAPH_BYTES, PREFILL_GRAPH_BYTES = 2 << 20, 58 * (8 << 20)
PREFILL_TOKENS = 8192
IMAGE_ROWS = 64  # Rows of each data set whose images are counted.
NF4_BYTES = 0.5625  # a weight: 4 bits, and a scale in fp32 for every 64
# Item -> bytes on a rank's device while it samples, while it learns.
Table = dict[str, tuple[float, float]]


@dataclass(kw_only=True, slots=True, frozen=True)
class Size(Widths):
    """A model's parameters and widths."""

    total: int
    linear: int  # parameters of matrices in blocks: LoRA freezes them, nf4 quantizes them
    experts: int  # parameters of stacks of experts, in none of `linear`
    largest_layer: int  # parameters of the experts of one layer
    largest_weight: int  # parameters of the largest tensor
    adapted: int  # inputs and outputs of all matrices that LoRA's targets name
    adapters: int  # trained parameters of LoRA; 0: all parameters are trained
    vocabulary: int  # V


def model_size(actor: ActorConfig, parts: str | None = None) -> Size:
    """Sizes of an actor's model, made from its config.json on the meta device. `parts`: those that
    get adapters."""
    import torch

    from rl_core.learning.lora import LANGUAGE, linear_layers
    from rl_core.models.loading import load_model_config, on_meta

    assert actor.model
    hf = load_model_config(actor.model)
    model = on_meta(hf)
    text = hf.get_text_config()
    wanted = split(actor.lora.targets)
    linear = adapted = 0  # parameters; inputs and outputs of matrices that have an adapter
    of_layer: Counter[str] = Counter()  # Parameters of the experts of each layer.
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            linear += module.weight.numel()
    for name, module in linear_layers(model, split(parts) or LANGUAGE).items():
        if "all-linear" in wanted or name.rpartition(".")[2] in wanted:
            adapted += module.in_features + module.out_features
    for name, weight in model.named_parameters():
        if "experts" not in name or weight.ndim != 3:
            continue
        of_layer[name.rpartition(".")[0]] += weight.numel()
        if "experts" in wanted:
            adapted += weight.shape[0] * sum(weight.shape[1:])
    return Size(
        total=sum(weight.numel() for weight in model.parameters()),
        linear=linear,
        experts=sum(of_layer.values()),
        largest_layer=max(of_layer.values(), default=0),
        largest_weight=max(weight.numel() for weight in model.parameters()),
        adapted=adapted,
        adapters=actor.lora.rank * adapted,
        **asdict(widths(text)),
        vocabulary=text.vocab_size,
    )


def learner_bytes(plan: Plan, actor: ActorConfig, size: Size, mesh: Mesh) -> Table:
    """Memory of a learner on one rank. Weights, gradients and optimizer state are fp32, sharded.
    `plan`: with the settings of this actor."""
    from rl_core.learning.optimizers import state_bytes
    from rl_core.models.loading import compute_dtype

    config, w = plan.config, compute_dtype(plan.config).itemsize
    learner = config.learner
    shards = mesh.dp_shard * mesh.cp * mesh.tp
    trained, frozen = size.adapters or size.total, 0.0
    if size.adapters and not actor.lora_base:
        of_linear = NF4_BYTES if actor.lora.quantize == "nf4" else w
        frozen = of_linear * size.linear + w * (size.total - size.linear)
    if size.adapters:  # Ranks of tp split one of an adapter's two matrices.
        trained *= (mesh.tp + 1) / 2
    weights = (4 * trained + frozen) / shards
    moments = state_bytes(config.optim.name) * trained / shards
    while_sampling, while_learning = learner.offload == "none", learner.offload != "always"
    tokens = learner.microbatch_tokens
    kept = activation_bytes(size, w, mesh.tp, learner.activations == "recompute")
    if learner.activations == "offload":
        kept = block_bytes(size, w, mesh.tp) + around_blocks(size, w)
    logits = 2 * min(LOGPROB_TILE_BYTES, 4 * tokens * size.vocabulary)
    if w == 2:
        logits += min(KEPT_LOGIT_BYTES, 2 * tokens * size.vocabulary)
    trained_ids = 0 if size.adapters else size.vocabulary
    # A rank gathers a tp-th of the matrices of the block that is computed and of the next, at most
    # those of two blocks with experts. With ep FSDP gathers experts apart from their block: an
    # ep-th of one layer's at a time. In a lower precision one rank has a copy of them too.
    is_sharded = shards > 1 or w != 4 or learner.offload == "always"
    around = size.total - size.linear - size.experts
    of_experts = size.largest_layer * (2 if mesh.ep == 1 else 1 / mesh.ep)
    of_blocks = 2 * size.linear / size.layers + of_experts
    gathered = w * (around + of_blocks) / mesh.tp
    table: Table = {
        "weights": (weights * while_sampling, weights * while_learning),
        "optimizer": (moments * while_sampling, moments * while_learning),
        "gradients": (0.0, 4 * trained / shards * while_learning),
        "gathered weights": (0.0, gathered * is_sharded),
        "activations": (0.0, tokens * kept),
        # Sums of the hidden states' gradient in fp32, and the gradient of a head that is trained.
        "logprobs": (0.0, logits + size.hidden * (4 * tokens + w * trained_ids / mesh.tp)),
    }
    if mesh.ep > 1:
        # A layer's tokens of all ranks, and their outputs in fp32 and in the compute dtype.
        table["tokens of ep ranks"] = (0.0, mesh.ep * tokens * size.hidden * (2 * w + 4))
    if num_images := image_tokens(plan):
        assert actor.model
        held = image_bytes(config, actor.model, size, w) * num_images
        table["images"] = (0.0, held)
    compared_with = config.frozen_models
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


def sync_bytes(plan: Plan, name: str, size: Size) -> float:
    """Most memory that weights take on one rank on their way to an engine, in addition to both
    sides' own: the largest tensor, the shard that it is gathered from, pieces of it on their way;
    for a server two buckets and experts in the published form."""
    from rl_core.engines.options import engine_classes
    from rl_core.engines.remote import BUCKET_BYTES
    from rl_core.engines.weights import PIECE_BYTES
    from rl_core.models.loading import compute_dtype
    from rl_core.models.weight_gathering import GROUP_BYTES
    from rl_core.sampling.engine import WeightOwner

    config, w = plan.config, compute_dtype(plan.config).itemsize
    num_shards = plan.mesh.dp_shard * plan.mesh.cp * plan.mesh.tp
    gathered = w * size.largest_weight * (1 + 1 / num_shards * (num_shards > 1))
    if config.rollout_ranks:  # A bucket of smaller tensors, and its copy that travels.
        gathered += 2 * min(BUCKET_BYTES, w * size.total)
    if engine_classes(config)[name].weight_owner is not WeightOwner.SERVER:
        return gathered + 2 * GROUP_BYTES
    return gathered + max(2 * GROUP_BYTES, PIECE_BYTES) + 2 * config.engine_bucket_mib * 2**20


def image_tokens(plan: Plan) -> float:
    """Image tokens of a microbatch, if each sample has as many as the row with the most."""
    from rl_core.data.preference_pairs import LeftOutError, pair_messages

    config, most = plan.config, 0
    chat = plan.chats.get(next(iter(plan.algorithms)))
    if chat is None or isinstance(chat.vision, str) or plan.train is None:
        return 0.0
    for source in plan.train.sources:
        for task in islice(source, IMAGE_ROWS):
            messages = task.messages
            if source.is_pairs:
                with suppress(LeftOutError):
                    (context, chosen), _ = pair_messages(task.row)
                    messages = context + chosen
            most = max(most, sum(map(chat.vision.num_tokens, chat.images_of(messages))))
    return config.learner.microbatch_tokens * most / config.max_context_tokens


def image_bytes(config: Config, model: str, size: Size, w: int) -> float:
    """Memory of an image token of a microbatch: its pixels, the activations of the vision tower,
    and its feature."""
    from rl_core.data.vision_models import load_family
    from rl_core.models.loading import load_model_config

    family = load_family(model, config.data.max_image_pixels)
    assert not isinstance(family, str), family
    vision = load_model_config(model).vision_config
    tower, learner = tower_widths(vision), config.learner
    edge = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    num_frames = getattr(vision, "temporal_patch_size", 1)
    # Patches of a token; each channel of a pixel is a number in fp32.
    num_patches = family.bytes_per_token / (4 * 3 * num_frames * edge**2)
    of_patch = block_bytes(tower, w, 1) + around_blocks(tower, w)
    is_trained = "vision" in split(learner.train) if learner.train else not size.adapters
    if is_trained and learner.activations != "offload":
        of_patch = activation_bytes(tower, w, 1, learner.activations == "recompute")
    return w / 4 * family.bytes_per_token + num_patches * of_patch + w * size.hidden


def engine_bytes(
    plan: Plan, name: str, size: Size, mesh: Mesh, gpu_bytes: float = 0.0, held: float = 0.0
) -> Table:
    """Memory of an engine on one rank: a copy of the weights, unless the engine reads the learner's,
    and the KV cache: of all episodes in flight or, given the GPU's memory, of which learners hold
    `held` bytes while engines sample, as the engine takes it. Raises ValueError if the weights do
    not fit."""
    from rl_core.engines.options import engine_classes
    from rl_core.engines.sglang_cuda import pool_bytes
    from rl_core.models.loading import compute_dtype
    from rl_core.sampling.engine import WeightOwner

    config, w = plan.config, compute_dtype(plan.config).itemsize
    if config.actors[name].servers:  # They have other GPUs.
        return {}
    fraction = config.actors[name].engine_memory_frac or config.engine_memory_frac
    owner = engine_classes(config)[name].weight_owner
    has_copy = (
        owner is not WeightOwner.LEARNER or mesh.num_shards > 1 or w != 4 or size.adapters > 0
    )
    weights = w * size.total / config.engine_tp
    cache = num_episodes(config, mesh) * episode_bytes(config, size, w)
    if owner is not WeightOwner.SERVER:
        if gpu_bytes:
            cache = max(0.0, min(cache, fraction * gpu_bytes - weights))
        copy = has_copy * weights
        return {"engine weights": (copy, copy), "KV cache": (cache, 0.0)}
    table: Table = {"engine weights": (weights, 0.0), "KV cache": (cache, 0.0)}
    if gpu_bytes:
        pool = pool_bytes(fraction, gpu_bytes - CONTEXT_BYTES, held, weights)
        table["KV cache"] = (pool - weights, 0.0)
        table |= server_bytes(config, size, mesh, w)
    return table


def server_bytes(config: Config, size: Size, mesh: Mesh, w: int) -> Table:
    """Memory of an SGLang server on one rank without its pool."""
    from rl_core.engines.sglang_cuda import MAX_ASLEEP_BYTES, MAX_GRAPH_ROWS

    prefill = PREFILL_TOKENS * block_bytes(size, w, config.engine_tp)
    rows = min(num_episodes(config, mesh), MAX_GRAPH_ROWS)
    graphs = rows * ROW_GRAPH_BYTES + PREFILL_GRAPH_BYTES
    # Graphs of SGLang 0.5.17 hold an fp32 copy of the head, a large one only while awake.
    head = 4 * size.vocabulary * size.hidden / config.engine_tp
    asleep = graphs + (head if head <= MAX_ASLEEP_BYTES else 0.0)
    return {
        "server's prefill": (prefill, 0.0),
        "server's graphs": (graphs + head, asleep),
        "server's context": (CONTEXT_BYTES, CONTEXT_BYTES),
    }


def num_episodes(config: Config, mesh: Mesh) -> int:
    """Most episodes that one engine samples at once."""
    from rl_core.engines.factory import max_episodes

    return max_episodes(config, max(1, mesh.size // config.engine_tp))


def episode_bytes(config: Config, size: Size, w: int) -> float:
    """KV cache of the longest episode on one rank of its engine."""
    return config.max_context_tokens * 2 * size.layers * size.keys * w / config.engine_tp


def rank_table(plan: Plan, name: str, size: Size, mesh: Mesh, gpu_bytes: float = 0.0) -> Table:
    """Memory of one rank of an actor that learns, with its sum. Raises the errors of
    engine_bytes()."""
    actor = plan.config.actors[name]
    settings = plan.config.of(name)
    plan = replace(plan, config=settings, algorithms={name: plan.algorithms[name]})
    table = learner_bytes(plan, actor, size, mesh)
    if settings.is_rl and not actor.lora_base:
        held = sum(sampling for sampling, _ in table.values())
        table |= engine_bytes(plan, name, size, mesh, gpu_bytes, held)
    if gpu_bytes:
        table["CUDA context"] = (CONTEXT_BYTES, CONTEXT_BYTES)
    sampling, learning = zip(*table.values(), strict=True)
    return table | {"sum": (sum(sampling), sum(learning))}


def rounded(table: Table) -> JSONObject:
    return {
        row: {"sample": round(sampling), "learn": round(learning)}
        for row, (sampling, learning) in table.items()
    }


def facts(plan: Plan) -> JSONObject:
    """Data, tokens of a step, assumptions, and for each actor that learns its parameters and
    bytes on one rank."""
    from rl_core.data.tasks.row_lengths import left_out
    from rl_core.data.warnings.column_use import column_use
    from rl_core.data.warnings.unread_columns import name_columns
    from rl_core.models.loading import compute_dtype

    config, mesh = plan.config, plan.mesh
    meshes, num_ranks = {}, mesh.size + config.rollout_ranks
    for group in plan.rank_groups[1:]:
        meshes |= dict.fromkeys(group.actors, group.mesh)
        num_ranks += len(group.ranks)
    actors = {}
    for name in config.trained:
        actor, mesh = config.actors[name], meshes.get(name, plan.mesh)
        size = model_size(actor, config.of(name).learner.train)
        table = rank_table(plan, name, size, mesh)
        actors[name] = {
            "model": actor.model,
            "ranks": actor.ranks,
            "parameters": size.total,
            "adapter_parameters": size.adapters,
            "bytes_on_one_rank": rounded(table),
            "sync_bytes": round(sync_bytes(plan, name, size)) if config.is_rl else 0,
        }
    num_tasks = plan.num_tasks or config.num_steps * config.tasks_per_step
    num_rows, left = 0, ""
    if not config.data.streaming:
        num_rows, left = len(plan.train), left_out(config, plan.train.sources)
    samples, each = "rows", 1
    if config.is_rl:
        samples, each = "episodes", config.group_size
    elif plan.algorithm.reads_pairs:
        samples, each = "replies", 2
    sources = {f"eval/{name}": source for name, source in plan.eval.items()}
    for source in plan.train.sources:
        name = "train" if len(plan.train.sources) == 1 else f"train/{source.env}"
        sources = {name: source} | sources
    columns = {}
    for name, source in sources.items():
        use = column_use(config, source, plan.envs.get(source.env))
        columns[name] = asdict(name_columns(use))
    return {
        "train_rows": num_rows or "streamed",
        "eval_rows": sum(map(len, plan.eval.values())),
        "left_out": {"train": left, "eval": left_out(config, plan.eval.values())},
        "columns": columns,
        "num_steps": config.num_steps,
        "may_end_early": plan.may_end_early,
        "tasks_per_step": config.tasks_per_step,
        "epochs": num_tasks / num_rows if num_rows else 0.0,
        "ranks": {"all": num_ranks} | asdict(plan.mesh),
        "engine": config.engine if config.is_rl else None,
        "dtype": str(compute_dtype(config)).removeprefix("torch."),
        "microbatch_tokens": config.learner.microbatch_tokens,
        "samples": samples,
        "samples_per_step": config.tasks_per_step * each,
        "max_tokens_of_a_sample": config.max_context_tokens,
        "actors": actors,
    }
