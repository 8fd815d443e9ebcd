"""Hidden states x head weight -> logprob and entropy of each trained token, never all tokens x
vocabulary at once.

Logits live in tiles of C tokens x S vocabulary ids, whose softmax statistics are merged by token.
Torch fills the tiles, or a kernel that is passed in.

M trained tokens, D hidden, V vocabulary, C tokens and S vocabulary ids of one tile.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.models.kernels.torch_logprobs import (
    logit_gradients,
    scaled_logits,
    softmax_stats,
    sum_dtype,
    tiled_gradients,
)

# Size of one fp32 tile, which stays in the cache of a CPU. Products of fewer than 512 tokens or
# 2048 ids are slow.
CPU_TILE_BYTES, CUDA_TILE_BYTES = 4 << 20, 64 << 20
LEAST_IDS = 2048
SIDE_BYTES = 128 << 20  # Limit for the fp32 hidden states of a tile, and for its weights.
# On a CPU logits of up to this size are kept for the backward, not computed again.
KEPT_BYTES = 512 << 20


class VocabularySplit(Protocol):
    """Merges results with those of ranks that have other vocabulary ids."""

    def merged(
        self, chosen: Tensor, entropy: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    def add_up(self, sums: Tensor) -> None: ...


def fused_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    cap: float | None = None,
    kernel: ModuleType | None = None,
    split: VocabularySplit | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `labels` and entropies, both [M] in nats, of softmax(z / temperature) with z =
    hidden @ weight.T, or cap * tanh(z / cap): fp64 if hidden is, else fp32. Both are
    differentiable, once, in hidden and weight. bf16 factors are multiplied as they are but their
    sums, logits included, stay in fp32; on a GPU alone, gradients of logits are rounded to bf16 for
    their products. `kernel` has softmax_stats() and logit_gradients(), and computes gradients in
    tiles of TILE_BYTES, from logits that new_kept() gives it memory for or from computed ones;
    torch computes caps and fp64. `split` merges results with those of ranks that have other
    vocabulary ids.

    Peak extra memory is below 1 GiB at any M and V, with a kernel 1.5 GiB, in addition to the two
    gradients; the gradient of bf16 hidden states is summed in fp32."""
    assert hidden_MD.dtype == weight_VD.dtype, (hidden_MD.dtype, weight_VD.dtype)
    if cap is not None or hidden_MD.dtype == torch.float64:
        kernel = None
    tile_bytes = CUDA_TILE_BYTES if hidden_MD.is_cuda else CPU_TILE_BYTES
    if kernel is not None:
        tile_bytes = kernel.TILE_BYTES
    vocab_size, width = weight_VD.shape
    num_tokens, num_ids = tile_shape(len(labels), vocab_size, width, tile_bytes)
    tiles = slices(len(labels), num_tokens), slices(vocab_size, num_ids)
    kept: tuple[Tensor | None, Tensor | None] = None, None
    is_small = not hidden_MD.is_cuda and 4 * len(labels) * len(weight_VD) <= KEPT_BYTES
    if kernel is not None:
        kept = kernel.new_kept(hidden_MD[: None if torch.is_grad_enabled() else 0], weight_VD)
    elif is_small and torch.is_grad_enabled():
        # One block: many of a tile's size would leave holes of that size in the heap.
        kept = hidden_MD.new_empty(len(labels), vocab_size, dtype=sum_dtype(hidden_MD)), None
    options = temperature, cap, kernel, split, tiles
    return FusedLogprobs.apply(hidden_MD, weight_VD, labels, *kept, options)


class FusedLogprobs(torch.autograd.Function):
    """With z = h W^T / t and p = softmax(z): logprob = z[label] - lse(z), entropy = -sum(p log p),
    and so d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy)."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, labels, kept_MV, tops, options):
        temperature, cap, kernel, split, tiles = options
        factors = hidden_MD, weight_VD, labels, temperature
        if kernel is None:
            stats = softmax_stats(*factors, cap, kept_MV, tiles)
        else:
            stats = kernel.softmax_stats(*factors, (kept_MV, tops))
        if split is not None:
            stats = split.merged(*stats)
        chosen, entropy, lse = stats
        ctx.save_for_backward(hidden_MD, weight_VD, labels, kept_MV, tops, lse, entropy)
        ctx.options = options
        # None, not zeros, for the entropy's gradient where no bonus is asked.
        ctx.set_materialize_grads(False)
        return chosen - lse, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_MD, weight_VD, labels, kept_MV, tops, lse, entropy = ctx.saved_tensors
        temperature, cap, kernel, split, tiles = ctx.options
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        # Gradients with respect to the undivided logits.
        columns = [lse, entropy, grad_logprobs / temperature]
        if grad_entropy is not None:
            columns.append(grad_entropy / temperature)

        def gradient_of(h_CD: Tensor, w_SD: Tensor, rows: slice, ids: slice) -> Tensor:
            of_tile = labels[rows] - ids.start, *(column[rows] for column in columns)
            if kernel is not None:
                kept = {"kept": (kept_MV[rows], tops[:, rows]), "first_id": ids.start}
                return kernel.logit_gradients(h_CD, w_SD, temperature, *of_tile, **kept)
            if kept_MV is None:
                z_CS = scaled_logits(h_CD, w_SD, temperature, cap)
            else:
                z_CS = kept_MV[rows, ids]
            return logit_gradients(z_CS, temperature, cap, *of_tile)

        has_weight = ctx.needs_input_grad[1]
        grad_hidden, grad_weight = tiled_gradients(
            hidden_MD, weight_VD, tiles, has_weight, gradient_of
        )
        if split is not None:
            split.add_up(grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None


def tile_shape(num_tokens: int, num_ids: int, width: int, tile_bytes: int) -> tuple[int, int]:
    """(C, S)"""
    size, side = tile_bytes // 4, max(1, SIDE_BYTES // 4 // width)
    ids = min(num_ids, side, max(LEAST_IDS, size // max(1, num_tokens)))
    return min(side, max(1, size // ids)), ids


def slices(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]
