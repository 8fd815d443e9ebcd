"""Attention over packed sequences: one mechanism for whole sequences, shared prompts and sequences
cut over ranks.

Queries attend to segments of keys, which a kernel computes without a mask or padding. Where a query
sees several segments, their results are merged by log-sum-exp. The backward of each segment takes
the output and the log-sum-exp of whole rows: its probabilities are then the final ones, and the
gradients of all segments only need adding.

    queries                         segments of keys
    each piece                      itself, causal
    what follows a shared prompt    that prompt, all of it

With cp ranks, sequence n is padded at its end to 2 * cp * c_n tokens and cut into 2 * cp chunks.
Rank r holds, for each sequence in order, chunk r and then chunk 2cp-1-r: all ranks have the same
work under a causal mask. Keys and values travel round the ring while the segments at hand are
computed (Ring Attention, arXiv 2310.01889). One rank is a ring of one.

    keys from           segments        seen by the queries
    this rank           both chunks     both, causal: the two chunks lie in their order
    a lower rank        first chunk     both: it ends before either begins
    a higher rank       both chunks     the second only: it begins after either ends

T local tokens, H heads of queries, G of keys (H is a multiple of G), D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers import AttentionInterface

from rl_core.types import option

NAME = "rl_core_packed"
# --attention: what computes a segment.
KERNELS = {
    "torch": "rl_core.plugins.attention_kernels:TORCH",
    "flash_attn": "rl_core.plugins.attention_kernels:FLASH_ATTN",
    "ring_flash_attn": "rl_core.plugins.attention_kernels:RING_FLASH_ATTN",
}
LIBRARIES = {  # functions that they call
    "flash_attn": "flash_attn.flash_attn_interface:_flash_attn_varlen_backward",
    "ring_flash_attn": "ring_flash_attn:zigzag_ring_flash_attn_varlen_func",
}

Rows = slice | Tensor  # which tokens


@dataclass(kw_only=True, slots=True)
class Kernel:
    """forward(q, k, v, segments, scale, cap) -> out [T, H, D], lse [H, T] of fp32, or fp64 for fp64
    backward(dout, q, k, v, out, lse, segments, scale, cap) -> dq, dk, dv
    A cap bounds scores to cap * tanh(score / cap).
    ring(q, k, v, plan, scale) -> out: a library's ring, if it has one"""

    forward: Callable
    backward: Callable
    ring: Callable | None = None


def find_kernel(name: str, device: torch.device) -> Kernel:
    """Raises ValueError if its library does not import here. "auto": flash-attn's on a GPU where it
    imports, else torch's."""
    if name == "auto":
        has_flash_attn = device.type == "cuda" and not import_error("flash_attn")
        name = "flash_attn" if has_flash_attn else "torch"
    if error := import_error(name):
        raise ValueError(
            f"--attention={name} needs {name}, which does not import here ({error}); "
            "install it, or leave --attention at auto"
        )
    return option(KERNELS[name])


@cache  # Each batch asks, and a library that fails to import would be searched for each time.
def import_error(name: str) -> str:
    """Why the kernel's library does not import; "" if it does. A folder of the library's name is
    not the library: flash-attn-4, which SGLang requires, has none of flash-attn 2's functions."""
    try:
        if name in LIBRARIES:
            option(LIBRARIES[name])
    except Exception as error:  # whatever a library does when it is imported
        return f"{type(error).__name__}: {error}"
    return ""


class Segments:
    """P runs of queries, each with the segment of keys that it attends to. If causal, the last of
    both is one token."""

    def __init__(
        self,
        runs: list[tuple[range, range | np.ndarray]],  # tokens (queries, keys)
        device: torch.device,
        is_causal: bool = False,
        window: int | None = None,  # a query sees this many keys, itself included
    ):
        runs = [(q, k) for q, k in runs if len(q) and len(k)]
        self.lengths = [(len(q), len(k)) for q, k in runs]  # [P]
        self.q_rows, self.k_rows = (rows_of([run[i] for run in runs], device) for i in range(2))
        starts = np.cumsum([(0, 0), *self.lengths], 0, dtype=np.int32).T.copy()
        self.cu_q, self.cu_k = torch.from_numpy(starts).to(device)  # [P+1] each
        # One query a sequence sends the flash kernels down their path for decoding, which lays out
        # its results otherwise.
        self.max_q, self.max_k = (
            max([2, *(q for q, _ in self.lengths)]),
            max([1, *(k for _, k in self.lengths)]),
        )
        self.is_causal, self.window = is_causal, window
        self.layout: Any = None  # of the kernel that uses it


def rows_of(parts: list[range | np.ndarray], device: torch.device) -> Rows:
    """These tokens one after the other: a slice, which costs no copy, where nothing lies between
    them."""
    rows = np.concatenate(
        [np.arange(x.start, x.stop) if isinstance(x, range) else x for x in parts or [range(0)]]
    )
    first = int(rows[0]) if len(rows) else 0
    is_slice = np.array_equal(rows, np.arange(first, first + len(rows)))
    return slice(first, first + len(rows)) if is_slice else torch.from_numpy(rows).to(device)


class AttentionPlan:
    """What attention needs to know about one batch, made once and given to every layer.

    Its pieces start at cu_seqlens [N+1], on the CPU, and follow the prompts `parents` (-1: none);
    what follows one prompt stands together. With a group of ranks the pieces are this rank's parts
    of whole sequences."""

    def __init__(
        self,
        cu_seqlens: Tensor,
        parents: list[int],
        device: torch.device,
        kernel: str = "auto",
        group: dist.ProcessGroup | None = None,
    ):
        self.kernel, self.device, self.group = find_kernel(kernel, device), device, group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.pieces = pieces = [range(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]
        self.prompts = [pieces[parent] if parent >= 0 else range(0) for parent in parents]
        both = list(zip(self.prompts, pieces, strict=True))
        # Tokens of a sequence.
        self.longest = max(len(prompt) + len(piece) * self.size for prompt, piece in both)
        causal = Segments([(piece, piece) for piece in pieces], device, is_causal=True)
        if self.size == 1:
            # The queries after one prompt are one run, for which its keys are read once.
            families = [list(family) for _, family in itertools.groupby(both, lambda x: x[0])]
            prompts = Segments(
                [(range(f[0][1].start, f[-1][1].stop), f[0][0]) for f in families], device
            )
            by_source = [[causal, prompts] if prompts.lengths else [causal]]
        else:
            lower = Segments([(piece, piece[: len(piece) // 2]) for piece in pieces], device)
            higher = Segments([(piece[len(piece) // 2 :], piece) for piece in pieces], device)
            by_source = (
                [[lower]] * self.rank + [[causal]] + [[higher]] * (self.size - 1 - self.rank)
            )
        # Segments in the keys of each rank; the first in this one's keys covers all queries.
        self.by_source = by_source
        self.windows: dict[int, Segments] = {}

    def near(self, window: int) -> Segments:
        """Each run of queries with the keys within its window, which are few: rows of the keys of
        all ranks, rank by rank."""
        if window not in self.windows:
            runs, size = [], self.size
            chunks = [0] if size == 1 else [self.rank, 2 * size - 1 - self.rank]
            for piece, prompt in zip(self.pieces, self.prompts, strict=True):
                length, rows = (
                    len(piece) // len(chunks),
                    np.concatenate([prompt, piece]).astype(np.int64),
                )
                if size > 1:  # of the whole sequence
                    number, place = divmod(np.arange(2 * size * length), max(1, length))
                    owner = np.minimum(number, 2 * size - 1 - number)
                    rows = (
                        owner * self.pieces[-1].stop
                        + piece.start
                        + (number >= size) * length
                        + place
                    )
                for n, chunk in enumerate(chunks):
                    first = len(prompt) + chunk * length
                    keys = rows[max(0, first - window + 1) : first + length]
                    runs.append((piece[n * length : (n + 1) * length], keys))
            self.windows[window] = Segments(runs, self.device, is_causal=True, window=window)
        return self.windows[window]


def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, H, D]: what this rank's tokens see of their whole sequences, causal. With a window a
    token sees that many, itself included. A cap bounds scores. Sinks [H] are the scores of one more
    key of each head, whose value is 0. Every rank of the group must call it, and run its backward,
    in the same order."""
    assert len(query_THD) == plan.pieces[-1].stop, (query_THD.shape, plan.pieces[-1])
    if window is not None and window >= plan.longest:
        window = None
    if window is cap is sinks is None and plan.size > 1 and plan.kernel.ring:
        return plan.kernel.ring(query_THD, key_TGD, value_TGD, plan, scale)
    return PackedAttention.apply(query_THD, key_TGD, value_TGD, sinks, plan, (scale, cap), window)


class PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TGD, v_TGD, sinks, plan, how, window):
        out = lse = None
        for kv, parts in keys_and_segments([k_TGD, v_TGD], plan, window):
            for part in parts:
                result = plan.kernel.forward(
                    q_THD[part.q_rows], *(x[part.k_rows] for x in kv), part, *how
                )
                out, lse = result if out is None else merged(out, lse, *result, part.q_rows)
        if sinks is not None:
            share, lse = (
                torch.sigmoid(lse - sinks[:, None]),
                torch.logaddexp(lse, sinks[:, None].to(lse.dtype)),
            )
            out = out * share.T[:, :, None]
        out = out.to(q_THD.dtype)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out, lse, sinks)
        ctx.how = plan, how, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (q, k, v, out, lse, sinks), (plan, how, window) = ctx.saved_tensors, ctx.how
        dq = dkv = dsinks = None
        # The score of a key with value 0: dp = 0 in ds = p (dp - sum(dout * out))
        if sinks is not None:
            dsinks = (
                -((sinks[:, None] - lse).exp() * (dout.to(lse.dtype) * out).sum(-1).T)
                .sum(1)
                .to(sinks.dtype)
            )
        for kv, parts in keys_and_segments([k, v], plan, window):
            # The gradient of these keys so far arrives from the rank before, which has just added
            # its own part.
            arriving = None if dkv is None else Shift(dkv, plan)
            grads = [
                part_gradients(plan.kernel, dout, q, kv, out, lse, part, how) for part in parts
            ]
            dkv = arriving.wait() if arriving else [None, None]
            for part, (dq_part, *dkv_part) in zip(parts, grads, strict=True):
                dq = added(dq, dq_part, part.q_rows, len(q))
                dkv = [
                    added(total, x, part.k_rows, len(kv[0]))
                    for total, x in zip(dkv, dkv_part, strict=True)
                ]
            del grads  # not while the next segments are computed
        if plan.size > 1:
            dkv = (
                [scattered(x.to(lse.dtype), plan) for x in dkv]
                if window
                else Shift(dkv, plan).wait()
            )
        return dq.to(q.dtype), *(x.to(k.dtype) for x in dkv), dsinks, None, None, None


def part_gradients(kernel: Kernel, dout, q, kv: list[Tensor], out, lse, part: Segments, how: tuple):
    rows = part.q_rows
    return kernel.backward(
        dout[rows], q[rows], *(x[part.k_rows] for x in kv), out[rows], lse[:, rows], part, *how
    )


def merged(
    out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of queries of which `rows` see more keys: those of the part."""
    out, before = out.to(lse.dtype), lse[:, rows]
    share = torch.sigmoid(part_lse - before).T[:, :, None]
    if isinstance(rows, slice):
        out[rows].lerp_(part.to(out.dtype), share)
    else:
        out[rows] = torch.lerp(out[rows], part.to(out.dtype), share)
    lse[:, rows] = torch.logaddexp(before, part_lse)
    return out, lse


def added(total: Tensor | None, part: Tensor, rows: Rows, num: int) -> Tensor:
    """[num, heads, D] sum of gradients, the part's at `rows`; in fp32, or fp64, once there are
    several."""
    if total is None and isinstance(rows, slice) and rows.stop - rows.start == num:
        return part
    wide = torch.promote_types(part.dtype, torch.float32)
    total = part.new_zeros(num, *part.shape[1:], dtype=wide) if total is None else total.to(wide)
    if isinstance(rows, slice):
        total[rows] += part
    else:
        total.index_add_(0, rows, part.to(wide))
    return total


def keys_and_segments(
    kv: list[Tensor], plan: AttentionPlan, window: int | None
) -> Iterator[tuple[list, list]]:
    """Keys and values of each rank, this one first, and the segments in them. The next travel while
    the caller works. With a window, the keys of all ranks at once."""
    if window is not None:
        yield [gathered(x, plan) for x in kv], [plan.near(window)]
        return
    for step in range(plan.size):
        arriving = Shift(kv, plan) if step + 1 < plan.size else None
        yield kv, plan.by_source[(plan.rank - step) % plan.size]
        kv = arriving.wait() if arriving else kv


class Shift:
    """One step round the ring: the tensors leave for the next rank, and wait() gives those of the
    rank before."""

    def __init__(self, tensors: list[Tensor], plan: AttentionPlan):
        to, source = (plan.rank + 1) % plan.size, (plan.rank - 1) % plan.size
        self.sent = [x.contiguous() for x in tensors]
        self.received = [torch.empty_like(x) for x in self.sent]
        moves = [dist.P2POp(dist.isend, x, group=plan.group, group_peer=to) for x in self.sent]
        moves += [
            dist.P2POp(dist.irecv, x, group=plan.group, group_peer=source) for x in self.received
        ]
        self.works = dist.batch_isend_irecv(moves)

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        self.sent = self.works = None
        return self.received


def gathered(x: Tensor, plan: AttentionPlan) -> Tensor:
    """[cp * T, G, D]: rank by rank."""
    if plan.size == 1:
        return x
    out = x.new_empty(plan.size * len(x), *x.shape[1:])
    dist.all_gather(list(out.chunk(plan.size)), x.contiguous(), group=plan.group)
    return out


def scattered(grad: Tensor, plan: AttentionPlan) -> Tensor:
    """[T, G, D]: this rank's part of the sum over ranks."""
    summed = grad.new_empty(len(grad) // plan.size, *grad.shape[1:])
    dist.reduce_scatter(summed, list(grad.chunk(plan.size)), group=plan.group)
    return summed


def attention_forward(
    module, query, key, value, _, scaling=None, sliding_window=None, attention_plan=None, **more
):
    """[1, T, H, D]. query [1, H, T, D], key and value [1, G, T, D]; `attention_plan` comes through
    the model's forward. Raises ValueError if a model's attention asks for what would be left out
    silently."""
    if more.get("dropout"):
        raise ValueError("attention here has no dropout; train a model without it")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    width, head_dim = v.shape[2], q.shape[2]
    if width < head_dim:  # kernels want one head dim
        v = pad(v, (0, head_dim - width))
    scale = head_dim**-0.5 if scaling is None else scaling
    changes = more.get("softcap"), more.get("s_aux")
    return packed_attention(q, k, v, attention_plan, scale, sliding_window, *changes)[
        None, ..., :width
    ], None


# No mask function is registered under this name, which is how transformers is told to build no
# mask: the plan says all that one would, and transformers waits for the device to see whether
# positions are of packed sequences.
AttentionInterface.register(NAME, attention_forward)
