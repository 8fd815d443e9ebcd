"""TrainingSamples -> PackedBatches of equal work. The one shift by one of the whole project happens here."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rl_core.types import PackedBatch, SequenceShard, TrainingSample

Bins = list[list[int]]  # indices of samples
TRAINED = ("token_ids", "rollout_logprobs", "advantages", "policy_versions")  # arrays of a sample, for trained tokens
DTYPES = {"rollout_logprobs": torch.float32, "advantages": torch.float32}
SHARE_FROM = 0.1  # of a group's tokens that computing its prompt once must save


class Entry(NamedTuple):
    """What every rank knows of each sample; the tokens stay where they are until the plan is made."""

    group_id: str
    rank: int  # that has it
    index: int  # there
    length: int
    prompt_length: int  # tokens before the first trained one
    prompt: int  # a hash of them
    num_trained: int  # tokens
    has_signal: bool  # an advantage that is not 0

    def shares_prompt_with(self, other: Entry) -> bool:
        return (self.group_id, self.prompt, self.prompt_length) == (other.group_id, other.prompt, other.prompt_length)


@dataclass(kw_only=True, slots=True)
class MinibatchPlan:
    num_tokens: int  # trained tokens of all samples, those left out included
    num_sequences: int  # of them
    entries: list[Entry]  # samples that need a forward
    bins: Bins  # of entries; bin b is a microbatch of rank b % num_ranks
    bin_tokens: list[int]  # of each bin, a shared prompt counted once
    bin_work: list[float]  # of each bin, in tokens' worth of matrix products: attention counts too


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """What samples are packed into."""

    max_tokens: int  # of a microbatch, on all of its cp ranks together
    num_ranks: int = 1  # that train on different samples
    cp: int = 1  # ranks that compute a sequence together: it is padded for them, and shares no prompt
    pair_work: float = 0.0  # of a token that sees another, as a share of its matrix products


def plan_minibatches(
    entries: list[Entry], num_minibatches: int, room: Room, skip_zero_advantages: bool = False, is_pairs: bool = False
) -> list[MinibatchPlan]:
    """Groups split in their order into minibatches, samples of each balanced over ranks and microbatches. A pair is a group
    of two, of which each microbatch has both or none."""
    entries = sorted(entries)
    groups = {group_id: n for n, group_id in enumerate(dict.fromkeys(e.group_id for e in entries))}
    parts: list[list[Entry]] = [[] for _ in range(num_minibatches)]
    for e in entries:
        parts[groups[e.group_id] * num_minibatches // len(groups)].append(e)
    return [plan_minibatch(part, room, skip_zero_advantages, is_pairs) for part in parts]


def plan_minibatch(part: list[Entry], room: Room, skip_zero_advantages: bool, is_pairs: bool) -> MinibatchPlan:
    used = [e for e in part if e.has_signal or not skip_zero_advantages]
    plan = MinibatchPlan(
        num_tokens=sum(e.num_trained for e in part),
        num_sequences=len(part),
        entries=used,
        bins=[],
        bin_tokens=[],
        bin_work=[],
    )
    if used:
        if is_pairs:
            units = [[i, i + 1] for i in range(0, len(used), 2)]
        elif room.cp > 1:
            units = [[i] for i in range(len(used))]
        else:
            # A group that shares its prompt goes to one bin, but no unit is so large that the ranks' loads would differ.
            whole = sum(unit_tokens(used, unit) for unit in shared_units(used, room.max_tokens))
            units = shared_units(used, min(room.max_tokens, whole // (2 * room.num_ranks)))
        tokens = [unit_tokens(used, unit, room.cp) for unit in units]
        work = [t + room.pair_work * unit_pairs(used, unit, t) for t, unit in zip(tokens, units, strict=True)]
        bins = balanced_bins(tokens, room.max_tokens, room.num_ranks, work)
        plan.bins = [[i for u in b for i in units[u]] for b in bins]
        plan.bin_tokens = [sum(tokens[u] for u in b) for b in bins]
        plan.bin_work = [sum(work[u] for u in b) for b in bins]
    return plan


def is_worth_sharing(prompt_length: int, num_samples: int, num_tokens: int) -> bool:
    """Whether a prompt of samples with num_tokens in all is computed once: attention over a shared prompt costs more."""
    return prompt_length * (num_samples - 1) >= SHARE_FROM * num_tokens


def shared_units(entries: list[Entry], max_tokens: int) -> list[list[int]]:
    """Indices of entries that begin with the same prompt, in runs of at most max_tokens."""
    units: list[list[int]] = []
    for i, e in enumerate(entries):
        last = units[-1] if units else []
        is_same = last and e.shares_prompt_with(entries[last[0]])
        if is_same and unit_tokens(entries, [*last, i]) <= max_tokens:
            last.append(i)
        else:
            units.append([i])
    return units


def unit_tokens(entries: list[Entry], unit: list[int], cp: int = 1) -> int:
    if cp > 1:
        return sum(padded_length(entries[i].length, cp) for i in unit)
    prompt, tokens = entries[unit[0]].prompt_length, sum(entries[i].length for i in unit)
    return tokens - prompt * (len(unit) - 1) if is_worth_sharing(prompt, len(unit), tokens) else tokens


def unit_pairs(entries: list[Entry], unit: list[int], num_tokens: int) -> float:
    """How often a token sees another in a unit that is computed as num_tokens."""
    lengths = [entries[i].length for i in unit]
    shared = entries[unit[0]].prompt_length if num_tokens < sum(lengths) else 0
    return (sum(n * n for n in lengths) - (len(unit) - 1) * shared**2) / 2


def padded_length(length: int, cp: int) -> int:
    """Tokens that a sequence takes where cp ranks compute it together: a multiple of 2 cp (see SequenceShard)."""
    return length if cp == 1 else -(-length // (2 * cp)) * 2 * cp


def prompt_length(loss_mask: Sequence[int]) -> int:
    """Tokens before the first trained one; at least 1, because nothing predicts the first token."""
    return next((i for i, m in enumerate(loss_mask) if m and i), 1)


def trained_span(loss_mask: Sequence[int]) -> int:
    """Tokens that a forward needs: up to the one before the last trained token; what follows teaches nothing."""
    last = len(loss_mask) - 1
    while last > 0 and not loss_mask[last]:
        last -= 1
    return last


def balanced_bins(
    lengths: Sequence[int], max_tokens: int, multiple: int = 1, work: Sequence[float] | None = None
) -> Bins:
    """Bins of nearly equal work (default: tokens), each of at most max_tokens (a longer sample stands alone). Their number
    is a multiple of `multiple`; some are empty where there are fewer samples. The most work first, into the bin with the
    least that has room: deterministic, so that every rank computes the same (Graham 1969; at most 4/3 of the best largest
    bin)."""
    work = lengths if work is None else work
    order = sorted(range(len(lengths)), key=lambda i: (-work[i], i))
    num = -(-sum(lengths) // max_tokens)
    while True:
        num = max(multiple, -(-num // multiple) * multiple)
        heap = [(0, b) for b in range(num)]
        bins: Bins = [[] for _ in range(num)]
        tokens = [0] * num
        for i in order:
            full = []
            while heap and tokens[heap[0][1]] and tokens[heap[0][1]] + lengths[i] > max_tokens:
                full.append(heapq.heappop(heap))
            if not heap:
                break
            done, b = heap[0]
            heapq.heapreplace(heap, (done + work[i], b))
            bins[b].append(i)
            tokens[b] += lengths[i]
            for entry in full:
                heapq.heappush(heap, entry)
        else:
            return bins
        num += 1


def pack_samples(samples: Sequence[TrainingSample], cp: int = 1) -> PackedBatch:
    """The samples end to end, shortest first, each without its last token (nothing follows it); a prompt that several
    begin with stands once. No samples at all give one untrained token, for a rank that must keep step with the others.
    For cp ranks that compute it together each sample stands whole, and padded."""
    by_prompt: dict[tuple[int, ...], list[TrainingSample]] = {}
    for sample in samples:
        by_prompt.setdefault(tuple(sample.token_ids[: prompt_length(sample.loss_mask)]), []).append(sample)
    wholes: list[tuple[list[int], TrainingSample | None]] = []  # tokens from the first on, and whose they are
    branches: list[tuple[tuple[int, ...], TrainingSample]] = []  # samples that follow a shared prompt
    for prompt, members in by_prompt.items():
        if cp == 1 and is_worth_sharing(len(prompt), len(members), sum(len(s.token_ids) for s in members)):
            wholes.append((list(prompt), None))
            branches += [(prompt, s) for s in members]
        else:
            wholes += [(s.token_ids[:-1], s) for s in members]
    wholes = sorted(wholes, key=lambda whole: len(whole[0])) or [([0], None)]
    branches.sort(key=lambda branch: len(branch[1].token_ids) - len(branch[0]))

    layout = Layout(cp)
    prompt_pieces = {}
    for tokens, sample in wholes:
        piece = layout.add(tokens, 0, -1)
        if sample is None:
            prompt_pieces[tuple(tokens)] = piece
        else:
            layout.samples.append(sample)
            layout.train(sample, 1, piece)
    for prompt, sample in branches:
        layout.samples.append(sample)
        parent, first = prompt_pieces[prompt], len(prompt)
        layout.train(sample, first, parent, up_to=first + 1)  # the prompt's last token predicts the first one after it
        if len(sample.token_ids) > first + 1:
            layout.train(sample, first + 1, layout.add(sample.token_ids[first:-1], first, parent))
    place = {id(sample): i for i, sample in enumerate(samples)}
    return layout.batch([place[id(sample)] for sample in layout.samples])


class Layout:
    """A packed batch under construction."""

    def __init__(self, cp: int):
        self.cp = cp
        self.tokens, self.positions, self.starts, self.parents = [], [], [0], []
        self.samples: list[TrainingSample] = []  # of which tokens are trained, in their order
        self.columns = {name: [] for name in ("sources", "sequences", *TRAINED)}

    def add(self, tokens: Sequence[int], position: int, parent: int) -> int:
        """The new piece's number."""
        length = padded_length(len(tokens), self.cp)
        self.tokens += [*tokens, *[0] * (length - len(tokens))]
        self.positions += range(position, position + length)
        self.starts.append(len(self.tokens))
        self.parents.append(parent)
        return len(self.parents) - 1

    def train(self, sample: TrainingSample, first: int, piece: int, up_to: int | None = None) -> None:
        """The sample's trained tokens in first .. up_to, the first of which the piece predicts at token first - 1."""
        source = self.starts[piece] - self.positions[self.starts[piece]] - 1  # plus the token's place in the sequence
        trained = [i for i in range(first, len(sample.token_ids) if up_to is None else up_to) if sample.loss_mask[i]]
        self.columns["sources"] += [source + i for i in trained]
        self.columns["sequences"] += [len(self.samples) - 1] * len(trained)
        for name in TRAINED:
            values = getattr(sample, name)
            self.columns[name] += [values[i] for i in trained]

    def batch(self, order: list[int]) -> PackedBatch:
        columns = {
            name: torch.tensor(values, dtype=DTYPES.get(name, torch.int64)) for name, values in self.columns.items()
        }
        return PackedBatch(
            input_ids=torch.tensor(self.tokens),
            position_ids=torch.tensor(self.positions),
            cu_seqlens=torch.tensor(self.starts, dtype=torch.int32),
            parents=self.parents,
            labels=columns.pop("token_ids"),
            order=torch.tensor(order, dtype=torch.int64),
            **columns,
        )


def shard_sequences(batch: PackedBatch, cp: int, rank: int) -> PackedBatch:
    """The batch with what one of cp ranks computes of it; every rank knows who computes what."""
    starts, place = batch.cu_seqlens.long(), batch.position_ids
    chunks = (starts.diff() // (2 * cp)).repeat_interleave(
        starts.diff()
    )  # [T] length of a chunk of the token's sequence
    chunk = place // chunks
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
