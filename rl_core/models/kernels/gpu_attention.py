"""Attention kernels for GPUs, from torch and flash-attn: variable-length attention over segments,
with separate forward and backward and the log-sum-exp.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from rl_core.models.kernels.cpu_attention import dense_backward, dense_forward
from rl_core.models.kernels.segments import Kernel, Segments


def find_kernel(name: str, device: torch.device) -> Kernel:
    """Raises ValueError if the library does not import. "auto": flash-attn on a GPU where it
    imports, else torch."""
    error = ""
    if name == "flash_attn" or (name == "auto" and device.type == "cuda"):
        error = import_error()
        if not error:
            return FLASH_ATTN
    if name == "flash_attn":
        raise ValueError(
            f"--attention=flash_attn needs flash_attn, which does not import here ({error}); "
            "install it, or leave --attention at auto"
        )
    return TORCH


def flash_attn() -> ModuleType:
    return import_module("flash_attn.flash_attn_interface")


def import_error() -> str:
    """Reason why flash-attn does not import; "" if it does. A folder of that name is not enough:
    flash-attn-4, which SGLang requires, lacks the functions of flash-attn 2."""
    try:
        flash_attn()._flash_attn_varlen_backward  # noqa: B018
    except Exception as error:  # An import may raise anything.
        return f"{type(error).__name__}: {error}"
    return ""


def has_flash(q: Tensor) -> bool:
    return q.device.type != "cpu" and q.dtype in (torch.float16, torch.bfloat16)


def sizes(segments: Segments) -> tuple:
    return segments.cu_q, segments.cu_k, segments.max_q, segments.max_k


def windows(segments: Segments) -> dict[str, int]:
    """Number of keys before and after a query's position that it sees; -1 for all."""
    left, right = -1, -1
    if segments.is_causal:
        right = 0
    if segments.window is not None:
        left = segments.window - 1
    return {"window_size_left": left, "window_size_right": right}


def is_plainly_causal(segments: Segments) -> bool:
    return segments.is_causal and segments.window is None


def torch_forward(q, k, v, segments, scale, cap=None):
    """Calls the operator below torch.nn.attention.varlen.varlen_attn, because the backward of
    varlen_attn ignores the gradient of the log-sum-exp."""
    if cap is not None or not has_flash(q):
        return dense_forward(q, k, v, segments, scale, cap)
    options = 0.0, is_plainly_causal(segments), False  # dropout, causal, debug mask
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes(segments), *options, scale=scale, **windows(segments)
    )
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def torch_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    if cap is not None or not has_flash(q):
        return dense_backward(dout, q, k, v, out, lse, segments, scale, cap)
    # Dropout is 0, so that its random state is unused.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    options = 0.0, is_plainly_causal(segments), seed, torch.empty(0, device=q.device)
    tensors = dout.contiguous(), q, k, v, out, lse.contiguous()
    return torch.ops.aten._flash_attention_backward(
        *tensors, *sizes(segments), *options, scale=scale, **windows(segments)
    )


def flash_attn_forward(q, k, v, segments, scale, cap=None):
    more = {"causal": segments.is_causal, "softcap": cap or 0.0} | windows(segments)
    forward = flash_attn()._flash_attn_varlen_forward
    out, lse, *_ = forward(q, k, v, *sizes(segments), 0.0, scale, **more)
    assert lse.shape == (q.shape[1], len(q)), lse.shape
    return out, lse


def flash_attn_backward(dout, q, k, v, out, lse, segments, scale, cap=None):
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    tensors = dout.contiguous(), q, k, v, out, lse.contiguous(), *grads
    more = {"softcap": cap or 0.0, "alibi_slopes": None} | windows(segments)
    more["deterministic"] = torch.are_deterministic_algorithms_enabled()
    options = 0.0, scale, segments.is_causal
    backward = flash_attn()._flash_attn_varlen_backward
    backward(*tensors, *sizes(segments), *options, **more)
    return grads


TORCH = Kernel(forward=torch_forward, backward=torch_backward)
FLASH_ATTN = Kernel(forward=flash_attn_forward, backward=flash_attn_backward)
