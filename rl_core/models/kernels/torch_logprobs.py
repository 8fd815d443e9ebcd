"""Softmax statistics and gradients of tiles of logits, in torch.

M trained tokens, D hidden, V vocabulary, C tokens and S vocabulary ids of one tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_core.distributed import MPS


def capped_(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def sum_dtype(factor: Tensor) -> torch.dtype:
    return torch.promote_types(factor.dtype, torch.float32)


def softmax_stats(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float,
    cap: float | None,
    kept_MV: Tensor | None,
    tiles: tuple[list[slice], list[slice]],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logit of the label, entropy, lse), all [M]. Logits are kept if there is a index for them."""
    token_tiles, id_tiles = tiles
    shape = 4, len(id_tiles), len(labels)
    stats = hidden_MD.new_empty(shape, dtype=sum_dtype(hidden_MD))
    for rows in token_tiles:
        for i, ids in enumerate(id_tiles):
            z_CS = scaled_logits(hidden_MD[rows], weight_VD[ids], temperature, cap)
            if kept_MV is not None:
                kept_MV[rows, ids] = z_CS
            stats[:, i, rows] = torch.stack(tile_stats(z_CS, labels[rows] - ids.start))
    return merged_stats(*stats)


def scaled_logits(h_CD: Tensor, w_SD: Tensor, temperature: float, cap: float | None) -> Tensor:
    return capped_(product(h_CD, w_SD.T), cap).div_(temperature)


def tile_stats(z_CS: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics of one tile, all [C]: the logit of the label, or 0 if the label is outside of the
    tile; the largest logit; the sums of e^(z - top) and of e^(z - top) (z - top). Overwrites the
    logits."""
    index = labels.clamp(0, z_CS.shape[1] - 1)
    chosen = z_CS.gather(-1, index[:, None])[:, 0] * (index == labels)
    top = z_CS.amax(-1)
    z_CS -= top[:, None]
    e_CS = z_CS.exp()
    return chosen, top, e_CS.sum(-1), torch.linalg.vecdot(e_CS, z_CS)


def merged_stats(
    chosen: Tensor, top: Tensor, total: Tensor, moment: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logit of the label, entropy, lse), all [M], from what tile_stats() gives of parts of the
    vocabulary, [parts, M]."""
    highest = top.amax(0)
    below = top - highest
    share = below.exp()
    moment = (share * (moment + below * total)).sum(0)
    total = (share * total).sum(0)
    log_total = total.log()
    return chosen.sum(0), log_total - moment / total, highest + log_total


def logit_gradients(
    z_CS: Tensor,
    temperature: float,
    cap: float | None,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    """[C, S]: the gradient of the undivided logits h @ weight.T."""
    logp_CS = z_CS - lse[:, None]
    share = grad_logprobs[:, None]
    if grad_entropy is not None:
        share = share + grad_entropy[:, None] * (logp_CS + entropy[:, None])
    grad_CS = logp_CS.exp_().mul_(-share)
    index = labels.clamp(0, z_CS.shape[1] - 1)
    is_here = index == labels
    grad_CS.scatter_add_(-1, index[:, None], (grad_logprobs * is_here)[:, None])
    if cap is not None:
        grad_CS *= 1 - (z_CS * (temperature / cap)) ** 2
    return grad_CS


def sums_in_fp32(b: Tensor) -> bool:
    """True if a product with b can have an fp32 result although b is not in fp32."""
    return b.device.type not in ("cpu", MPS) and b.dtype != sum_dtype(b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 factors in fp32, not rounded to bf16. On a CPU and an Apple GPU, where torch
    cannot do that, the factors are raised."""
    dtype = sum_dtype(b)
    if sums_in_fp32(b):
        return torch.mm(a.to(b.dtype), b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, with no copy of the product, except of bf16 factors on a CPU. `out` is in fp32
    or fp64."""
    if sums_in_fp32(b):
        torch.addmm(out, a.to(b.dtype), b, out_dtype=out.dtype, out=out)
    elif out.dtype == a.dtype == b.dtype:
        out.addmm_(a, b)
    else:
        out += product(a, b)


def tiled_gradients(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tiles: tuple[list[slice], list[slice]],
    has_weight: bool,
    gradient_of: Callable[[Tensor, Tensor, slice, slice], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the hidden states, and of the weight if it has one. `gradient_of(h_CD, w_SD,
    rows, ids)` is that of the undivided logits of one tile, [C, S]. The weight's is complete with
    its ids' last tile, so that fp32 sums are held of the hidden states alone."""
    token_tiles, id_tiles = tiles
    grad_hidden = torch.zeros_like(hidden_MD, dtype=sum_dtype(hidden_MD))
    grad_weight = torch.zeros_like(weight_VD) if has_weight else None
    for ids in id_tiles:
        w_SD = weight_VD[ids]
        sum_SD = None if grad_weight is None else grad_weight[ids].to(grad_hidden.dtype)
        for rows in token_tiles:
            h_CD = hidden_MD[rows]
            grad_CS = gradient_of(h_CD, w_SD, rows, ids)
            add_product(grad_hidden[rows], grad_CS, w_SD)
            if sum_SD is not None:
                add_product(sum_SD, grad_CS.T, h_CD)
        if grad_weight is not None and sum_SD is not None and sum_SD.dtype != grad_weight.dtype:
            grad_weight[ids] = sum_SD
    return grad_hidden.to(hidden_MD.dtype), grad_weight
