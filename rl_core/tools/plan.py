"""rl-core plan: what a run would hold in memory, from the model's config and the flags alone.

Every episode counts as long as it may be. w bytes of a number in compute, L blocks, D hidden size, I of the MLP, Q and K widths
of all heads of queries and of keys, V vocabulary; T tokens and M trained tokens of a microbatch on one rank.
docs/parallelism.md explains each row.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rl_core.config import ActorConfig, parse_config

if TYPE_CHECKING:
    from rl_core.build import Plan
    from rl_core.distributed import Mesh

GIB = 2**30
LOGPROB_TILE_BYTES = 256 << 20  # logits in flight, forward and backward
OPTIMIZER_BYTES = {"adamw": 8, "adamw8bit": 2.03, "sgd": 4}  # a trained parameter
NF4_BYTES = 0.5625  # a weight: 4 bits, and a scale in fp32 for every 64
Table = dict[str, tuple[float, float]]  # what -> bytes on a rank's device while it samples, while it learns


@dataclass(kw_only=True, slots=True, frozen=True)
class Size:
    """A model's parameters and widths."""

    total: int
    linear: int  # parameters of matrices in blocks: LoRA freezes them, nf4 quantizes them
    adapters: int  # trained parameters of LoRA; 0: all parameters are trained
    layers: int  # L
    hidden: int  # D
    intermediate: int  # I
    queries: int  # Q
    keys: int  # K
    vocabulary: int  # V


def main(argv: list[str]) -> int:
    """Prints the plan of a run with these flags. It makes no folder."""
    with tempfile.TemporaryDirectory() as out:
        config = parse_config([*argv, "--out", out])
        from rl_core.build import make_plan

        print(describe(make_plan(config)))
    return 0


def model_size(actor: ActorConfig) -> Size:
    """Sizes of an actor's model, made from its config.json on the meta device."""
    import torch

    from rl_core.learning.loading import load_model_config, model_class

    hf = load_model_config(actor.model)
    with torch.device("meta"):
        model = model_class(hf).from_config(hf)
    text = hf.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    linear = {n: m for n, m in model.base_model.named_modules() if isinstance(m, torch.nn.Linear)}
    wanted = [t.strip() for t in actor.lora.targets.split(",")]
    adapted = [m for n, m in linear.items() if "all-linear" in wanted or n.rpartition(".")[2] in wanted]
    return Size(
        total=sum(p.numel() for p in model.parameters()),
        linear=sum(m.weight.numel() for m in linear.values()),
        adapters=actor.lora.rank * sum(m.in_features + m.out_features for m in adapted),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        queries=text.num_attention_heads * head_dim,
        keys=(getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_dim,
        vocabulary=text.vocab_size,
    )


def learner_bytes(plan: Plan, actor: ActorConfig, size: Size, mesh: Mesh) -> Table:
    """What a learner holds on one rank. Weights, gradients and optimizer state are fp32, sharded."""
    from rl_core.models import compute_dtype

    config, learner, w = plan.config, plan.config.learner, compute_dtype(plan.config).itemsize
    shards, trained = mesh.dp_shard * mesh.cp * mesh.tp, size.adapters or size.total
    frozen = 0.0
    if size.adapters and not actor.share:
        of_linear = NF4_BYTES if actor.lora.quantize == "nf4" else w
        frozen = of_linear * size.linear + w * (size.total - size.linear)
    weights, moments = (4 * trained + frozen) / shards, OPTIMIZER_BYTES[config.optim.name] * trained / shards
    while_sampling, while_learning = learner.offload == "none", learner.offload != "always"
    tokens = learner.microbatch_tokens
    block = block_bytes(size, w, mesh.tp)
    # Recomputed: the input of each block is kept, and all of one block.
    kept = size.layers * w * size.hidden + block if learner.activations == "recompute" else size.layers * block
    logits = 2 * min(LOGPROB_TILE_BYTES, 4 * tokens * size.vocabulary)
    found: Table = {
        "weights": (weights * while_sampling, weights * while_learning),
        "optimizer": (moments * while_sampling, moments * while_learning),
        "gradients": (0.0, 4 * trained / shards * while_learning),
        "gathered weights": (0.0, w * (size.total - size.linear + 2 * size.linear / size.layers) * (shards > 1)),
        "activations": (0.0, tokens * (kept + 2 * (4 + w) * size.hidden)),
        "logprobs": (0.0, logits + 4 * size.vocabulary * size.hidden / mesh.tp),
    }
    if plan.algorithm.needs_reference and not size.adapters:
        found["reference"] = (0.0, w * size.total / shards)
    if plan.algorithm.has_critic:
        held = (4 + OPTIMIZER_BYTES[config.optim.name]) * size.total / shards
        found["critic, its optimizer"] = (held * while_sampling, held * while_learning)
    return found


def block_bytes(size: Size, w: int, tp: int) -> float:
    """Bytes of a token that one block keeps for its backward: norms, attention, MLP."""
    norms, attention = 2 * (4 + 2 * w) * size.hidden, 2 * w * (size.queries + size.keys)
    return norms + (attention + 4 * w * size.intermediate) / tp


def engine_bytes(plan: Plan, size: Size, mesh: Mesh) -> Table:
    """What an engine holds on one rank: its own copy of the weights, unless it reads the learner's, and the KV cache."""
    from rl_core.models import compute_dtype

    config, w = plan.config, compute_dtype(plan.config).itemsize
    has_copy = config.engine == "sglang" or mesh.size > 1 or w != 4 or size.adapters > 0
    groups = math.ceil(config.tasks_per_step * (1 + config.max_staleness) / mesh.size)
    slots = min(config.rollout.max_concurrent, groups * config.group_size)
    cache = slots * config.max_context_tokens * 2 * size.layers * size.keys * w
    weights = has_copy * w * size.total / config.engine_tp
    stays = config.engine == "embedded"
    return {"engine weights": (weights, weights * stays), "KV cache": (cache, 0.0)}


def describe(plan: Plan) -> str:
    """Data, tokens of a step, and for each actor that learns its parameters and GiB on one rank."""
    config, algorithm, mesh = plan.config, plan.algorithm, plan.mesh
    kind = "episodes" if algorithm.is_rl else "replies" if algorithm.is_pairs else "rows"
    num = config.tasks_per_step * (config.group_size if algorithm.is_rl else 1 + algorithm.is_pairs)
    longest = config.max_context_tokens
    lines = [
        f"data             {len(plan.train)} rows to train on, {sum(map(len, plan.eval.values()))} held out",
        f"steps            {config.num_steps} of {config.tasks_per_step} rows: "
        f"{config.num_steps * config.tasks_per_step / len(plan.train):.3g} epochs",
        f"ranks            {mesh.size + config.engine_ranks}: "
        + ", ".join(f"{name} {size}" for name, size in asdict(mesh).items()),
        f"tokens per step  at most {num * longest}: {num} {kind} of at most {longest} tokens",
    ]
    for name in config.trained:
        actor = config.actors[name]
        size = model_size(actor)
        table = learner_bytes(plan, actor, size, mesh)
        if algorithm.is_rl and not actor.share:
            table |= engine_bytes(plan, size, mesh)
        adapters = f", {size.adapters / 1e6:.2f} M of them in adapters" if size.adapters else ""
        lines += ["", f"{name}: {actor.model}, {size.total / 1e6:.2f} M parameters{adapters}"]
        lines.append(f"{'GiB on one rank':<22} {'sample':>10} {'learn':>10}")
        table["sum"] = sum(row[0] for row in table.values()), sum(row[1] for row in table.values())
        for what, row in table.items():
            sample, learn = (f"{size / GIB:.3g}" if size else "-" for size in row)
            lines.append(f"{what:<22} {sample:>10} {learn:>10}")
    return "\n".join(lines)
