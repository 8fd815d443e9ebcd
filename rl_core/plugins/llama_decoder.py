"""The decoder of models in Llama's layout on a CPU, with fewer passes over memory than their own.

On a CPU an operation on all tokens is a pass over memory. Norms and rotary positions are functions
with a backward of their own here, and layers are computed without their modules' Python. Large
products are oneDNN's where it is faster. Linear layers with adapters or quantised weights are still
called as modules.

T tokens, H heads, D head dim, X width of what is normed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutput

from rl_core.engines import onednn
from rl_core.engines.llama_slots import window_of
from rl_core.engines.onednn import is_plain, linear, mlp, rows_for_onednn
from rl_core.learning.attention import AttentionPlan


class LlamaDecoder:
    """Gives what the decoder of a Llama, Mistral, Qwen2 or Qwen3 gives in fp32, for one row of
    packed tokens."""

    def __init__(self, decoder: nn.Module):
        self.decoder = decoder

    def __call__(
        self, input_ids: Tensor, attention_plan: AttentionPlan | None = None, **inputs: Any
    ) -> BaseModelOutput:
        decoder = self.decoder
        if attention_plan is None:  # padded rows
            return decoder(input_ids, **inputs)
        num_tokens = input_ids.shape[1]
        extra = num_padding(decoder, num_tokens)
        x = decoder.embed_tokens(pad(input_ids[0], (0, extra)))
        cos, sin = decoder.rotary_emb(x, pad(inputs["position_ids"], (0, extra)))
        rotary = cos[0, :, None], sin[0, :, None]
        for layer in decoder.layers:
            h = normed(layer.input_layernorm, x)
            x = x + attention(layer.self_attn, h, rotary, attention_plan)
            h = normed(layer.post_attention_layernorm, x)
            x = x + mlp(layer.mlp, h, OneDNNLinear.apply)
        x = normed(decoder.norm, x[:num_tokens])
        return BaseModelOutput(last_hidden_state=x[None])


def num_padding(decoder: nn.Module, num_tokens: int) -> int:
    """Tokens to add to a batch: every product of it is of these. 0 where none is oneDNN's."""
    largest = decoder.layers[0].mlp.gate_proj
    if not is_plain(largest) or num_tokens < rows_for_onednn(largest.weight):
        return 0
    return onednn.num_padding(num_tokens)


def attention(
    attn: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], plan: AttentionPlan
) -> Tensor:
    """[T, hidden size]"""
    heads = len(x), -1, attn.head_dim
    query, key, value = (
        linear(layer, x, OneDNNLinear.apply).view(heads)
        for layer in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    if hasattr(attn, "q_norm"):
        query, key = normed(attn.q_norm, query), normed(attn.k_norm, key)
    query, key = Rotary.apply(query, *rotary), Rotary.apply(key, *rotary)
    num_tokens = plan.num_tokens
    qkv = query[:num_tokens], key[:num_tokens], value[:num_tokens]
    out = plan.attend(*qkv, attn.scaling, window_of(attn)).flatten(1)
    out = pad(out, (0, 0, 0, len(x) - num_tokens))
    return linear(attn.o_proj, out, OneDNNLinear.apply)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    return RMSNorm.apply(x, norm.weight, norm.variance_epsilon)


class OneDNNLinear(torch.autograd.Function):
    """y = x W^T + b; d loss / dx = dy W, d loss / dW = dy^T x. x is [T, in], W is [out, in]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return onednn.product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = onednn.product(dy, weight.T)
        if ctx.needs_input_grad[1]:
            dweight = onednn.product(dy.T, x.T)
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
    """Su et al. 2021, arXiv:2104.09864: turns pairs of x [T, H, D], of which one is in each half.
    cos and sin are [T, 1, D]."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return turned(dy, *ctx.saved_tensors, -1), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    first, second = x.chunk(2, -1)
    out = x * cos
    out_first, out_second = out.chunk(2, -1)
    sin = sin[..., : first.shape[-1]]  # equal in both halves
    out_first.addcmul_(second, sin, value=-sign)
    out_second.addcmul_(first, sin, value=sign)
    return out
