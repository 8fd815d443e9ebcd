"""A model from its folder: whole, as transformers loads it; or without memory (on torch's meta device), to be split, given
memory, and filled from the safetensors files with the slices that this rank holds."""

from __future__ import annotations

import difflib
from contextlib import suppress
from dataclasses import dataclass
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

# A classifier is made from a language model: its head is drawn, and the language model's is left out.
MAY_LACK, MAY_LEAVE = "score.weight", "lm_head.weight"


@dataclass(kw_only=True, slots=True)
class SavedWeight:
    file: str
    shape: tuple[int, ...]


def load_model_config(path: str) -> PretrainedConfig:
    """The model's config.json, read before any weight. Raises ValueError for a folder without one and for a model whose
    logits are not hidden states times the head's weight."""
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
    check_packs(path, config)
    return config


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


def check_packs(path: str, config: PretrainedConfig) -> None:
    """Raises ValueError for a model in which a token of a packed batch would see its neighbours' documents: its layers are
    not attention over keys and values, or transformers cannot exchange that."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    family = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    family = family[0] if isinstance(family, (tuple, list)) else family
    if kinds or (family is not None and (family._is_stateful or not family._supports_attention_backend)):
        what = (
            f"has layers of kind {sorted(kinds)[0]}" if kinds else f"of type {config.model_type} has its own attention"
        )
        raise ValueError(
            f"model {path!r} {what}, in which packed sequences would mix; take one whose layers are full or sliding "
            "attention, such as Llama, Qwen2 or Qwen3"
        )


def load_hf_model(path: str, dtype: torch.dtype, device: torch.device, **how) -> nn.Module:
    """The whole model on this rank's device, with attention over packed batches. Weights come from safetensors alone."""
    model, _ = from_files(AutoModelForCausalLM, path, "be loaded", dtype=dtype, **how)
    check_head(path, model)
    return model if "device_map" in how else model.to(device)


def from_files(family: type, path: str, purpose: str, **how) -> tuple[nn.Module, set[str]]:
    """The model, and which of its weights no file held. Raises ValueError, that it cannot serve its purpose, if transformers
    cannot load it."""
    how |= {"attn_implementation": attention.NAME, "use_safetensors": True, "output_loading_info": True}
    try:
        model, found = family.from_pretrained(path, **how)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model {path!r} cannot {purpose}: {str(error).splitlines()[0]}") from None
    check_found(path, found)
    return model, set(found["missing_keys"])


def check_found(path: str, found: dict) -> None:
    """Raises ValueError if the model's files lack a weight, which transformers would draw at random, or have others."""
    for name in sorted(set(found["missing_keys"]) - {MAY_LACK}):
        raise ValueError(
            f"model {path!r}: its files lack {name}; are they of the model that its config.json describes?"
        )
    for name in sorted(set(found["unexpected_keys"]) - {MAY_LEAVE}):
        raise ValueError(f"model {path!r}: its files hold {name}, which the model of its config.json has no place for")


def check_head(path: str, model: nn.Module) -> None:
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"model {path!r} has a head with a bias, which its logprobs here would leave out")


def make_empty_model(
    path: str, dtype: torch.dtype, is_scoring: bool
) -> tuple[nn.Module, dict[str, SavedWeight]] | None:
    """The model without memory for its weights, and the files that hold them; None if only transformers can load it.
    Raises ValueError as load_hf_model."""
    family = AutoModelForSequenceClassification if is_scoring else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(path, **({"num_labels": 1} if is_scoring else {}))
    if hasattr(config, "quantization_config"):
        return None
    with torch.device("meta"):
        model = family.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    weights = matching_weights(model, path)
    if weights is None or not restore_buffers(model):
        return None
    if is_scoring:
        model.config.architectures = [type(model).__name__]
    else:
        check_head(path, model)
        with suppress(OSError):  # not every model has one
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model, weights


def second_model(hf: nn.Module) -> nn.Module:
    """A model of its own modules over the weights of another, those of the other's adapters left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf.config, dtype=hf.dtype, attn_implementation=attention.NAME)
    model.requires_grad_(False)  # which the weights' own is set to
    parameters = hf.named_parameters(remove_duplicate=False)
    weights = {n.replace(".base_layer.", "."): p for n, p in parameters if ".lora_A." not in n and ".lora_B." not in n}
    model.load_state_dict(weights, strict=False, assign=True)
    assert restore_buffers(model), f"{type(model).__name__} has buffers that cannot be computed anew"
    model.generation_config = hf.generation_config
    return model.to(hf.device)


def load_scoring_model(path: str, device: torch.device) -> nn.Module:
    """A sequence classifier of one label in fp32. Its head `score` is 0, so that no reply is better than another, unless
    the folder holds a trained one."""
    model, missing = from_files(AutoModelForSequenceClassification, path, "score", num_labels=1, dtype=torch.float32)
    if MAY_LACK in missing:
        nn.init.zeros_(model.score.weight)
    model.config.architectures = [type(model).__name__]
    return model.to(device)


def local_part(value: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's part of a parameter and where it begins in the whole."""
    if not isinstance(value, DTensor):
        return value, [0] * value.ndim
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return value.to_local(), list(offset)


def local_slices(value: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter and which part of the whole it is."""
    local, start = local_part(value.detach())
    return local, tuple(slice(a, a + n) for a, n in zip(start, local.shape, strict=True))


def saved_weights(path: str) -> dict[str, SavedWeight]:
    """Name -> weight in the model's safetensors files; empty if it has none. Raises ValueError for a damaged file."""
    file = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    files = [] if file is None else [file]
    if file is None:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        files = [] if index is None else get_checkpoint_shard_files(path, index)[0]
    found = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as saved:
                for name in saved.keys():  # noqa: SIM118
                    found[name] = SavedWeight(file=file, shape=tuple(saved.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model {path!r}: {file} cannot be read: {error}") from None
    return found


def matching_weights(model: nn.Module, path: str) -> dict[str, SavedWeight] | None:
    """The files' weights by name, if they are the model's one to one: what is tied is there once. None if they are not, so
    that transformers, which can convert some, must say what is wrong. Raises ValueError if one has another shape."""
    saved, parameters = saved_weights(path), dict(model.named_parameters(remove_duplicate=False))
    aliases: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        aliases.setdefault(id(parameter), []).append(name)
    known = {n for names in aliases.values() if len(present := saved.keys() & set(names)) == 1 for n in present}
    lacking = [names for names in aliases.values() if not known & set(names) and names != [MAY_LACK]]
    may_leave = {MAY_LEAVE} if MAY_LACK in parameters else set()
    if lacking or saved.keys() - known - may_leave:
        return None
    for name in known:
        if saved[name].shape != (shape := tuple(parameters[name].shape)):
            raise ValueError(
                f"model {path!r}: {name} is {list(saved[name].shape)} in {saved[name].file}, its config.json asks for "
                f"{list(shape)}; is it of another model?"
            )
    return {name: saved[name] for name in known}


def restore_buffers(model: nn.Module) -> bool:
    """Whether all buffers that no file holds (rotary frequencies) could be computed anew on the host."""
    for module in model.modules():
        names = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if any(
            n not in module._non_persistent_buffers_set or not module._buffers[n].is_floating_point() for n in names
        ):
            return False
        for name in names:
            module._buffers[name] = torch.full_like(module._buffers[name], torch.nan, device="cpu")
        if names:
            model._init_weights(module)
        if any(module._buffers[name].isnan().any() for name in names):
            return False
    return True


def allocate(model: nn.Module, weights_on: torch.device, buffers_on: torch.device) -> None:
    """Memory for the parameters of a model without; what they hold is undefined."""
    # Not to_empty(), which would destroy the buffers. FSDP hears of it through its own _apply.
    model._apply(lambda t: torch.empty_like(t, device=weights_on) if t.is_meta else t.to(buffers_on))


@torch.no_grad()
def read_weights(model: nn.Module, weights: dict[str, SavedWeight]) -> None:
    """Fills the model, adapters excepted, from the files, in its own dtype. A rank reads only the slices that it holds."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer.", ".")  # beside it are adapters
        local, slices = local_slices(parameter)
        if name in weights and local.numel():
            # Opened for one weight: the pages that are read count as this process's until it is closed.
            with safe_open(weights[name].file, framework="pt") as saved:
                local.copy_(saved.get_slice(name)[slices] if slices else saved.get_tensor(name))
        elif name == MAY_LACK:
            nn.init.zeros_(local)
