"""The slots' forward of models in Llama's layout, without their modules' Python.

A decode step of a small model, or of few rows, is mostly its overhead: a Hugging Face layer takes
some 50 calls of torch, this one about 30. Linear layers are still called as modules, for adapters
and quantised weights stand there.

Legend: n rows, S new tokens of each, H heads, K key-value heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_core.engines.slots import ForwardPlan, SlotModel, slot_attention


class LlamaSlots(SlotModel):
    """A SlotModel of Llama, Mistral, Qwen2 or Qwen3. In fp32 norms are torch's; in other types they
    are the model's own, which round as the learner does."""

    def hidden(self, tokens: Tensor, position_ids: Tensor, plan: ForwardPlan) -> Tensor:
        decoder = self.decoder
        x = decoder.embed_tokens(tokens)
        cos, sin = decoder.rotary_emb(x, position_ids)
        # As if halves were turned: the first half of what is rolled is to be negative.
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        rotary = cos[:, :, None], sin[:, :, None]
        for layer in decoder.layers:
            x = x + attention(layer.self_attn, normed(layer.input_layernorm, x), rotary, plan)
            x = x + layer.mlp(normed(layer.post_attention_layernorm, x))
        return normed(decoder.norm, x)


def attention(
    attn: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], plan: ForwardPlan
) -> Tensor:
    """[n, S, hidden size], by the slots' attention."""
    heads = (*x.shape[:-1], -1, attn.head_dim)
    query, key = attn.q_proj(x).view(heads), attn.k_proj(x).view(heads)
    value = attn.v_proj(x).view(heads)
    if hasattr(attn, "q_norm"):
        query, key = normed(attn.q_norm, query), normed(attn.k_norm, key)
    num_heads = query.shape[2]
    both = turned(torch.cat([query, key], 2), *rotary).transpose(1, 2)
    out, _ = slot_attention(
        attn,
        both[:, :num_heads],
        both[:, num_heads:],
        value.transpose(1, 2),
        None,
        scaling=attn.scaling,
        sliding_window=window_of(attn),
        slot_plan=plan,
    )
    return attn.o_proj(out.reshape(*x.shape[:-1], -1))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864) for x [n, S, H + K, D]; the first half of
    sin is negative."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def window_of(attn: nn.Module) -> int | None:
    """Of an attention layer; Mistral has one for all."""
    if hasattr(attn, "sliding_window"):
        return attn.sliding_window
    return getattr(attn.config, "sliding_window", None)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    if x.dtype != torch.float32:
        return norm(x)
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
