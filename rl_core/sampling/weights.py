"""Weights on their way from a learner to an engine: each is known, has its shape, and none is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def arriving(
    model: PreTrainedModel, named_weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, weight, what it replaces in the model) of each. ValueError on an unknown name, another shape, or, at the end, a
    parameter left out; a tied head is the embedding under another name. The model may have shapes alone, on "meta"."""
    targets = model.state_dict(keep_vars=True)
    loaded = set()
    for name, weight in named_weights:
        if name not in targets:
            raise ValueError(f"weight {name!r} is not in {type(model).__name__}; send its own state_dict's names")
        if weight.shape != targets[name].shape:
            raise ValueError(f"weight {name!r} has shape {list(weight.shape)}, not {list(targets[name].shape)}")
        yield name, weight, targets[name]
        loaded.add(id(targets[name]))
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in loaded]
    if missing:
        raise ValueError(f"{len(missing)} parameters did not arrive, such as {missing[0]!r}; send all of them")


@torch.no_grad()
def load_weights(model: PreTrainedModel, named_weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every weight into the model. Raises as `arriving`."""
    for _, weight, target in arriving(model, named_weights):
        target.copy_(weight)


def on_host(named_weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights, numbers in dtype, as they can be written to a file."""
    for name, weight in named_weights:
        yield name, weight.detach().to("cpu", dtype if weight.is_floating_point() else weight.dtype).contiguous()
