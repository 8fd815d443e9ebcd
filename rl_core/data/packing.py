"""TrainingSamples -> PackedBatches of equal work. The project's one shift by one happens here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike

from rl_core.data.prefix_tree import Segment, is_worth_sharing, num_shared, tree_pieces
from rl_core.types import PER_TOKEN, InputImage, PackedBatch, TrainingSample


class PackItem(NamedTuple):
    """Samples of one rank that go to one bin together: a pair, or neighbours that begin alike."""

    group: int  # index among the groups of all ranks
    rank: int  # rank that has the item
    first: int  # sample, of the rank's in this minibatch that need a forward
    num_samples: int
    num_tokens: int  # computed tokens
    num_scores: int  # attention scores, twice


@dataclass(kw_only=True, slots=True)
class MinibatchPlan:
    """The plan of a minibatch, equal on every rank. Tokens are moved after the plan is made."""

    groups: dict[str, int] = field(default_factory=dict)  # name -> index among all groups
    num_tokens: int = 0  # trained tokens of all samples, skipped ones included
    num_sequences: int = 0  # number of these samples
    num_used: int = 0  # tokens of samples that need a forward
    has_images: bool = False  # True if a sample of any rank has one.
    # Bin b is a microbatch of rank b % num_ranks.
    bins: list[list[PackItem]] = field(default_factory=list)
    # Cost of each bin: matrix products and attention, in units of one token's matrix products.
    bin_work: list[float] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, frozen=True)
class PackBudget:
    """Limits of a microbatch."""

    max_tokens: int  # Limit of a microbatch over all of its cp ranks.
    num_ranks: int = 1  # Number of ranks that train on different samples.
    cp: int = 1  # ranks that compute a sequence together; it is padded, and shares no prompt
    # Cost of attention to one token, as a fraction of a token's matrix products.
    pair_work: float = 0.0


def group_totals(samples: list[TrainingSample], skips: bool) -> list[list]:
    """[id, samples, trained tokens, tokens of samples that need a forward, True if one has images]
    of a rank's groups."""
    totals: dict[str, list] = {}
    for sample in samples:
        total = totals.setdefault(sample.group_id, [sample.group_id, 0, 0, 0, False])
        total[1] += 1
        total[2] += int(np.count_nonzero(sample.loss_mask))
        if needs_forward(sample, skips):
            total[3] += len(sample.token_ids)
        total[4] = total[4] or bool(sample.images)
    return list(totals.values())


def needs_forward(sample: TrainingSample, skips: bool) -> bool:
    return not skips or bool(np.count_nonzero(sample.advantages))


def trimmed(sample: TrainingSample) -> TrainingSample:
    """The sample without the tokens after its last trained one: they have no loss."""
    if sample.loss_mask[-1]:
        return sample
    trained = sample.loss_mask.nonzero()[0]
    length = int(trained[-1]) + 1 if len(trained) else 1
    arrays = {name: getattr(sample, name)[:length] for name in PER_TOKEN}
    return dataclasses.replace(sample, **arrays)


def split_groups(of_ranks: list[list[list]], num: int) -> list[MinibatchPlan]:
    """Splits the groups of all ranks, in their order, into minibatches. `of_ranks`: the totals of
    each."""
    plans = [MinibatchPlan() for _ in range(num)]
    totals = list(itertools.chain(*of_ranks))
    names = sorted({name for name, *_ in totals})
    plan_of = {}
    for number, name in enumerate(names):
        plan_of[name] = plan = plans[number * num // len(names)]
        plan.groups[name] = number
    for name, num_sequences, num_tokens, num_used, has_images in totals:
        plan = plan_of[name]
        plan.num_sequences += num_sequences
        plan.num_tokens += num_tokens
        plan.num_used += num_used
        plan.has_images = plan.has_images or has_images
    return plans


def make_items(
    samples: list[TrainingSample],
    plan: MinibatchPlan,
    rank: int,
    budget: PackBudget,
    is_pairs: bool = False,
) -> list[PackItem]:
    """The items of a rank's samples in the plan that need a forward. Samples with a common
    beginning are neighbours."""
    lengths = [len(sample.token_ids) - 1 for sample in samples]
    shared = [0] * len(samples)  # tokens, with the sample before
    for i in range(1, len(samples)):
        if samples[i - 1].group_id == samples[i].group_id:
            shared[i] = num_shared(samples[i - 1], samples[i])
    if is_pairs:
        max_tokens = math.inf
        starts = range(0, len(samples), 2)
    else:
        # No item is so large that the ranks' loads would differ.
        max_tokens = min(budget.max_tokens, plan.num_used // (2 * budget.num_ranks))
        starts = item_starts(lengths, shared, max_tokens, budget.cp)
    items = []
    for first, end in itertools.pairwise([*starts, len(samples)]):
        group = plan.groups[samples[first].group_id]
        for facts in fitting(lengths[first:end], shared[first + 1 : end], max_tokens, budget.cp):
            items.append(PackItem(group, rank, first, *facts))
            first += facts[0]
    return items


def item_starts(lengths: list[int], shared: list[int], max_tokens: int, cp: int) -> list[int]:
    """Indices of samples that share no beginning with the previous sample, or exceed an item."""
    starts = []
    tokens = 0  # lower bound of the last item's tokens
    for i, (length, num) in enumerate(zip(lengths, shared, strict=True)):
        begins_alike = cp == 1 and is_worth_sharing(num, length + 1)
        tokens += length - num
        if not begins_alike or tokens > max_tokens:
            starts.append(i)
            tokens = length
    return starts


def fitting(
    lengths: list[int], shared: list[int], max_tokens: float, cp: int
) -> Iterator[tuple[int, int, int]]:
    """(samples, tokens, scores) of an item, halved where not all that its samples share is worth
    computing once."""
    tokens, scores = item_cost(lengths, shared, cp)
    half = len(lengths) // 2
    if not half or tokens <= max_tokens:
        yield len(lengths), tokens, scores
    else:
        yield from fitting(lengths[:half], shared[: half - 1], max_tokens, cp)
        yield from fitting(lengths[half:], shared[half:], max_tokens, cp)


def item_cost(lengths: list[int], shared: list[int], cp: int) -> tuple[int, int]:
    """Tokens, and twice the scores of attention, of samples that are computed together."""
    tokens = scores = 0
    for piece in tree_pieces(lengths, shared, cp):
        tokens += padded_length(piece.end - piece.first, cp)
        scores += piece.end**2 - piece.first**2
    return tokens, scores


def fill_bins(plan: MinibatchPlan, of_ranks: list[list[list]], budget: PackBudget) -> None:
    """Balances the items of all ranks over ranks and microbatches."""
    items = sorted(itertools.starmap(PackItem, itertools.chain(*of_ranks)))
    costs = []
    for item in items:
        costs.append((item.num_tokens, item.num_tokens + budget.pair_work * item.num_scores / 2))
    for numbers in balanced_bins(costs, budget.max_tokens, budget.num_ranks):
        plan.bins.append([items[n] for n in sorted(numbers)])
        plan.bin_work.append(sum(costs[n][1] for n in numbers))


def padded_length(length: int, cp: int) -> int:
    """Tokens of a sequence padded for cp ranks: a multiple of 2 cp (see SequenceShard)."""
    return length if cp == 1 else -(-length // (2 * cp)) * 2 * cp


def balanced_bins(
    costs: Sequence[tuple[int, float]], max_tokens: int, multiple: int
) -> list[list[int]]:
    """Indices of (tokens, work) in bins of nearly equal work, each of at most max_tokens (a longer
    sample stands alone). Their number is a multiple of `multiple`, or 0; some are empty where there
    are fewer samples. Most work first, each into the bin with the least work that has space (Graham
    1969; at most 4/3 of the best largest bin). It is deterministic."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i][1])
    least = -(-sum(tokens for tokens, _ in costs) // max_tokens)
    num = -(-least // multiple) * multiple
    while (bins := fill(costs, order, max_tokens, num)) is None:
        num += max(1, num // (64 * multiple)) * multiple
    return bins


def fill(
    costs: Sequence[tuple[int, float]], order: list[int], max_tokens: int, num: int
) -> list[list[int]] | None:
    """None: one of them has space in no bin."""
    bins: list[list[int]] = [[] for _ in range(num)]
    # Heaps: bins as (work, bin, tokens), and as (tokens, bin, work) those that had no space.
    least = [(0.0, b, 0) for b in range(num)]
    full: list[tuple[int, int, float]] = []
    for i in order:
        tokens, work = costs[i]
        most = max(0, max_tokens - tokens)  # An empty bin takes any.
        while full and full[0][0] <= most:
            filled, b, spent = heappop(full)
            heappush(least, (spent, b, filled))
        while least and least[0][2] > most:
            spent, b, filled = heappop(least)
            heappush(full, (filled, b, spent))
        if not least:
            return None
        before, b, filled = least[0]
        heapreplace(least, (before + work, b, filled + tokens))
        bins[b].append(i)
    return bins


def pack_samples(samples: Sequence[TrainingSample], cp: int = 1) -> PackedBatch:
    """The samples, each without its last token (it predicts nothing), as trees: what neighbours
    begin with stands once, where that saves enough. Without samples the batch has one untrained
    token, for a rank that must keep step with the others. With cp > 1 each sample stands alone,
    padded."""
    pieces = [Segment(range(0), 0, 1)]
    if samples:
        shared = list(itertools.starmap(num_shared, itertools.pairwise(samples)))
        pieces = tree_pieces([len(sample.token_ids) - 1 for sample in samples], shared, cp)
    starts = np.cumsum([0, *(padded_length(piece.end - piece.first, cp) for piece in pieces)])
    input_ids, position_ids = np.zeros((2, starts[-1]), np.int64)
    parts: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in samples]
    for piece, start, end in zip(pieces, starts.tolist(), starts[1:].tolist(), strict=False):
        position_ids[start:end] = np.arange(piece.first, piece.first + end - start)
        tokens = np.arange(start, start + piece.end - piece.first)
        for i in piece.samples:
            parts[i].append(tokens)
        if piece.samples:
            read = samples[piece.samples[0]].token_ids[piece.first : piece.end]
            input_ids[start : start + len(read)] = read
    paths = [np.concatenate(of_sample) for of_sample in parts]
    images = images_of_samples(samples)
    # Models would read placeholders without features.
    assert images or not (input_ids < 0).any(), "samples have tokens of images and no images"
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        parents=[piece.parent for piece in pieces],
        paths=paths,
        images=images,
        # All of them are tensors, also by name.
        **trained_columns(samples, paths),  # pyright: ignore[reportArgumentType]
    )


def images_of_samples(samples: Sequence[TrainingSample]) -> dict[int, InputImage] | None:
    """The samples' images by key; None if they have none."""
    return {image.key: image for sample in samples for image in sample.images} or None


def trained_columns(
    samples: Sequence[TrainingSample], paths: list[np.ndarray]
) -> dict[str, torch.Tensor]:
    """The fields of a batch that list only trained tokens."""
    numbers = np.repeat(np.arange(len(samples)), [len(path) for path in paths])
    columns = {"logit_indices": joined(paths, np.int64), "sequences": numbers}
    for name, dtype in PER_TOKEN.items():
        columns[name] = joined([getattr(sample, name)[1:] for sample in samples], dtype)
    trained = columns.pop("loss_mask")
    fields = {name: torch.from_numpy(column[trained]) for name, column in columns.items()}
    return fields | {"labels": fields.pop("token_ids")}


def joined(parts: list[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts])
