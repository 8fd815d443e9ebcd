"""--learner.logprob_microbatch_tokens: larger microbatches for forwards without gradient: old
logprobs, the reference's and the teacher's logprobs, the critic's values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl_core.config import LearnerConfig
from rl_core.learning.activation_memory import activation_bytes, around_blocks, block_bytes, widths
from rl_core.learning.learner_context import Metrics
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.models.policy import Policy
from rl_core.types import PackedBatch

# Fields that are filled in without gradients: a value for each trained token.
ANNOTATED = ("old_logprobs", "ref_logprobs", "values", "returns", "advantages")


def num_joined(settings: LearnerConfig, policy: Policy, tp: int) -> int:
    """Microbatches in one forward without gradient. auto: as many as fit into the memory of one
    microbatch with gradient. Without gradient one block's activations are alive at a time."""
    if settings.logprob_microbatch_tokens != "auto":
        return max(1, settings.logprob_microbatch_tokens // settings.microbatch_tokens)
    w = policy.compute_dtype.itemsize
    size = widths(policy.hf.config.get_text_config())
    with_gradient = activation_bytes(size, w, tp, settings.activations == "recompute")
    return max(1, int(with_gradient / (block_bytes(size, w, tp) + around_blocks(size, w))))


@torch.no_grad()
def annotate(
    batches: Sequence[PackedBatch],
    num: int,
    forward: Callable[[PackedBatch], tuple[Tensor, ...]] | None,
    extensions: Iterable[LearnerExtension],
) -> Metrics:
    """Fills in old logprobs by `forward`, if given, and calls annotate() of the extensions, with
    `num` batches joined. Returns the metrics of the extensions."""
    metrics: Metrics = {}
    with joined_batches(batches, num) as joined:
        if forward is not None:
            for batch in joined:
                batch.old_logprobs = forward(batch)[0]
        for extension in extensions:
            metrics |= extension.annotate(joined)
    return metrics


@contextmanager
def joined_batches(batches: Sequence[PackedBatch], num: int) -> Iterator[list[PackedBatch]]:
    """Batches joined by `num`. At the end of the context their annotations are split again."""
    # All ranks have equally many batches, and so equally many joined ones.
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
    experts = [batch.experts for batch in batches if batch.experts is not None]
    if experts:
        joined["experts"] = torch.cat(experts)
    mismatched = [batch.mismatched for batch in batches if batch.mismatched is not None]
    images = [batch.images for batch in batches if batch.images is not None]
    return dataclasses.replace(
        batches[0],
        cu_seqlens=torch.cat(starts),
        parents=parents,
        paths=paths,
        images={key: image for of in images for key, image in of.items()} if images else None,
        mismatched=join_batches(mismatched) if mismatched else None,
        **joined,
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
