"""The forward of models in Llama's layout (Llama, Mistral, Qwen2, Qwen3) for learners and engines
on a CPU, with fewer passes over memory than their modules.

In fp32, norms and rotary embeddings are functions with a backward, and large products are computed
by oneDNN where oneDNN is faster than MKL. In other types, norms and rotary embeddings round as the
modules do. Linear layers with adapters or quantised weights are called as modules.

T tokens, E hidden size, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutput

from rl_core.models.attention import AttentionPlan

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import (
        LlamaAttention,
        LlamaDecoderLayer,
        LlamaModel,
        LlamaRMSNorm,
    )

# Multiply-adds from which oneDNN is faster than MKL on a CPU with AVX512. With ten times as many,
# oneDNN takes half the time on an AMD EPYC; with fewer, its overhead dominates.
LARGE_PRODUCT = 2**22
# oneDNN keeps 0.6 MiB of memory for each shape that it has seen, so rows are padded to multiples.
FEW_ROWS, MANY_ROWS = 8, 128

# (attention module, query [..., H, D], key, value) -> attention output [..., H * D].
Attend = Callable[["LlamaAttention", Tensor, Tensor, Tensor], Tensor]


class LlamaDecoder:
    """Replaces the decoder of an unsharded model in fp32, for one row of packed tokens."""

    def __init__(self, decoder: nn.Module):
        self.decoder = cast("LlamaModel", decoder)

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_plan: AttentionPlan | None = None,
        use_cache: bool = False,
    ) -> BaseModelOutput:
        decoder, plan = self.decoder, attention_plan
        if plan is None:  # The rows are padded, not packed.
            return decoder(input_ids, position_ids=position_ids, use_cache=use_cache)
        assert position_ids is not None
        num_tokens = input_ids.shape[1]
        extra = self.num_padding(num_tokens)

        def attend(attn: LlamaAttention, *qkv: Tensor) -> Tensor:
            query, key, value = (x[:num_tokens] for x in qkv)
            out = plan.attend(query, key, value, attn.scaling, window_of(attn)).flatten(1)
            return pad(out, (0, 0, 0, extra))

        x = decoder.embed_tokens(pad(input_ids[0], (0, extra)))
        cos, sin = decoder.rotary_emb(x, pad(position_ids, (0, extra)))
        x = llama_layers(decoder, x, (cos[0, :, None], sin[0, :, None]), attend)
        x = normed(decoder.norm, x[:num_tokens])
        return BaseModelOutput(last_hidden_state=x[None])

    def num_padding(self, num_tokens: int) -> int:
        """Tokens to append, so that no product needs padding; 0 if none is computed by oneDNN."""
        largest = layers_of(self.decoder)[0].mlp.gate_proj
        if not is_plain(largest) or num_tokens < rows_for_onednn(largest.weight):
            return 0
        return num_padding(num_tokens)


def llama_layers(
    decoder: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
) -> Tensor:
    """Hidden states [..., E] behind the last layer, before the final norm. rotary: cos and sin
    [..., 1, D]; outside of fp32 the first half of sin is negative."""
    for layer in layers_of(decoder):
        attn, mlp = layer.self_attn, layer.mlp
        h = normed(layer.input_layernorm, x)
        heads = (*h.shape[:-1], -1, attn.head_dim)
        query, key, value = (
            linear(module, h).view(heads) for module in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        if hasattr(attn, "q_norm"):
            query_norm, key_norm = cast("tuple[LlamaRMSNorm, ...]", (attn.q_norm, attn.k_norm))
            query, key = normed(query_norm, query), normed(key_norm, key)
        query, key = rotated(query, key, *rotary)
        x = x + linear(attn.o_proj, attend(attn, query, key, value))
        # SwiGLU: Shazeer 2020, arXiv:2002.05202.
        h = normed(layer.post_attention_layernorm, x)
        gates = mlp.act_fn(linear(mlp.gate_proj, h))
        x = x + linear(mlp.down_proj, gates * linear(mlp.up_proj, h))
    return x


def layers_of(decoder: nn.Module) -> Sequence[LlamaDecoderLayer]:
    return cast("Sequence[LlamaDecoderLayer]", decoder.layers)


def window_of(attn: LlamaAttention) -> int | None:
    """The sliding window of an attention layer. Mistral has one for all layers; Llama ignores its
    configuration's."""
    if attn.config.model_type == "mistral":
        return attn.config.sliding_window
    return getattr(attn, "sliding_window", None)


def normed(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return norm(x)
    return RMSNorm.apply(x, norm.weight, norm.variance_epsilon)


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if query.dtype == torch.float32:
        return Rotary.apply(query, cos, sin), Rotary.apply(key, cos, sin)
    both = torch.cat([query, key], -2)
    both = both * cos + both.roll(both.shape[-1] // 2, -1) * sin
    num_queries = query.shape[-2]
    return both[..., :num_queries, :], both[..., num_queries:, :]


@cache
def has_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_plain(module: nn.Module) -> bool:
    """True if the module computes x @ W.T + bias and nothing else."""
    return type(module) is nn.Linear and not module._forward_hooks


def rows_for_onednn(weight: Tensor) -> float:
    """Rows of x from which on x @ weight.T is faster by oneDNN."""
    is_fit = weight.dtype == torch.float32 and weight.device.type == "cpu" and has_onednn()
    return LARGE_PRODUCT / weight.numel() if is_fit else math.inf


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """Output of a linear layer for x [..., in]."""
    num_rows = x.numel() // x.shape[-1]
    if is_plain(module) and num_rows >= rows_for_onednn(module.weight):
        return OneDNNLinear.apply(x, module.weight, module.bias)
    return module(x)


def num_padding(num_rows: int) -> int:
    """Rows to append, so that oneDNN sees few shapes."""
    return -num_rows % (FEW_ROWS if num_rows <= MANY_ROWS else MANY_ROWS)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] @ weight.T + bias, by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] @ weight.T + bias, by oneDNN, for any number of rows."""
    rows = x.flatten(0, -2)
    num_rows = len(rows)
    if extra := num_padding(num_rows):
        rows = pad(rows, (0, 0, 0, extra))
    return product(rows, weight, bias)[:num_rows].view(*x.shape[:-1], -1)


class OneDNNLinear(torch.autograd.Function):
    """y = x W^T + b; d loss / dx = dy W, d loss / dW = dy^T x. x is [..., in], W is [out, in]; the
    backward is for x [T, in]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return padded_product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight.T)
        if ctx.needs_input_grad[1]:
            dweight = product(dy.T, x.T)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0)
        return dx, dweight, dbias


class RMSNorm(torch.autograd.Function):
    """Zhang and Sennrich 2019, arXiv:1910.07467: y = w n with n = x / r, r^2 = mean(x^2) + epsilon;
    d loss / dx = (w dy - n mean(w dy n)) / r. x is [..., X]."""

    @staticmethod
    def forward(ctx, x, weight, epsilon):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = size.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        n = x * inverse
        ctx.save_for_backward(n, inverse, weight)
        return n * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        n, inverse, weight = ctx.saved_tensors
        # Where squares overflow, NaN lets all ranks skip the update, as the model's own norm does.
        inverse = inverse.masked_fill(inverse == 0, torch.nan)
        product = dy * n
        dweight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight).div_(-len(weight))
        dx = torch.mul(dy, weight, out=product)
        return dx.addcmul_(n, mean[..., None]).mul_(inverse), dweight, None


class Rotary(torch.autograd.Function):
    """Su et al. 2021, arXiv:2104.09864: rotates pairs of x [..., H, D], one number of each half.
    cos and sin are [..., 1, D]; only the second half of sin is read."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotation(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rotation(dy, cos, sin, -1), None, None


def rotation(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    first, second = x.chunk(2, -1)
    out = x * cos
    out_first, out_second = out.chunk(2, -1)
    sin = sin[..., first.shape[-1] :]
    out_first.addcmul_(second, sin, value=-sign)
    out_second.addcmul_(first, sin, value=sign)
    return out
