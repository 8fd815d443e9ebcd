"""Adapters beside a frozen model, through peft: y = W x + alpha/rank B A x (LoRA, Hu et al. 2021, arXiv:2106.09685), where
W may be held in 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from rl_core.config import LoraConfig
from rl_core.distributed import whole
from rl_core.learning.loading import local_slices
from rl_core.types import counter_seed

if TYPE_CHECKING:
    import peft

DEFAULT = "default"  # peft's name of an adapter, which exports and checkpoints have in the names of its weights


def check_lora(lora: LoraConfig, model_config: PretrainedConfig) -> None:
    """Raises ValueError if the model has no such layers or a rank is larger than a layer, before any weight is read."""
    if not lora.rank:
        return
    with torch.device("meta"):
        layers = linear_layers(AutoModelForCausalLM.from_config(model_config))
    names = target_names(lora, layers)
    known = sorted({name.rpartition(".")[2] for name in layers})
    if unknown := [n for n in names if n not in known]:
        raise ValueError(
            f"--actors.policy.lora.targets={lora.targets}: {unknown[0]!r} is no linear layer of a block of this model; "
            f"take some of {', '.join(known)}, or all-linear"
        )
    sizes = {n: min(m.in_features, m.out_features) for n, m in layers.items() if n.rpartition(".")[2] in names}
    smallest = min(sizes, key=sizes.get)
    if lora.rank > sizes[smallest]:
        raise ValueError(
            f"--actors.policy.lora.rank={lora.rank} is larger than the rank of {smallest}; take at most {sizes[smallest]}, "
            "or other targets"
        )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Name -> layer, without the head, whose weight the logprobs take as it is."""
    head = model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}


def target_names(lora: LoraConfig, layers: dict[str, nn.Linear]) -> list[str]:
    if lora.targets == "all-linear":
        return sorted({name.rpartition(".")[2] for name in layers})
    return [name.strip() for name in lora.targets.split(",")]


def adapter_size(lora: LoraConfig, layers: dict[str, nn.Linear]) -> int:
    """Parameters of all adapters."""
    chosen = [m for n, m in layers.items() if n.rpartition(".")[2] in target_names(lora, layers)]
    return sum(lora.rank * (m.in_features + m.out_features) for m in chosen)


def quantization(lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> dict:
    """What from_pretrained needs to hold the linear layers in 4 bits."""
    if lora.quantize == "none":
        return {}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=lora.quantize, bnb_4bit_compute_dtype=dtype)
    return {"quantization_config": config, "device_map": {"": device}}


def add_adapters(model: nn.Module, loras: dict[str, LoraConfig], path: str) -> dict[str, peft.LoraConfig]:
    """Freezes the model and puts fp32 adapters beside its layers, several by name; draw_adapters() fills them."""
    import peft

    configs = {name: peft_config(lora, model, path) for name, lora in loras.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # of another actor, which is meant
        for name, config in configs.items():
            peft.inject_adapter_in_model(config, model, name)
    for name in loras:
        for _, parameter in adapter_parameters(model, name):
            parameter.data = torch.zeros(parameter.shape, device=parameter.device)
            parameter.requires_grad_(True)  # of several, which peft leaves to its version
    return configs


def peft_config(lora: LoraConfig, model: nn.Module, path: str) -> peft.LoraConfig:
    """Of an adapter for the model at `path`, which has none yet."""
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=target_names(lora, linear_layers(model)),
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )


@torch.no_grad()
def draw_adapters(model: nn.Module, seed: int, adapter: str = DEFAULT) -> None:
    """An adapter as training begins with it, alike for any number of ranks and other adapters: A is random, B is 0."""
    for name, parameter in adapter_parameters(model, adapter):
        draw = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(counter_seed(seed, "lora", name))
            nn.init.kaiming_uniform_(draw, a=5**0.5, generator=generator)
        local, slices = local_slices(parameter)
        local.copy_(draw[slices])


def adapter_parameters(model: nn.Module, adapter: str = DEFAULT) -> Iterator[tuple[str, nn.Parameter]]:
    """Of one adapter, by the names that they would have if it were alone."""
    for name, parameter in model.named_parameters():
        if f".lora_A.{adapter}." in name or f".lora_B.{adapter}." in name:
            yield name.replace(f".{adapter}.", f".{DEFAULT}."), parameter


def adapter_weights(model: nn.Module, adapter: str = DEFAULT) -> Iterator[tuple[str, Tensor]]:
    """(peft's name, full tensor) of each matrix of an adapter. Every rank must exhaust it."""
    for name, parameter in adapter_parameters(model, adapter):
        yield f"base_model.model.{name.replace(f'.{DEFAULT}.', '.')}", whole(parameter.detach())


def merged_weights(model: nn.Module, adapter: str | None = DEFAULT) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) with an adapter added, W + alpha/rank B A, and nothing in 4 bits; a tied weight comes
    once. Every rank must exhaust it."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            continue
        layer_name, _, kind = name.rpartition(".")
        layer, value = model.get_submodule(layer_name), whole(parameter.detach())
        if kind == "weight" and (quant_state := getattr(layer, "quant_state", None)) is not None:
            from bitsandbytes.functional import dequantize_4bit

            value = dequantize_4bit(value, quant_state)
        owner_name = layer_name.removesuffix(".base_layer")
        if kind == "weight" and owner_name != layer_name:
            owner = model.get_submodule(owner_name)
            if adapter in owner.lora_A:
                a_RD, b_DR = (whole(part[adapter].weight.detach()) for part in (owner.lora_A, owner.lora_B))
                value = value.float() + owner.scaling[adapter] * (b_DR @ a_RD)
        yield f"{owner_name}.{kind}", value
