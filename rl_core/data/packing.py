"""TrainingSamples -> PackedBatches of equal work. The project's one shift by one happens here."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from rl_core.types import PER_TOKEN, PackedBatch, TrainingSample

SHARE_FROM = 0.1  # least fraction of a group's tokens that a shared prompt must save


class Entry(NamedTuple):
    """What every rank knows of each sample. Tokens are moved after the plan is made."""

    group_id: str
    rank: int  # that has it
    index: int  # there
    length: int
    prompt_length: int  # tokens before the first trained one
    prompt: int  # a hash of its group and of them
    num_trained: int  # tokens
    has_signal: bool  # an advantage that is not 0


@dataclass(kw_only=True, slots=True)
class MinibatchPlan:
    num_tokens: int  # trained tokens of all samples, skipped ones included
    num_sequences: int  # of them
    # Of samples that need a forward; bin b is a microbatch of rank b % num_ranks.
    bins: list[list[Entry]] = field(default_factory=list)
    # Of each bin: matrix products and attention, in units of one token's matrix products.
    bin_work: list[float] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, frozen=True)
class PackBudget:
    """Limits of a microbatch."""

    max_tokens: int  # of a microbatch, on all of its cp ranks together
    num_ranks: int = 1  # that train on different samples
    cp: int = 1  # ranks that compute a sequence together; it is padded, and shares no prompt
    # Of attention to one other token, as a fraction of a token's matrix products.
    pair_work: float = 0.0


def make_entry(sample: TrainingSample, rank: int, index: int) -> Entry:
    length = prompt_length(sample)
    group = zlib.crc32(sample.group_id.encode())
    return Entry(
        group_id=sample.group_id,
        rank=rank,
        index=index,
        length=len(sample.token_ids),
        prompt_length=length,
        prompt=zlib.crc32(sample.token_ids[:length].tobytes(), group),
        num_trained=int(sample.loss_mask.sum()),
        has_signal=bool(sample.advantages.any()),
    )


def trained_positions(sample: TrainingSample) -> np.ndarray:
    """Of trained tokens, but for the first, which nothing predicts."""
    return 1 + sample.loss_mask[1:].nonzero()[0]


def prompt_length(sample: TrainingSample) -> int:
    """Tokens before the first trained one; at least 1."""
    trained = trained_positions(sample)
    return int(trained[0]) if len(trained) else 1


def trimmed(sample: TrainingSample) -> TrainingSample:
    """The sample without the tokens after its last trained one: they have no loss."""
    trained = trained_positions(sample)
    length = int(trained[-1]) + 1 if len(trained) else 1
    if length == len(sample.token_ids):
        return sample
    arrays = {name: getattr(sample, name)[:length] for name in PER_TOKEN}
    return dataclasses.replace(sample, **arrays)


def plan_minibatches(
    entries: list[Entry],
    num: int,
    budget: PackBudget,
    skip_zero_advantages: bool = False,
    is_pairs: bool = False,
) -> list[MinibatchPlan]:
    """Splits groups in their order into minibatches, and balances the samples of each over ranks
    and microbatches. A pair is a group of two that stays in one microbatch."""
    groups: dict[str, list[Entry]] = {}
    for entry in sorted(entries):
        groups.setdefault(entry.group_id, []).append(entry)
    parts: list[list[Entry]] = [[] for _ in range(num)]
    for number, group in enumerate(groups.values()):
        parts[number * num // len(groups)] += group
    plans = []
    for part in parts:
        used = [e for e in part if e.has_signal or not skip_zero_advantages]
        units = make_units(used, budget, is_pairs)
        costs = [unit_cost(unit, budget) for unit in units]
        plan = MinibatchPlan(num_tokens=sum(e.num_trained for e in part), num_sequences=len(part))
        for numbers in balanced_bins(costs, budget.max_tokens, budget.num_ranks):
            entries_of_bin: list[Entry] = []
            for n in numbers:
                entries_of_bin += units[n]
            plan.bins.append(entries_of_bin)
            plan.bin_work.append(sum(costs[n][1] for n in numbers))
        plans.append(plan)
    return plans


def make_units(entries: list[Entry], budget: PackBudget, is_pairs: bool) -> list[list[Entry]]:
    """Entries that go to one bin together: pairs, or those that share a prompt."""
    if is_pairs:
        return [entries[i : i + 2] for i in range(0, len(entries), 2)]
    if budget.cp > 1:
        return [[entry] for entry in entries]
    # No unit is so large that the ranks' loads would differ.
    share = sum(entry.length for entry in entries) // (2 * budget.num_ranks)
    max_tokens = min(budget.max_tokens, share)
    units: list[list[Entry]] = []
    for entry in entries:
        if units and units[-1][0].prompt == entry.prompt:
            longer = [*units[-1], entry]
            if unit_cost(longer, budget)[0] <= max_tokens:
                units[-1] = longer
                continue
        units.append([entry])
    return units


def unit_cost(unit: list[Entry], budget: PackBudget) -> tuple[int, float]:
    """(tokens, work) of samples that are computed together. Work includes attention."""
    lengths = [entry.length for entry in unit]
    prompt = unit[0].prompt_length
    saved = 0  # times that the prompt is not computed
    if budget.cp == 1 and is_worth_sharing(prompt, lengths):
        saved = len(unit) - 1
    tokens = sum(padded_length(n, budget.cp) for n in lengths) - saved * prompt
    pairs = sum(n * n for n in lengths) - saved * prompt**2
    return tokens, tokens + budget.pair_work * pairs / 2


def is_worth_sharing(prompt_length: int, lengths: list[int]) -> bool:
    """Whether to compute a prompt of samples once: attention over a shared prompt costs more."""
    return prompt_length * (len(lengths) - 1) >= SHARE_FROM * sum(lengths)


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
    while True:
        bins: list[list[int]] = [[] for _ in range(num)]
        tokens, work = np.zeros(num), np.zeros(num)
        for i in order:
            has_room = (tokens == 0) | (tokens + costs[i][0] <= max_tokens)
            if not has_room.any():
                break
            b = np.where(has_room, work, np.inf).argmin()
            bins[b].append(i)
            tokens[b] += costs[i][0]
            work[b] += costs[i][1]
        else:
            return bins
        num += multiple


class Piece(NamedTuple):
    token_ids: np.ndarray  # that the model reads
    first: int  # position of the first in its sequence
    parent: int = -1  # the piece that holds the prompt before them
    sample: int = -1  # whose trained tokens they predict; -1: a shared prompt, or nothing


def pack_samples(samples: Sequence[TrainingSample], cp: int = 1) -> PackedBatch:
    """The samples end to end, each without its last token (it predicts nothing). A shared prompt
    stands once: first the shared prompts, then unshared sequences, then what continues the prompts,
    prompt by prompt. Without samples the batch has one untrained token, for a rank that must keep
    step with the others. With cp > 1 each sample is unshared and padded."""
    by_prompt: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        prompt = sample.token_ids[: prompt_length(sample)]
        by_prompt.setdefault(prompt.tobytes(), []).append(i)
    prompts, alone, after = [], [], []
    for members in by_prompt.values():
        length = prompt_length(samples[members[0]])
        if cp == 1 and is_worth_sharing(length, [len(samples[i].token_ids) for i in members]):
            parent = len(prompts)
            prompts.append(Piece(samples[members[0]].token_ids[:length], 0))
            after += [Piece(samples[i].token_ids[length:-1], length, parent, i) for i in members]
        else:
            alone += [Piece(samples[i].token_ids[:-1], 0, -1, i) for i in members]
    pieces = [*prompts, *alone, *after]
    return packed(pieces or [Piece(np.zeros(1, np.int64), 0)], samples, cp)


def packed(pieces: list[Piece], samples: Sequence[TrainingSample], cp: int) -> PackedBatch:
    lengths = [padded_length(len(piece.token_ids), cp) for piece in pieces]
    starts = np.cumsum([0, *lengths])
    dtypes = PER_TOKEN | {"logit_indices": np.int64, "sequences": np.int64}
    columns = {name: [np.zeros(0, dtype)] for name, dtype in dtypes.items()}
    input_ids, position_ids = np.zeros((2, starts[-1]), np.int64)
    order = []
    for piece, start, length in zip(pieces, starts.tolist(), lengths, strict=False):
        input_ids[start : start + len(piece.token_ids)] = piece.token_ids
        position_ids[start : start + length] = np.arange(piece.first, piece.first + length)
        if piece.sample < 0:
            continue
        sample = samples[piece.sample]
        trained = trained_positions(sample)
        logit_indices = start + trained - piece.first - 1
        # The last token of a shared prompt predicts the first after it.
        logit_indices[trained == piece.first] = starts[piece.parent + 1] - 1
        columns["logit_indices"].append(logit_indices)
        columns["sequences"].append(np.full(len(trained), len(order)))
        for name in PER_TOKEN:
            columns[name].append(getattr(sample, name)[trained])
        order.append(piece.sample)
    joined = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    del joined["loss_mask"]
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        parents=[piece.parent for piece in pieces],
        labels=joined.pop("token_ids"),
        order=torch.tensor(order, dtype=torch.int64),
        **joined,
    )
