"""Adapters of several actors beside the one set of weights that an engine samples with, a row of a forward with each:
y = W x + alpha/rank B A x, as Punica (Chen et al. 2023, arXiv:2310.18547) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285) do.

Legend: n rows in a forward, S new tokens of each, I and O widths of a layer, R ranks of all adapters together, K adapters.

Every row is multiplied with all adapters, and what is not its own is set to 0 between the two products: for as few adapters
as a run has actors, that is less work than to gather matrices for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_core.sampling.weights import arriving_adapter


class AdapterTable:
    """The adapters of an engine, by name; "" is none. They act while of_rows() is entered."""

    def __init__(self, model: nn.Module):
        self.linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.spans: dict[str, slice] = {}  # of each adapter in R
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}  # A [R, I] and scaled, transposed B [R, O]
        self.arrived: dict[str, set[str]] = {}  # names of each adapter's weights
        self.num_ranks = 0  # R
        self.active: slice | None = None  # of the forward under way
        self.foreign: Tensor | None = None  # [n, 1, R], which of them are not a row's own; None: all rows have the same

    @torch.no_grad()
    def load(self, name: str, named_weights: Iterable[tuple[str, Tensor]], config: dict[str, Any]) -> None:
        """Fills an adapter, a new one too, from peft's names and adapter_config.json. Raises ValueError on a layer that the
        model does not have, on another rank than before, and on a weight that did not arrive."""
        rank, scaling = config["r"], config["lora_alpha"] / config["r"]
        if name not in self.spans:
            self.add(name, rank)
        span, arrived = self.spans[name], set()
        coming = arriving_adapter(
            name, named_weights, span.stop - span.start, self.linear, self.arrived.get(name, set())
        )
        for full, layer, kind, weight in coming:
            if layer not in self.layers:
                self.attach(layer)
            self.layers[layer][kind == "lora_B"][span].copy_(weight if kind == "lora_A" else scaling * weight.T)
            arrived.add(full)
        self.arrived[name] = arrived

    def add(self, name: str, rank: int) -> None:
        self.spans[name] = slice(self.num_ranks, self.num_ranks + rank)
        self.num_ranks += rank
        self.layers = {n: tuple(F.pad(x, (0, 0, 0, rank)) for x in pair) for n, pair in self.layers.items()}

    def attach(self, layer: str) -> None:
        module = self.linear[layer]
        widths = (module.in_features, module.out_features)
        self.layers[layer] = tuple(module.weight.new_zeros(self.num_ranks, width) for width in widths)
        module.register_forward_hook(partial(self.add_products, layer))

    @contextmanager
    def of_rows(self, names: list[str]) -> Iterator[None]:
        """A context in which row i of a forward is computed with the adapter names[i]."""
        used = set(names)
        if len(used) == 1:
            self.active = self.spans.get(names[0])
        else:
            self.active = slice(0, self.num_ranks)
            owned = torch.zeros(len(used), self.num_ranks, dtype=torch.bool)
            rows = {name: i for i, name in enumerate(used)}
            for name, row in rows.items():
                owned[row, self.spans.get(name, slice(0))] = True
            self.foreign = ~owned[[rows[name] for name in names], None].to(next(iter(self.layers.values()))[0].device)
        try:
            yield
        finally:
            self.active = self.foreign = None

    def add_products(self, layer: str, module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        """Adds B A x to what the layer gave."""
        if self.active is None:
            return
        a_RI, b_RO = (x[self.active] for x in self.layers[layer])
        inner = F.linear(args[0], a_RI)  # [n, S, R]
        if self.foreign is not None:
            inner.masked_fill_(self.foreign, 0)
        out.view(-1, out.shape[-1]).addmm_(inner.view(-1, inner.shape[-1]), b_RO)
