"""Memory of a model's activations, from its config.json alone. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_core.data.pretrained import size_of_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class Widths:
    """Widths of a model's blocks, which decide the memory per token."""

    layers: int  # L
    hidden: int  # D
    intermediate: int  # I
    queries: int  # Q, summed over heads
    keys: int  # K, summed over heads
    chosen: int = 0  # experts that a token is routed to


def widths(text: PretrainedConfig) -> Widths:
    """`text`: configuration of the language model."""
    heads = getattr(text, "num_attention_heads", 0)  # Mamba has no heads.
    head_dim = size_of_layers(text, "head_dim") or text.hidden_size // max(1, heads)
    return Widths(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        queries=heads * head_dim,
        keys=(size_of_layers(text, "num_key_value_heads") or heads) * head_dim,
        chosen=getattr(text, "num_experts_per_tok", None) or 0,
    )


def tower_widths(vision: PretrainedConfig) -> Widths:
    """`vision`: configuration of a vision tower, whose names differ between families."""
    hidden = getattr(vision, "embed_dim", None) or vision.hidden_size
    intermediate = getattr(vision, "intermediate_size", None)
    return Widths(
        layers=getattr(vision, "num_hidden_layers", None) or vision.depth,
        hidden=hidden,
        intermediate=intermediate or int(hidden * getattr(vision, "mlp_ratio", 4)),
        queries=hidden,
        keys=hidden,
    )


def block_bytes(size: Widths, w: int, tp: int) -> float:
    """Bytes per token that one block keeps for its backward: norms, attention, MLP, inputs and
    outputs of experts. w: bytes of a number in the compute dtype."""
    norms, attention = 2 * (4 + 2 * w) * size.hidden, 2 * w * (size.queries + size.keys)
    of_experts = 2 * w * size.chosen * size.hidden
    return norms + (of_experts + attention + 4 * w * size.intermediate) / tp


def activation_bytes(size: Widths, w: int, tp: int, recomputes: bool) -> float:
    """Bytes per token of the activations at the end of a forward with gradient. With recomputation
    only the input and the attention of each block are kept, and all activations of one block."""
    block = block_bytes(size, w, tp)
    kept = size.layers * block
    if recomputes:
        kept = size.layers * w * (size.hidden + size.queries / tp) + block
    return kept + around_blocks(size, w)


def around_blocks(size: Widths, w: int) -> float:
    """Bytes per token before the first and after the last block."""
    return 2 * (4 + w) * size.hidden
