"""A curriculum: training tasks drawn by weights that depend on how often each was solved, not each
once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rl_core.data.tasks import TaskSource, shorten
from rl_core.sampling.env import Env
from rl_core.sampling.hooks import Hook, describe_error, finite
from rl_core.types import RunError, counter_seed


@dataclass(slots=True)
class Progress:
    """Results of a task so far. In both means the newest group counts half, and all before it the
    other half."""

    tries: int = 0  # groups of episodes
    # Fraction of a group's episodes that passed; 0.5 before the first group.
    success_rate: float = 0.5
    mean_reward: float = 0.0

    def add(self, success_rate: float, mean_reward: float) -> None:
        share = 0.5 if self.tries else 1.0
        self.success_rate += share * (success_rate - self.success_rate)
        self.mean_reward += share * (mean_reward - self.mean_reward)
        self.tries += 1


class WeightedOrder:
    """The task at each position, as in a RowOrder. Between two calls of draw() the positions are a
    weighted permutation: each next task is drawn by weight among the remaining ones (Efraimidis and
    Spirakis 2006), so that none comes twice before all with a weight came once. It depends on the
    seed, the weights and its first position alone."""

    def __init__(
        self, source: TaskSource, weigh: Callable[[int, Progress], float], is_by_row: bool
    ):
        """`weigh` gives the weight of a row by its number. Unless is_by_row, all untried rows have
        the same weight."""
        self.source, self.weigh = source, weigh
        self.rows = np.asarray(source.kept)  # [tasks] in ascending order
        untried = source.kept if is_by_row else source.kept[:1]
        self.weights = np.full(len(self.rows), [weigh(row, Progress()) for row in untried])
        self.tried: dict[int, Progress] = {}  # by the number of the row
        self.draw((), start=0)

    def row_index(self, position: int) -> int:
        return int(self.places[(position - self.start) % len(self.places)])

    def record(self, results: Iterable[tuple[int, float, float]], start: int) -> None:
        """(row, success rate, mean reward) of each group; positions from `start` on are drawn anew.
        Raises ValueError if the weights are unfit."""
        changed = {}
        for row, success_rate, mean_reward in results:
            changed[row] = self.tried.setdefault(row, Progress())
            changed[row].add(success_rate, mean_reward)
        self.draw(changed, start)

    def draw(self, changed: Iterable[int], start: int) -> None:
        """Weighs these rows again; then all weights decide which place in `rows` each position from
        `start` on has."""
        for row in changed:
            place = int(np.searchsorted(self.rows, row))
            if place < len(self.rows) and self.rows[place] == row:  # else it is left out by now
                self.weights[place] = self.weigh(row, self.tried[row])
        [places] = np.nonzero(self.weights)
        if not len(places):
            raise ValueError(
                f"{self.source.env}: task_weight() gives 0 for all {len(self.rows)} tasks, so that "
                "none can be drawn; let it "
                "give some a weight above 0, such as 0.01"
            )
        random = np.random.RandomState(counter_seed(self.source.seed, "weights", start))
        luck = -np.log1p(-random.random_sample(len(self.weights)))  # exponential, for every task
        with np.errstate(over="ignore"):
            self.places, self.start = places[np.argsort(luck[places] / self.weights[places])], start


@dataclass(kw_only=True, slots=True)
class Curriculum:
    """The weighted orders of a run's training tasks, the same on every rank."""

    train: TaskSource
    orders: dict[str, WeightedOrder]  # by the name of the environment

    def record(self, results: Iterable[tuple[str, str, float, float]], position: int) -> None:
        """(environment, task id, success rate, mean reward) of each group of a step, alike on every
        rank. Tasks from `position` on, which counts as `train.task` does, are drawn by what is
        known now. Raises RunError if the weights are unfit."""
        results = list(results)
        starts = dict(
            zip((s.env for s in self.train.sources), self.train.drawn_before(position), strict=True)
        )
        for env, order in self.orders.items():
            rows = [(int(id.rpartition("/")[2]), *values) for e, id, *values in results if e == env]
            try:
                order.record(rows, starts[env])
            except ValueError as error:
                raise RunError(str(error)) from error

    def state(self) -> dict[str, Any]:
        """For a checkpoint: progress of the tried tasks."""
        return {
            env: {
                "start": o.start,
                "tried": {n: [p.tries, p.success_rate, p.mean_reward] for n, p in o.tried.items()},
            }
            for env, o in self.orders.items()
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores state(). An environment that is not in it begins anew. Raises ValueError as
        WeightedOrder does."""
        for env in self.orders.keys() & state.keys():
            order = self.orders[env]
            order.tried = {
                int(row): Progress(*values) for row, values in state[env]["tried"].items()
            }
            order.draw(order.tried, state[env]["start"])


def task_weight(hook: Hook, task_id: str, row: dict[str, Any], known: Progress) -> float:
    """The weight that the user's hook gives for a task. Raises ValueError unless it is a finite
    number of at least 0."""
    values = asdict(known)
    given = ", ".join(f"{name}={value:.4g}" for name, value in values.items())
    what = f"{hook.path}: task_weight() for task {task_id} with {given}"
    try:
        weight = hook.function(**hook.arguments(row, values))
    except Exception as error:
        raise ValueError(f"{what} failed: {describe_error(error, hook.path)}") from error
    with suppress(ValueError):
        if finite(weight, what) >= 0:
            return float(weight)
    raise ValueError(f"{what} gave {shorten(weight)}; it must give a finite number of at least 0")


def make_curriculum(train: TaskSource, envs: dict[str, Env]) -> Curriculum | None:
    """Draws the tasks of environments with task_weight() by it from here on. None if no environment
    has one."""
    orders = {}
    for source in train.sources:
        if hook := envs[source.env].hooks.get("task_weight"):
            columns, rows = hook.named - hook.ours, source.rows
            if (
                columns
                and not hook.takes_all
                and (names := getattr(rows, "column_names", None)) is not None
            ):
                # Reading a row of a table is slow.
                rows = rows.select_columns(sorted(columns & set(names)))

            def weigh(row: int, known: Progress, hook=hook, rows=rows, source=source) -> float:
                return task_weight(hook, f"{source.split}/{row}", rows[row], known)

            orders[source.env] = WeightedOrder(
                source, weigh, is_by_row=bool(columns) or hook.takes_all
            )
            source.order = orders[source.env]
    return Curriculum(train=train, orders=orders) if orders else None
