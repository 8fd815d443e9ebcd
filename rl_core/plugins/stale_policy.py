"""Older weights: a second engine of each actor that learns, which gets the newest weights every few
versions only. A part of the actor's turns goes to it (Actor.generate), so that episodes mix
policies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_core.learning.learner import Learner
from rl_core.sampling.weights import on_host

if TYPE_CHECKING:
    from rl_core.sampling.engine import Engine


@dataclass(kw_only=True)
class OlderPolicy:
    engines: dict[str, Engine | None]  # None: another rank has this actor's
    learners: Mapping[str, Learner]
    every: int  # versions between two renewals
    dtype: torch.dtype
    folder: Path | None  # where rank 0 keeps the weights for checkpoints

    async def sync(self, name: str, version: int) -> None:
        if self._is_renewed(name, version):
            await self._renew(name, self.learners[name].engine_weights(in_place=False), version)

    async def restore(self, name: str, version: int, checkpoint: Path) -> None:
        """When a run resumes, older weights are those of its checkpoint, or the newest where it has
        none."""
        if name not in self.engines or self._is_renewed(name, version):
            return
        weights, file = None, file_of(checkpoint, name)
        if file.is_file():
            with safe_open(file, framework="pt") as saved:
                version = int(saved.metadata()["version"])
            weights = load_file(file).items()
        await self._renew(
            name, weights or self.learners[name].engine_weights(in_place=False), version
        )

    def files_to_save(self, step: int) -> list[Path]:
        """Rank 0's files of weights that are older than a checkpoint's own, which it copies."""
        names = self.engines if self.folder else ()
        return [file_of(self.folder, name) for name in names if not self._is_renewed(name, step)]

    def _is_renewed(self, name: str, version: int) -> bool:
        return name in self.engines and version % self.every == 0

    async def _renew(
        self, name: str, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        """Every rank must call it: gathering a weight is a collective."""
        engine, kept = self.engines[name], {}

        def coming() -> Iterator[tuple[str, torch.Tensor]]:
            for tensor, weight in on_host(weights, self.dtype):
                if self.folder is not None:
                    kept[tensor] = weight.clone()
                yield tensor, weight

        if engine is None:
            for _ in coming():
                pass
        else:
            await engine.update(
                coming(), version, adapter=name if self.learners[name].policy.sends_adapters else ""
            )
            await engine.sleep()
        if self.folder is not None:
            file = file_of(self.folder, name)
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.name}.tmp")
            save_file(kept, beside, metadata={"version": str(version)})
            os.replace(beside, file)


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.lagged.safetensors"  # no actor's folder has such a name
