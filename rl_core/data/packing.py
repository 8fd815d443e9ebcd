"""TrainingSamples -> PackedBatches of equal work. The one shift by one of the whole project happens here."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rl_core.types import PackedBatch, TrainingSample

Bins = list[list[int]]  # indices of samples


class Entry(NamedTuple):
    """What every rank knows of each sample; the tokens stay where they are until the plan is made."""

    group_id: str
    rank: int  # that has it
    index: int  # there
    length: int
    num_trained: int  # tokens
    has_signal: bool  # an advantage that is not 0


@dataclass(kw_only=True, slots=True)
class MinibatchPlan:
    num_tokens: int  # trained tokens of all samples, those left out included: the one denominator
    entries: list[Entry]  # samples that need a forward
    bins: Bins  # of entries; bin b is a microbatch of rank b % num_ranks


def plan_minibatches(
    entries: list[Entry], num_minibatches: int, max_tokens: int, num_ranks: int, skip_zero_advantages: bool
) -> list[MinibatchPlan]:
    """Groups split in their order into minibatches, samples of each balanced over ranks and microbatches."""
    entries = sorted(entries)
    groups = {group_id: n for n, group_id in enumerate(dict.fromkeys(e.group_id for e in entries))}
    parts: list[list[Entry]] = [[] for _ in range(num_minibatches)]
    for e in entries:
        parts[groups[e.group_id] * num_minibatches // len(groups)].append(e)
    plans = []
    for part in parts:
        used = [e for e in part if e.has_signal or not skip_zero_advantages]
        bins = balanced_bins([e.length for e in used], max_tokens, num_ranks) if used else []
        plans.append(MinibatchPlan(num_tokens=sum(e.num_trained for e in part), entries=used, bins=bins))
    return plans


def trained_span(loss_mask: Sequence[int]) -> int:
    """Tokens that a forward needs: up to the one before the last trained token; what follows teaches nothing."""
    last = len(loss_mask) - 1
    while last > 0 and not loss_mask[last]:
        last -= 1
    return last


def balanced_bins(lengths: Sequence[int], max_tokens: int, multiple: int = 1) -> Bins:
    """Bins of nearly equal token counts, each at most max_tokens (a longer sample stands alone). Their number is a
    multiple of `multiple`; some are empty where there are fewer samples. Longest first into the emptiest bin:
    deterministic, so that every rank computes the same (Graham 1969; at most 4/3 of the best largest bin)."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num = -(-sum(lengths) // max_tokens)
    while True:
        num = max(multiple, -(-num // multiple) * multiple)
        heap = [(0, b) for b in range(num)]
        bins: Bins = [[] for _ in range(num)]
        for i in order:
            size, b = heap[0]
            if bins[b] and size + lengths[i] > max_tokens:
                break
            heapq.heapreplace(heap, (size + lengths[i], b))
            bins[b].append(i)
        else:
            return bins
        num += 1


def fill_frac(bins: Bins, lengths: Sequence[int]) -> tuple[int, int]:
    """(tokens, tokens that would fit if every bin were as full as the fullest): bins run in step across the ranks."""
    sizes = [sum(lengths[i] for i in b) for b in bins]
    return sum(sizes), max(sizes, default=0) * len(sizes)


def pack_samples(samples: Sequence[TrainingSample]) -> PackedBatch:
    """The samples end to end, shortest first, each without its last token (nothing follows it). No samples at all give
    one untrained token, for a rank that must keep step with the others."""
    chosen = sorted(samples, key=lambda s: len(s.token_ids)) or [
        TrainingSample(
            token_ids=[0, 0], loss_mask=[0, 0], rollout_logprobs=[0, 0], policy_versions=[-1, -1], advantages=[0, 0]
        )
    ]

    def shifted(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([x for s in chosen for x in getattr(s, name)[1:]], dtype=dtype)

    loss_mask = shifted("loss_mask", torch.bool)
    lengths = [len(s.token_ids) - 1 for s in chosen]
    return PackedBatch(
        input_ids=torch.tensor([t for s in chosen for t in s.token_ids[:-1]]),
        labels=shifted("token_ids", torch.int64).masked_fill_(~loss_mask, -100),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        loss_mask=loss_mask,
        rollout_logprobs=shifted("rollout_logprobs", torch.float32),
        advantages=shifted("advantages", torch.float32),
        policy_versions=shifted("policy_versions", torch.int64),
    )
