"""Decode graphs of models in bf16 or fp16 with fused kernels, and attention that reads the tokens
of each row and no padding.

A decode step by the modules of a 0.6B model launches 1,563 kernels; most of them compute for less
time than they take to start.

Legend: n rows with one token each, L cached tokens, E hidden size, H heads, K key-value heads, D
head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_core.engines.cuda_graphs import DecodeGraphs
from rl_core.engines.llama_slots import LlamaCache, signed
from rl_core.models.kernels.fused_norms import FusedRMSNorm
from rl_core.models.kernels.llama_cpu import layers_of, window_of


class FusedGraphs(DecodeGraphs):
    """DecodeGraphs by the kernels of models/kernels/triton_decode.py."""

    is_optional = True

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        head_dim = model.get_decoder().layers[0].self_attn.head_dim
        return (
            model.dtype in (torch.bfloat16, torch.float16)
            and head_dim in (16, 32, 64, 128, 256)
            and find_spec("triton") is not None
            and torch.cuda.get_device_capability(model.device) >= (8, 0)
        )

    def decode_step(
        self,
        cache: LlamaCache,
        rows: slice,
        tokens: Tensor,
        starts: Tensor,
        length: int,
        *,
        is_even: bool,
    ) -> Tensor:
        from rl_core.models.kernels import triton_decode as kernels

        def normed(norm: FusedRMSNorm, delta: Tensor | None) -> Tensor:
            """The norm of x + delta, which replaces x."""
            return kernels.add_norm(x, delta, norm.weight, norm.variance_epsilon)

        decoder, layers = self.decoder, layers_of(self.decoder)
        x = decoder.embed_tokens(tokens)  # [n, 1, E]
        rotary = signed(*decoder.rotary_emb(x, starts[:, None]))
        plan = DecodeSeqlens.of(starts, cache, length)
        h = normed(layers[0].input_layernorm, None)
        next_norms = [*(layer.input_layernorm for layer in layers[1:]), decoder.norm]
        for layer, next_norm in zip(layers, next_norms, strict=True):
            attn, mlp = layer.self_attn, layer.mlp
            qkv = attn.q_proj(h), attn.k_proj(h), attn.v_proj(h)
            keys, values = (tensor[rows] for tensor in cache.layers[attn.layer_idx])
            weights, epsilon = None, 0.0
            if hasattr(attn, "q_norm"):
                weights = attn.q_norm.weight, attn.k_norm.weight
                epsilon = attn.q_norm.variance_epsilon
            query = kernels.store_heads(qkv, rotary, weights, epsilon, starts, (keys, values))
            out = attention(query, keys, values, plan, attn.scaling, window_of(attn))
            h = normed(layer.post_attention_layernorm, attn.o_proj(out.reshape(*tokens.shape, -1)))
            gate, up = mlp.gate_proj(h), mlp.up_proj(h)
            is_silu = decoder.config.hidden_act == "silu"
            gates = kernels.swiglu(gate, up) if is_silu else mlp.act_fn(gate) * up
            h = normed(next_norm, mlp.down_proj(gates))
        return h


@dataclass(kw_only=True, slots=True)
class DecodeSeqlens:
    """Sequence lengths of attention in a decode step, for all layers, as of flash-attn."""

    used_k: Tensor  # [n] int32 Number of keys that each row sees.
    cu_q: Tensor  # [n + 1] int32 Number of each query.
    cu_k: Tensor  # [n + 1] int32 First key of each row.
    max_k: int

    @classmethod
    def of(cls, starts: Tensor, cache: LlamaCache, max_k: int) -> DecodeSeqlens:
        """`starts` [n]: columns of the newest tokens; max_tokens for padding, which sees no key."""
        _, num_keys, num_columns, _ = cache.layers[0][0].shape
        cu_q = torch.arange(len(starts) + 1, dtype=torch.int32, device=starts.device)
        return cls(
            used_k=((starts + 1) % num_columns).int(),
            cu_q=cu_q,
            cu_k=cu_q * (num_keys * num_columns),
            max_k=max_k,
        )


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: DecodeSeqlens,
    scaling: float,
    window: int | None,
) -> Tensor:
    """[n, H, D] for queries [n, H, D] over the first keys of caches [n, K, L, D]."""
    num_rows, num_keys, num_columns, head_dim = keys.shape
    # A packed sequence of n L keys whose heads overlap: row i + 1 begins K L keys behind row i, and
    # head k + 1 L keys behind head k.
    size = ((num_rows - 1) * num_keys + 1) * num_columns, num_keys, head_dim
    stride = head_dim, num_columns * head_dim, 1
    return torch.ops.aten._flash_attention_forward(
        query,
        keys.as_strided(size, stride),
        values.as_strided(size, stride),
        plan.cu_q,
        plan.cu_k,
        1,
        plan.max_k,
        0.0,  # dropout
        False,  # No mask: all keys of a row come before its query.
        False,
        scale=scaling,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
        seqused_k=plan.used_k,
    )[0]
