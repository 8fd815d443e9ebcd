"""Truncated sampling (top-k, top-p, min-p) in training: logprobs and entropy over the ids that each
token was drawn from.

The engine returns these ids with each token. Logprobs of the policy before and after its updates,
of the reference and of a teacher that scores sampled tokens are over the same ids. So the ratio
compares two distributions on one set, also after the weights have changed ("Keep Sampling Mask",
DeepSeek-V3.2, arXiv:2512.02556, section 3.1). The divergence from an exact teacher
(--algo.teacher_loss reverse_kl, forward_kl or jsd) is over the whole vocabulary. A set recomputed
from the learner's logits would differ from the engine's where two logits are close, and would lack
sampled tokens once the weights have changed.

Legend: M trained tokens, K most ids that a token was drawn from, D hidden, V vocabulary, C tokens
of one tile.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from rl_core.learning.learner_extension import LearnerExtension
from rl_core.models.kernels.torch_logprobs import sum_dtype
from rl_core.types import PackedBatch, TrainingSample

TILE_BYTES = 64 << 20  # Bytes, in fp32, of the head's rows that are gathered at once.


class TruncationSupport(LearnerExtension):
    """Adds the ids that tokens were drawn from to the batches of a learner."""

    def __init__(self, name: str):
        self.name = name  # The actor.

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        if not samples:
            return batch
        lines: list[str] = []
        for sample in samples:
            text = b"" if sample.kept_ids is None else sample.kept_ids.tobytes()
            lines += text.decode().splitlines()
        num_tokens = len(batch.labels)
        if len(lines) != num_tokens:
            raise ValueError(
                f"{num_tokens - len(lines)} of {num_tokens} tokens of {self.name} do not name the "
                "ids that they were drawn from, as --sampling.top_k needs; were they sampled "
                "without it, or made by an environment's rollout()?"
            )
        return dataclasses.replace(batch, labels=support_labels(batch.labels, lines))


def support_labels(labels: Tensor, lines: list[str]) -> Tensor:
    """[M, K] int64: each label, then the other ids of its line, then -1."""
    counts = np.array([line.count(" ") + 1 for line in lines])
    kept = np.full((len(lines), counts.max()), -1)
    kept[np.arange(kept.shape[1]) < counts[:, None]] = np.array(" ".join(lines).split(), np.int64)
    rows, is_label = np.arange(len(lines)), kept == labels.numpy()[:, None]
    assert is_label.any(1).all(), "a token was not drawn from its ids"
    kept[rows, is_label.argmax(1)] = kept[:, 0]
    kept[:, 0] = labels.numpy()
    return torch.from_numpy(kept)


def support_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_MK: Tensor,
    temperature: float = 1.0,
    cap: float | None = None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """Logprobs of the first column of `labels_MK` and entropies, both [M] in nats, of
    softmax(z / temperature) over the ids of each row, with z = hidden @ weight.T, or cap * tanh(z /
    cap): fp64 if hidden is, else fp32. A weight that is split over ranks gives the same on each."""
    first, split = 0, None
    if isinstance(weight_VD, DTensor):
        from rl_core.models.parallel.tensor_parallel import local_slice

        weight_VD, first, split = local_slice(weight_VD)
    z_MK = GatheredProducts.apply(hidden_MD, weight_VD, labels_MK - first, split)
    if cap is not None:
        z_MK = cap * torch.tanh(z_MK / cap)
    return over_support(z_MK / temperature, labels_MK)


def over_support(z_MK: Tensor, labels_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(logprobs of the first column, entropies), both [M], of the softmax of logits; columns with
    label -1 do not count."""
    is_none = labels_MK < 0
    logp_MK = z_MK.masked_fill(is_none, -torch.inf).log_softmax(-1)
    entropy = -(logp_MK.exp() * logp_MK.masked_fill(is_none, 0.0)).sum(-1)
    return logp_MK[:, 0], entropy


class GatheredProducts(torch.autograd.Function):
    """[M, K]: products of each hidden state and the weight's rows of its ids; 0 for ids of other
    ranks. `split`: sums the products over ranks with different rows."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, ids_MK, split):
        is_here_MK = (ids_MK >= 0) & (ids_MK < len(weight_VD))
        ids_MK = ids_MK.where(is_here_MK, 0)
        ctx.save_for_backward(hidden_MD, weight_VD, ids_MK, is_here_MK)
        ctx.split = split
        z_MK = hidden_MD.new_zeros(ids_MK.shape, dtype=sum_dtype(hidden_MD))
        for rows in tiles(hidden_MD, ids_MK):
            h_CD, w_CKD = hidden_MD[rows].to(z_MK.dtype), weight_VD[ids_MK[rows]].to(z_MK.dtype)
            z_MK[rows] = (w_CKD @ h_CD[..., None])[..., 0]
        z_MK *= is_here_MK
        if split is not None:
            split.add_up(z_MK)
        return z_MK

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_MK):
        hidden_MD, weight_VD, ids_MK, is_here_MK = ctx.saved_tensors
        grad_MK = grad_MK * is_here_MK
        grad_hidden = torch.zeros_like(hidden_MD, dtype=grad_MK.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_VD, dtype=grad_MK.dtype)
        for rows in tiles(hidden_MD, ids_MK):
            ids, grad_CK1 = ids_MK[rows], grad_MK[rows][..., None]
            grad_hidden[rows] = (weight_VD[ids].to(grad_MK.dtype) * grad_CK1).sum(1)
            if grad_weight is not None:
                outer_CKD = grad_CK1 * hidden_MD[rows, None].to(grad_MK.dtype)
                grad_weight.index_add_(0, ids.flatten(), outer_CKD.flatten(0, 1))
        if ctx.split is not None:
            ctx.split.add_up(grad_hidden)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        return grad_hidden.to(hidden_MD.dtype), grad_weight, None, None


def tiles(hidden_MD: Tensor, ids_MK: Tensor) -> list[slice]:
    """Slices of tokens whose rows of the weight are gathered at once."""
    num_tokens, width = hidden_MD.shape
    size = max(1, TILE_BYTES // (4 * width * ids_MK.shape[1]))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]
