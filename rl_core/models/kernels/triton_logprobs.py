"""Triton kernels of fused_logprobs on a GPU: softmax statistics of each token in one pass over the
vocabulary, and one tile of the logits' gradient. Logits of 16-bit factors are kept for the first
tokens, as many as KEPT_BYTES hold, and are recomputed for the others.

A kept logit is its distance from the largest one so far, in fp16: the likelier a token, the smaller
the error. At 8 nats the error is 1/512, which is that of a gradient in bf16.

The two products of that gradient, with the weights and with the hidden states, are left to torch:
cuBLAS computes them at the device's full rate, and a kernel here would compute the logits a third
time. Launch parameters are fixed, not tuned: the interpreter does not support tuning, and its
result would differ between ranks.

Legend: C tokens and S vocabulary ids of one tile, D hidden. A program computes TOKENS x IDS logits
at a time, summed over WIDTH of D.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_core.models.kernels.torch_logprobs import merged_stats

TILE_BYTES = 256 << 20  # Bytes of one fp32 tile of the gradient.
KEPT_BYTES = 1 << 30
TOKENS, IDS = 128, 128
KEPT_TOKENS = 32  # Of a program that reads logits instead of computing them.
# Vocabulary ids of one program of the forward: few enough that 1,000 tokens fill a GPU, many enough
# that each output stays small.
SPAN = 4096


@triton.jit
def logits_tile(
    h_ptr,
    w_ptr,
    tokens,
    ids,
    num_tokens,
    num_ids,
    scale,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[TOKENS, IDS] fp32: h @ w.T scale; 0 for tokens beyond num_tokens, -inf for ids beyond
    num_ids."""
    # 64 bits: a head of 152,064 ids x 16,384 has more numbers than 32 bits count.
    h_row = h_ptr + tokens.to(tl.int64)[:, None] * D
    w_row = w_ptr + ids.to(tl.int64)[None, :] * D
    z = tl.zeros((TOKENS, IDS), tl.float32)
    for k in range(0, D, WIDTH):
        d = k + tl.arange(0, WIDTH)
        h = tl.load(
            h_row + d[None, :], mask=(tokens[:, None] < num_tokens) & (d[None, :] < D), other=0.0
        )
        w = tl.load(w_row + d[:, None], mask=(ids[None, :] < num_ids) & (d[:, None] < D), other=0.0)
        # ieee: fp32 factors are not rounded to TF32; bf16 ones are multiplied as they are.
        z = tl.dot(h, w, z, input_precision="ieee")
    return tl.where(ids[None, :] < num_ids, z * scale, float("-inf"))


@triton.jit
def stats_kernel(
    h_ptr,
    w_ptr,
    labels_ptr,
    out_ptr,
    kept_ptr,
    tops_ptr,
    num_tokens,
    num_ids,
    num_kept,
    scale,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """out [4, spans, M]: for each span of ids the label's logit (0 if the label is elsewhere), the
    largest logit, and the sums of e^(z - top) and of e^(z - top) (z - top). kept [num_kept, blocks
    of IDS]: z - top with the top so far, which is in tops [blocks, num_kept]."""
    # Programs that run together share their ids, so that all but the first read the weights from
    # the cache.
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    span = tl.program_id(1)
    in_range = tokens < num_tokens
    labels = tl.load(labels_ptr + tokens, mask=in_range, other=-1)
    top = tl.full((TOKENS,), -1e30, tl.float32)  # Finite, since -inf * 0 is NaN.
    total = tl.zeros((TOKENS,), tl.float32)
    moment = tl.zeros((TOKENS,), tl.float32)
    chosen = tl.zeros((TOKENS,), tl.float32)
    for first in range(span * SPAN, tl.minimum(span * SPAN + SPAN, num_ids), IDS):
        ids = first + tl.arange(0, IDS)
        z = logits_tile(
            h_ptr, w_ptr, tokens, ids, num_tokens, num_ids, scale, D, TOKENS, IDS, WIDTH
        )
        chosen += tl.sum(tl.where(ids[None, :] == labels[:, None], z, 0.0), 1)
        last = top
        top = tl.maximum(top, tl.max(z, 1))
        z = tl.where(ids[None, :] < num_ids, z - top[:, None], -1e30)
        e = tl.exp(z)
        shrink = tl.exp(last - top)
        moment = shrink * (moment + (last - top) * total) + tl.sum(e * z, 1)
        total = shrink * total + tl.sum(e, 1)
        if tl.program_id(0) * TOKENS < num_kept:
            is_kept = tokens < num_kept
            tl.store(tops_ptr + first // IDS * num_kept + tokens, top, mask=is_kept)
            # KEPT_BYTES are few enough for 32 bits.
            offsets = (tokens * tl.cdiv(num_ids, IDS) * IDS)[:, None] + ids[None, :]
            tl.store(kept_ptr + offsets, z.to(tl.float16), mask=is_kept[:, None])
    out = out_ptr + span * num_tokens + tokens
    step = tl.num_programs(1) * num_tokens
    tl.store(out, chosen, mask=in_range)
    tl.store(out + step, top, mask=in_range)
    tl.store(out + 2 * step, total, mask=in_range)
    tl.store(out + 3 * step, moment, mask=in_range)


@triton.jit
def gradients_kernel(
    h_ptr,
    w_ptr,
    labels_ptr,
    lse_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    out_ptr,
    kept_ptr,
    tops_ptr,
    num_tokens,
    num_ids,
    num_kept,
    first_id,
    row_stride,
    scale,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    IS_KEPT: tl.constexpr,
):
    """out [C, S]: g (onehot - p) - g' p (log p + entropy), with the gradients g of logprobs and g'
    of entropy. The tile begins at first_id; kept, with rows of row_stride, and tops are those of
    stats_kernel()."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    ids = tl.program_id(1) * IDS + tl.arange(0, IDS)
    in_range = tokens < num_tokens
    is_there = in_range[:, None] & (ids[None, :] < num_ids)
    if IS_KEPT:
        offsets = tokens[:, None] * row_stride + (first_id + ids)[None, :]
        z = tl.load(kept_ptr + offsets, mask=is_there, other=float("-inf")).to(tl.float32)
        tops = tops_ptr + ((first_id + ids) // IDS)[None, :] * num_kept + tokens[:, None]
        z += tl.load(tops, mask=is_there, other=0.0)
    else:
        z = logits_tile(
            h_ptr, w_ptr, tokens, ids, num_tokens, num_ids, scale, D, TOKENS, IDS, WIDTH
        )
    labels = tl.load(labels_ptr + tokens, mask=in_range, other=-1)
    lse = tl.load(lse_ptr + tokens, mask=in_range, other=0.0)
    grad = tl.load(grad_logprobs_ptr + tokens, mask=in_range, other=0.0)[:, None]
    logp = z - lse[:, None]
    p = tl.exp(logp)
    out = grad * (tl.where(ids[None, :] == labels[:, None], 1.0, 0.0) - p)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptr + tokens, mask=in_range, other=0.0)[:, None]
        grad = tl.load(grad_entropy_ptr + tokens, mask=in_range, other=0.0)[:, None]
        out -= grad * tl.where(p > 0, p * (logp + entropy), 0.0)
    offsets = tokens.to(tl.int64)[:, None] * num_ids + ids[None, :]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=is_there)


def launch(h_CD: Tensor, num_tokens: int = TOKENS) -> dict[str, int]:
    """Launch parameters. Three stages of two blocks of 128 bytes a row take 96 KiB of shared
    memory, which every GPU since 2020 has."""
    return {
        "D": h_CD.shape[1],
        "TOKENS": num_tokens,
        "IDS": IDS,
        "WIDTH": 128 // h_CD.element_size(),
        "num_warps": 8,
        "num_stages": 3,
    }


def run(kernel: triton.JITFunction, grid: tuple[int, int], *args: object, **constants: int) -> None:
    kernel[grid](*args, **constants)


def new_kept(h_MD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the logits of the first K tokens, [K, blocks of IDS], and for the tops that they
    are relative to, [blocks, K]. K is 0 for fp32 factors."""
    num_blocks = triton.cdiv(len(weight_VD), IDS)
    num_kept = min(len(h_MD), KEPT_BYTES // (2 * IDS * num_blocks))
    if h_MD.dtype == torch.float32:
        num_kept = 0
    tops = h_MD.new_empty(num_blocks, num_kept, dtype=torch.float32)
    return h_MD.new_empty(num_kept, num_blocks * IDS, dtype=torch.float16), tops


def softmax_stats(
    h_MD: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logit of the label or 0, entropy, lse), all [M] fp32. Fills `kept`, from new_kept()."""
    h_MD, weight_VD = h_MD.contiguous(), weight_VD.contiguous()
    num_tokens, num_ids = len(h_MD), len(weight_VD)
    grid = triton.cdiv(num_tokens, TOKENS), triton.cdiv(num_ids, SPAN)
    stats = h_MD.new_empty((4, grid[1], num_tokens), dtype=torch.float32)
    labels = torch.where(labels < num_ids, labels, -1)  # The last tile is wider than its ids.
    if kept is None:
        kept = new_kept(h_MD[:0], weight_VD)
    if num_tokens:
        sizes = num_tokens, num_ids, len(kept[0]), 1 / temperature
        tensors = h_MD, weight_VD, labels, stats, *kept
        run(stats_kernel, grid, *tensors, *sizes, SPAN=SPAN, **launch(h_MD))
    return merged_stats(*stats)


def logit_gradients(
    h_CD: Tensor,
    weight_SD: Tensor,
    temperature: float,
    labels: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
    *,
    kept: tuple[Tensor, Tensor],
    first_id: int,
) -> Tensor:
    """[C, S] in h's dtype: the gradient in the undivided logits h @ weight.T. `kept`: those of
    the tile's first K tokens; the tile's ids begin at first_id."""
    h_CD, weight_SD = h_CD.contiguous(), weight_SD.contiguous()
    has_entropy = grad_entropy is not None
    columns = labels, lse, entropy, grad_logprobs, grad_entropy if has_entropy else lse
    out = h_CD.new_empty(len(h_CD), len(weight_SD))
    num_kept = len(kept[0])
    for rows, is_kept in ((slice(num_kept), True), (slice(num_kept, None), False)):
        tensors = h_CD[rows], weight_SD, *(column[rows] for column in columns), out[rows]
        num_tokens, num_ids = tensors[-1].shape
        if not num_tokens:
            continue
        sizes = num_tokens, num_ids, kept[1].stride(0), first_id, kept[0].shape[1], 1 / temperature
        constants = launch(h_CD, KEPT_TOKENS if is_kept else TOKENS)
        constants |= {"HAS_ENTROPY": has_entropy, "IS_KEPT": is_kept}
        grid = triton.cdiv(num_tokens, constants["TOKENS"]), triton.cdiv(num_ids, IDS)
        run(gradients_kernel, grid, *tensors, *kept, *sizes, **constants)
    return out
