"""Tiny untrained models that see, of the families' own classes: what tiny_model.py is for text. 8 x 8
pixels of an image are one token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# An image of a user or a tool is a placeholder between two tokens, as Qwen's templates write it.
VISION_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
PATCH, MERGE = 4, 2
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.1,
}
# Model type -> differences of its vision tower. A window of the first layer has 2 x 2 tokens.
VISION_MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2},
}
VISION_MODELS["qwen3_vl_moe"] = VISION_MODELS["qwen3_vl"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def vision_config(arch: str, text: dict[str, Any], tokenizer) -> Any:
    """The configuration of a model of `arch` whose language model has the settings `text`."""
    from transformers import AutoConfig

    tower = TOWER | VISION_MODELS[arch] | {"out_hidden_size": text["hidden_size"]}
    if arch == "qwen2_vl":  # The name of its output's size.
        tower["hidden_size"] = text["hidden_size"]
    text |= EXPERTS if arch.endswith("moe") else {}
    half = text["head_dim"] // 2
    rest = half // 3
    sections = [half - 2 * rest, rest, rest]
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    # Its language model alone has no id of a first token.
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = dict(zip(names, map(tokenizer.convert_tokens_to_ids, tokens), strict=True))
    return AutoConfig.for_model(
        arch,
        text_config=text | {"rope_parameters": rotary},
        vision_config=tower,
        tie_word_embeddings=text["tie_word_embeddings"],
        initializer_range=text["initializer_range"],
        dtype=text["dtype"],
        eos_token_id=text["eos_token_id"],
        pad_token_id=text["pad_token_id"],
        **ids,
    )


def write_preprocessor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2))
