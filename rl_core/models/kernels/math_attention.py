"""Attention of dense blocks where no fused kernel computes it: with caps of scores, and on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def math_forward(q, k, v, dropout, is_causal, attn_mask=None, scale=1.0, cap=None):
    """Attention without a fused kernel; fp32 or fp64 inside."""
    scores = math_scores(q, k, is_causal, attn_mask, scale, cap)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ repeated(v, q)).to(q.dtype), lse


def math_backward(dout, q, k, v, out, lse, dropout, is_causal, attn_mask=None, scale=1.0, cap=None):
    """With p = e^(score - lse): d loss / d score = p (dp - sum(dout * out))."""
    with torch.enable_grad():
        inputs = q, k, v = [x.detach().requires_grad_() for x in (q, k, v)]
        scores = math_scores(q, k, is_causal, attn_mask, scale, cap)
        probs = (scores - lse[..., None]).exp()
        dout = dout.to(probs.dtype)
        dprobs = dout @ repeated(v, q).mT
        loss = probs * (dprobs - (dout * out).sum(-1, keepdim=True))
        return torch.autograd.grad(loss.sum(), inputs)


def math_scores(
    q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float, cap: float | None
) -> Tensor:
    k = repeated(k, q)
    scores = q.to(k.dtype) @ k.mT * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if is_causal:
        is_later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(is_later, -torch.inf)
    return scores if mask is None else scores + mask


def repeated(x: Tensor, q: Tensor) -> Tensor:
    """[B, H, length, D]: heads of keys or values repeated for the heads of queries that share them,
    in fp32 or fp64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
