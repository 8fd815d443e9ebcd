"""Checks weights on their way from a learner to an engine: names, shapes, none missing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.sampling.engine import NamedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def arriving(
    named_weights: NamedWeights, targets: Mapping[str, Tensor], needed: Iterable[str], owner: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name, weight, target to overwrite). Raises ValueError on an unknown name, a wrong
    shape, or, at the end, a missing weight of `needed`. A tied head and its embedding are one
    target: only the first of them is yielded."""
    loaded = set()
    for name, weight in named_weights:
        if name not in targets:
            raise ValueError(f"weight {name!r} is not in {owner}; send its own names")
        target = targets[name]
        if weight.shape != target.shape:
            raise ValueError(
                f"weight {name!r} of {owner} has shape {list(weight.shape)}, not "
                f"{list(target.shape)}"
            )
        if id(target) not in loaded:
            yield name, weight, target
        loaded.add(id(target))
    missing = [name for name in needed if id(targets[name]) not in loaded]
    if missing:
        raise ValueError(
            f"{len(missing)} weights of {owner} did not arrive, such as {missing[0]!r}; send all"
        )


def arriving_at(
    model: PreTrainedModel, named_weights: NamedWeights
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Same as `arriving`, for the parameters and buffers of a model, which may be on "meta"."""
    needed = [name for name, _ in model.named_parameters()]
    return arriving(
        named_weights, model.state_dict(keep_vars=True), needed, owner=type(model).__name__
    )


@torch.no_grad()
def load_weights(model: PreTrainedModel, named_weights: NamedWeights) -> None:
    """Copies every weight into the model. Raises the errors of `arriving`."""
    for _, weight, target in arriving_at(model, named_weights):
        target.copy_(weight)


def on_host(named_weights: NamedWeights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Contiguous weights on the CPU, floating-point ones in dtype, ready to be saved."""
    for name, weight in named_weights:
        saved_dtype = dtype if weight.is_floating_point() else weight.dtype
        yield name, weight.detach().to("cpu", saved_dtype).contiguous()


def checkpoint_weights(hf: PreTrainedModel, named: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """The weights as published checkpoints of this model have them, such as one tensor per expert.
    Weights of one layer must be consecutive, as in named_weights()."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    from rl_core.models.loading import save_as_published

    save_as_published(hf)
    conversions = get_model_conversion_mapping(hf, add_legacy=False)
    if not conversions and not getattr(hf, "_weight_conversions", None):
        yield from named
        return
    for _, layer in itertools.groupby(named, lambda item: layer_number(item[0])):
        yield from revert_weight_conversion(hf, dict(layer)).items()


def layer_number(name: str) -> str:
    return next((word for word in name.split(".") if word.isdigit()), "")
