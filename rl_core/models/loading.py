"""A model from its folder, as transformers loads it."""

from __future__ import annotations

import copy
from collections.abc import Collection
from functools import cache

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_layers import GenericForSequenceClassification

from rl_core.config import Config
from rl_core.data.pretrained import from_config, load_pretrained
from rl_core.models import attention

# A classifier is made from a language model: its head is new, and the language model's is left out.
SCORE_HEAD, LM_HEADS = "score.weight", {"lm_head.weight", "lm_head.bias"}


def compute_dtype(config: Config) -> torch.dtype:
    if config.learner.dtype == "auto":
        if not torch.cuda.is_available():
            return torch.float32
        # T4 and V100 have no bf16.
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_bf16 else torch.float16
    return getattr(torch, config.learner.dtype)


def load_model_config(path: str) -> PretrainedConfig:
    """The model's config.json, read before any weight."""
    return load_pretrained(AutoConfig, path)


def max_positions(model_config: PretrainedConfig) -> tuple[int | None, str]:
    """(tokens of the longest sequence, key of config.json that says so); None: any number. With
    longrope a sequence ends where its short factors do: transformers chooses short or long factors
    by the longest sequence of a forward, so that logprobs would depend on other sequences of the
    batch."""
    text = model_config.get_text_config()
    limits = [(getattr(text, "max_position_embeddings", None), "max_position_embeddings")]
    rotary = getattr(text, "rope_parameters", None) or {}
    # Some families have parameters for each kind of layer.
    for parameters in (rotary, *rotary.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            key = "original_max_position_embeddings"
            limits.append((parameters.get(key), f"{key} of longrope"))
    known = [(limit, key) for limit, key in limits if limit]
    return min(known, default=(None, ""))


def model_class(config: PretrainedConfig) -> type:
    """The transformers class that loads a language model; of a multimodal checkpoint, the whole of
    it."""
    return (
        AutoModelForImageTextToText
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        else AutoModelForCausalLM
    )


def classifier_class(config: PretrainedConfig) -> type:
    """The class that loads a sequence classifier. transformers has none for most models that see:
    theirs is the multimodal model with the head of transformers' other classifiers."""
    kind = type(config)
    has_none = kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if has_none and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return scored_class(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind])
    return AutoModelForSequenceClassification


@cache
def scored_class(model: type) -> type:
    """The classifier of a family, from the family's class with a language model's head."""
    family = next(kind for kind in model.__mro__ if PreTrainedModel in kind.__bases__)
    name = model.__name__.replace("ForConditionalGeneration", "ForSequenceClassification")
    # Names of weights in older files.
    if renamed := get_checkpoint_conversion_mapping(model.__name__):
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    # transformers reads the source of the family's module to see that attention can be replaced.
    return type(name, (GenericForSequenceClassification, family), {"__module__": family.__module__})


def save_as_published(model: PreTrainedModel) -> None:
    """Makes save_pretrained() and revert_weight_conversion() transpose the weights that published
    checkpoints have transposed, such as experts of Qwen3-VL. transformers 5.24 transposes on the
    way back only where a shape differs from the model's own, which is never."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # transformers takes these for a model that it did not load.
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in known if type(each).__name__ != "PrefixChange"]
    conversions = copy.deepcopy(conversions)
    for conversion in conversions:
        for operation in getattr(conversion, "operations", ()):
            if getattr(operation, "check_dims", False):
                operation.check_dims = False
    model.__dict__["_weight_conversions"] = conversions or None  # Else found for each call.


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Names of tensors that from_pretrained(dtype=dtype) has in fp32, such as routers."""
    if not (kept := model._get_dtype_plan(dtype)):
        return []
    pattern, _, _ = build_glob_alternation(list(kept))
    return [name for name in model.state_dict() if pattern.search(name)]


def load_hf_model(
    path: str,
    dtype: torch.dtype | str,
    device: torch.device | None,
    is_scoring: bool = False,
    **options,
) -> PreTrainedModel:
    """The unsharded model, with attention over packed batches if it can be exchanged. A
    classifier's new head is 0, so that no reply is better than another. In dtype "auto", its
    files', weights on the CPU are read when they are used. Raises ValueError if transformers cannot
    load it, and if its files lack a weight or hold others."""
    options |= {"use_safetensors": True, "output_loading_info": True}
    options |= {"dtype": dtype, "ignore_mismatched_sizes": True}
    try:
        config = load_model_config(path)
        if is_scoring:
            family = classifier_class(config)
            options["num_labels"] = 1
        else:
            family = model_class(config)
        model, info = load_pretrained(family, path, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    if any(info[kind] for kind in ("mismatched_keys", "missing_keys", "unexpected_keys")):
        refuse_files(path, info)
    if SCORE_HEAD in info["missing_keys"]:
        nn.init.zeros_(model.score.weight)
    if is_scoring:
        model.config.architectures = [type(model).__name__]
    set_attention(model, attention.NAME)
    if torch.cuda.is_available():
        from rl_core.models.kernels.fused_norms import fuse_norms

        fuse_norms(model)
    return model if "device_map" in options or device is None else model.to(device)


def refuse_files(path: str, info: dict[str, Collection]) -> None:
    """Raises ValueError for a weight that a model's files lack, add or have in another shape."""
    for name, shape, wanted in info["mismatched_keys"]:
        problem = f"{name} is {list(shape)} in its files, its config.json asks for {list(wanted)}"
        raise ValueError(f"model {path!r}: {problem}")
    for name in sorted(set(info["missing_keys"]) - {SCORE_HEAD}):
        problem = f"its files lack {name}; are they of the model that its config.json describes?"
        raise ValueError(f"model {path!r}: {problem}")
    for name in sorted(set(info["unexpected_keys"]) - LM_HEADS):
        problem = f"its files hold {name}, for which its config.json has no place"
        raise ValueError(f"model {path!r}: {problem}")


def on_meta(model_config: PretrainedConfig, **options) -> PreTrainedModel:
    """The model's shapes alone."""
    with torch.device("meta"):
        return from_config(model_class(model_config), model_config, **options)


def set_attention(hf: PreTrainedModel, implementation: str) -> None:
    """Exchanges the attention of the language model; towers of images and sound keep theirs."""
    config = hf.config
    if not hf._can_set_attn_implementation() or config._attn_implementation == implementation:
        return
    parts = [key for key in config.sub_configs if not key.startswith(("vision", "audio"))]
    of_parts = {"": implementation} | dict.fromkeys(parts, implementation)
    hf.set_attn_implementation(of_parts if config.sub_configs else implementation)
