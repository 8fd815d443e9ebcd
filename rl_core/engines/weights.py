"""Checks weights on their way from a learner to an engine: names, shapes, none missing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_core.sampling.engine import NamedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE_BYTES = 256 << 20  # Bytes of experts converted at once; conversion copies them.


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
        del weight  # Its memory is free before the next one is gathered.
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
        del weight


def on_host(named_weights: NamedWeights, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Contiguous weights on the CPU, floating-point ones in dtype, ready to be saved."""
    for name, weight in named_weights:
        saved_dtype = dtype if weight.is_floating_point() else weight.dtype
        yield name, weight.detach().to("cpu", saved_dtype).contiguous()
        del weight


def checkpoint_weights(hf: PreTrainedModel, named: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """The weights as published checkpoints of this model have them, such as one tensor per expert.
    Weights of one layer must be consecutive, as in named_weights(). One stack of experts is held at
    a time, and PIECE_BYTES of it in the published form. Raises the errors of `arriving`."""
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    from rl_core.models.loading import save_as_published

    save_as_published(hf)
    conversions = hf.__dict__["_weight_conversions"]
    named = map(itemgetter(0, 1), arriving_at(hf, named))
    if not conversions:
        yield from named
        return
    revert = partial(revert_weight_conversion, hf)
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    # Converted together with the layer, which some renamings need too.
    merging = [c.reverse_transform() for c in converters if len(c.target_patterns) > 1]
    for _, layer in itertools.groupby(named, lambda item: layer_number(item[0])):
        together = {}
        for name, weight in layer:
            if weight.ndim != 3 or any(c.rename_source_key(name)[1] for c in merging):
                together[name] = weight
            else:
                yield from published(revert, name, weight)
            del weight
        yield from revert(together).items()


def published(
    revert: Callable[[dict[str, Tensor]], dict[str, Tensor]], name: str, weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `revert` makes of a weight, for PIECE_BYTES of its experts at a time if it
    makes tensors of each expert."""
    names = [*revert({name: weight.to("meta")})] if weight.ndim == 3 else []
    if not names or len(names) % len(weight):
        yield from revert({name: weight}).items()
        return
    num = len(weight)
    # All experts' first matrices, then all second ones.
    of_kinds = [names[i : i + num] for i in range(0, len(names), num)]
    step = max(1, num * PIECE_BYTES // weight.nbytes)
    for first in range(0, num, step):
        piece = weight[first : first + step]
        of_piece = itertools.chain(*(kind[first : first + step] for kind in of_kinds))
        yield from zip(of_piece, revert({name: piece}).values(), strict=True)


def layer_number(name: str) -> str:
    return next((word for word in name.split(".") if word.isdigit()), "")
