"""The prefix tree of neighbouring sequences: what several have in common is computed once."""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from rl_core.types import TrainingSample

SHARE_FROM = 0.1  # least fraction of its samples' tokens that a shared piece must save
# The least number of them. Each level of a tree is one more pass of attention.
SHARE_TOKENS = 4


def num_shared(a: TrainingSample, b: TrainingSample) -> int:
    """Tokens that both begin with and a model reads: not the last one of either."""
    length = min(len(a.token_ids), len(b.token_ids)) - 1
    if not length:
        return 0
    differs = a.token_ids[:length] != b.token_ids[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def is_worth_sharing(num_saved: int, num_tokens: int) -> bool:
    """True if sharing saves enough tokens: attention over shared pieces costs more."""
    return num_saved >= SHARE_FROM * num_tokens


class Segment(NamedTuple):
    samples: range  # samples that read the piece
    first: int  # positions in each of them
    end: int
    parent: int = -1  # the piece before it


def tree_pieces(lengths: list[int], shared: list[int], cp: int) -> list[Segment]:
    """The pieces of sequences of these lengths, level by level; pieces that follow one piece are
    neighbours. `shared`: number of first tokens that each sequence shares with the one before. With
    cp > 1 nothing is shared."""
    pieces: list[Segment] = []
    families = deque([(range(len(lengths)), 0, -1)])
    while families:
        members, first, parent = families.popleft()
        between = shared[members.start : members.stop - 1]
        if not between:
            pieces.append(Segment(members, first, lengths[members.start], parent))
            continue
        end = min(between)
        cuts = [i for i, length in zip(members[1:], between, strict=True) if length == end]
        parts = itertools.pairwise([members.start, *cuts, members.stop])
        num_tokens = sum(lengths[i] - first for i in members)
        num_saved = (end - first) * len(between)
        if cp == 1 and num_saved >= SHARE_TOKENS and is_worth_sharing(num_saved, num_tokens):
            pieces.append(Segment(members, first, end, parent))
            families.extend((range(a, b), end, len(pieces) - 1) for a, b in parts)
        else:
            # They come next: pieces of one level stand together.
            families.extendleft((range(a, b), first, parent) for a, b in parts)
    return pieces
