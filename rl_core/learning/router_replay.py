"""Router replay: the learner's routers use the experts that the engine's routers chose (R3, Ma et
al. 2025, arXiv:2510.11370).

A token's experts [R, K] are stored with its completion and sample, for every token that the engine
read.

Legend: R routers, K experts that a token is routed to, n rows of S tokens in an engine's forward.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel

from rl_core.config import Config
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.models.routers import find_routers
from rl_core.types import PackedBatch, TrainingSample

OWN = -1  # Marks a token whose experts the learner chooses.


def check_replay(config: Config, name: str) -> None:
    """Raises ValueError for flags that --router_replay cannot be combined with."""
    actor = config.actors[name]
    for is_given, flag in (
        (
            config.max_staleness,
            f"--max_staleness={config.max_staleness}",
        ),  # Older tokens would get the experts of newer weights.
        (config.rollout_ranks, f"--rollout_ranks={config.rollout_ranks}"),
        (config.rollout.stale_policy_frac, "--rollout.stale_policy_frac"),
        (actor.lora_base or config.sharers(name), "lora_base"),
    ):
        if is_given:
            raise ValueError(
                f"--actors.{name}.router_replay=true cannot be combined with {flag}; remove one"
            )


class RouterReplay(LearnerExtension):
    """Adds the recorded experts to the batches of a learner."""

    def __init__(self, hf: PreTrainedModel):
        routers = find_routers(hf)[1]
        self.shape = len(routers), cast(int, routers[0].top_k)

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        """The batch with the experts of its tokens. A token that several samples share gets the
        experts of the first sample."""
        experts = np.full((len(batch.input_ids), *self.shape), OWN, np.int16)
        read = list(zip(batch.paths, samples, strict=True))
        for path, sample in reversed(read):
            if sample.experts is not None:
                known = sample.experts.reshape(-1, *self.shape)
                experts[path] = known[: len(path)]
        return dataclasses.replace(batch, experts=torch.from_numpy(experts))
