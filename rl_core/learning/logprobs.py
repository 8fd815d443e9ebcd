"""Hidden states x head weight -> logprob and entropy of each trained token, never all tokens x
vocabulary at once.

Logits live in tiles of C tokens x S vocabulary ids, and a token's softmax is put together tile by
tile. Torch fills the tiles, or a kernel that is passed in.

M trained tokens, D hidden, V vocabulary, C tokens and S vocabulary ids of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import linear

# Of one fp32 tile. On a CPU it stays in the cache; with fewer than 512 tokens or 2048 ids products
# get slow.
CPU_TILE_BYTES, CUDA_TILE_BYTES = 4 << 20, 64 << 20
LEAST_IDS = 2048
SIDE_BYTES = 128 << 20  # of the hidden states, and of the weights, of one tile in fp32
# On a CPU probabilities of up to this size are kept for the backward, not computed again.
KEPT_BYTES = 512 << 20
FAR_BELOW = -1e30  # under any logit; finite, since -inf * 0 is not a number


def fused_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    cap: float | None = None,
    kernel: Any = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `labels` and entropies, both [M] in nats, of softmax(z / temperature) with z =
    hidden @ weight.T, or cap * tanh(z / cap): fp64 if hidden is, else fp32. Both are
    differentiable, once, in hidden and weight. bf16 factors are multiplied as they are but their
    sums, logits included, stay in fp32; on a GPU alone, gradients of logits are rounded to bf16 for
    their products. Of a weight that is split by rows, a DTensor, each rank computes the logits of
    its own ids; all give the same. `kernel` computes tiles of TILE_BYTES by softmax_stats() and
    logit_gradients() of its own; torch computes those with a cap, and of fp64.

    Peak extra memory is below 1 GiB at any M and V, beside the two gradients; that of a bf16 weight
    is summed in fp32 where the tokens do not fit one tile."""
    assert hidden_MD.dtype == weight_VD.dtype, (hidden_MD.dtype, weight_VD.dtype)
    group = None
    if isinstance(weight_VD, DTensor):
        spread = weight_VD.shape, weight_VD.device_mesh, weight_VD.placements
        _, (first, _) = compute_local_shape_and_global_offset(*spread)
        group, weight_VD = weight_VD.device_mesh.get_group(), weight_VD.to_local()
        labels = torch.where(is_between(labels, first, first + len(weight_VD)), labels - first, -1)
    if cap is not None or hidden_MD.dtype == torch.float64:
        kernel = None
    is_small = not hidden_MD.is_cuda and 4 * len(labels) * len(weight_VD) <= KEPT_BYTES
    is_plain = group is None and cap is None and kernel is None
    keeps = is_small and is_plain and torch.is_grad_enabled()
    how = temperature, cap, kernel, group
    return FusedLogprobs.apply(hidden_MD, weight_VD, labels, how, keeps)


# Keys of a model's config.json that change logits after the product with the head's weight: by
# which power of the value they are multiplied, and what bounds them to (-value, value) by a tanh.
LOGIT_SCALES = {
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "output_multiplier": 1,
    "logits_scaling": -1,
    "logits_mup_width_multiplier": -1,
    "mup_width_multiplier": -1,
}
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap")


def logit_change(config: Any) -> tuple[float, float | None]:
    """(scale, cap) by a transformers configuration: logits are cap * tanh(scale * head(hidden) /
    cap); None: without tanh."""
    text = config.get_text_config()
    scale = 1.0
    for key, power in LOGIT_SCALES.items():
        scale *= (getattr(text, key, None) or 1.0) ** power
    caps = [getattr(text, key, None) for key in LOGIT_CAPS]
    return scale, caps[0] or caps[1]


def logits_of(hf: nn.Module, hidden: Tensor) -> Tensor:
    """[..., V] in fp32 from hidden states [..., D], by the product of fused_logprobs: the head's
    own forward would round them to its dtype, by up to 0.1 nats in bf16."""
    head, (scale, cap) = hf.get_output_embeddings(), logit_change(hf.config)
    logits = product(hidden.reshape(-1, hidden.shape[-1]), head.weight.T)
    if getattr(head, "bias", None) is not None:
        logits += head.bias
    if scale != 1.0:
        logits *= scale
    return capped_(logits, cap).view(*hidden.shape[:-1], -1)


def head_factors(
    hf: nn.Module, hidden_MD: Tensor, temperature: float
) -> tuple[Tensor, Tensor, float, float | None]:
    """(hidden, weight, temperature, cap) for fused_logprobs. A bias is one more column of the
    weight. A scale divides temperature and cap, because hidden states times it would be rounded."""
    head, (scale, cap) = hf.get_output_embeddings(), logit_change(hf.config)
    weight = head.weight
    if getattr(head, "bias", None) is not None:
        hidden_MD = torch.cat([hidden_MD, torch.ones_like(hidden_MD[:, :1])], 1)
        weight = torch.cat([weight, head.bias[:, None]], 1)
    return hidden_MD, weight, temperature / scale, None if cap is None else cap / scale


def scores_of(hf: nn.Module, hidden_MD: Tensor) -> Tensor:
    """[M] in fp32, a classifier's scores of hidden states. Its one row of weights is raised, not
    the score rounded."""
    dtype = sum_dtype(hidden_MD)
    bias = None if hf.score.bias is None else hf.score.bias.to(dtype)
    return linear(hidden_MD.to(dtype), hf.score.weight.to(dtype), bias)[:, 0]


def capped_(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class FusedLogprobs(torch.autograd.Function):
    """With z = h W^T / t and p = softmax(z): logprob = z[label] - lse(z), entropy = -sum(p log p),
    and so d logprob / dz = onehot - p and d entropy / dz = -p (log p + entropy)."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, labels, how, keeps):
        temperature, cap, kernel, group = how
        tile_bytes = CUDA_TILE_BYTES if hidden_MD.is_cuda else CPU_TILE_BYTES
        if kernel:
            tile_bytes = kernel.TILE_BYTES
        num_tokens, num_ids = tile_shape(len(labels), *weight_VD.shape, tile_bytes)
        stats = hidden_MD.new_empty(3, len(labels), dtype=sum_dtype(hidden_MD))
        kept: list[Tensor] = []
        for rows in slices(len(labels), num_tokens):
            args = hidden_MD[rows], weight_VD, labels[rows], temperature
            if kernel:
                of_rows = kernel.softmax_stats(*args)
            else:
                of_rows = softmax_stats(*args, cap, num_ids, kept if keeps else None)
            stats[:, rows] = torch.stack(of_rows)
        if group is not None:
            stats = stats_of_all_ids(*stats, labels >= 0, group)
        logprobs, entropy, lse = (row.clone() for row in stats)
        ctx.save_for_backward(hidden_MD, weight_VD, labels, lse, entropy, *kept)
        ctx.how = how, num_tokens, num_ids
        # None, not zeros, for the entropy's gradient where no bonus is asked.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_MD, weight_VD, labels, lse, entropy, *kept = ctx.saved_tensors
        (temperature, cap, kernel, group), num_tokens, num_ids = ctx.how
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        columns = labels, lse, entropy, grad_logprobs, grad_entropy
        grad_hidden, grad_weight = torch.zeros_like(hidden_MD), None
        if ctx.needs_input_grad[1]:
            is_summed = len(labels) > num_tokens  # over several tiles of tokens
            dtype = sum_dtype(weight_VD) if is_summed else weight_VD.dtype
            grad_weight = torch.zeros_like(weight_VD, dtype=dtype)
        for tile, rows in enumerate(slices(len(labels), num_tokens)):
            h_CD = hidden_MD[rows]
            sum_CD = torch.zeros_like(h_CD, dtype=sum_dtype(h_CD))
            of_rows = [None if column is None else column[rows] for column in columns]
            for ids in slices(len(weight_VD), num_ids):
                args = h_CD, weight_VD[ids], ids.start, *of_rows, temperature
                if kernel:
                    grad_CS = kernel.logit_gradients(*args)
                else:
                    grad_CS = logit_gradients(*args, cap, kept[tile][:, ids] if kept else None)
                add_product(sum_CD, grad_CS, weight_VD[ids])
                if grad_weight is not None:
                    add_product(grad_weight[ids], grad_CS.T, h_CD)
            grad_hidden[rows] = sum_CD
        if group is not None:
            dist.all_reduce(grad_hidden, group=group)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None, None


def tile_shape(num_tokens: int, num_ids: int, width: int, tile_bytes: int) -> tuple[int, int]:
    """(C, S)"""
    size, side = tile_bytes // 4, max(1, SIDE_BYTES // 4 // width)
    ids = min(num_ids, side, max(LEAST_IDS, size // max(1, num_tokens)))
    return min(side, max(1, size // ids)), ids


def slices(total: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, total)) for i in range(0, total, size))


def sum_dtype(factor: Tensor) -> torch.dtype:
    return torch.promote_types(factor.dtype, torch.float32)


def is_between(labels: Tensor, first: int, last: int) -> Tensor:
    return (labels >= first) & (labels < last)


def softmax_stats(
    h_CD: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float,
    cap: float | None,
    num_ids: int,
    kept: list[Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, lse), all [C], in one pass over the vocabulary (online softmax, Milakov
    and Gimelshein 2018): top is the largest logit so far, total the sum of e^(z - top) and moment
    that of e^(z - top) (z - top). The probabilities [C, V] are appended to `kept`."""
    top = h_CD.new_full((len(h_CD),), FAR_BELOW, dtype=sum_dtype(h_CD))
    total, moment, chosen = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
    # One block: many of a tile's size would leave holes of that size in the heap.
    p_CV, tops = None if kept is None else top.new_empty(len(h_CD), len(weight_VD)), []
    for ids in slices(len(weight_VD), num_ids):
        z_CS = capped_(product(h_CD, weight_VD[ids].T), cap).div_(temperature)
        place = (labels - ids.start).clamp(0, z_CS.shape[1] - 1)[:, None]
        chosen = torch.where(
            is_between(labels, ids.start, ids.stop), z_CS.gather(-1, place)[:, 0], chosen
        )
        last, top = top, torch.maximum(top, z_CS.amax(-1))
        z_CS -= top[:, None]
        e_CS = torch.exp(z_CS, out=None if p_CV is None else p_CV[:, ids])
        shrink = (last - top).exp_()
        moment = shrink * (moment + (last - top) * total) + torch.linalg.vecdot(e_CS, z_CS)
        total = shrink * total + e_CS.sum(-1)
        tops.append((ids, top))
    lse = top + total.log()
    if kept is not None:
        kept.append(p_CV)
        for ids, top_then in tops:
            p_CV[:, ids] *= (top_then - lse).exp_()[:, None]
    return chosen - lse, total.log() - moment / total, lse


def stats_of_all_ids(
    logprobs, entropy, lse, is_here: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of all ranks' ids, from those of each one's, all [M]. A rank's ids have the share w
    = e^(lse_r - lse), and entropy = sum_r w (entropy_r - log w)."""
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    share = (lse - top).exp()
    chosen = torch.where(is_here, logprobs + (lse - top), 0.0)
    total, moment, chosen = sums = torch.stack([share, share * (entropy - (lse - top)), chosen])
    dist.all_reduce(sums, group=group)
    return chosen - total.log(), total.log() + moment / total, top + total.log()


def logit_gradients(
    h_CD,
    weight_SD,
    first_id,
    labels,
    lse,
    entropy,
    grad_logprobs,
    grad_entropy,
    temperature,
    cap=None,
    p_CS=None,
) -> Tensor:
    """[C, S]: the gradient of the undivided logits h @ weight.T, from their probabilities if these
    are known."""
    if p_CS is None:
        z_CS = capped_(product(h_CD, weight_SD.T), cap)
        slope_CS = None if cap is None else 1 - (z_CS / cap) ** 2
        p_CS = z_CS.div_(temperature).sub_(lse[:, None]).exp_()
    onehot_C = grad_logprobs / temperature
    if grad_entropy is None:
        grad_CS = p_CS * -onehot_C[:, None]
    else:
        entropy_C = grad_entropy / temperature
        grad_CS = torch.special.xlogy(p_CS, p_CS).mul_(-entropy_C[:, None])
        grad_CS.addcmul_(p_CS, (-onehot_C - entropy_C * entropy)[:, None])
    last_id = first_id + grad_CS.shape[1]
    place = (labels - first_id).clamp(0, grad_CS.shape[1] - 1)[:, None]
    grad_CS.scatter_add_(
        -1, place, torch.where(is_between(labels, first_id, last_id), onehot_C, 0.0)[:, None]
    )
    return grad_CS if cap is None else grad_CS.mul_(slope_CS)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 factors in fp32, not rounded to bf16. On a CPU, where torch cannot do that, the
    factors are raised."""
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
