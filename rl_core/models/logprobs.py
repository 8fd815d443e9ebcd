"""Hidden states x head weight -> logprob and entropy of each trained token, never all tokens x
vocabulary at once.

Logits live in tiles of C tokens x S vocabulary ids, whose softmax statistics are merged by token.
Torch fills the tiles, or a kernel that is passed in.

M trained tokens, D hidden, V vocabulary, C tokens and S vocabulary ids of one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from rl_core.distributed import MPS

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


# Families whose own forward multiplies logits by a power of a value of config.json. Others may
# have the key, and ignore it.
LOGIT_SCALES = {
    ("logit_scale", 1): "cohere cohere2 cohere2_moe cohere_compass cohere_compass_text",
    ("logits_scaling", -1): """granite granite4_vision granite_docling granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared minicpm3""",
    ("logits_scaling", 1): "hyperclovax hyperclovax_vision_v2",
    ("lm_head_multiplier", 1): "falcon_h1",
    ("logits_mup_width_multiplier", -1): "inkling_mm_model inkling_text",
    ("output_multiplier", 1): "muse_glimmer muse_spark",
}
# Families whose own forward bounds logits to (-value, value) by a tanh.
LOGIT_CAPS = {
    "final_logit_softcapping": """beam gemma2 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified gemma4_unified_text inkling2 inkling2_loop inkling2_loop_text inkling2_text
    mistral_large4 muse_glimmer muse_spark nanochat paligemma vaultgemma""",
    "logits_soft_cap": "recurrent_gemma",
    "output_logit_soft_cap": "xlstm",
}


def logit_change(config: PretrainedConfig) -> tuple[float, float | None]:
    """(scale, cap) by a transformers configuration: logits are cap * tanh(scale * head(hidden) /
    cap); None: without tanh. A family that neither table names has (1, None); the probe at the
    start of a run compares the result with the model's own logits."""
    family, text = config.model_type, config.get_text_config()
    scale, cap = 1.0, None
    for (key, power), families in LOGIT_SCALES.items():
        if family in families.split():
            scale = (getattr(text, key) or 1.0) ** power
    for key, families in LOGIT_CAPS.items():
        if family in families.split():
            cap = getattr(text, key, None)
    return scale, cap


def head_factors(
    hf: PreTrainedModel, hidden_MD: Tensor, temperature: float
) -> tuple[Tensor, Tensor, float, float | None]:
    """(hidden, weight, temperature, cap) for fused_logprobs. A bias is one more column of the
    weight. A scale divides temperature and cap, because hidden states times it would be rounded."""
    scale, cap = logit_change(hf.config)
    head = cast(nn.Linear, hf.get_output_embeddings())
    weight = head.weight
    if getattr(head, "bias", None) is not None:
        hidden_MD = torch.cat([hidden_MD, torch.ones_like(hidden_MD[:, :1])], 1)
        weight = torch.cat([weight, head.bias[:, None]], 1)
    return hidden_MD, weight, temperature / scale, None if cap is None else cap / scale


def scores_of(hf: PreTrainedModel, hidden_MD: Tensor) -> Tensor:
    """[M] fp32 scores that a classifier gives hidden states. The weights are cast to fp32, so that
    scores are not rounded."""
    dtype = sum_dtype(hidden_MD)
    head = hf.get_submodule("score")
    assert isinstance(head, nn.Linear), head
    bias = None if head.bias is None else head.bias.to(dtype)
    return linear(hidden_MD.to(dtype), head.weight.to(dtype), bias)[:, 0]


def capped_(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


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
        gradients = tiled_gradients(hidden_MD, weight_VD, tiles, split, has_weight, gradient_of)
        return *gradients, None, None, None, None


def tiled_gradients(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    tiles: tuple[list[slice], list[slice]],
    split: VocabularySplit | None,
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
    grad_hidden = grad_hidden.to(hidden_MD.dtype)
    if split is not None:
        split.add_up(grad_hidden)
    return grad_hidden, grad_weight


def tile_shape(num_tokens: int, num_ids: int, width: int, tile_bytes: int) -> tuple[int, int]:
    """(C, S)"""
    size, side = tile_bytes // 4, max(1, SIDE_BYTES // 4 // width)
    ids = min(num_ids, side, max(LEAST_IDS, size // max(1, num_tokens)))
    return min(side, max(1, size // ids)), ids


def slices(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


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
