"""A model from its folder: all of it, as transformers loads it; or on torch's meta device, to be sharded and then filled
from the safetensors files with the slices that this rank holds."""

from __future__ import annotations

import difflib
import inspect
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from rl_core.learning import attention
from rl_core.types import logit_change

# A classifier is made from a language model: its head is new, and the language model's is left out.
SCORE_HEAD, WORD_HEAD = "score.weight", "lm_head.weight"


def load_model_config(path: str) -> PretrainedConfig:
    """The model's config.json, read before any weight. Raises ValueError for a folder without one, for logits that are not
    hidden states times the head's weight, and for layers in which packed sequences would see each other."""
    check_model_folder(Path(path))
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {path!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    if change := logit_change(config):
        raise ValueError(
            f"model {path!r} sets {change}; its logprobs here would leave that out: take a model whose logits are hidden "
            "states times the head's weight"
        )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    family = family[0] if isinstance(family, (tuple, list)) else family
    if kinds or (family is not None and not can_pack(family)):
        what = f"has layers of kind {min(kinds)}" if kinds else f"of type {config.model_type} has its own attention"
        raise ValueError(
            f"model {path!r} {what}, in which packed sequences would mix; take one whose layers are full or sliding "
            "attention, such as Llama, Qwen2 or Qwen3"
        )
    return config


def can_pack(family: type) -> bool:
    """Whether all that mixes tokens is attention that can be exchanged, and layers hand it what it is called with."""
    layers = [vars(sys.modules[family.__module__]).get(name) for name in family._no_split_modules or ()]
    layers = [layer for layer in layers if layer is not None and layer.__name__.endswith("DecoderLayer")]
    hand_on = all(inspect.getsource(layer.forward).count("**kwargs") > 1 for layer in layers)
    return hand_on and family._supports_attention_backend and not family._is_stateful


def check_model_folder(path: Path) -> None:
    """Raises ValueError for a path without a folder, and for folders of a run that hold no model, with what to name instead."""
    is_path = path.is_absolute() or (
        str(path) != path.name and (path.parts[0] in (".", "..", "~") or len(path.parts) > 2)
    )
    if not path.exists() and is_path:
        names = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        raise ValueError(f"model {path}: no such folder" + (f"; did you mean {path.parent / near[0]}?" if near else ""))
    if (path / "config.json").exists():
        return
    if (path / "hf").is_dir():
        raise ValueError(f"model {path} is a run's folder; name the model that it exported: {found_in(path / 'hf')}")
    if (path / "manifest.json").exists():
        raise ValueError(f"model {path} is a checkpoint; name the model of its run: {found_in(path.parents[1] / 'hf')}")
    if (path / "adapter_config.json").exists():
        merged = path.with_name(path.name.removesuffix("_adapter"))
        raise ValueError(f"model {path} is an adapter; name a whole model, such as the merged one in {merged}")


def found_in(folder: Path) -> str:
    models = sorted(str(p.parent) for p in folder.glob("*/config.json"))
    return " or ".join(models) or f"{folder} has none yet"


def load_hf_model(path: str, dtype: torch.dtype, device: torch.device, is_scoring: bool = False, **how) -> nn.Module:
    """The unsharded model, with attention over packed batches. A classifier's new head is 0, so that no reply is better than
    another. Raises ValueError if transformers cannot load it, or if its files lack a weight or hold others."""
    how |= {"attn_implementation": attention.NAME, "use_safetensors": True, "output_loading_info": True}
    family, more = (AutoModelForSequenceClassification, {"num_labels": 1}) if is_scoring else (AutoModelForCausalLM, {})
    try:
        model, found = family.from_pretrained(path, dtype=dtype, **how, **more)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        purpose = "score" if is_scoring else "be loaded"
        raise ValueError(f"model {path!r} cannot {purpose}: {str(error).splitlines()[0]}") from None
    missing = set(found["missing_keys"])
    for name in sorted(missing - {SCORE_HEAD}):
        raise ValueError(
            f"model {path!r}: its files lack {name}; are they of the model that its config.json describes?"
        )
    for name in sorted(set(found["unexpected_keys"]) - {WORD_HEAD}):
        raise ValueError(f"model {path!r}: its files hold {name}, which the model of its config.json has no place for")
    if SCORE_HEAD in missing:
        nn.init.zeros_(model.score.weight)
    finish(path, model, is_scoring)
    return model if "device_map" in how else model.to(device)


def finish(path: str, model: nn.Module, is_scoring: bool) -> None:
    """Raises ValueError for a head with a bias."""
    if is_scoring:
        model.config.architectures = [type(model).__name__]
    elif getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"model {path!r} has a head with a bias, which its logprobs here would leave out")


def make_empty_model(path: str, dtype: torch.dtype, is_scoring: bool) -> tuple[nn.Module, dict[str, str]] | None:
    """The model without memory for its weights, and weight -> the file that holds it. None if only transformers can load it:
    it is quantized, or its files name weights otherwise. Raises ValueError as load_hf_model."""
    family = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(path, **({"num_labels": 1} if is_scoring else {}))
    if hasattr(config, "quantization_config"):
        return None
    with torch.device("meta"):
        model = family.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    files = matching_files(model, path)
    if files is None or not restore_buffers(model):
        return None
    finish(path, model, is_scoring)
    with suppress(OSError):  # not every model has one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model, files


def matching_files(model: nn.Module, path: str) -> dict[str, str] | None:
    """Weight -> file, if the files hold the model's weights one to one: what is tied is there once. Raises ValueError if
    one has another shape."""
    saved, parameters = saved_shapes(path), dict(model.named_parameters(remove_duplicate=False))
    aliases: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        aliases.setdefault(id(parameter), []).append(name)
    known = {n for names in aliases.values() if len(present := saved.keys() & set(names)) == 1 for n in present}
    lacking = [names for names in aliases.values() if not known & set(names) and names != [SCORE_HEAD]]
    may_leave = {WORD_HEAD} if SCORE_HEAD in parameters else set()
    if lacking or saved.keys() - known - may_leave:
        return None
    for name in known:
        file, shape = saved[name]
        if shape != (wanted := list(parameters[name].shape)):
            raise ValueError(
                f"model {path!r}: {name} is {shape} in {file}, its config.json asks for {wanted}; is it of another model?"
            )
    return {name: saved[name][0] for name in known}


def saved_shapes(path: str) -> dict[str, tuple[str, list[int]]]:
    """Weight -> (its safetensors file, its shape); empty without such files. Raises ValueError for a damaged file."""
    file = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    files = [] if file is None else [file]
    if file is None:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        files = [] if index is None else get_checkpoint_shard_files(path, index)[0]
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as saved:
                found |= {name: (file, list(saved.get_slice(name).get_shape())) for name in saved.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model {path!r}: {file} cannot be read: {error}") from None
    return found


def restore_buffers(model: nn.Module) -> bool:
    """Whether all buffers that no file holds (rotary frequencies) could be computed again on the host."""
    for module in model.modules():
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        computed = module._non_persistent_buffers_set
        if any(n not in computed or not module._buffers[n].is_floating_point() for n in names):
            return False
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device="cpu")
        if names:
            model._init_weights(module)
        if any(module._buffers[name].isnan().any() for name in names):
            return False
    return True


def allocate(model: nn.Module, weights_on: torch.device, buffers_on: torch.device) -> None:
    """Memory for the parameters of an empty model; their values are undefined."""
    # Not to_empty(), which would destroy the buffers. FSDP hears of it through its own _apply.
    model._apply(lambda t: torch.empty_like(t, device=weights_on) if t.is_meta else t.to(buffers_on))


@torch.no_grad()
def read_weights(model: nn.Module, files: dict[str, str]) -> None:
    """Fills the model from the files, adapters excepted. A rank reads only the slices that it holds."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer.", ".")  # beside it are adapters
        local, slices = local_slices(parameter)
        if name in files and local.numel():
            # Opened for one weight: the pages that are read count as this process's until it is closed.
            with safe_open(files[name], framework="pt") as saved:
                local.copy_(saved.get_slice(name)[slices] if slices else saved.get_tensor(name))
        elif name == SCORE_HEAD:
            nn.init.zeros_(local)


def local_slices(value: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, and which part of the unsharded one it is."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value, tuple(slice(0, n) for n in value.shape)
    shape, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local(), tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
