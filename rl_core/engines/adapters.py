"""Adapters of several actors over one model, in one batch: each row of a forward has its own.
y = W x + alpha/rank B A x, as Punica (Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al.
2023, arXiv:2311.03285) do.

Legend: n rows in a forward, S new tokens of each, I and O widths of a layer, R ranks of all
adapters together, K adapters.

Rows of one adapter are multiplied with it. Otherwise every row is multiplied with all adapters, and
between the two products the parts of other adapters are set to 0. A run has few adapters, so this
is less work than gathering matrices for each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_core.engines.weights import NamedWeights, arriving
from rl_core.types import JSONObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AdapterTable:
    """The adapters of an engine by name; "" is none. `configs`: the
    content of each adapter_config.json. Adapters act inside `of_rows`."""

    def __init__(self, model: PreTrainedModel, configs: dict[str, JSONObject]):
        self.model, self.configs = model, configs
        self.numbers = {"": 0}
        self.spans: dict[str, slice] = {}  # Ranks of each adapter, a slice of R.
        owners: list[int] = []
        for number, (name, config) in enumerate(configs.items(), 1):
            self.numbers[name] = number
            self.spans[name] = slice(len(owners), len(owners) + config["r"])
            owners += [number] * config["r"]
        self.owners = torch.tensor(owners, device=model.device)  # [R] number of the adapter
        # A [R, I] and scaled, transposed B [R, O].
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}
        self.head = ""  # Name of the head; "" if it has no adapters.
        self.used = slice(0, 0)  # Ranks of the adapters in a forward.
        self.others: Tensor | None = None  # [n, 1, R] ranks of other adapters; None if all are used

    @torch.no_grad()
    def load(self, name: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fills an adapter from peft's (name, tensor) pairs. Raises as arriving_adapter."""
        span, config = self.spans[name], self.configs[name]
        for full, weight in arriving_adapter(name, weights, config, self.model):
            layer, kind = full.removeprefix("base_model.model.").split(".lora_")
            if layer not in self.layers:
                self.add_layer(layer)
            a_RI, b_RO = self.layers[layer]
            if kind == "A.weight":
                a_RI[span].copy_(weight)
            else:
                b_RO[span].copy_(config["lora_alpha"] / config["r"] * weight.T)

    def add_layer(self, layer: str) -> None:
        module, num_ranks = cast(nn.Linear, self.model.get_submodule(layer)), len(self.owners)
        a_RI = module.weight.new_zeros(num_ranks, module.in_features)
        b_RO = module.weight.new_zeros(num_ranks, module.out_features)
        self.layers[layer] = a_RI, b_RO
        if module is self.model.get_output_embeddings():
            self.head = layer
        else:
            module.register_forward_hook(partial(self.add_products, layer))

    @contextmanager
    def of_rows(self, names: list[str]) -> Iterator[None]:
        """Inside, row i of a forward uses the adapter names[i]."""
        if len(set(names)) == 1:
            self.used = self.spans.get(names[0], slice(0, 0))
        else:
            self.used = slice(0, len(self.owners))
            rows = torch.tensor([[[self.numbers[name]]] for name in names])
            device = self.owners.device
            self.others = rows.to(device, non_blocking=device.type == "cuda") != self.owners
        try:
            yield
        finally:
            self.used, self.others = slice(0, 0), None

    def add_products(self, layer: str, module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        """Adds B A x to the layer's output."""
        if self.used.start == self.used.stop:
            return
        a_RI, b_RO = (factor[self.used] for factor in self.layers[layer])
        inner = F.linear(args[0], a_RI)  # [n, S, R]
        if self.others is not None:
            inner.masked_fill_(self.others, 0)
        out.view(-1, out.shape[-1]).addmm_(inner.view(-1, inner.shape[-1]), b_RO)

    def head_products(self, hidden: Tensor, logits: Tensor) -> None:
        """Adds B A x of the head, which must have adapters, to logits [n, V]: engines compute the
        logits without its module."""
        module = self.model.get_submodule(self.head)
        self.add_products(self.head, module, (hidden[:, None],), logits)


def arriving_adapter(
    name: str, named_weights: NamedWeights, config: JSONObject, model: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Yields the (peft's name, weight) pairs of an adapter. Raises as `arriving`."""
    targets = adapter_targets(config, model)
    for full, weight, _ in arriving(named_weights, targets, targets, owner=f"adapter {name!r}"):
        yield full, weight


def adapter_targets(config: JSONObject, model: nn.Module) -> dict[str, Tensor]:
    """peft's names of an adapter's matrices -> their shapes, on "meta". config: the
    content of adapter_config.json."""
    targets, rank = {}, config["r"]
    excluded = config.get("exclude_modules") or "(?!)"
    for layer, module in model.named_modules():
        is_target = layer.rpartition(".")[2] in config["target_modules"]
        if is_target and isinstance(module, nn.Linear) and not re.fullmatch(excluded, layer):
            name = f"base_model.model.{layer}"
            shapes = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
            for kind, shape in shapes.items():
                targets[f"{name}.{kind}.weight"] = torch.empty(shape, device="meta")
    return targets
