"""Checks weights on their way from a learner to an engine: names, shapes, none missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_core.rules import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def arriving(
    model: PreTrainedModel, named_weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name, weight, the model's tensor that it replaces). Raises ValueError on an unknown
    name, another shape, or, at the end, a missing parameter. Of a tied head and its embedding the
    first comes. The model may be on "meta"."""
    targets = model.state_dict(keep_vars=True)
    loaded = set()
    for name, weight in named_weights:
        if name not in targets:
            raise ValueError(
                f"weight {name!r} is not in {type(model).__name__}; send its own state_dict's names"
            )
        if weight.shape != targets[name].shape:
            raise ValueError(
                f"weight {name!r} has shape {list(weight.shape)}, not {list(targets[name].shape)}"
            )
        if id(targets[name]) not in loaded:
            yield name, weight, targets[name]
        loaded.add(id(targets[name]))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in loaded]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters did not arrive, such as {missing[0]!r}; send all of them"
        )


def arriving_adapter(
    name: str,
    named_weights: Iterable[tuple[str, Tensor]],
    rank: int,
    layers: Mapping[str, nn.Linear],
    before: set[str],
) -> Iterator[tuple[str, str, str, Tensor]]:
    """Yields (peft's name, layer, "lora_A" or "lora_B", weight) of an adapter. Raises ValueError on
    a layer that is not in `layers`, another shape, or, at the end, a missing matrix: one of a
    layer's pair, or one that came in `before`."""
    arrived = set()
    for full, weight in named_weights:
        layer, _, kind = (
            full.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        )
        if layer not in layers or kind not in ("lora_A", "lora_B"):
            raise ValueError(
                f"adapter {name!r}: {full!r} is of no linear layer; {nearest(layer, layers)}"
            )
        module = layers[layer]
        if weight.shape != (
            (rank, module.in_features) if kind == "lora_A" else (module.out_features, rank)
        ):
            raise ValueError(
                f"adapter {name!r}: {full!r} has shape {list(weight.shape)}, its rank is {rank}"
            )
        yield full, layer, kind, weight
        arrived.add(full)
    pairs = {
        full.replace(*kinds)
        for full in arrived
        for kinds in ((".lora_A.", ".lora_B."), (".lora_B.", ".lora_A."))
    }
    if missing := sorted((pairs | before) - arrived):
        raise ValueError(
            f"adapter {name!r}: {len(missing)} weights did not arrive, such as {missing[0]!r}"
        )


@torch.no_grad()
def load_weights(model: PreTrainedModel, named_weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight into the model. Raises as `arriving`."""
    for _, weight, target in arriving(model, named_weights):
        target.copy_(weight)


def on_host(
    named_weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The weights on the CPU, floating-point ones in dtype, ready for a file."""
    for name, weight in named_weights:
        yield (
            name,
            weight.detach()
            .to("cpu", dtype if weight.is_floating_point() else weight.dtype)
            .contiguous(),
        )
