"""Divergences between a student's and a teacher's distribution of each token: over the whole
vocabulary, or over the teacher's top K tokens with all others as one bucket. Neither materializes
[tokens, vocabulary].

p is the student's distribution and q the teacher's. Each divergence D is a sum over tokens v of the
vocabulary, whose gradient in the student's logits is s_v - p_v sum(s) with s_v = p_v dD/dp_v.

Legend: M trained tokens, D hidden, V vocabulary, C tokens and S vocabulary ids of one tile, K top
tokens, B = K + 1 of them and the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_core.models.kernels.torch_logprobs import scaled_logits, sum_dtype, tiled_gradients
from rl_core.models.logprobs import (
    CPU_TILE_BYTES,
    CUDA_TILE_BYTES,
    VocabularySplit,
    slices,
    tile_shape,
)

# (hidden states [M, D], weight [V, D], temperature, cap), as head_factors() gives.
Factors = tuple[Tensor, Tensor, float, float | None]
Tiles = tuple[list[slice], list[slice]]
# (log p, log q) of tokens -> (their terms of the divergence, their s_v).
Form = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# Least probability of the tokens outside of the teacher's top K: 1 minus the sum of the top K,
# which a server rounds.
LEAST_REST = 1e-6


def reverse_kl(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q)."""
    terms = logp.exp() * (logp - logq)
    return terms, terms


def forward_kl(logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p)."""
    q = logq.exp()
    return q * (logq - logp), -q


def jsd(logp: Tensor, logq: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (Agarwal et al. 2024,
    arXiv:2306.13649, section 2)."""
    logm = torch.logaddexp(logq + math.log(beta), logp + math.log1p(-beta))
    slopes = (1 - beta) * logp.exp() * (logp - logm)
    return beta * logq.exp() * (logq - logm) + slopes, slopes


def make_form(name: str, beta: float) -> Form:
    """The divergence `name`. `beta` is the weight in jsd."""
    forms = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": partial(jsd, beta=beta)}
    return forms[name]


def fused_divergence(
    student: Factors,
    target: WholeVocabulary | TopTokens,
    num_ids: int,
    split: VocabularySplit | None = None,
) -> Tensor:
    """[M] nats, divergence between target and student over the first `num_ids` rows of the
    student's weight, in fp64 if the hidden states are, else fp32. Differentiable, once, in the
    student's hidden states and weight."""
    hidden_MD, weight_VD, temperature, cap = student
    tile_bytes = CUDA_TILE_BYTES if hidden_MD.is_cuda else CPU_TILE_BYTES
    width = max(hidden_MD.shape[1], target.width)
    tokens, ids = tile_shape(len(hidden_MD), max(1, num_ids), width, tile_bytes)
    tiles = slices(len(hidden_MD), tokens), slices(num_ids, ids)
    return FusedDivergence.apply(hidden_MD, weight_VD, target, (temperature, cap, split, tiles))


class FusedDivergence(torch.autograd.Function):
    """The backward recomputes each tile of logits."""

    @staticmethod
    def forward(ctx, hidden_MD, weight_VD, target, options):
        temperature, cap, split, tiles = options
        student = hidden_MD, weight_VD, temperature, cap
        values, stats = target.measure(student, tiles, split)
        ctx.save_for_backward(hidden_MD, weight_VD, *stats)
        ctx.target, ctx.options = target, options
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_values):
        hidden_MD, weight_VD, *stats = ctx.saved_tensors
        temperature, cap, split, tiles = ctx.options

        def gradient_of(h_CD: Tensor, w_SD: Tensor, rows: slice, ids: slice) -> Tensor:
            z_CS = scaled_logits(h_CD, w_SD, temperature, cap)
            of_rows = [value[rows] for value in stats]
            # The gradient in the logits before they are divided by the temperature.
            scale = grad_values[rows, None] / temperature
            grad_CS = scale * ctx.target.gradient(z_CS, rows, ids, *of_rows)
            if cap is not None:
                grad_CS *= 1 - (z_CS * (temperature / cap)) ** 2
            return grad_CS

        has_weight = ctx.needs_input_grad[1]
        grad_hidden, grad_weight = tiled_gradients(
            hidden_MD, weight_VD, tiles, has_weight, gradient_of
        )
        if split is not None:
            split.add_up(grad_hidden)
        return grad_hidden, grad_weight, None, None


class WholeVocabulary:
    """The teacher's distribution from its hidden states and head, whose rows are the student's
    first ones."""

    def __init__(self, teacher: Factors, form: Form):
        self.teacher, self.form = teacher, form
        self.width = teacher[0].shape[1]

    def measure(
        self, student: Factors, tiles: Tiles, split: VocabularySplit | None
    ) -> tuple[Tensor, list[Tensor]]:
        """([M] divergences, statistics for gradient())"""
        own_lse = merged_lse(log_partition(student, tiles), split)
        lse = merged_lse(log_partition(self.teacher, tiles), split)
        sums = torch.zeros(2, len(lse), dtype=lse.dtype, device=lse.device)
        for rows, ids in each_tile(tiles):
            logp_CS = logits(student, rows, ids) - own_lse[rows, None]
            logq_CS = logits(self.teacher, rows, ids) - lse[rows, None]
            terms = self.form(logp_CS, logq_CS)
            for total, values in zip(sums, terms, strict=True):
                total[rows] += values.sum(-1)
        if split is not None:
            split.add_up(sums)
        values, slopes = sums
        return values, [own_lse, lse, slopes]

    def gradient(
        self, z_CS: Tensor, rows: slice, ids: slice, own_lse: Tensor, lse: Tensor, slopes: Tensor
    ) -> Tensor:
        """[C, S], the gradient in the divided logits."""
        logp_CS = z_CS - own_lse[:, None]
        logq_CS = logits(self.teacher, rows, ids) - lse[:, None]
        return self.form(logp_CS, logq_CS)[1] - logp_CS.exp() * slopes[:, None]


class TopTokens:
    """The teacher's top K tokens, and all others as one bucket."""

    width = 1

    def __init__(self, ids_MK: Tensor, logq_MK: Tensor, form: Form, first: int = 0):
        """`first`: the id of the student's first row on this rank."""
        self.ids_MK, self.form = ids_MK - first, form
        rest = (1 - logq_MK.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log()
        self.logq_MB = torch.cat([logq_MK, rest], 1)

    def measure(
        self, student: Factors, tiles: Tiles, split: VocabularySplit | None
    ) -> tuple[Tensor, list[Tensor]]:
        """([M] divergences, statistics for gradient())"""
        dtype = sum_dtype(student[0])
        z_MK = torch.zeros_like(self.logq_MB[:, :-1], dtype=dtype)
        rest = torch.full_like(z_MK[:, 0], -math.inf)
        for rows, ids in each_tile(tiles):
            z_CS = logits(student, rows, ids)
            columns, is_here = self.columns(rows, ids, z_CS)
            z_MK[rows] += z_CS.gather(1, columns).where(is_here, 0.0)
            others = without(z_CS, columns, is_here).logsumexp(-1)
            rest[rows] = torch.logaddexp(rest[rows], others)
        if split is not None:
            split.add_up(z_MK)
        rest = merged_lse(rest, split)
        logp_MB = torch.cat([z_MK, rest[:, None]], 1).log_softmax(-1)
        terms, slopes = self.form(logp_MB, self.logq_MB.to(dtype))
        grad_MB = slopes - logp_MB.exp() * slopes.sum(-1, keepdim=True)
        return terms.sum(-1), [rest, grad_MB]

    def gradient(
        self, z_CS: Tensor, rows: slice, ids: slice, rest: Tensor, grad_CB: Tensor
    ) -> Tensor:
        """[C, S], the gradient in the divided logits: the bucket's is divided in proportion to the
        student's probabilities."""
        columns, is_here = self.columns(rows, ids, z_CS)
        others_CS = without(z_CS, columns, is_here) - rest[:, None]
        grad_CS = others_CS.exp_().mul_(grad_CB[:, -1:])
        return grad_CS.scatter_add_(1, columns, grad_CB[:, :-1].where(is_here, 0.0))

    def columns(self, rows: slice, ids: slice, z_CS: Tensor) -> tuple[Tensor, Tensor]:
        """([C, K] column of each top token in a tile, [C, K] True if the token is in the tile)"""
        wanted = self.ids_MK[rows] - ids.start
        columns = wanted.clamp(0, z_CS.shape[1] - 1)
        return columns, columns == wanted


def without(z_CS: Tensor, columns: Tensor, is_here: Tensor) -> Tensor:
    """The logits with -inf in these columns where is_here."""
    lowest = torch.full_like(columns, math.inf, dtype=z_CS.dtype).masked_fill_(is_here, -math.inf)
    return z_CS.scatter_reduce(1, columns, lowest, "amin")


def each_tile(tiles: Tiles) -> Iterator[tuple[slice, slice]]:
    token_tiles, id_tiles = tiles
    for rows in token_tiles:
        for ids in id_tiles:
            yield rows, ids


def logits(factors: Factors, rows: slice, ids: slice) -> Tensor:
    hidden_MD, weight_VD, temperature, cap = factors
    return scaled_logits(hidden_MD[rows], weight_VD[ids], temperature, cap)


def log_partition(factors: Factors, tiles: Tiles) -> Tensor:
    """[M] log sum exp of the logits."""
    hidden_MD = factors[0]
    shape = hidden_MD.shape[:1]
    lse = hidden_MD.new_full(shape, -math.inf, dtype=sum_dtype(hidden_MD))
    for rows, ids in each_tile(tiles):
        lse[rows] = torch.logaddexp(lse[rows], logits(factors, rows, ids).logsumexp(-1))
    return lse


def merged_lse(lse: Tensor, split: VocabularySplit | None) -> Tensor:
    if split is None:
        return lse
    zero = torch.zeros_like(lse)
    return split.merged(zero, zero, lse)[2]
