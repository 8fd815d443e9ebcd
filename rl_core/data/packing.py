"""TrainingSamples -> PackedBatches of equal work. The project's one shift by one happens here."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from rl_core.types import PER_TOKEN, PackedBatch, TrainingSample

SHARE_FROM = 0.1  # least fraction of its samples' tokens that a shared piece must save


class Entry(NamedTuple):
    """What every rank knows of each sample. Tokens are moved after the plan is made."""

    group_id: str
    rank: int  # that has it
    index: int  # there
    length: int
    num_shared: int  # tokens that it and the last one of its group that is not skipped begin with
    num_trained: int  # tokens
    is_skipped: bool  # it needs no forward
    env: str = ""


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


def make_entries(samples: list[TrainingSample], rank: int, skips: bool) -> list[Entry]:
    """Of a rank's samples, in which those that begin alike are neighbours."""
    entries = []
    before: TrainingSample | None = None
    for index, sample in enumerate(samples):
        shared = 0
        if before is not None and before.group_id == sample.group_id:
            shared = num_shared(before, sample)
        entry = Entry(
            group_id=sample.group_id,
            rank=rank,
            index=index,
            length=len(sample.token_ids),
            num_shared=shared,
            num_trained=int(sample.loss_mask.sum()),
            is_skipped=skips and not sample.advantages.any(),
            env=sample.env,
        )
        entries.append(entry)
        if not entry.is_skipped:
            before = sample
    return entries


def num_shared(a: TrainingSample, b: TrainingSample) -> int:
    """Tokens that both begin with and a model reads: not the last one of either."""
    length = min(len(a.token_ids), len(b.token_ids)) - 1
    differs = a.token_ids[:length] != b.token_ids[:length]
    return int(differs.argmax()) if differs.any() else length


def trained_positions(sample: TrainingSample) -> np.ndarray:
    """Of trained tokens, but for the first, which nothing predicts."""
    return 1 + sample.loss_mask[1:].nonzero()[0]


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
        used = [e for e in part if not e.is_skipped]
        units = make_units(used, budget, is_pairs)
        costs = [unit_cost(unit, budget) for unit in units]
        plan = MinibatchPlan(num_tokens=sum(e.num_trained for e in part), num_sequences=len(part))
        for numbers in balanced_bins(costs, budget.max_tokens, budget.num_ranks):
            plan.bins.append(sorted(itertools.chain(*(units[n] for n in numbers))))
            plan.bin_work.append(sum(costs[n][1] for n in numbers))
        plans.append(plan)
    return plans


def make_units(entries: list[Entry], budget: PackBudget, is_pairs: bool) -> list[list[Entry]]:
    """Entries that go to one bin together: pairs, or those that begin alike."""
    if is_pairs:
        return [entries[i : i + 2] for i in range(0, len(entries), 2)]
    # No unit is so large that the ranks' loads would differ.
    share = sum(entry.length for entry in entries) // (2 * budget.num_ranks)
    max_tokens = min(budget.max_tokens, share)
    units: list[list[Entry]] = []
    tokens = 0  # of the last unit, at least
    for entry in entries:
        begins_alike = budget.cp == 1 and is_worth_sharing(entry.num_shared, entry.length)
        tokens += entry.length - 1 - entry.num_shared
        if not begins_alike or tokens > max_tokens:
            units.append([])
            tokens = entry.length - 1
        units[-1].append(entry)
    return fitting(units, max_tokens, budget)


def fitting(units: list[list[Entry]], max_tokens: int, budget: PackBudget) -> list[list[Entry]]:
    """The units, halved where not all that their entries share is worth computing once."""
    found: list[list[Entry]] = []
    for unit in units:
        half = len(unit) // 2
        if half and unit_cost(unit, budget)[0] > max_tokens:
            found += fitting([unit[:half], unit[half:]], max_tokens, budget)
        else:
            found.append(unit)
    return found


def unit_cost(unit: list[Entry], budget: PackBudget) -> tuple[int, float]:
    """(tokens, work) of samples that are computed together. Work includes attention."""
    tokens = pairs = 0
    shared = [entry.num_shared for entry in unit[1:]]
    for piece in tree_pieces([entry.length - 1 for entry in unit], shared, budget.cp):
        tokens += padded_length(piece.end - piece.first, budget.cp)
        pairs += piece.end**2 - piece.first**2
    return tokens, tokens + budget.pair_work * pairs / 2


def is_worth_sharing(num_saved: int, num_tokens: int) -> bool:
    """Whether to save these of the tokens: attention over shared pieces costs more."""
    return num_saved >= SHARE_FROM * num_tokens


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
    samples: range  # that read it
    first: int  # positions in each of them
    end: int
    parent: int = -1  # the piece before it


def tree_pieces(lengths: list[int], shared: list[int], cp: int) -> list[Piece]:
    """Of sequences of these lengths, of which neighbours begin with so many equal tokens: level by
    level, and those that follow one piece together. With cp > 1 nothing is shared."""
    pieces: list[Piece] = []
    families = deque([(range(len(lengths)), 0, -1)])
    while families:
        members, first, parent = families.popleft()
        between = shared[members.start : members.stop - 1]
        if not between:
            pieces.append(Piece(members, first, lengths[members.start], parent))
            continue
        end = min(between)
        cuts = [i for i, length in zip(members[1:], between, strict=True) if length == end]
        parts = itertools.pairwise([members.start, *cuts, members.stop])
        num_tokens = sum(lengths[i] - first for i in members)
        if cp == 1 and is_worth_sharing((end - first) * len(between), num_tokens):
            pieces.append(Piece(members, first, end, parent))
            families.extend((range(a, b), end, len(pieces) - 1) for a, b in parts)
        else:
            # They come next: pieces of one level stand together.
            families.extendleft((range(a, b), first, parent) for a, b in parts)
    return pieces


def pack_samples(samples: Sequence[TrainingSample], cp: int = 1) -> PackedBatch:
    """The samples, each without its last token (it predicts nothing), as trees: what neighbours
    begin with stands once, where that saves enough. Without samples the batch has one untrained
    token, for a rank that must keep step with the others. With cp > 1 each sample stands alone,
    padded."""
    pieces = [Piece(range(0), 0, 1)]
    if samples:
        shared = list(itertools.starmap(num_shared, itertools.pairwise(samples)))
        pieces = tree_pieces([len(sample.token_ids) - 1 for sample in samples], shared, cp)
    lengths = [padded_length(piece.end - piece.first, cp) for piece in pieces]
    starts = np.cumsum([0, *lengths])
    input_ids, position_ids = np.zeros((2, starts[-1]), np.int64)
    paths = [np.zeros(0, np.int64)] * len(samples)
    for piece, start, length in zip(pieces, starts.tolist(), lengths, strict=False):
        position_ids[start : start + length] = np.arange(piece.first, piece.first + length)
        tokens = np.arange(start, start + piece.end - piece.first)
        for i in piece.samples:
            paths[i] = np.concatenate([paths[i], tokens])
            input_ids[tokens] = samples[i].token_ids[piece.first : piece.end]
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        parents=[piece.parent for piece in pieces],
        paths=paths,
        **trained_columns(samples, paths),
    )


def trained_columns(
    samples: Sequence[TrainingSample], paths: list[np.ndarray]
) -> dict[str, torch.Tensor]:
    """What a batch lists of trained tokens alone."""
    dtypes = PER_TOKEN | {"logit_indices": np.int64, "sequences": np.int64}
    columns = {name: [np.zeros(0, dtype)] for name, dtype in dtypes.items()}
    for number, (sample, path) in enumerate(zip(samples, paths, strict=True)):
        trained = trained_positions(sample)
        columns["logit_indices"].append(path[trained - 1])
        columns["sequences"].append(np.full(len(trained), number))
        for name in PER_TOKEN:
            columns[name].append(getattr(sample, name)[trained])
    joined = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
    del joined["loss_mask"]
    return joined | {"labels": joined.pop("token_ids")}
