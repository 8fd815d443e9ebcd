"""Every rank's samples -> this rank's minibatches of equal work."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from rl_core.algorithms import Algorithm, loss_denominator
from rl_core.config import Config
from rl_core.data.packing import (
    Entry,
    PackBudget,
    make_entry,
    pack_samples,
    plan_minibatches,
    shard_sequences,
    trimmed,
)
from rl_core.distributed import Ranks, all_gather_json, exchange
from rl_core.learning.policy import backbone
from rl_core.metrics import Mean, Metric, Sum, add_metrics
from rl_core.types import PER_TOKEN, PackedBatch, SequenceShard, TrainingSample


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """This rank's share of the samples of one optimizer step."""

    denominator: int  # of the sum of losses over all ranks
    num_tokens: int  # that are trained, on all ranks
    batches: list[PackedBatch] = field(default_factory=list)  # as many on every rank


def shard_samples(
    samples: list[TrainingSample],
    algorithm: Algorithm,
    config: Config,
    budget: PackBudget,
    ranks: Ranks,
    replay=None,
) -> tuple[list[Minibatch], dict[str, Metric]]:
    """Every rank's samples -> balanced minibatches, and metrics of their packing. Each sample moves
    at most once, from the rank that has it to the ranks that train on it. Every rank must call it;
    the plan is computed alike on all. `replay`: an plugins.router_replay.Replay."""
    me, dp, cp = ranks.dp_rank, ranks.mesh.dp, ranks.mesh.cp
    samples = [trimmed(s) for s in samples]
    facts = all_gather_json([make_entry(s, ranks.rank, i) for i, s in enumerate(samples)], ranks)
    entries = [Entry(*fact) for part in facts for fact in part]
    skip, is_pairs = algorithm.skips_zero_advantages, algorithm.is_pairs
    plans = plan_minibatches(entries, config.learner.minibatches, budget, skip, is_pairs)
    trainer = {e: b % dp for plan in plans for b, part in enumerate(plan.bins) for e in part}
    received = move_samples(samples, trainer, ranks)
    if replay:
        replay.move(samples, trainer, received, ranks)
    minibatches, metrics = [], {}
    for plan in plans:
        mine = [[received[e] for e in part] for part in plan.bins[me::dp]]
        batches = [pack_samples(part, cp) for part in mine]
        if replay:
            batches = [replay.place(*pair) for pair in zip(batches, mine, strict=True)]
        if cp > 1:
            batches = [shard_sequences(b, cp, ranks.cp_rank) for b in batches]
        longest = config.max_tokens * config.turn_limit
        minibatches.append(
            Minibatch(
                denominator=loss_denominator(
                    algorithm.aggregation, plan.num_tokens, plan.num_sequences, longest
                ),
                num_tokens=plan.num_tokens,
                batches=[to_device(b, ranks.device) for b in batches],
            )
        )
        # Bins run in step across the ranks.
        fullest = max(plan.bin_work, default=0) * len(plan.bin_work)
        share = dp / ranks.size  # of what the ranks compute together
        packing = {
            "fill_frac": Mean(sum(plan.bin_work), fullest),
            "microbatches": Sum(len(mine) * share),
            "tokens": Sum(sum(len(s.token_ids) for part in mine for s in part) * share),
            "computed_tokens": Sum(sum(b.input_ids.numel() for b in batches) * share),
        }
        add_metrics(metrics, packing, prefix="pack/")
    return minibatches, metrics


def move_samples(
    samples: list[TrainingSample], trainer: dict[Entry, int], ranks: Ranks
) -> dict[Entry, TrainingSample]:
    """The samples that this rank trains on. `trainer`: the data parallel rank that trains on each.
    Per-token arrays travel end to end as float64, which holds token ids exactly."""
    if ranks.size == 1:
        return {e: samples[e.index] for e in trainer}
    me, size, dp_rank_of = ranks.rank, ranks.size, ranks.dp_rank_of
    outgoing = [
        [e for e in trainer if e.rank == me and trainer[e] == dp_rank_of(r)] for r in range(size)
    ]
    incoming = [
        [e for e in trainer if e.rank == r and trainer[e] == dp_rank_of(me)] for r in range(size)
    ]
    arrays = [
        [getattr(samples[e.index], name) for e in part for name in PER_TOKEN] for part in outgoing
    ]
    flat = [torch.from_numpy(np.concatenate([*part, []], dtype=np.float64)) for part in arrays]
    lengths = [[e.length * len(PER_TOKEN) for e in part] for part in incoming]
    received = exchange(flat, [sum(part) for part in lengths], ranks)
    found = {}
    for part, numbers, sizes in zip(incoming, received, lengths, strict=True):
        for e, piece in zip(part, numbers.split(sizes), strict=True):
            columns = piece.view(len(PER_TOKEN), -1).numpy()
            found[e] = TrainingSample(**dict(zip(PER_TOKEN, columns, strict=True)))
    return found


def pair_work(hf: nn.Module) -> float:
    """What it costs a token to see one other in attention, as a share of the token's matrix
    products. 0 where no layer has attention."""
    text = hf.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0.0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum(
        kind == "hybrid" or (kind.endswith("attention") and kind != "linear_attention")
        for kind in kinds
    )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * heads * head_dim * layers / active_parameters(hf)


def active_parameters(hf: nn.Module) -> float:
    """Parameters that a token of text meets: those of the language model and its head, of each
    layer's experts the share that its router chooses."""
    text = backbone(hf)
    head = hf.score if hasattr(hf, "score") else hf.get_output_embeddings()
    parameters = [*text.parameters()]
    if head is not None:
        parameters += head.parameters()
    met = {id(p): num_weights(p) for p in parameters}  # a tied weight once
    return sum(met.values()) - sum(idle_weights(block) for block in text.modules())


def idle_weights(block: nn.Module) -> float:
    """Weights of the experts of a block that a token does not go to."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        return 0.0
    for router in block.children():
        if router is not experts and hasattr(router, "top_k") and hasattr(router, "num_experts"):
            return (1 - router.top_k / router.num_experts) * sum(
                map(num_weights, experts.parameters())
            )
    return 0.0


def num_weights(parameter: Tensor) -> int:
    in_one = 2 if parameter.dtype == torch.uint8 else 1  # QLoRA's 4 bits, two in a byte
    return parameter.numel() * in_one


def to_device(
    batch: PackedBatch | SequenceShard, device: torch.device
) -> PackedBatch | SequenceShard:
    """The batch with its tensors on the device, but for cu_seqlens."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {
        n: v.to(device) for n, v in fields.items() if isinstance(v, Tensor) and n != "cu_seqlens"
    }
    if fields.get("shard"):
        moved["shard"] = to_device(batch.shard, device)
    return dataclasses.replace(batch, **moved)
