"""Several environments as one: each task goes to its own, with its own limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_core.sampling.actor import Speaker, at_most
from rl_core.sampling.env import Env
from rl_core.types import Task, Trajectory


@dataclass(kw_only=True, slots=True)
class Limits:
    max_tokens: int  # of one turn
    max_turns: int  # of an episode


@dataclass(kw_only=True, slots=True)
class EnvMix:
    """Has of an Env what rollout() asks of one."""

    envs: dict[str, Env]
    limits: dict[str, Limits]

    @property
    def group_rewards(self) -> bool:
        return any(env.group_rewards for env in self.envs.values())

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        return await self.envs[task.env].draw(task, names, seed)

    async def rollout(self, task: Task, speakers: Mapping[str, Speaker]) -> list[Trajectory]:
        limits = self.limits[task.env]
        for speaker in speakers.values():
            speaker.params = at_most(speaker.params, limits.max_tokens)
            speaker.max_turns = limits.max_turns
        return await self.envs[task.env].rollout(task, speakers)

    async def score_group(self, task: Task, found: Sequence[Trajectory], speakers: Mapping[str, Speaker]) -> None:
        await self.envs[task.env].score_group(task, found, speakers)
