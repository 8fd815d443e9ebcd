"""Stale weights: each actor that learns has a second engine, whose weights are updated only every
few versions. A fraction of the actor's turns is sampled by it (Actor.generate), so that episodes
mix policies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rl_core.data.episodes import succeeded
from rl_core.engines.weights import on_host
from rl_core.metrics import Mean, Metric
from rl_core.plugin import Plugin, RunState
from rl_core.sampling.actor import Actor
from rl_core.sampling.groups import Group
from rl_core.sampling.rollout import sorted_trajectories
from rl_core.types import Trajectory

if TYPE_CHECKING:
    from rl_core.actors import ActorRuntime


class StalePolicy(Plugin):
    """Rank 0 keeps the stale weights in a file, for checkpoints."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.every: int = (
            trainer.config.rollout.stale_policy_refresh
        )  # Versions between two updates.
        self.folder = trainer.out / "older"

    async def start(self) -> None:
        """Loads the stale weights of the checkpoint if the run resumes between two updates, or the
        newest weights if the checkpoint has none."""
        trainer, version = self.trainer, self.trainer.first_step
        if version % self.every == 0:
            return
        assert trainer.checkpoint is not None
        for name in trainer.learners:
            async with trainer.actors[name].learning() as learner:
                weights, version = learner.engine_weights(), trainer.first_step
                file = file_of(trainer.checkpoint, name)
                if file.is_file():
                    with safe_open(file, framework="pt") as saved:
                        version = int(saved.metadata()["version"])
                    weights = load_file(file).items()
                await self._renew(trainer.actors[name], weights, version)
        await trainer.resume()

    async def after_sync(self, actor: str, version: int) -> None:
        if version % self.every == 0:
            weights = self.trainer.learners[actor].engine_weights()
            await self._renew(self.trainer.actors[actor], weights, version)

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        trajectories = sorted_trajectories(groups)
        for name in self.trainer.learners:
            of_actor = [t for t in trajectories if t.actor == name]
            self.trainer.add_metrics(f"rollout/{name}/", lag_metrics(of_actor, step))

    async def files(self, scratch: Path) -> list[Path]:
        """Files of weights that are older than those of the checkpoint."""
        trainer = self.trainer
        if trainer.ranks.rank or trainer.step % self.every == 0:
            return []
        return [file_of(self.folder, name) for name in trainer.learners]

    async def _renew(
        self, actor: ActorRuntime, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Sends weights to the stale engine. Every rank must call it: gathering is a collective."""
        assert weights is not None and isinstance(actor.speaker, Actor) and actor.learner
        learner = actor.learner
        engine, is_writer = actor.speaker.stale_engine, self.trainer.ranks.is_writer
        kept: dict[str, torch.Tensor] = {}

        def coming() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in on_host(weights, learner.policy.compute_dtype):
                if is_writer:
                    kept[name] = weight.clone()
                yield name, weight

        if engine is None:
            for _ in coming():
                pass
        else:
            await engine.update(coming(), version, adapter=actor.adapter)
            await engine.sleep()
        if is_writer:
            file = file_of(self.folder, actor.name)
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = file.with_name(f".{file.name}.tmp")
            save_file(kept, scratch, metadata={"version": str(version)})
            os.replace(scratch, file)


def lag_metrics(trajectories: list[Trajectory], version: int) -> dict[str, Metric]:
    """Fraction of tokens sampled by weights older than `version`, and the mean age of these tokens
    in versions."""
    lags = []
    for trajectory in succeeded(trajectories):
        for turn in trajectory.turns:
            lags += [version - v for v in turn.completion.policy_versions]
    older = [lag for lag in lags if lag > 0]
    metrics: dict[str, Metric] = {"lagged_frac": Mean(len(older), len(lags))}
    if older:
        metrics["lag_versions"] = Mean(sum(older), len(older))
    return metrics


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.lagged.safetensors"  # Actors' folders have no such names.
