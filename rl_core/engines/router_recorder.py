"""Records the experts of each token in the cache of an embedded engine for router replay (R3, Ma et
al. 2025, arXiv:2510.11370).

R routers, K experts per token, n rows of S tokens in a forward of the engine.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rl_core.engines.hf_sampling import CACHE_NAMES, RowCaches
from rl_core.engines.kv_slots import SlotCache
from rl_core.learning.moe import Routers
from rl_core.types import AnyJSON

KEPT = "experts"  # Name of the cache's entry.


class Recorder:
    """Keeps the experts of each token with its keys and values, in the cache of an embedded
    engine."""

    def __init__(self, model: PreTrainedModel):
        self.routers, decoder = Routers(model), model.get_decoder()
        decoder.register_forward_pre_hook(self.begin, with_kwargs=True)
        decoder.register_forward_hook(self.keep, with_kwargs=True)

    def begin(self, _: nn.Module, args: tuple, kwargs: dict[str, AnyJSON]) -> None:
        # Not the learner, which may have the same model.
        if kwargs.get("slot_plan") or kwargs.get("use_cache"):
            self.routers.open()

    def keep(self, _: nn.Module, args: tuple, kwargs: dict[str, AnyJSON], output: AnyJSON) -> None:
        if not self.routers.is_open:
            return
        self.routers.close()
        # [R, n * S, K].
        experts, plan = torch.stack(self.routers.experts).short(), kwargs.get("slot_plan")
        if plan is None:  # One row, in the cache of transformers.
            cache = next(output[name] for name in CACHE_NAMES if name in output)
            before = getattr(cache, KEPT, experts[:, :0])
            setattr(cache, KEPT, torch.cat([before, experts], 1))
        else:
            # [n, R, S, K].
            experts = experts.unflatten(1, (plan.rows.stop - plan.rows.start, -1)).transpose(0, 1)
            plan.write(KEPT, experts, experts[:, :1, :, :1])

    def experts_of(self, cache: SlotCache | RowCaches, row: int, length: int) -> np.ndarray:
        """[length, R, K] int16 of a row's tokens."""
        if isinstance(cache, RowCaches):
            kept = getattr(cache.rows[row], KEPT)
        else:
            kept = cache.layers[KEPT][0][row]
        return kept[:, :length].transpose(0, 1).cpu().numpy().copy()  # the row gets other tokens
