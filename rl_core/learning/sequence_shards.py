"""--cp: each of cp ranks computes a shard of every sequence of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from rl_core.distributed import Ranks
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.learning.minibatches import to_device
from rl_core.types import PackedBatch, SequenceShard, TrainingSample


class SequenceShards(LearnerExtension):
    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def packed(self, batch: PackedBatch, samples: Sequence[TrainingSample]) -> PackedBatch:
        return shard_sequences(batch, self.ranks)


def shard_sequences(batch: PackedBatch, ranks: Ranks) -> PackedBatch:
    """The batch with this rank's shard, which is on the device and has the token counts of all cp
    ranks."""
    cp, rank = ranks.mesh.cp, ranks.cp_rank
    lengths = batch.cu_seqlens.long().diff()
    # [T] index of each token's chunk in its sequence.
    chunk = batch.position_ids // (lengths // (2 * cp)).repeat_interleave(lengths)
    owners = torch.minimum(chunk, 2 * cp - 1 - chunk)  # [T] rank of each token
    tokens = (owners == rank).nonzero()[:, 0]
    here = torch.full_like(owners, -1).index_put((tokens,), torch.arange(len(tokens)))
    by_owner = [(owners[batch.logit_indices] == r).nonzero()[:, 0] for r in range(cp)]
    shard = SequenceShard(
        tokens=tokens,
        cu_seqlens=batch.cu_seqlens // cp,
        logit_indices=here[batch.logit_indices[by_owner[rank]]],
        trained=by_owner[rank],
        counts=[len(tokens) for tokens in by_owner],
        gathered=torch.cat(by_owner).argsort(),
    )
    return dataclasses.replace(batch, shard=to_device(shard, ranks.device))
