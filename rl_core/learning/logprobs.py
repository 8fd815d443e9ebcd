"""Hidden states x head weight -> logprob and entropy of each trained token, never all tokens x vocabulary at once.

Logits live in tiles of C tokens x S words, and a token's softmax is put together tile by tile. On a GPU with Triton the
kernels of logprobs_triton.py fill the tiles, elsewhere torch does.

M trained tokens, D hidden, V vocabulary, C tokens and S words of one tile.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Of one fp32 tile. On a CPU it stays in the cache; with fewer than 512 tokens or 2048 words products get slow.
CPU_TILE_BYTES, CUDA_TILE_BYTES, TRITON_TILE_BYTES = 4 << 20, 64 << 20, 256 << 20
LEAST_WORDS = 2048
SIDE_BYTES = 128 << 20  # of the hidden states, and of the weights, of one tile in fp32
KEPT_BYTES = (
    512 << 20
)  # on a CPU fewer numerators of the softmax are kept, elsewhere or if more they are computed again
FAR_BELOW = -1e30  # under any logit; finite, since -inf * 0 is not a number


def fused_logprobs(
    hidden_MD: Tensor, weight_VD: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logprobs of `labels` and entropies, both [M] in nats, of softmax(hidden @ weight.T / temperature): fp64 if hidden
    is, else fp32. Both are differentiable, once, in hidden and weight. bf16 factors are multiplied as they are but their
    sums, logits included, stay in fp32; on a GPU alone, gradients of logits are rounded to bf16 for their products.
    Of a weight that is split by rows, a DTensor, each rank computes the logits of its own words; all give the same.

    Peak extra memory is below 1 GiB at any M and V, beside the two gradients; that of a bf16 weight is summed in fp32
    where the tokens do not fit one tile."""
    assert hidden_MD.dtype == weight_VD.dtype, (hidden_MD.dtype, weight_VD.dtype)
    group = None
    if isinstance(weight_VD, DTensor):
        _, (first, _) = compute_local_shape_and_global_offset(
            weight_VD.shape, weight_VD.device_mesh, weight_VD.placements
        )
        group, weight_VD = weight_VD.device_mesh.get_group(), weight_VD.to_local()
        place, is_here = label_places(labels, first, len(weight_VD))
        labels = torch.where(is_here, place, -1)
    keeps = torch.is_grad_enabled() and not hidden_MD.is_cuda and 4 * len(labels) * len(weight_VD) <= KEPT_BYTES
    return FusedLogprobs.apply(hidden_MD, weight_VD, labels, temperature, triton_kernels(hidden_MD), keeps, group)


def triton_kernels(hidden_MD: Tensor) -> ModuleType | None:
    if hidden_MD.is_cuda and hidden_MD.dtype != torch.float64 and importlib.util.find_spec("triton"):
        from rl_core.learning import logprobs_triton

        return logprobs_triton
    return None


class FusedLogprobs(torch.autograd.Function):
    """With z = h W^T / t and p = softmax(z): logprob = z[label] - lse(z), entropy = -sum(p log p), and so
    d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy)."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, labels, temperature, kernels, keeps, group=None):
        tile_bytes = TRITON_TILE_BYTES if kernels else CUDA_TILE_BYTES if hidden_MD.is_cuda else CPU_TILE_BYTES
        ctx.tile = tile_shape(len(labels), *weight_VD.shape, tile_bytes)
        ctx.temperature, ctx.kernels, ctx.group = temperature, kernels, group
        logprobs = hidden_MD.new_empty(labels.shape, dtype=sum_dtype(hidden_MD))
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept = [] if keeps and any(ctx.needs_input_grad) else None
        for rows in slices(len(labels), ctx.tile[0]):
            args = hidden_MD[rows], weight_VD, labels[rows], temperature
            stats = kernels.softmax_stats(*args) if kernels else softmax_stats(*args, ctx.tile[1], kept)
            logprobs[rows], entropy[rows], lse[rows] = stats
        if group is not None:
            logprobs, entropy, lse = stats_of_all_words(logprobs, entropy, lse, labels >= 0, group)
        ctx.save_for_backward(hidden_MD, weight_VD, labels, lse, entropy, *(kept or ()))
        ctx.set_materialize_grads(False)  # None, not zeros, for the entropy's gradient where no bonus is asked
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_MD, weight_VD, labels, lse, entropy, *kept = ctx.saved_tensors
        kept = iter(kept)  # two tensors for each tile of tokens
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        grad_hidden = torch.zeros_like(hidden_MD) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            is_summed = len(labels) > ctx.tile[0]  # over several tiles of tokens
            grad_weight = torch.zeros_like(weight_VD, dtype=sum_dtype(weight_VD) if is_summed else None)
        for rows in slices(len(labels), ctx.tile[0]):
            h_CD = hidden_MD[rows]
            # The gradient itself where it is of the sum's dtype.
            sum_CD = None if grad_hidden is None else grad_hidden[rows].to(sum_dtype(h_CD))
            row_grads = grad_logprobs[rows], None if grad_entropy is None else grad_entropy[rows]
            row_stats = labels[rows], lse[rows], entropy[rows]
            e_CV, tops = next(kept, None), next(kept, None)
            for words in slices(len(weight_VD), ctx.tile[1]):
                args = h_CD, weight_VD[words], words.start, *row_stats, *row_grads, ctx.temperature
                if ctx.kernels:
                    grad_CS = ctx.kernels.logit_gradients(*args)
                else:
                    known = None if e_CV is None else (e_CV[:, words], tops[words.start // ctx.tile[1]])
                    grad_CS = logit_gradients(*args, known)
                if sum_CD is not None:
                    add_product(sum_CD, grad_CS, weight_VD[words])
                if grad_weight is not None:
                    add_product(grad_weight[words], grad_CS.T, h_CD)
            if sum_CD is not None and sum_CD.dtype != h_CD.dtype:
                grad_hidden[rows] = sum_CD
        if ctx.group is not None and grad_hidden is not None:
            dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype), *[None] * 5


def tile_shape(num_tokens: int, num_words: int, width: int, tile_bytes: int) -> tuple[int, int]:
    """(C, S)"""
    size, side = tile_bytes // 4, max(1, SIDE_BYTES // 4 // width)
    words = min(num_words, side, max(LEAST_WORDS, size // max(1, num_tokens)))
    return min(side, max(1, size // words)), words


def slices(total: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


def sum_dtype(factor: Tensor) -> torch.dtype:
    return torch.promote_types(factor.dtype, torch.float32)


def softmax_stats(
    h_CD: Tensor, weight_VD: Tensor, labels: Tensor, temperature: float, num_words: int, kept: list[Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, lse), all [C], in one pass over the vocabulary (online softmax, Milakov and Gimelshein 2018):
    top is the largest logit so far, total the sum of e^(z - top) and moment that of e^(z - top) (z - top). Appended to
    `kept`: e^(z - top) [C, V], and its top [words of a tile, C]."""
    top = h_CD.new_full((len(h_CD),), FAR_BELOW, dtype=sum_dtype(h_CD))
    total, moment, chosen = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
    # One block: many of a tile's size would leave holes of that size in the heap.
    e_CV, tops = None if kept is None else top.new_empty(len(h_CD), len(weight_VD)), []
    for words in slices(len(weight_VD), num_words):
        z_CS = scaled_logits(h_CD, weight_VD[words], temperature)
        place, is_here = label_places(labels, words.start, z_CS.shape[1])
        chosen = torch.where(is_here, z_CS.gather(-1, place[:, None])[:, 0], chosen)
        last, top = top, torch.maximum(top, z_CS.amax(-1))
        z_CS -= top[:, None]
        e_CS = torch.exp(z_CS, out=None if e_CV is None else e_CV[:, words])
        shrink = (last - top).exp_()
        moment = shrink * (moment + (last - top) * total) + torch.linalg.vecdot(e_CS, z_CS)
        total = shrink * total + e_CS.sum(-1)
        tops.append(top)
    if kept is not None:
        kept += [e_CV, torch.stack(tops)]
    lse = top + total.log()
    return chosen - lse, total.log() - moment / total, lse


def stats_of_all_words(
    logprobs: Tensor, entropy: Tensor, lse: Tensor, is_here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all ranks' words, from those of each one's, all [M]. A rank's words have the share w = e^(lse_r - lse),
    and entropy = sum_r w (entropy_r - log w)."""
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    share = (lse - top).exp()
    chosen = torch.where(is_here, logprobs + (lse - top), 0.0)
    total, moment, chosen = sums = torch.stack([share, share * (entropy - (lse - top)), chosen])
    dist.all_reduce(sums, group=group)
    return chosen - total.log(), total.log() + moment / total, top + total.log()


def logit_gradients(
    h_CD: Tensor,
    weight_SD: Tensor,
    first_word: int,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    known: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """[C, S]: the gradient of the undivided logits h @ weight.T, from e^(z - top) and top where these are known."""
    e_CS, top = known or (scaled_logits(h_CD, weight_SD, temperature).sub_(lse[:, None]).exp_(), lse)
    share_C = (top - lse).exp_()  # p = e share
    onehot_C = grad_logprobs / temperature
    if grad_entropy is None:
        grad_CS = e_CS * (-onehot_C * share_C)[:, None]
    else:
        p_CS, entropy_C = e_CS * share_C[:, None], grad_entropy / temperature
        grad_CS = torch.special.xlogy(p_CS, p_CS).mul_(-entropy_C[:, None])
        grad_CS.addcmul_(p_CS, (-onehot_C - entropy_C * entropy)[:, None])
    place, is_here = label_places(labels, first_word, grad_CS.shape[1])
    return grad_CS.scatter_add_(-1, place[:, None], torch.where(is_here, onehot_C, 0.0)[:, None])


def label_places(labels: Tensor, first_word: int, num_words: int) -> tuple[Tensor, Tensor]:
    """Each label's place in the tile (any place if it is not there), and whether it is there."""
    place = labels - first_word
    return place.clamp(0, num_words - 1), (place >= 0) & (place < num_words)


def scaled_logits(h_CD: Tensor, weight_SD: Tensor, temperature: float) -> Tensor:
    return product(h_CD, weight_SD.T).div_(temperature)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 factors in fp32, not rounded to bf16. On a CPU, where torch cannot do that, the factors are raised."""
    dtype = sum_dtype(b)
    if b.is_cuda and b.dtype != dtype:
        return torch.mm(a.to(b.dtype), b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, without a copy where all have one dtype."""
    if out.dtype == a.dtype == b.dtype == sum_dtype(b):
        out.addmm_(a, b)
    else:
        out += product(a, b)
