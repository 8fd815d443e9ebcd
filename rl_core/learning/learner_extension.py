"""The interface of a learner's extensions, and the arguments from which both are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from rl_core.algorithms import Algorithm
from rl_core.config import Config, OptimConfig
from rl_core.distributed import Ranks
from rl_core.learning.minibatches import Minibatch
from rl_core.metrics import Metric
from rl_core.models.policy import Outputs, Policy
from rl_core.types import PackedBatch, TrainingSample

if TYPE_CHECKING:
    from rl_core.learning.lagged_copy import WeightSnapshot

Metrics = dict[str, Metric]
# (config, batch, logprobs or scores) -> losses of its tokens or pairs, and metrics whose values are
# still on the device.
Loss = Callable[[Config, PackedBatch, Tensor], tuple[Tensor, Metrics]]
# (algorithm, batch, logprobs [M], entropy [M]) -> losses [M], and which ratios were clipped.
TokenLoss = Callable[[Algorithm, PackedBatch, Tensor, Tensor], tuple[Tensor, Tensor | None]]
# (batch, result of forward()) -> losses of its tokens or pairs, and metrics.
Losses = Callable[[PackedBatch, tuple[Tensor, ...]], tuple[Tensor, Metrics]]
Named = Iterable[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named, OptimConfig], Optimizer]


class ExtendedLearner(Protocol):
    """The members of Learner (learning/learner.py, which imports this module) that extensions
    use."""

    policy: Policy
    adapter: str
    ranks: Ranks

    def forward(self, batch: PackedBatch, /) -> tuple[Tensor, ...]: ...
    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


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


@dataclass(kw_only=True)
class LearnerContext:
    """Arguments from which a learner and its extensions are made."""

    config: Config  # The learning rate is the one of the actor.
    algorithm: Algorithm
    name: str  # The name of the actor.
    policy: Policy
    adapter: str = ""  # Name of the trained adapter.
    ranks: Ranks
    load: Callable[..., Policy]  # Loads a further model from a folder.
    make_optimizer: MakeOptimizer
    # By actor, as far as made.
    learners: Mapping[str, ExtendedLearner] = field(default_factory=dict)
    token_loss: TokenLoss | None = None  # A script's, instead of the algorithm's.

    @property
    def model_path(self) -> str:
        path = self.config.actors[self.name].model
        assert path
        return path

    @property
    def temperature(self) -> float:
        return self.config.sampling.temperature if self.algorithm.is_rl else 1.0

    def snapshot(self, name: str, every: int = 0, decay: float = 0.0) -> WeightSnapshot:
        from rl_core.learning.lagged_copy import WeightSnapshot

        return WeightSnapshot(
            self.policy,
            self.adapter,
            name=f"{self.name}_{name}",
            stride=self.config.actors[self.name].update_every,
            every=every,
            decay=decay,
        )
