"""The arguments from which a learner and its extensions are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from rl_core.algorithms import Algorithm
from rl_core.config import Config, OptimConfig
from rl_core.distributed import Ranks
from rl_core.metrics import Metric
from rl_core.models.policy import Policy
from rl_core.types import PackedBatch

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
    # Learners made so far, by actor.
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
