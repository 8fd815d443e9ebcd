"""The training tasks of several environments, and what flags of environments contradict each
other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rl_core.config import Config
from rl_core.data.tasks import TaskSource
from rl_core.errors import nearest, refuse, split
from rl_core.types import Task

# (is it broken?, message). c: the configuration.
OF_ENVIRONMENTS = [
    (
        lambda c: len(c.env_paths) < len(split(c.env_path)),
        "--env_path={c.env_path}: two files have one name; rename one",
    ),
    (
        lambda c: not any(c.env(name).weight for name in c.env_paths),
        "every environment has --envs.NAME.weight 0, so that none is trained in; raise one",
    ),
    (
        lambda c: len(c.env_paths) > 1 and (c.data.train or c.data.eval),
        "--data.train and --data.eval are for one environment; give --envs.NAME.train and "
        "--envs.NAME.eval",
    ),
]


def check_flags(config: Config) -> None:
    """Raises ValueError with what was given, the rule and the fix."""
    for name, env in config.envs.items():
        if name not in config.env_paths:
            near = nearest(name, config.env_paths)
            raise ValueError(f"--envs.{name}: --env_path has no such file; {near}")
        if env.teacher and not any(config.of(actor).algo.teacher for actor in config.trained):
            raise ValueError(
                f"--envs.{name}.teacher={env.teacher} needs --algo.teacher, that of the other "
                "environments"
            )
        if (env.max_tokens or 0) > config.max_tokens:
            raise ValueError(
                f"--envs.{name}.max_tokens={env.max_tokens} must be at most "
                f"--max_tokens={config.max_tokens}"
            )
    refuse(OF_ENVIRONMENTS, c=config)


class TaskMix:
    """The tasks of several sources in turn: among the first n each has its share by weight, to
    within one task."""

    def __init__(self, sources: Sequence[TaskSource], weights: Sequence[float]):
        self.sources, self.weights = sources, weights

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def task(self, position: int) -> Task:
        """The task at a position, which counts the tasks of all sources."""
        drawn = self.drawn_before(position)
        i = self.next_source(drawn)
        return self.sources[i].task(drawn[i])

    def drawn_before(self, position: int) -> list[int]:
        """Number of tasks of each source before a position."""
        # Task k of a source is due at (k + 0.5) / weight. All that is due by this time certainly
        # comes before.
        time = max(0, position - len(self.sources)) / sum(self.weights)
        drawn = [math.floor(time * weight + 0.5) for weight in self.weights]
        while sum(drawn) < position:
            drawn[self.next_source(drawn)] += 1
        return drawn

    def next_source(self, drawn: list[int]) -> int:
        """The source with the earliest next task; on a tie the one named first."""
        return min(range(len(drawn)), key=lambda i: ((drawn[i] + 0.5) / self.weights[i], i))
