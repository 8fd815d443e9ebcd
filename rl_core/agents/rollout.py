"""The rollout of files with an `agent`: a program plays the episode at an endpoint, and rewards
score what came of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rl_core.agents.endpoint import Endpoint, EndpointServer
from rl_core.agents.program import CommandResult, filled, remove, run_command
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.hooks import Hook, HookError, add_parts, finite_parts, wait_for_all
from rl_core.types import Task, Trajectory


@dataclass(kw_only=True)
class Endpoints:
    """The endpoint server of this process's event loop."""

    server: EndpointServer | None = None
    loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def open(self, actors: EpisodeActors, max_turns: int = 0) -> AsyncIterator[Endpoint]:
        """An endpoint for the time inside. Raises EngineDied, after it, if an engine died."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self.server, self.loop = EndpointServer(), loop
        endpoint = await self.server.open(actors, max_turns)
        try:
            yield endpoint
        except Exception:
            # The program's error follows from the engine's.
            if endpoint.failure is not None:
                raise endpoint.failure from None
            raise
        finally:
            self.server.shut(endpoint)
        if endpoint.failure is not None:
            raise endpoint.failure


@dataclass(kw_only=True)
class AgentRollout:
    """Plays the episodes of a file with an `agent`."""

    path: str
    agent: Hook | Sequence[str]  # a function, or a command
    rewards: list[Hook]
    endpoints: Endpoints = field(default_factory=Endpoints)

    async def rollout(self, task: Task, actors: EpisodeActors) -> list[Trajectory]:
        """The trajectories of each trainable actor that was asked; if none is trainable, of each
        actor that was asked. Raises ValueError if none was."""
        async with self.endpoints.open(actors, actors.max_turns) as llm:
            result = None
            try:
                result = await self.run(task, llm)
                asked = [name for name, tree in llm.trees.items() if tree.nodes]
                learners = [name for name in asked if actors[name].is_trainable]
                if not asked:
                    raise ValueError(
                        f"{self.path}: the agent asked no model; its requests go to llm.base_url, "
                        f"with llm.api_key{ended(result)}"
                    )
                return await self.score(task, actors, llm, learners or asked, result)
            finally:
                if isinstance(result, CommandResult):
                    remove(result.workspace)

    async def run(self, task: Task, llm: Endpoint) -> Any:
        """What the agent returned, or how its command ended."""
        if not isinstance(self.agent, Hook):
            command = filled(self.agent, task.row, self.path)
            return await run_command(command, task.row, llm.environ)
        try:
            return await self.agent(task, {"task": task, "llm": llm})
        except HookError:
            # Many programs raise when they are told that the context is full.
            if llm.is_truncated:
                return None
            raise

    async def score(
        self, task: Task, actors: EpisodeActors, llm: Endpoint, names: list[str], result: Any
    ) -> list[Trajectory]:
        found = {name: llm.trajectories(0.0, name) for name in names}
        calls = []
        for hook in self.rewards:
            if not hook.batched:
                calls += [(hook, name) for name in (names if hook.is_per_actor else names[:1])]
        values = await wait_for_all(
            [self.call(hook, task, actors, found[name], result) for hook, name in calls]
        )
        for (hook, name), value in zip(calls, values, strict=True):
            parts = finite_parts(value, hook.name, f"{hook.path}: what {hook.name}() returned")
            for scored in [name] if hook.is_per_actor else names:
                for t in found[scored]:
                    add_parts(t.reward_parts, t.metrics, hook, parts, actors)
        trajectories = [t for name in names for t in found[name]]
        for t in trajectories:
            t.reward_parts.pop("rollout", None)
            t.reward = math.fsum(t.reward_parts.values())
        return trajectories

    async def call(
        self,
        hook: Hook,
        task: Task,
        actors: EpisodeActors,
        branches: list[Trajectory],
        result: Any,
    ) -> Any:
        """A reward's result. It sees the branch that ended last."""
        last = branches[-1]
        given = {"task": task, "prompt": task.messages, "messages": last.messages}
        given |= {"trajectory": last, "actor": last.actor, "actors": actors, "result": result}
        given["completion"] = last.messages[-1].get("content") or ""
        return await hook(task, given)


def ended(result: Any) -> str:
    """How a command ended, for an error."""
    if not isinstance(result, CommandResult):
        return ""
    wrote = (result.stderr or result.stdout).strip()[-300:]
    return f"; it ended with exit code {result.exit_code}: {wrote}"
