"""Segments of keys: the interface of kernels, and the merging of their results.

T tokens, H heads of queries, G of keys, D head dim; P runs of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Rows = slice | Tensor  # Indices of tokens.
Layout = TypeVar("Layout")


@dataclass(kw_only=True, slots=True)
class Kernel:
    """forward(q, k, v, segments, scale, cap) -> out [T, H, D], lse [H, T] of fp32, or fp64 for fp64
    backward(dout, q, k, v, out, lse, segments, scale, cap) -> dq, dk, dv
    A cap bounds scores to cap * tanh(score / cap)."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Sequence[Tensor]]


class Segments:
    """P runs of queries, each with the segment of keys that it attends to. If causal, the last of
    both is one token."""

    def __init__(
        self,
        runs: list[tuple[np.ndarray, np.ndarray]],  # tokens (queries, keys)
        device: torch.device,
        is_causal: bool = False,
        window: int | None = None,  # a query sees this many keys, itself included
    ):
        runs = [run for run in runs if len(run[0]) and len(run[1])]
        self.lengths = [(len(queries), len(keys)) for queries, keys in runs]  # [P]
        self.q_rows = rows_of([queries for queries, _ in runs], device)
        self.k_rows = rows_of([keys for _, keys in runs], device)
        starts = np.cumsum([(0, 0), *self.lengths], 0, dtype=np.int32).T.copy()
        self.cu_q, self.cu_k = torch.from_numpy(starts).to(device)  # [P+1] each
        # One query a sequence sends the flash kernels down their path for decoding, which lays out
        # its results otherwise.
        self.max_q, self.max_k = np.max([(2, 1), *self.lengths], 0).tolist()
        self.is_causal, self.window = is_causal, window
        self._layout: Any = None

    def layout(self, make: Callable[[Segments], Layout]) -> Layout:
        """The kernel's layout of the segments, which make() builds once."""
        if self._layout is None:
            self._layout = make(self)
        return self._layout


def rows_of(runs: list[np.ndarray], device: torch.device) -> Rows:
    """These tokens one after the other: a slice, which costs no copy, where nothing lies between
    them."""
    rows = np.concatenate([np.arange(0), *runs])
    first = int(rows[0]) if len(rows) else 0
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return torch.from_numpy(rows).to(device)


def merged(
    out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Merges the attention of `rows` over further keys, [new_out, new_lse], into out and lse."""
    out, before = out.to(lse.dtype), lse[:, rows]
    share = torch.sigmoid(new_lse - before).T[:, :, None]
    chosen = out[rows].lerp_(new_out.to(out.dtype), share)
    if not isinstance(rows, slice):  # A slice of out is a view.
        out[rows] = chosen
    lse[:, rows] = torch.logaddexp(before, new_lse)
    return out, lse


def added(total: Tensor | None, grad: Tensor, rows: Rows, num: int) -> Tensor:
    """[num, heads, D] total plus `grad` at `rows`. Sums of several gradients are in fp32 or
    fp64."""
    if total is None and isinstance(rows, slice) and rows == slice(0, num):
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(num, *grad.shape[1:], dtype=wide) if total is None else total.to(wide)
    if isinstance(rows, slice):
        total[rows] += grad
    else:
        total.index_add_(0, rows, grad.to(wide))
    return total
