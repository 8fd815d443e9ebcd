"""--learner.logprob_microbatch_tokens: larger microbatches for forwards without gradient: old
logprobs, the reference's and the teacher's logprobs, the critic's values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_core.learning.learner import Learner, LearnerExtension
from rl_core.types import PackedBatch

# Fields that are filled in without gradients: a value for each trained token.
ANNOTATED = ("old_logprobs", "ref_logprobs", "values", "returns", "advantages")


@dataclass(kw_only=True, slots=True, frozen=True)
class Widths:
    """Widths of a model's blocks, which decide the memory per token."""

    layers: int  # L
    hidden: int  # D
    intermediate: int  # I
    queries: int  # Q, summed over heads
    keys: int  # K, summed over heads


def widths(text: Any) -> Widths:
    """`text`: transformers' configuration of the language model."""
    heads = getattr(text, "num_attention_heads", 0)  # Mamba has no heads.
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // max(1, heads)
    return Widths(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        queries=heads * head_dim,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
    )


def block_bytes(size: Any, w: int, tp: int) -> float:
    """Bytes per token that one block keeps for its backward: norms, attention, MLP. `size` has the
    fields of Widths. w: bytes of a number in the compute dtype."""
    norms, attention = 2 * (4 + 2 * w) * size.hidden, 2 * w * (size.queries + size.keys)
    return norms + (attention + 4 * w * size.intermediate) / tp


def activation_bytes(size: Any, w: int, tp: int, recomputes: bool) -> float:
    """Bytes per token of the activations at the end of a forward with gradient. With recomputation
    only the input of each block is kept, and all activations of one block."""
    block = block_bytes(size, w, tp)
    kept = size.layers * block
    if recomputes:
        kept = size.layers * w * size.hidden + block
    return kept + around_blocks(size, w)


def around_blocks(size: Any, w: int) -> float:
    """Bytes per token before the first and after the last block."""
    return 2 * (4 + w) * size.hidden


def num_joined(learner: Learner) -> int:
    """Microbatches in one forward without gradient. auto: as many as fit into the memory of one
    microbatch with gradient. Without gradient one block's activations are alive at a time."""
    settings = learner.config.learner
    if settings.logprob_microbatch_tokens != "auto":
        return settings.logprob_microbatch_tokens // settings.microbatch_tokens
    policy, tp = learner.policy, learner.ranks.mesh.tp
    w = policy.compute_dtype.itemsize
    size = widths(policy.hf.config.get_text_config())
    with_gradient = activation_bytes(size, w, tp, settings.activations == "recompute")
    return max(1, int(with_gradient / (block_bytes(size, w, tp) + around_blocks(size, w))))


class JoinedBatches(LearnerExtension):
    """Joins microbatches for forwards without gradients."""

    @contextmanager
    def joined(self, learner: Learner, batches: list[PackedBatch]) -> Iterator[list[PackedBatch]]:
        """All ranks have equally many batches, and so equally many joined ones."""
        num = num_joined(learner)
        chunks = [batches[i : i + num] for i in range(0, len(batches), num)]
        joined = [join_batches(chunk) for chunk in chunks]
        yield joined
        for batch, chunk in zip(joined, chunks, strict=True):
            split_annotations(batch, chunk)


def join_batches(batches: Sequence[PackedBatch]) -> PackedBatch:
    """One batch with the sequences of all batches. No sequence sees another's tokens."""
    if len(batches) == 1:
        return dataclasses.replace(batches[0])
    tokens = before([len(batch.input_ids) for batch in batches])
    pieces = before([len(batch.parents) for batch in batches])
    samples = before([len(batch.paths) for batch in batches])
    starts, parents, paths = [batches[0].cu_seqlens[:1]], [], []
    for batch, token, piece in zip(batches, tokens, pieces, strict=True):
        starts.append(batch.cu_seqlens[1:] + token)
        parents += [parent + piece if parent >= 0 else -1 for parent in batch.parents]
        paths += [path + token for path in batch.paths]
    joined = {
        "logit_indices": shifted([batch.logit_indices for batch in batches], tokens),
        "sequences": shifted([batch.sequences for batch in batches], samples),
        "labels": joined_labels([batch.labels for batch in batches]),
    }
    for name in ("input_ids", "position_ids", "rollout_logprobs", "advantages", "policy_versions"):
        joined[name] = torch.cat([getattr(batch, name) for batch in batches])
    if batches[0].experts is not None:
        joined["experts"] = torch.cat([batch.experts for batch in batches])
    return dataclasses.replace(
        batches[0], cu_seqlens=torch.cat(starts), parents=parents, paths=paths, **joined
    )


def before(counts: Iterable[int]) -> list[int]:
    """The sum of the counts before each count."""
    return list(itertools.accumulate(counts, initial=0))[:-1]


def shifted(columns: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
    return torch.cat([column + offset for column, offset in zip(columns, offsets, strict=True)])


def joined_labels(columns: Sequence[Tensor]) -> Tensor:
    """[M], or [M, K] with -1 after the ids of shorter rows."""
    if columns[0].ndim > 1:
        width = max(column.shape[1] for column in columns)
        columns = [pad(column, (0, width - column.shape[1]), value=-1) for column in columns]
    return torch.cat(list(columns))


def split_annotations(joined: PackedBatch, batches: Sequence[PackedBatch]) -> None:
    """Splits the annotations of `joined` into its batches."""
    counts = [len(batch.labels) for batch in batches]
    for name in ANNOTATED:
        column = getattr(joined, name)
        if column is None:
            continue
        for batch, values in zip(batches, column.split(counts), strict=True):
            setattr(batch, name, values)
