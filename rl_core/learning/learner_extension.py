"""The interface of a learner's extensions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from rl_core.learning.learner_context import ExtendedLearner, Metrics
from rl_core.learning.minibatches import Minibatch
from rl_core.models.policy import Outputs, Policy
from rl_core.types import PackedBatch, TrainingSample

if TYPE_CHECKING:
    from rl_core.learning.lagged_copy import WeightSnapshot


class LearnerExtension:
    """Extends a learner by an option: a reference model, a critic, an auxiliary router loss. An
    extension changes only its own state. All ranks have the same extensions."""

    models: tuple[Policy, ...] = ()  # Frozen models.
    learners: tuple[ExtendedLearner, ...] = ()  # Learners of further models.
    copies: tuple[WeightSnapshot, ...] = ()  # Updated after each step.
    loss_scale = 1.0  # Multiplies the loss before backward(); after_backward() undoes it.

    def packed(self, batch: PackedBatch, samples: list[TrainingSample]) -> PackedBatch:
        """Returns the batch, extended by further columns of its samples."""
        return batch

    def around(self, batch: PackedBatch) -> AbstractContextManager:
        """A context for a forward of the learner's policy."""
        return nullcontext()

    def outputs(self, policy: Policy, batch: PackedBatch) -> Outputs | None:
        """A replacement for policy.outputs() in forwards of this batch, or None."""
        return None

    def annotate(self, batches: list[PackedBatch]) -> Metrics:
        """Fills in columns that losses need. Called once for a step, without gradients."""
        return {}

    def before_update(self, learner: ExtendedLearner, minibatch: Minibatch, step: float) -> Metrics:
        return {}

    def loss(
        self, batch: PackedBatch, minibatch: Minibatch, outputs: tuple[Tensor, ...]
    ) -> Tensor | float:
        """Added to the loss of a forward of this batch, which gave `outputs`."""
        return 0.0

    def after_backward(self, learner: ExtendedLearner) -> None:
        """Called with the gradients of all microbatches, before they are clipped."""

    def skipped(self, learner: ExtendedLearner, loss: float) -> Metrics | None:
        """Metrics of an update that is skipped because its gradient is not finite, if the
        extension expects such updates. `loss`: the mean over all ranks."""
        return None

    def after_update(self) -> Metrics:
        """Called after each update, unless it was skipped or not applied."""
        return {}

    def state(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Loads the states of all extensions. Runs with other extensions lack keys."""

    def metrics(self) -> Metrics:
        """Metrics of the update's forwards. Their values may still be on the device."""
        return {}
