"""task_weight(): draws training tasks by weights that depend on each task's success rate so far,
instead of each task once an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from rl_core.data.episodes import episode_rewards, succeeded
from rl_core.data.task_rows import Tasks, TaskSource, shorten
from rl_core.distributed import Ranks, all_gather_json
from rl_core.plugin import Plugin
from rl_core.sampling.env import Env
from rl_core.sampling.groups import Group
from rl_core.sampling.hooks import Hook, describe_error
from rl_core.sampling.reward_parts import finite
from rl_core.sampling.rollout import sorted_trajectories
from rl_core.types import JSONObject, RunError, Trajectory, counter_seed

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(slots=True)
class Progress:
    """Results of a task so far. Both means are exponential: the newest group counts half."""

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
    """The task at each position, like RowOrder. Between two calls of draw() the positions are a
    weighted permutation: each next task is drawn by weight among the remaining ones (Efraimidis and
    Spirakis 2006), so that no task comes twice before all with a weight came once. Depends only on
    the seed, the weights and the first position."""

    def __init__(
        self, source: TaskSource, weigh: Callable[[int, Progress], float], is_by_row: bool
    ):
        """`weigh` gives the weight of a row by its number. Unless is_by_row, all untried rows have
        equal weights."""
        self.source, self.weigh = source, weigh
        self.rows = np.asarray(source.kept)  # [tasks] in ascending order
        untried = source.kept if is_by_row else source.kept[:1]
        self.weights = np.full(len(self.rows), [weigh(row, Progress()) for row in untried])
        self.tried: dict[int, Progress] = {}  # row number -> progress
        self.draw(0)

    def row_index(self, position: int) -> int:
        return int(self.order[(position - self.start) % len(self.order)])

    def record(self, results: Iterable[tuple[int, float, float]], start: int) -> None:
        """Adds (row, success rate, mean reward) of each group and draws the positions from `start`
        on anew. Raises ValueError if no task has a weight."""
        for row, success_rate, mean_reward in results:
            progress = self.tried.setdefault(row, Progress())
            progress.add(success_rate, mean_reward)
            self.weigh_again(row)
        self.draw(start)

    def weigh_again(self, row: int) -> None:
        index = np.searchsorted(self.rows, row)
        if index < len(self.rows) and self.rows[index] == row:  # Else the row is left out by now.
            self.weights[index] = self.weigh(row, self.tried[row])

    def draw(self, start: int) -> None:
        """Draws the index into `rows` for each position from `start` on, by weight."""
        [indices] = np.nonzero(self.weights)
        if not len(indices):
            raise ValueError(
                f"{self.source.env}: task_weight() gives 0 for all {len(self.rows)} tasks, so that "
                "none can be drawn; let it give some a weight above 0, such as 0.01"
            )
        random = np.random.RandomState(counter_seed(self.source.seed, "weights", start))
        luck = -np.log1p(-random.random_sample(len(self.weights)))  # Exponential, for every task.
        with np.errstate(over="ignore"):
            order = np.argsort(luck[indices] / self.weights[indices])
        self.order, self.start = indices[order], start

    def state(self) -> JSONObject:
        return {"start": self.start, "tried": {row: astuple(p) for row, p in self.tried.items()}}

    def load(self, state: JSONObject) -> None:
        for row, values in state["tried"].items():
            self.tried[int(row)] = Progress(*values)
            self.weigh_again(int(row))
        self.draw(state["start"])


class Curriculum(Plugin):
    """Records each step's results in the orders of training tasks, the same on every rank."""

    async def after_rollout(self, step: int, groups: list[Group]) -> None:
        trainer, config = self.trainer, self.trainer.config
        trajectories, pass_reward = sorted_trajectories(groups), config.eval.pass_reward
        results = group_results(trajectories, config.trained, pass_reward, trainer.ranks)
        state = trainer.read_data_state()
        position = min([*state["pending"], state["position"]])
        try:
            record(trainer.plan.train, results, position)
        except ValueError as error:
            raise RunError(str(error)) from error

    def state(self) -> JSONObject:
        orders = weighted_orders(self.trainer.plan.train)
        return {"curriculum": {env: order.state() for env, order in orders.items()}}

    def load(self, state: JSONObject) -> None:
        """Environments that are missing in `state` begin anew."""
        before = state.get("curriculum", {})
        for env, order in weighted_orders(self.trainer.plan.train).items():
            if env in before:
                order.load(before[env])


def weighted_orders(train: Tasks) -> dict[str, WeightedOrder]:
    """Environment -> order, for environments with task_weight()."""
    orders = {source.env: source.order for source in train.sources}
    return {env: order for env, order in orders.items() if isinstance(order, WeightedOrder)}


def record(train: Tasks, results: Iterable[tuple[str, str, float, float]], position: int) -> None:
    """Records (environment, task id, success rate, mean reward) of each group of a step, equal on
    every rank. Tasks from `position` on, which counts as `train.task` does, are drawn with the new
    weights. Raises ValueError if no task has a weight."""
    envs = [source.env for source in train.sources]
    starts = dict(zip(envs, train.num_before(position), strict=True))
    for env, order in weighted_orders(train).items():
        rows = []
        for of_env, task, rate, mean in results:
            if of_env == env:
                rows.append((int(task.rpartition("/")[2]), rate, mean))
        order.record(rows, starts[env])


def group_results(
    trajectories: list[Trajectory], trained: Iterable[str], pass_reward: float, ranks: Ranks
) -> list[tuple[str, str, float, float]]:
    """(environment, task id, fraction of passed episodes, mean reward) of each group of all ranks,
    in the order of the groups and equal on all ranks. Over successful episodes of trained
    actors."""
    groups: dict[str, list[Trajectory]] = {}
    for t in succeeded(trajectories):
        if t.actor in trained:
            groups.setdefault(t.group_id, []).append(t)
    results = []
    for group_id, group in groups.items():
        rewards = episode_rewards(group)
        passed = sum(reward >= pass_reward for reward in rewards)
        means = passed / len(rewards), sum(rewards) / len(rewards)
        results.append((group_id, group[0].env, group[0].task_id, *means))
    every = []
    for results_of_rank in all_gather_json(results, ranks):
        every += results_of_rank
    return [tuple(result[1:]) for result in sorted(every)]


def task_weight(hook: Hook, task_id: str, row: JSONObject, known: Progress) -> float:
    """The weight that the user's hook returns for a task. Raises ValueError unless it is a finite
    number of at least 0."""
    values = asdict(known)
    facts = ", ".join(f"{name}={value:.4g}" for name, value in values.items())
    call = f"{hook.path}: task_weight() for task {task_id} with {facts}"
    try:
        weight = hook.function(**hook.arguments(row, values))
    except Exception as error:
        raise ValueError(f"{call} failed: {describe_error(error, hook.path)}") from error
    with suppress(ValueError):
        if finite(weight, call) >= 0:
            return float(weight)
    raise ValueError(f"{call} gave {shorten(weight)}; it must give a finite number of at least 0")


def draw_by_weight(envs: dict[str, Env], train: Tasks) -> None:
    """Gives each environment with task_weight() a weighted order."""
    for source in train.sources:
        if hook := envs[source.env].hooks.get("task_weight"):
            source.draw_by(weighted_order(source, hook))


def weighted_order(source: TaskSource, hook: Hook) -> WeightedOrder:
    columns, rows = hook.named - hook.ours, source.rows
    if columns and not hook.takes_all and hasattr(rows, "select_columns"):
        # Reading a row of a table is slow.
        table = cast("Dataset", rows)
        rows = table.select_columns(sorted(columns & set(table.column_names)))

    def weigh(row: int, known: Progress) -> float:
        return task_weight(hook, f"{source.split}/{row}", rows[row], known)

    return WeightedOrder(source, weigh, is_by_row=bool(columns) or hook.takes_all)
