"""Components that a script passes to train()."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_core.plugin import Plugin, RunState
    from rl_core.sampling.engine import Engine


@dataclass(kw_only=True, slots=True, frozen=True)
class CustomComponents:
    """Components of a script: train(config, loss=..., optimizer=..., engine=..., plugins=...).
    tools/api/custom_components.py checks and makes them."""

    is_script: bool = False  # train() was called, not the command.
    token_loss: Callable | None = None  # A TokenLoss.
    make_optimizer: Callable | None = None  # (named parameters, config.optim) -> Optimizer.
    engine: type[Engine] | None = None
    plugins: tuple[Callable[[RunState], Plugin], ...] = ()
