"""Older weights: a second engine of each actor that learns, which gets the newest weights every few steps only. A part of the
actor's turns goes to it (Actor.generate), so that episodes mix policies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from rl_core.sampling.weights import on_host

if TYPE_CHECKING:
    from rl_core.sampling.engine import Engine


async def renew(
    older: Engine | None,
    weights: Iterable[tuple[str, torch.Tensor]],
    version: int,
    dtype: torch.dtype,
    file: Path | None = None,
) -> None:
    """The older engine gets these weights. They are kept in `file`, if one is given, for checkpoints. Every rank must call
    it: gathering a weight is a collective."""
    kept = {}

    def coming() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in on_host(weights, dtype):
            if file is not None:
                kept[name] = weight.clone()
            yield name, weight

    if older is None:
        for _ in coming():
            pass
    else:
        await older.update(coming(), version)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.tmp")
        save_file(kept, beside, metadata={"version": str(version)})
        os.replace(beside, file)
