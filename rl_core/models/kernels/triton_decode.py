"""Triton kernels of a decode step on a GPU: one launch for each RMSNorm with the addition before
it, one for norms and rotary embeddings of heads with the write of keys and values to the cache, one
for SwiGLU. Torch takes 8, 27 and 2.

Results are rounded to the input's dtype where the learner rounds on a GPU: after each FusedRMSNorm
and each operation of transformers' other modules.

Legend: n rows with one token each, E hidden size, H heads, K key-value heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def add_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    epsilon,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """x += delta; out = x / rms(x) weight. One program per row."""
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, WIDTH)
    seen = column < E
    at = tl.program_id(0) * E + column
    x = tl.load(x_ptr + at, mask=seen, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + at, mask=seen, other=0.0).to(tl.float32)
        x = rounded(x, dtype)
        tl.store(x_ptr + at, x.to(dtype), mask=seen)
    weight = tl.load(weight_ptr + column, mask=seen, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / E + epsilon)
    tl.store(out_ptr + at, (x * weight).to(dtype), mask=seen)


@triton.jit
def store_heads_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    query_weight_ptr,
    key_weight_ptr,
    columns_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    length,
    epsilon,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """out [n, H, D]: rotated queries; rotated keys and the values are stored to the caches
    [n, K, length, D]. One program per row and head."""
    dtype = query_ptr.dtype.element_ty
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    # 64 bits: a cache has more numbers than 32 bits count.
    to_cache = (row * K + head % K).to(tl.int64) * length + tl.load(columns_ptr + row)
    if head >= H + K:
        value = tl.load(value_ptr + (row * K + head - H - K) * D + d)
        tl.store(values_ptr + to_cache * D + d, value)
    else:
        x_ptr = query_ptr + (row * H + head) * D
        weight_ptr, to_ptr = query_weight_ptr, out_ptr + (row * H + head) * D
        if head >= H:
            x_ptr = key_ptr + (row * K + head - H) * D
            weight_ptr, to_ptr = key_weight_ptr, keys_ptr + to_cache * D
        rolled = (d + D // 2) % D
        x, other = tl.load(x_ptr + d).to(tl.float32), tl.load(x_ptr + rolled).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
            x = rounded(x * (scale * tl.load(weight_ptr + d).to(tl.float32)), dtype)
            other *= scale * tl.load(weight_ptr + rolled).to(tl.float32)
            other = rounded(other, dtype)
        x = rounded(x * tl.load(cos_ptr + row * D + d).to(tl.float32), dtype)
        x += rounded(other * tl.load(sin_ptr + row * D + d).to(tl.float32), dtype)
        tl.store(to_ptr + d, x.to(dtype))


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, size, WIDTH: tl.constexpr):
    dtype = gate_ptr.dtype.element_ty
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    gate = tl.load(gate_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    gate = rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out_ptr + at, (gate * up).to(dtype), mask=at < size)


def run(kernel: triton.JITFunction, grid: tuple[int, ...], *args: object, **constants: int) -> None:
    kernel[grid](*args, **constants)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of x + delta [n, 1, E], which replaces x."""
    out, width = torch.empty_like(x), x.shape[-1]
    tensors = x, x if delta is None else delta, weight, out
    constants = {"E": width, "WIDTH": triton.next_power_of_2(width), "HAS_DELTA": delta is not None}
    run(add_norm_kernel, (len(x),), *tensors, epsilon, **constants, num_warps=4)
    return out


def store_heads(
    qkv: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor] | None,
    epsilon: float,
    columns: Tensor,
    caches: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotated queries [n, H, D] of projections [n, 1, heads * D]. Stores rotated keys and the
    values at `columns` [n] of the first n rows of `caches` [slots, K, L, D]. rotary: cos and sin
    [n, 1, D], the first half of sin negative. weights: of the norms of queries and keys."""
    keys, values = caches
    _, num_keys, length, head_dim = keys.shape
    num_heads = qkv[0].shape[-1] // head_dim
    out = qkv[0].new_empty(len(columns), num_heads, head_dim)
    norms = weights or (out, out)
    tensors = *qkv, *rotary, *norms, columns, out, keys, values
    constants = {"H": num_heads, "K": num_keys, "D": head_dim, "HAS_NORM": weights is not None}
    grid = len(columns), num_heads + 2 * num_keys
    run(store_heads_kernel, grid, *tensors, length, epsilon, **constants, num_warps=1)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out, width = torch.empty_like(gate), 1024
    grid = (triton.cdiv(gate.numel(), width),)
    run(swiglu_kernel, grid, gate, up, out, gate.numel(), WIDTH=width, num_warps=4)
    return out
