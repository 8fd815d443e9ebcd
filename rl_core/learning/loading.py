"""A model from its folder, as transformers loads it. To be sharded, it becomes an empty one on
torch's meta device, of which each rank then fills the slices that it holds."""

from __future__ import annotations

import ctypes
import difflib
import mmap
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from rl_core.data.pretrained import from_config, load_pretrained
from rl_core.learning import attention

# A classifier is made from a language model: its head is new, and the language model's is left out.
SCORE_HEAD, LM_HEADS = "score.weight", {"lm_head.weight", "lm_head.bias"}


def load_model_config(path: str) -> PretrainedConfig:
    """The model's config.json, read before any weight. Raises ValueError for a folder without
    one."""
    check_model_folder(path)
    try:
        config = load_pretrained(AutoConfig, path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if Path(path).is_dir():
            raise ValueError(f"model {path!r} cannot be loaded: {reason}") from None
        # "org/name" may mean a folder too, of which transformers says nothing.
        near = nearest_folder(Path(path))
        raise ValueError(
            f"model {path!r} is no folder here, and the hub does not give it: {reason}{near}"
        ) from None
    check_is_decoder(config, path)
    return config


def check_is_decoder(config: PretrainedConfig, path: str) -> None:
    """Raises ValueError for a model that cannot continue a text: an encoder, or an encoder with a
    decoder."""
    family = config.model_type
    kind = None
    if config.is_encoder_decoder:
        kind = "an encoder-decoder"
    elif family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    if kind:
        raise ValueError(
            f"model {path!r} is {kind} ({family}); take a decoder-only language model, such as "
            "Qwen3"
        )


def check_model_folder(name: str) -> None:
    """Raises ValueError for a path without a folder, and for folders of a run that hold no model,
    with what to name instead."""
    path = Path(name)  # without the ./ of the name
    is_relative = name.startswith(("./", "../", "~")) or len(path.parts) > 2
    if not path.exists() and (path.is_absolute() or is_relative):
        raise ValueError(f"model {path}: no such folder{nearest_folder(path)}")
    if (path / "config.json").exists():
        return
    for mark, what, hf in (
        ("hf", "a run's folder; name the model that it exported", path / "hf"),
        ("manifest.json", "a checkpoint; name the model of its run", path.parent.parent / "hf"),
    ):
        if (path / mark).exists():
            models = sorted(str(p.parent) for p in hf.glob("*/config.json"))
            raise ValueError(
                f"model {path} is {what}: {' or '.join(models) or f'{hf} has none yet'}"
            )
    if (path / "adapter_config.json").exists():
        merged = path.with_name(path.name.removesuffix("_adapter"))
        raise ValueError(
            f"model {path} is an adapter; name a whole model, such as the merged one in {merged}"
        )


def nearest_folder(path: Path) -> str:
    """`; did you mean models/qwen3?`, or nothing if no folder beside it has a name like that."""
    names = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def model_class(config: PretrainedConfig) -> type:
    """The transformers class that loads a language model; of a multimodal checkpoint, the whole of
    it."""
    return (
        AutoModelForImageTextToText
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        else AutoModelForCausalLM
    )


def load_hf_model(
    path: str,
    dtype: torch.dtype | str,
    device: torch.device | None,
    is_scoring: bool = False,
    **how,
) -> nn.Module:
    """The unsharded model, with attention over packed batches if it can be exchanged. A
    classifier's new head is 0, so that no reply is better than another. In dtype "auto", its
    files', weights on the CPU are read when they are used. Raises ValueError if transformers cannot
    load it, and if its files lack a weight or hold others."""
    how |= {"use_safetensors": True, "output_loading_info": True}
    family, more = (
        (AutoModelForSequenceClassification, {"num_labels": 1})
        if is_scoring
        else (model_class(load_pretrained(AutoConfig, path)), {})
    )
    try:
        model, info = load_pretrained(
            family, path, dtype=dtype, ignore_mismatched_sizes=True, **how, **more
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        purpose = "score" if is_scoring else "be loaded"
        raise ValueError(f"model {path!r} cannot {purpose}: {str(error).splitlines()[0]}") from None
    for name, shape, wanted in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"model {path!r}: {name} is {list(shape)} in its files, its config.json asks for "
            f"{list(wanted)}"
        )
    missing = set(info["missing_keys"])
    for name in sorted(missing - {SCORE_HEAD}):
        raise ValueError(
            f"model {path!r}: its files lack {name}; are they of the model that its config.json "
            "describes?"
        )
    for name in sorted(set(info["unexpected_keys"]) - LM_HEADS):
        raise ValueError(
            f"model {path!r}: its files hold {name}, which the model of its config.json has no "
            "place for"
        )
    if SCORE_HEAD in missing:
        nn.init.zeros_(model.score.weight)
    if is_scoring:
        model.config.architectures = [type(model).__name__]
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention.NAME)
    return model if "device_map" in how or device is None else model.to(device)


def on_meta(model_config: PretrainedConfig, **how) -> nn.Module:
    """The model's shapes alone."""
    with torch.device("meta"):
        return from_config(model_class(model_config), model_config, **how)


def to_meta(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name -> weight. The model's own become meta tensors of `dtype`; tied ones stay tied."""
    weights, empty = dict(model.named_parameters()), {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight not in empty:
                empty[weight] = nn.Parameter(torch.empty_like(weight, dtype=dtype, device="meta"))
            module._parameters[name] = empty.get(weight)
    return weights


@torch.no_grad()
def load_shards(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copies the weights, adapters excepted. A rank reads only the slices that it holds."""
    for name, parameter in model.named_parameters():
        weight = weights.get(name.replace(".base_layer", ""))  # beside it are adapters
        if weight is not None:
            local, slices = local_slices(parameter)
            local.copy_(weight[slices])
            if isinstance(weight, Tensor):
                forget_pages(weight)


def forget_pages(weight: Tensor) -> None:
    """Gives back a file's pages, which count as this process's memory once they are read
    (Linux)."""
    page, begin = mmap.PAGESIZE, weight.data_ptr()
    start, end = -(-begin // page) * page, (begin + weight.nbytes) // page * page
    if sys.platform == "linux" and start < end and not weight.untyped_storage().resizable():
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED
        )


def local_slices(value: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, and which part of the unsharded one it is."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value, tuple(slice(0, n) for n in value.shape)
    shape, start = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return value.to_local(), tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
