"""fp16 with dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), for
GPUs that lack bf16. Gradients of a scaled loss stay above fp16's least number, 6e-8.

As in torch.amp.GradScaler the scale halves if a gradient overflows, and that update is skipped; the
scale doubles after 2,000 updates without an overflow."""

from __future__ import annotations

import math

import torch

from rl_core.distributed import local
from rl_core.learning.learner_context import ExtendedLearner, Metrics
from rl_core.learning.learner_extension import LearnerExtension
from rl_core.metrics import Mean, count_once

FIRST_SCALE, GROWTH_UPDATES = 2.0**16, 2_000


class LossScale(LearnerExtension):
    """Multiplies losses by a scale before the backward, and divides their gradients by it after."""

    def __init__(self):
        self.loss_scale = FIRST_SCALE
        self.finite_in_a_row = 0  # Updates since the scale changed.

    def after_backward(self, learner: ExtendedLearner) -> None:
        grads = [p.grad for _, p in learner.trained_parameters() if p.grad is not None]
        torch._foreach_mul_([local(grad) for grad in grads], 1 / self.loss_scale)

    def skipped(self, learner: ExtendedLearner, loss: float) -> Metrics | None:
        """Halves the scale if the loss is finite, so that its gradient overflowed. At a scale of 1
        the update counts as any other that is not finite."""
        self.finite_in_a_row = 0
        if self.loss_scale <= 1 or not math.isfinite(loss):
            return None
        self.loss_scale /= 2
        return {"overflowed_updates": count_once(learner.ranks)} | self.metrics()

    def after_update(self) -> Metrics:
        self.finite_in_a_row += 1
        if self.finite_in_a_row == GROWTH_UPDATES:
            self.loss_scale *= 2
            self.finite_in_a_row = 0
        return self.metrics()

    def metrics(self) -> Metrics:
        return {"loss_scale": Mean(self.loss_scale)}

    def state(self) -> dict[str, float]:
        return {"scale": self.loss_scale, "finite_in_a_row": self.finite_in_a_row}

    def load_state(self, state: dict[str, float]) -> None:
        """A run in another dtype has saved no scale."""
        self.loss_scale = state.get("scale", self.loss_scale)
        self.finite_in_a_row = int(state.get("finite_in_a_row", 0))
