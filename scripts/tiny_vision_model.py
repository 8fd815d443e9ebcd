"""Tiny untrained models that see, of the families' own classes: what make_tiny_model() is for text.
8 x 8 pixels of an image are one token."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.tools.tiny_model import character_tokenizer, make_tiny_model
from rl_core.types import JSONObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# Qwen's templates write an image of a user or a tool so.
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VISION_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}"
    f"{{{{- '{QWEN_IMAGE}' -}}}}"
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
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2},
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# Layers of Qwen3.5 that keep a state.
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# A size at which transformers cannot mistake a matrix of an expert for its transpose.
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
GLM_EXPERTS = {"n_routed_experts": 4, "first_k_dense_replace": 1}


@dataclass(kw_only=True, slots=True)
class VisionModel:
    """Differences of a family from Qwen-VL."""

    tower: JSONObject = field(default_factory=dict)
    text: JSONObject = field(default_factory=dict)
    config: JSONObject = field(default_factory=dict)
    preprocessor: JSONObject = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    has_axes: bool = True  # Positions have three axes.
    image: str = QWEN_IMAGE  # The template's text of an image.
    ids: dict[str, str] = field(default_factory=dict)  # Further fields of the config -> token.

    @property
    def template(self) -> str:
        return VISION_TEMPLATE.replace(QWEN_IMAGE, self.image)


DEEPSTACK = {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
# The last layer is not of use here: what image tokens see in it reaches no text.
WINDOW = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
WINDOW |= {"num_hidden_layers": 3, "sliding_window": 3}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
TILE = {"image_size": 8}
GRIDS = [[8, 16], [16, 8], [16, 16]]  # Heights and widths of LLaVA's tiles.
TILES = {
    "size": {"longest_edge": 16},
    "max_image_size": {"longest_edge": 8},
    "do_image_splitting": True,
    "do_pad": True,
}
NAMES_OF_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
TILE_TOKENS = ("<fake_token_around_image>", "<global-img>", *NAMES_OF_TILES)
GLM = {"image_processor_type": "Glm4vImageProcessor"}
# Model type -> model. A window of the first layer of Qwen2.5-VL's tower has 2 x 2 tokens.
VISION_MODELS: dict[str, VisionModel] = {
    "qwen2_5_vl": VisionModel(tower={"window_size": 16, "fullatt_block_indexes": [1]}),
    "qwen3_vl": VisionModel(tower=DEEPSTACK),
    "qwen2_vl": VisionModel(tower={"embed_dim": 32, "mlp_ratio": 2, "in_chans": 3}),
    "qwen3_vl_moe": VisionModel(tower=DEEPSTACK, text=EXPERTS | {"num_experts": 4}),
    "qwen3_5": VisionModel(
        tower={"num_position_embeddings": 64},
        text=LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_5_moe": VisionModel(
        tower={"num_position_embeddings": 64},
        text=LINEAR
        | EXPERTS
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "glm4v": VisionModel(tower={"image_size": 32}, preprocessor=GLM),
    "glm4v_moe": VisionModel(
        tower={"image_size": 32}, text=EXPERTS | GLM_EXPERTS, preprocessor=GLM
    ),
    "glm46v": VisionModel(
        tower={"image_size": 32},
        text={"model_type": "glm4v_text"},
        preprocessor={"image_processor_type": "Glm46VImageProcessor"},
    ),
    "mistral3": VisionModel(
        tower=LAYERS | {"image_size": 64, "head_dim": 16},
        text={"model_type": "mistral"},
        has_axes=False,
        config={"spatial_merge_size": MERGE},
        preprocessor={
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 64},
            "patch_size": PATCH * MERGE,
        },
        tokens=("[IMG_BREAK]", "[IMG_END]"),
    ),
    "internvl": VisionModel(
        tower=LAYERS | {"image_size": [8, 8], "patch_size": [PATCH, PATCH]},
        text={"model_type": "qwen3"},
        has_axes=False,
        config={"image_seq_length": 1},
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 8, "width": 8},
            "max_patches": 4,
            "crop_to_patches": True,
        },
        tokens=("<img>", "</img>"),
    ),
    "idefics3": VisionModel(
        tower=LAYERS | TILE,
        text={"model_type": "llama"},
        has_axes=False,
        config={"scale_factor": MERGE},
        preprocessor={"image_processor_type": "Idefics3ImageProcessor"} | TILES,
        tokens=TILE_TOKENS,
    ),
    "smolvlm": VisionModel(
        tower=LAYERS | TILE,
        text={"model_type": "llama"},
        has_axes=False,
        config={"scale_factor": MERGE},
        preprocessor={"image_processor_type": "SmolVLMImageProcessor"} | TILES,
        tokens=TILE_TOKENS,
    ),
    # An image has at most 70 tokens of 8 x 8 pixels, to which it is enlarged.
    "gemma4": VisionModel(
        tower=LAYERS
        | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2}
        | {"position_embedding_size": 320},
        text=WINDOW
        | {"model_type": "gemma4_text", "rope_parameters": None, "global_head_dim": 32}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 110}
        | {"use_bidirectional_attention": "vision"},
        has_axes=False,
        preprocessor={
            "image_processor_type": "Gemma4ImageProcessor",
            "size": None,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 2,
        },
        tokens=("<|image>", "<image|>"),
        image="<|image_pad|>",
        ids={"boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
    ),
    **{
        arch: VisionModel(
            tower=LAYERS | TILE | {"model_type": f"{kind}_vision_model"},
            text={"model_type": "qwen2"},
            has_axes=False,
            config={"image_grid_pinpoints": GRIDS},
            preprocessor={
                "image_processor_type": f"{name}ImageProcessor",
                "image_grid_pinpoints": GRIDS,
                "size": {"height": 8, "width": 8} if kind == "siglip" else {"shortest_edge": 8},
                "crop_size": None if kind == "siglip" else {"height": 8, "width": 8},
            },
            image="<|image_pad|>",
        )
        for arch, kind, name in (
            ("llava", "clip", "Llava"),
            ("llava_next", "clip", "LlavaNext"),
            ("llava_onevision", "siglip", "LlavaOnevision"),
        )
    },
    # An image has 2 x 2 tokens, more than the window.
    "gemma3": VisionModel(
        tower=LAYERS | {"model_type": "siglip_vision_model", "image_size": 16},
        text=WINDOW | {"model_type": "gemma3_text", "rope_parameters": None},
        has_axes=False,
        config={"mm_tokens_per_image": 4},
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 16, "width": 16},
        },
        tokens=("<start_of_image>", "<end_of_image>"),
        image="<start_of_image>",
        ids={"boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"},
    ),
}


def vision_config(arch: str, text: JSONObject, tokenizer) -> PretrainedConfig:
    """The configuration of a model of `arch` whose language model has the settings `text`."""
    from transformers import AutoConfig

    row = VISION_MODELS[arch]
    tower = TOWER | {"out_hidden_size": text["hidden_size"]} | row.tower
    if arch == "qwen2_vl":  # The name of its output's size.
        tower["hidden_size"] = text["hidden_size"]
    half = text["head_dim"] // 2
    rest = half // 3
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    if row.has_axes:
        rotary["mrope_section"] = [half - 2 * rest, rest, rest]
    if arch.startswith("qwen3"):
        rotary["mrope_interleaved"] = True  # transformers does so anyway, servers if they read it.
    # Its language model alone has no id of a first token.
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    named = dict(zip(names, tokens, strict=True)) | row.ids
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in named.items()}
    return AutoConfig.for_model(
        arch,
        text_config=text | {"rope_parameters": rotary} | row.text,
        vision_config=tower,
        tie_word_embeddings=text["tie_word_embeddings"],
        initializer_range=text["initializer_range"],
        dtype=text["dtype"],
        eos_token_id=text["eos_token_id"],
        pad_token_id=text["pad_token_id"],
        **ids | row.config,
    )


def make_vision_model(out: str | Path, *sizes, arch: str, tokenizer=None, **more) -> None:
    """Writes a tiny model of an architecture of VISION_MODELS."""
    row = VISION_MODELS[arch]
    if tokenizer is None:
        tokenizer = character_tokenizer((*VISION_TOKENS, *row.tokens), row.template)
    make_config = partial(vision_config, tokenizer=tokenizer)
    make_tiny_model(out, *sizes, arch=arch, tokenizer=tokenizer, make_config=make_config, **more)
    text = json.dumps(PREPROCESSOR | row.preprocessor, indent=2)
    (Path(out) / "preprocessor_config.json").write_text(text)
