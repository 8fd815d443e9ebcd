"""--algo.baseline running: a baseline from earlier episodes, for tasks that are played once."""

from __future__ import annotations

from collections import defaultdict

from rl_core.data.episodes import by_episode, episode_rewards, succeeded
from rl_core.distributed import all_gather_json
from rl_core.plugin import Plugin, RunState
from rl_core.types import JSONObject, Trajectory

# An episode's weight after each later step, and the weight below which a task is forgotten.
DECAY, FORGOTTEN = 0.9, 0.01
PRIOR = 4.0  # The mean over all tasks counts as this number of episodes of a task.


class RunningBaseline(Plugin):
    """Sets each trajectory's baseline: the mean reward of the actor's other episodes, where those
    of step s count DECAY^(now - s). Episodes of the same task count fully, and all others together
    as PRIOR episodes. An episode is not in its own baseline, so that the baseline has no bias."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        # Actor, or actor and task -> [sum of weighted rewards, sum of weights].
        self.sums: dict[str, list[float]] = {}

    def load(self, state: JSONObject) -> None:
        self.sums = dict(state.get("running_baseline", {}))

    def state(self) -> JSONObject:
        return {"running_baseline": self.sums}

    async def on_episodes(self, step: int, name: str, trajectories: list[Trajectory]) -> None:
        if name.startswith("eval/"):
            return
        counted = succeeded(trajectories)
        episodes = by_episode(counted)
        facts = []
        for episode, reward in zip(episodes, episode_rewards(counted), strict=True):
            first = episode[0]
            actor = f"{first.actor}/{first.player}"
            facts.append((actor, f"{actor}/{first.env}/{first.task_id}", reward))
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for key, (total, weight) in self.sums.items():
            if weight * DECAY >= FORGOTTEN:
                sums[key] = [total * DECAY, weight * DECAY]
        for of_rank in all_gather_json(facts, self.trainer.ranks):
            for actor, task, reward in of_rank:
                for key in (actor, task):
                    sums[key][0] += reward
                    sums[key][1] += 1
        self.sums = dict(sums)
        for episode, (actor, task, reward) in zip(episodes, facts, strict=True):
            overall = without(self.sums[actor], reward, default=reward)
            total, weight = self.sums[task]
            baseline = (total - reward + PRIOR * overall) / (weight - 1 + PRIOR)
            for t in episode:
                t.baseline = baseline


def without(sums: list[float], reward: float, default: float) -> float:
    """The mean without one episode of this reward; `default` if no other is left."""
    total, weight = sums
    return (total - reward) / (weight - 1) if weight - 1 >= FORGOTTEN else default
