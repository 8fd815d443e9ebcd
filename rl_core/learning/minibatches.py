"""Every rank's samples -> this rank's minibatches of equal work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_core.algorithms import Algorithm, loss_denominator
from rl_core.config import Config
from rl_core.data.packing import (
    Entry,
    PackBudget,
    bytes_of,
    make_entry,
    pack_samples,
    plan_minibatches,
    sample_of,
    trimmed,
)
from rl_core.distributed import Ranks, all_gather_json, exchange
from rl_core.learning.policy import backbone
from rl_core.metrics import Mean, Metric, Sum, add_metrics
from rl_core.types import PackedBatch, SequenceShard, TrainingSample


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
    parts: Iterable[Any] = (),
) -> tuple[list[Minibatch], dict[str, Metric]]:
    """Every rank's samples -> balanced minibatches, and metrics of their packing. Each sample moves
    at most once, from the rank that has it to the ranks that train on it. Every rank must call it;
    the plan is computed alike on all. `parts`: the learner's, which may add to each batch."""
    samples = [trimmed(sample) for sample in samples]
    own = [make_entry(sample, ranks.rank, i) for i, sample in enumerate(samples)]
    entries = []
    for of_rank in all_gather_json(own, ranks):
        entries += [Entry(*facts) for facts in of_rank]
    skip, is_pairs = algorithm.skips_zero_advantages, algorithm.is_pairs
    plans = plan_minibatches(entries, config.learner.minibatches, budget, skip, is_pairs)
    trainers: dict[Entry, int] = {}
    for plan in plans:
        for number, entries in enumerate(plan.bins):
            trainers |= dict.fromkeys(entries, number % budget.num_ranks)
    received = move_samples(samples, trainers, ranks)
    minibatches, metrics = [], {}
    longest = config.max_tokens * config.turn_limit
    for plan in plans:
        batches, num_tokens = [], 0
        for entries in plan.bins[ranks.dp_rank :: budget.num_ranks]:
            mine = [received[entry] for entry in entries]
            num_tokens += sum(entry.length for entry in entries)
            batch = pack_samples(mine, budget.cp)
            for part in parts:
                batch = part.packed(batch, mine)
            batches.append(to_device(batch, ranks.device))
        sizes = plan.num_tokens, plan.num_sequences, longest
        denominator = loss_denominator(algorithm.aggregation, *sizes)
        minibatches.append(
            Minibatch(denominator=denominator, num_tokens=plan.num_tokens, batches=batches)
        )
        # Bins run in step across the ranks.
        fullest = max(plan.bin_work, default=0) * len(plan.bin_work)
        share = budget.num_ranks / ranks.size  # of what the ranks compute together
        computed = sum(batch.input_ids.numel() for batch in batches)
        packing = {
            "fill_frac": Mean(sum(plan.bin_work), fullest),
            "microbatches": Sum(len(batches) * share),
            "tokens": Sum(num_tokens * share),
            "computed_tokens": Sum(computed * share),
        }
        add_metrics(metrics, packing, prefix="pack/")
    return minibatches, metrics


def move_samples(
    samples: list[TrainingSample], trainers: dict[Entry, int], ranks: Ranks
) -> dict[Entry, TrainingSample]:
    """The samples that this rank trains on. `trainers`: the data parallel rank that trains on
    each."""
    if ranks.size == 1:
        return {entry: samples[entry.index] for entry in trainers}
    outgoing = [[np.zeros(0, np.uint8)] for _ in range(ranks.size)]
    incoming: list[list[Entry]] = [[] for _ in range(ranks.size)]
    for entry, dp_rank in trainers.items():
        if dp_rank == ranks.dp_rank:
            incoming[entry.rank].append(entry)
        if entry.rank == ranks.rank:
            for rank in range(ranks.size):
                if ranks.dp_rank_of(rank) == dp_rank:
                    outgoing[rank].append(bytes_of(samples[entry.index]))
    sent = [torch.from_numpy(np.concatenate(parts)) for parts in outgoing]
    sizes = [[entry.num_bytes for entry in entries] for entries in incoming]
    received = {}
    parts = exchange(sent, [sum(part) for part in sizes], ranks)
    for entries, part, lengths in zip(incoming, parts, sizes, strict=True):
        for entry, piece in zip(entries, part.split(lengths), strict=True):
            received[entry] = sample_of(piece.numpy(), entry.length)
    return received


def pair_work(hf: nn.Module) -> float:
    """What it costs a token to see one other in attention, as a share of the token's matrix
    products. 0 where no layer has attention."""
    text = hf.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0.0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    with_attention = [kind for kind in kinds if kind.endswith(("attention", "hybrid"))]
    num_layers = len(with_attention) - kinds.count("linear_attention")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 2 * heads * head_dim * num_layers / active_parameters(hf)


def active_parameters(hf: nn.Module) -> float:
    """Parameters that a token of text meets: those of the language model and its head, of each
    layer's experts the share that its router chooses."""
    text = backbone(hf)
    head = hf.score if hasattr(hf, "score") else hf.get_output_embeddings()
    parameters = {*text.parameters()}
    if head is not None:
        parameters |= {*head.parameters()}  # a tied weight once
    idle = sum(idle_weights(block) for block in text.modules())
    return sum(map(num_weights, parameters)) - idle


def idle_weights(block: nn.Module) -> float:
    """Weights of the experts of a block that a token does not go to."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        return 0.0
    for router in block.children():
        if router is not experts and hasattr(router, "top_k") and hasattr(router, "num_experts"):
            held = sum(map(num_weights, experts.parameters()))
            return held * (1 - router.top_k / router.num_experts)
    return 0.0


def num_weights(parameter: Tensor) -> int:
    in_one = 2 if parameter.dtype == torch.uint8 else 1  # QLoRA's 4 bits, two in a byte
    return parameter.numel() * in_one


def to_device(
    batch: PackedBatch | SequenceShard, device: torch.device
) -> PackedBatch | SequenceShard:
    """The batch with its tensors on the device, but for cu_seqlens."""
    for column in dataclasses.fields(batch):
        value = getattr(batch, column.name)
        if isinstance(value, SequenceShard):
            to_device(value, device)
        elif isinstance(value, Tensor) and column.name != "cu_seqlens":
            setattr(batch, column.name, value.to(device))
    return batch
