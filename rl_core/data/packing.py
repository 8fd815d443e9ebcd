"""TrainingSamples -> PackedBatches of equal work. The project's one shift by one happens here."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rl_core.types import PER_TOKEN, PackedBatch, SequenceShard, TrainingSample

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
    bins: list[list[Entry]]
    # Of each bin: matrix products and attention, in units of one token's matrix products.
    bin_work: list[float]


@dataclass(kw_only=True, slots=True, frozen=True)
class PackBudget:
    """Limits of a microbatch."""

    max_tokens: int  # of a microbatch, on all of its cp ranks together
    num_ranks: int = 1  # that train on different samples
    cp: int = 1  # ranks that compute a sequence together; it is padded, and shares no prompt
    # Of attention to one other token, as a fraction of a token's matrix products.
    pair_work: float = 0.0


def make_entry(sample: TrainingSample, rank: int, index: int) -> Entry:
    prompt = prompt_length(sample.loss_mask)
    prompt_hash = zlib.crc32(
        sample.token_ids[:prompt].tobytes(), zlib.crc32(sample.group_id.encode())
    )
    sizes = rank, index, len(sample.token_ids), prompt
    return Entry(
        sample.group_id,
        *sizes,
        prompt_hash,
        int(sample.loss_mask.sum()),
        bool(sample.advantages.any()),
    )


def prompt_length(loss_mask: np.ndarray) -> int:
    """Tokens before the first trained one; at least 1, because nothing predicts the first token."""
    return 1 + int(loss_mask[1:].argmax()) if len(loss_mask) > 1 else 1


def trimmed(sample: TrainingSample) -> TrainingSample:
    """The sample without the tokens after its last trained one: they have no loss."""
    trained = np.flatnonzero(sample.loss_mask[1:])
    keep = trained[-1] + 2 if len(trained) else 1
    if keep == len(sample.loss_mask):
        return sample
    return dataclasses.replace(sample, **{name: getattr(sample, name)[:keep] for name in PER_TOKEN})


def plan_minibatches(
    entries: list[Entry],
    num: int,
    budget: PackBudget,
    skip_zero_advantages: bool = False,
    is_pairs: bool = False,
) -> list[MinibatchPlan]:
    """Splits groups in their order into minibatches, and balances the samples of each over ranks
    and microbatches. A pair is a group of two that stays in one microbatch."""
    entries = sorted(entries)
    groups = {group_id: n for n, group_id in enumerate(dict.fromkeys(e.group_id for e in entries))}
    parts: list[list[Entry]] = [[] for _ in range(num)]
    for e in entries:
        parts[groups[e.group_id] * num // len(groups)].append(e)
    return [plan_minibatch(part, budget, skip_zero_advantages, is_pairs) for part in parts]


def plan_minibatch(
    part: list[Entry], budget: PackBudget, skip_zero_advantages: bool, is_pairs: bool
) -> MinibatchPlan:
    used = [e for e in part if e.has_signal or not skip_zero_advantages]
    if is_pairs:
        units = [used[i : i + 2] for i in range(0, len(used), 2)]
    elif budget.cp > 1:
        units = [[e] for e in used]
    else:
        # A group that shares its prompt goes to one bin, but no unit is so large that the ranks'
        # loads would differ.
        total = sum(
            unit_size(unit, budget)[0] for unit in shared_units(used, budget, budget.max_tokens)
        )
        units = shared_units(used, budget, min(budget.max_tokens, total // (2 * budget.num_ranks)))
    tokens, work = (
        zip(*(unit_size(unit, budget) for unit in units), strict=True) if units else ((), ())
    )
    bins = balanced_bins(tokens, budget.max_tokens, budget.num_ranks, work) if units else []
    return MinibatchPlan(
        num_tokens=sum(e.num_trained for e in part),
        num_sequences=len(part),
        bins=[[e for u in b for e in units[u]] for b in bins],
        bin_work=[sum(work[u] for u in b) for b in bins],
    )


def is_worth_sharing(prompt_length: int, num_samples: int, num_tokens: int) -> bool:
    """Whether to compute a prompt of samples with num_tokens in all once: attention over a shared
    prompt costs more."""
    return prompt_length * (num_samples - 1) >= SHARE_FROM * num_tokens


def shared_units(entries: list[Entry], budget: PackBudget, max_tokens: int) -> list[list[Entry]]:
    """Entries that begin with the same prompt, in runs of at most max_tokens."""
    units: list[list[Entry]] = []
    for e in entries:
        if (
            units
            and units[-1][0].prompt == e.prompt
            and unit_size([*units[-1], e], budget)[0] <= max_tokens
        ):
            units[-1].append(e)
        else:
            units.append([e])
    return units


def unit_size(unit: list[Entry], budget: PackBudget) -> tuple[int, float]:
    """(tokens, work) of samples that are computed together. Work includes attention."""
    lengths, prompt, others = [e.length for e in unit], unit[0].prompt_length, len(unit) - 1
    shared = prompt if budget.cp == 1 and is_worth_sharing(prompt, len(unit), sum(lengths)) else 0
    tokens = sum([padded_length(n, budget.cp) for n in lengths]) - others * shared
    return tokens, tokens + budget.pair_work * (
        sum([n * n for n in lengths]) - others * shared**2
    ) / 2


def padded_length(length: int, cp: int) -> int:
    """Tokens of a sequence padded for cp ranks: a multiple of 2 cp (see SequenceShard)."""
    return length if cp == 1 else -(-length // (2 * cp)) * 2 * cp


def balanced_bins(
    lengths: Sequence[int], max_tokens: int, multiple: int, work: Sequence[float]
) -> list[list[int]]:
    """Indices in bins of nearly equal work, each of at most max_tokens (a longer sample stands
    alone). Their number is a multiple of `multiple`; some are empty where there are fewer samples.
    Most work first, each into the bin with the least work that has space (Graham 1969; at most 4/3
    of the best largest bin). It is deterministic."""
    order = sorted(range(len(lengths)), key=lambda i: (-work[i], i))
    num = -(-sum(lengths) // max_tokens)
    while True:
        num = max(multiple, -(-num // multiple) * multiple)
        bins: list[list[int]] = [[] for _ in range(num)]
        tokens, done = np.zeros(num), np.zeros(num)
        for i in order:
            has_room = (tokens == 0) | (tokens + lengths[i] <= max_tokens)
            if not has_room.any():
                break
            b = np.where(has_room, done, np.inf).argmin()
            bins[b].append(i)
            tokens[b] += lengths[i]
            done[b] += work[i]
        else:
            return bins
        num += 1


class Piece(NamedTuple):
    token_ids: np.ndarray  # that the model reads
    position: int  # of the first in its sequence
    parent: int = -1  # the piece that holds the prompt before them
    sample: int = -1  # whose trained tokens they predict; -1: a shared prompt, or nothing


def pack_samples(samples: Sequence[TrainingSample], cp: int = 1) -> PackedBatch:
    """The samples end to end, each without its last token (it predicts nothing). A shared prompt
    stands once: first unshared sequences, then shared prompts, then their continuations, prompt by
    prompt. Without samples the batch has one untrained token, for a rank that must keep step with
    the others. With cp > 1 each sample is unshared and padded."""
    by_prompt: dict[bytes, list[int]] = {}
    for i, s in enumerate(samples):
        by_prompt.setdefault(s.token_ids[: prompt_length(s.loss_mask)].tobytes(), []).append(i)
    unshared, groups = [], []
    for members in by_prompt.values():
        length = prompt_length(samples[members[0]].loss_mask)
        num_tokens = sum(len(samples[i].token_ids) for i in members)
        if cp == 1 and is_worth_sharing(length, len(members), num_tokens):
            groups.append((length, members))
        else:
            unshared += members
    unshared.sort(key=lambda i: len(samples[i].token_ids))
    pieces = [Piece(samples[i].token_ids[:-1], 0, -1, i) for i in unshared]
    pieces += [Piece(samples[members[0]].token_ids[:length], 0) for length, members in groups]
    for parent, (length, members) in enumerate(groups, len(unshared)):
        pieces += [Piece(samples[i].token_ids[length:-1], length, parent, i) for i in members]
    return packed(pieces or [Piece(np.zeros(1, np.int64), 0)], samples, cp)


def packed(pieces: list[Piece], samples: Sequence[TrainingSample], cp: int) -> PackedBatch:
    lengths = np.array([padded_length(len(p.token_ids), cp) for p in pieces])
    starts = np.concatenate([[0], lengths.cumsum()])
    firsts, parents, order = np.array([p[1:] for p in pieces]).T
    offsets = starts[:-1] - firsts  # plus a token's position is its place in the batch
    input_ids = np.zeros(starts[-1], np.int64)
    for p, start in zip(pieces, starts.tolist(), strict=False):
        input_ids[start : start + len(p.token_ids)] = p.token_ids
    own = np.flatnonzero(order >= 0)
    members = [samples[i] for i in order[own]]
    columns = {
        n: np.concatenate([np.zeros(0, t), *(getattr(s, n) for s in members)])
        for n, t in PER_TOKEN.items()
    }
    sizes = np.array([len(s.loss_mask) for s in members], int)
    positions = np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)
    trained = np.flatnonzero(columns.pop("loss_mask") & (positions > 0))
    sequences, positions = np.arange(len(own)).repeat(sizes)[trained], positions[trained]
    piece = own[sequences]
    # The last token of a shared prompt predicts the first after it.
    places = np.where(
        positions == firsts[piece], starts[parents[piece] + 1], positions + offsets[piece]
    )
    columns = {name: values[trained] for name, values in columns.items()}
    columns |= {
        "sources": places - 1,
        "sequences": sequences,
        "order": order[own],
        "input_ids": input_ids,
    }
    columns["position_ids"] = np.arange(starts[-1]) - offsets.repeat(lengths)
    joined = {name: torch.from_numpy(values) for name, values in columns.items()}
    return PackedBatch(
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        parents=parents.tolist(),
        labels=joined.pop("token_ids"),
        **joined,
    )


def shard_sequences(batch: PackedBatch, cp: int, rank: int) -> PackedBatch:
    """The batch with the shard of one of cp ranks; it knows the shards of all ranks."""
    lengths = batch.cu_seqlens.long().diff()
    # [T] of its sequence.
    chunk = batch.position_ids // (lengths // (2 * cp)).repeat_interleave(lengths)
    owners = torch.minimum(chunk, 2 * cp - 1 - chunk)  # [T]
    tokens = (owners == rank).nonzero()[:, 0]
    here = torch.full_like(owners, -1).index_put((tokens,), torch.arange(len(tokens)))
    by_owner = [(owners[batch.sources] == r).nonzero()[:, 0] for r in range(cp)]
    shard = SequenceShard(
        tokens=tokens,
        cu_seqlens=batch.cu_seqlens // cp,
        sources=here[batch.sources[by_owner[rank]]],
        trained=by_owner[rank],
        counts=[len(part) for part in by_owner],
        places=torch.cat(by_owner).argsort(),
    )
    return dataclasses.replace(batch, shard=shard)
