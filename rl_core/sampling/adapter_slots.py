"""An adapter as a server reads it: a folder as peft writes it, one for each version, in a form that SGLang can load."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_core.sampling.shared_folder import SharedFolder

# SGLang computes each of these as one layer, and loads no adapter for a part of it: zeros stand for the others.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(kw_only=True, slots=True)
class Slot:
    """An actor's adapter at a server."""

    name: str  # there, of this version alone: a name that comes again would keep the adapter that it has
    version: int
    folder: SharedFolder  # what it holds, for another server if this one dies
    arrived: set[str]  # names of its weights
    was_aborted: bool = False  # a request for it


def save_adapter(
    folder: Path,
    arriving: Iterable[tuple[str, str, str, Tensor]],
    config: dict[str, Any],
    layers: Mapping[str, nn.Linear],
    dtype: torch.dtype,
) -> set[str]:
    """Writes adapter_config.json and adapter_model.safetensors, and gives the names of what came: what arriving_adapter
    yields, from whom layers are."""
    rank, found, filled = config["r"], {}, {}
    for full, layer, kind, weight in arriving:
        found[full] = weight.detach().to("cpu", dtype).contiguous()
        parent, _, own = layer.rpartition(".")
        for other in next((parts for parts in FUSED if own in parts), ()):
            if module := layers.get(f"{parent}.{other}"):
                shape = (rank, module.in_features) if kind == "lora_A" else (module.out_features, rank)
                filled[f"base_model.model.{parent}.{other}.{kind}.weight"] = torch.zeros(shape, dtype=dtype)
    save_file(filled | found, folder / "adapter_model.safetensors")
    targets = sorted({full.split(".")[-3] for full in filled | found})
    read = {"peft_type": "LORA", "r": rank, "lora_alpha": config["lora_alpha"], "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(read))
    return set(found)
