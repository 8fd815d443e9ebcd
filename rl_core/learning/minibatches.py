"""Every rank's samples -> this rank's minibatches of equal work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.algorithms import Algorithm, loss_denominator
from rl_core.config import Config
from rl_core.data.packing import (
    MinibatchPlan,
    PackBudget,
    fill_bins,
    group_totals,
    make_items,
    needs_forward,
    pack_samples,
    split_groups,
    trimmed,
)
from rl_core.data.pretrained import size_of_layers
from rl_core.distributed import Ranks, all_gather_json
from rl_core.metrics import Mean, Metric, Sum, add_metrics
from rl_core.models.policy import backbone
from rl_core.types import PackedBatch, SequenceShard, TrainingSample

Batch = TypeVar("Batch", PackedBatch, SequenceShard)


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """This rank's share of the samples of one optimizer step."""

    denominator: int  # Divides the sum of losses over all ranks.
    num_tokens: int  # Number of trained tokens on all ranks.
    batches: list[PackedBatch] = field(default_factory=list)  # Equally many on every rank.


class AddsColumns(Protocol):
    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        """Returns the batch, extended by further columns of its samples."""
        ...


def shard_samples(
    samples: list[TrainingSample],
    algorithm: Algorithm,
    config: Config,
    budget: PackBudget,
    ranks: Ranks,
    extensions: Iterable[AddsColumns] = (),
) -> tuple[list[Minibatch], dict[str, Metric]]:
    """Every rank's samples -> balanced minibatches, and metrics of their packing. Each sample moves
    at most once, from the rank that has it to the ranks that train on it. Every rank must call it
    and computes the same plan. `extensions` of the learner may add columns to each batch. KTO's
    samples alternate: a row's reply, and the mismatched one."""
    plans, local_samples = plan_minibatches(
        samples, algorithm, config.learner.updates_per_epoch, budget, ranks
    )

    def pack(samples: list[TrainingSample], has_images: bool) -> PackedBatch:
        batch = pack_samples(samples, budget.cp)
        if has_images and batch.images is None:
            batch.images = {}
        for extension in extensions:
            batch = extension.packed(batch, samples)
        return to_device(batch, ranks.device)

    received = move_samples(local_samples, plans, budget.num_ranks, ranks)
    share = budget.num_ranks / ranks.size  # Ranks of one bin (cp, tp) count together as one.
    minibatches, metrics = [], {}
    kind = "pair" if algorithm.is_pairs else algorithm.aggregation
    for plan in plans:
        longest = config.max_tokens * config.turn_limit
        minibatch = Minibatch(
            denominator=loss_denominator(kind, plan.num_tokens, plan.num_sequences, longest),
            num_tokens=plan.num_tokens,
        )
        minibatches.append(minibatch)
        # Bins run in step across the ranks.
        fullest = max(plan.bin_work, default=0) * len(plan.bin_work)
        add_metrics(metrics, {"pack/fill_frac": Mean(sum(plan.bin_work), fullest)})
        for items in plan.bins[ranks.dp_rank :: budget.num_ranks]:
            mine = []
            for item in items:
                mine += itertools.islice(received[item.rank], item.num_samples)
            others = None
            if algorithm.objective == "kto":
                mine, others = mine[::2], mine[1::2]
            batch = pack(mine, plan.has_images)
            batch.mismatched = None if others is None else pack(others, plan.has_images)
            minibatch.batches.append(batch)
            packing = {
                "microbatches": Sum(share),
                "tokens": Sum(sum(len(sample.token_ids) for sample in mine) * share),
                "computed_tokens": Sum(len(batch.input_ids) * share),
            }
            add_metrics(metrics, packing, prefix="pack/")
    return minibatches, metrics


def plan_minibatches(
    samples: list[TrainingSample],
    algorithm: Algorithm,
    num: int,
    budget: PackBudget,
    ranks: Ranks,
) -> tuple[list[MinibatchPlan], list[list[TrainingSample]]]:
    """The plan of each minibatch, and this rank's samples of it that need a forward."""
    samples = [trimmed(sample) for sample in samples]
    if algorithm.is_pairs:
        samples.sort(key=lambda s: s.group_id)
    else:
        samples.sort(key=lambda s: (s.group_id, s.token_ids.tobytes()))
    skips = algorithm.skips_zero_advantages
    plans = split_groups(all_gather_json(group_totals(samples, skips), ranks), num)
    used = [sample for sample in samples if needs_forward(sample, skips)]
    local_samples, items = [], []
    for plan in plans:
        local_samples.append([sample for sample in used if sample.group_id in plan.groups])
        items.append(make_items(local_samples[-1], plan, ranks.rank, budget, algorithm.is_pairs))
    of_ranks = all_gather_json(items, ranks)
    for number, plan in enumerate(plans):
        fill_bins(plan, [of_rank[number] for of_rank in of_ranks], budget)
    return plans, local_samples


def move_samples(
    local_samples: list[list[TrainingSample]],
    plans: list[MinibatchPlan],
    num_ranks: int,
    ranks: Ranks,
) -> list[Iterator[TrainingSample]]:
    """The samples that this rank trains on, in the order of its bins, by the rank that had them."""
    outgoing: list[list[TrainingSample]] = [[] for _ in range(num_ranks)]
    for samples, plan in zip(local_samples, plans, strict=True):
        for number, items in enumerate(plan.bins):
            for item in items:
                if item.rank == ranks.rank:
                    end = item.first + item.num_samples
                    outgoing[number % num_ranks] += samples[item.first : end]
    if ranks.size == 1:
        return [iter(outgoing[0])]
    from rl_core.learning.sample_exchange import exchange, from_bytes, to_bytes

    packed = [to_bytes(of_trainer) for of_trainer in outgoing]
    arrived = exchange([packed[ranks.dp_rank_of(rank)] for rank in range(ranks.size)])
    return [iter(from_bytes(data)) for data in arrived]


def pair_work(hf: PreTrainedModel) -> float:
    """FLOPs of one attention score relative to one token's linear layers; 0 for models without
    attention."""
    text = hf.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        return 0.0
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    num_layers = 0
    for kind in kinds:
        num_layers += kind.endswith(("attention", "hybrid")) and kind != "linear_attention"
    head_dim = size_of_layers(text, "head_dim") or text.hidden_size // heads
    return 2 * heads * head_dim * num_layers / active_parameters(hf)


def active_parameters(hf: PreTrainedModel) -> float:
    """Parameters that a token of text meets: those of the language model and its head, of each
    layer's experts the share that its router chooses."""
    text = backbone(hf)
    head = getattr(hf, "score", None) or hf.get_output_embeddings()
    names = {parameter: name for name, parameter in text.named_parameters()}
    if head is not None:
        names |= dict.fromkeys(head.parameters(), "head")  # a tied weight once
    top_k = getattr(text.config, "num_experts_per_tok", None)
    active = 0.0
    for parameter, name in names.items():
        size = parameter.numel()
        if parameter.dtype == torch.uint8:
            size *= 2  # QLoRA's 4 bits, two in a byte
        if ".experts." in name and top_k:
            size *= top_k / len(parameter)
        active += size
    return active


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch, or a shard of it, with its tensors on the device, but for cu_seqlens."""
    moved = {}
    for column in dataclasses.fields(batch):
        value = getattr(batch, column.name)
        if isinstance(value, Tensor) and column.name != "cu_seqlens":
            moved[column.name] = value.to(device)
    return dataclasses.replace(batch, **moved)
