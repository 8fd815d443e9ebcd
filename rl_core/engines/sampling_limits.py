"""top_k, top_p and min_p."""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_logits(
    logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, num_ordered: int
) -> tuple[Tensor, Tensor]:
    """(logits [n, V] with -inf for ids that top-k, then top-p of the rest, then min-p exclude; the
    remaining ids [n, num_ordered], most likely first, padded with -1). Limits [n] are per row;
    every row keeps at most num_ordered ids."""
    if num_ordered < logits.shape[-1]:
        ordered, order = logits.topk(num_ordered)  # Cheaper than sorting the vocabulary.
    else:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    excluded = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    ordered = ordered.masked_fill(excluded, -torch.inf)
    kept = order.masked_fill(ordered.isneginf(), -1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, ordered), kept
