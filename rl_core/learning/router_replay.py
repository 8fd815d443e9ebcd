"""Router replay: the learner's routers use the experts that the engine's routers chose (R3, Ma et
al. 2025, arXiv:2510.11370).

A token's experts [R, K] are stored with its completion and sample, for every token that the engine
read.

Legend: R routers, K experts that a token is routed to, n rows of S tokens in an engine's forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn

from rl_core.config import Config
from rl_core.engines.hf_sampling import CACHE_NAMES
from rl_core.learning.moe import Routers
from rl_core.types import PackedBatch, TrainingSample

KEPT = "experts"  # Name of the experts in a cache.
OWN = -1  # Marks a token whose experts the learner chooses.


def check_replay(config: Config, name: str) -> None:
    """Raises ValueError for flags that --router_replay cannot be combined with."""
    actor = config.actors[name]
    for is_given, flag in (
        (
            config.max_staleness,
            f"--max_staleness={config.max_staleness}",
        ),  # Older tokens would get the experts of newer weights.
        (config.engine_ranks, f"--engine_ranks={config.engine_ranks}"),
        (config.rollout.lagged[0], "--rollout.lagged"),
        (actor.share or config.sharers(name), "share"),
    ):
        if is_given:
            raise ValueError(
                f"--actors.{name}.router_replay=true cannot be combined with {flag}; leave one out"
            )


class Recorder:
    """Stores the experts of each token next to its keys and values, in the cache of an embedded
    engine."""

    def __init__(self, model: nn.Module):
        self.routers, decoder = Routers(model), model.get_decoder()
        decoder.register_forward_pre_hook(self.begin, with_kwargs=True)
        decoder.register_forward_hook(self.keep, with_kwargs=True)

    def begin(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Skips forwards of the learner, which may have the same model.
        if kwargs.get("slot_plan") or kwargs.get("use_cache"):
            self.routers.open()

    def keep(self, _: nn.Module, args: tuple, kwargs: dict[str, Any], outputs: Any) -> None:
        if not self.routers.is_open:
            return
        self.routers.close()
        # Shape [R, n * S, K].
        experts, plan = torch.stack(self.routers.experts).short(), kwargs.get("slot_plan")
        if plan is None:  # One row, in transformers' cache.
            cache = next(outputs[name] for name in CACHE_NAMES if name in outputs)
            before = getattr(cache, KEPT, experts[:, :0])
            setattr(cache, KEPT, torch.cat([before, experts], 1))
        else:
            # Shape [n, R, S, K].
            experts = experts.unflatten(1, (plan.rows.stop - plan.rows.start, -1)).transpose(0, 1)
            plan.write(KEPT, experts, experts[:, :1, :, :1])

    def experts_of(self, cache: Any, row: int, length: int) -> np.ndarray:
        """[length, R, K] int16 of a row's tokens."""
        kept = (
            cache.layers[KEPT][0][row]
            if hasattr(cache, "layers")
            else getattr(cache.rows[row], KEPT)
        )
        # A copy, because the row is reused.
        return kept[:, :length].transpose(0, 1).cpu().numpy().copy()


class Replay:
    """Adds the recorded experts to the batches of a learner."""

    def __init__(self, routers: Routers):
        self.shape = len(routers.modules), routers.modules[0].top_k

    def add_experts(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        """The batch with the experts of its tokens. A token that several samples share gets the
        experts of the first sample."""
        experts = np.full((len(batch.input_ids), *self.shape), OWN, np.int16)
        read = list(zip(batch.paths, samples, strict=True))
        for path, sample in reversed(read):
            if sample.experts is not None:
                known = sample.experts.reshape(-1, *self.shape)
                experts[path] = known[: len(path)]
        return dataclasses.replace(batch, experts=torch.from_numpy(experts))
