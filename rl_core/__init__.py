"""rl_core: reinforcement learning for language models with torchrun and nothing else.

from rl_core import Config, reward, train
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_core.config import Config
    from rl_core.tools.api.environment import Environment
    from rl_core.tools.viewer.notebook import view

    __all__ = ["Config", "Environment", "reward", "view"]

if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"rl_core needs Python >= 3.11; this is {sys.version.split()[0]}")

__version__ = "0.1.0"


def __getattr__(name: str):
    """Config, Environment and view, imported when they are asked for. `train` is a module that
    can be called (rl_core/tools/api/train.py)."""
    if name == "Environment":
        from rl_core.tools.api.environment import Environment

        return Environment
    if name == "Config":
        from rl_core.config import Config

        return Config
    if name == "view":
        from rl_core.tools.viewer.notebook import view

        return view
    raise AttributeError(f"module 'rl_core' has no attribute {name!r}")


def reward(function=None, *, weight: float = 1.0, batched: bool = False):
    """The function of an environment file, marked as one of its rewards: `@reward` or
    `@reward(weight=0.5)`.

    What it returns is multiplied by `weight`; with a weight of 0 it is only logged. A batched one
    is called once for a group, with `trajectories`, and returns a list of one number for each.
    """
    if function is None:
        return lambda function: reward(function, weight=weight, batched=batched)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not abs(weight) < float("inf")
    ):
        raise ValueError(f"@reward(weight={weight!r}): a weight is a finite number, such as 0.5")
    function.reward_mark = (float(weight), bool(batched))
    return function
