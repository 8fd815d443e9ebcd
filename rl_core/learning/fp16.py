"""fp16 with dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), for
GPUs that lack bf16. Gradients of a scaled loss stay above fp16's least number, 6e-8.

As torch.amp.GradScaler: the scale halves where a gradient overflows, and that update is left out;
it doubles after 2,000 updates without an overflow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_core.distributed import local
from rl_core.learning.learner import Learner, Metrics
from rl_core.learning.minibatches import Minibatch
from rl_core.metrics import Mean, count_once, reduce_metrics

FIRST_SCALE, GROWTH_UPDATES = 2.0**16, 2_000


class ScaledLearner(Learner):
    """A Learner that multiplies its losses by `scale` before the backward, and divides the
    gradients by it after."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.scale = FIRST_SCALE
        self.finite_in_a_row = 0  # updates since the scale changed

    def update(self, minibatch: Minibatch, step: float) -> tuple[Metrics, bool]:
        num_before = self.num_updates
        metrics, is_done = super().update(minibatch, step)
        self.finite_in_a_row += self.num_updates - num_before
        if self.finite_in_a_row == GROWTH_UPDATES:
            self.scale *= 2
            self.finite_in_a_row = 0
        return metrics | {"loss_scale": Mean(self.scale)}, is_done

    def clip_gradients(self) -> Tensor:
        grads = [p.grad for _, p in self.trained_parameters() if p.grad is not None]
        torch._foreach_mul_([local(grad) for grad in grads], 1 / self.scale)
        return super().clip_gradients()

    def skip(self, metrics: Metrics, grad_norm: float, step: float) -> Metrics:
        """Halves the scale of the next update if the loss is finite, since then the gradient
        overflowed. At a scale of 1 the update counts as not finite."""
        self.finite_in_a_row = 0
        loss = reduce_metrics({"loss": metrics["loss"]}, self.ranks)["loss"]
        if self.scale <= 1 or not math.isfinite(loss):
            return super().skip(metrics, grad_norm, step)
        self.scale /= 2
        return {"overflowed_updates": count_once(self.ranks)}

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "finite_in_a_row": self.finite_in_a_row}

    def load_state(self, state: dict[str, float]) -> None:
        """Restores the scale. `state` is empty after a run in another dtype."""
        self.scale = state.get("scale", self.scale)
        self.finite_in_a_row = int(state.get("finite_in_a_row", 0))
