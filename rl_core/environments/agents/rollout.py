"""The rollout of environments with an `agent`: a program plays the episode through an endpoint,
and rewards score the result."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature
from types import ModuleType
from typing import TYPE_CHECKING

from rl_core.data.task_rows import PROMPT_COLUMNS
from rl_core.environments.agents.endpoint import Endpoint, EndpointServer
from rl_core.environments.agents.program import (
    CommandResult,
    columns_named,
    filled,
    placed,
    remove,
    run_command,
)
from rl_core.sampling.actor import Actor, EpisodeActors
from rl_core.sampling.deadlines import wait_for_all
from rl_core.sampling.env import ARGUMENTS
from rl_core.sampling.hooks import Hook, HookError
from rl_core.sampling.reward_parts import add_parts, reward_values
from rl_core.types import AnyJSON, JSONObject, Task, Trajectory

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig
    from rl_core.environments.agents.boxed import CommandBox
    from rl_core.sandbox.boxes import OpenBox


@dataclass(kw_only=True)
class Endpoints:
    """Opens an endpoint for each episode, at one server of the running event loop."""

    config: AgentsConfig | None = None
    server: EndpointServer | None = None
    loop: asyncio.AbstractEventLoop | None = None  # The event loop of the server.

    def __call__(self, actor: Actor) -> AbstractAsyncContextManager[Endpoint]:
        """Opens an endpoint for one actor of an episode."""
        return self.open({actor.name: actor}, actor.max_turns)

    @asynccontextmanager
    async def open(
        self, actors: Mapping[str, Actor], max_turns: int, program: str = "a program"
    ) -> AsyncIterator[Endpoint]:
        """Opens an endpoint; closing the last one stops the server. If an engine died, raises
        EngineDied instead of the program's error."""
        if self.server is None or self.loop is not asyncio.get_running_loop():
            self.server, self.loop = EndpointServer(self.config), asyncio.get_running_loop()
        server = self.server
        llm = await server.open(actors, max_turns, program)
        try:
            yield llm
        except Exception:
            if llm.failure is not None:
                raise llm.failure from None
            raise
        finally:
            server.shut(llm)
            if not server.endpoints:
                await server.close()
        if llm.failure is not None:
            raise llm.failure


@dataclass(kw_only=True)
class AgentRollout:
    """Plays the episodes of a file with an `agent`."""

    path: str
    agent: Hook | Sequence[str]  # A function, or a command.
    rewards: list[Hook]
    box: CommandBox | None = None  # None runs a command as a process of this machine.
    endpoints: Endpoints
    has_warned: bool = False  # True after a warning about an exit code other than 0.

    async def rollout(self, task: Task, actors: EpisodeActors) -> list[Trajectory]:
        """Trajectories of the trainable actors that the agent asked, or of all asked actors if none
        is trainable. Raises HookError if the agent asked none."""
        endpoint = self.endpoints.open(actors, actors.max_turns, self.path)
        async with endpoint as llm, self.played(task, llm) as (result, box):
            asked = [name for name, tree in llm.trees.items() if tree.num_read]
            learners = [name for name in asked if actors[name].is_trainable]
            if not asked:
                reason = unasked(result, llm)
                raise HookError(
                    f"{self.path}: the agent asked no model for task {task.id}; {reason}"
                )
            is_command = isinstance(result, CommandResult)
            if is_command and result.exit_code != 0 and not self.has_warned:
                self.has_warned = True
                text = f"the command of task {task.id} ended with {result.end}; rewards score it"
                print(f"warning: {self.path}: {text}", file=sys.stderr, flush=True)
            arguments = {"actors": actors, "result": result, "box": box}
            return await self.score(task, arguments, llm, learners or asked)

    @asynccontextmanager
    async def played(
        self, task: Task, llm: Endpoint
    ) -> AsyncIterator[tuple[object, OpenBox | None]]:
        """Runs the agent and gives (its return value or CommandResult, the command's box or None).
        The command's files exist until the context ends."""
        if isinstance(self.agent, Hook):
            yield await self.call_agent(self.agent, task, llm), None
        elif self.box is not None:
            command = filled(self.box.placed(self.agent, self.path), task.row, self.path)
            async with await self.box.open(task.row, llm) as box:
                yield await self.box.run(box, command, task.row, llm), box
        else:
            command = filled(placed(self.agent, self.path), task.row, self.path)
            result = await run_command(command, task.row, llm.environ)
            try:
                yield result, None
            finally:
                remove(result.workspace)

    async def call_agent(self, agent: Hook, task: Task, llm: Endpoint) -> object:
        try:
            return await agent(task, {"task": task, "llm": llm})
        except HookError:
            # Many programs raise when a request does not fit into the context.
            if llm.is_truncated:
                return None
            raise

    async def score(
        self, task: Task, arguments: JSONObject, llm: Endpoint, names: list[str]
    ) -> list[Trajectory]:
        """Trajectories with their rewards. `arguments`: further arguments that rewards may name."""
        branches = {name: llm.trajectories(0.0, name) for name in names}
        return await self.score_branches(task, arguments, branches)

    async def score_branches(
        self, task: Task, arguments: JSONObject, branches: dict[str, list[Trajectory]]
    ) -> list[Trajectory]:
        """The trajectories of each actor with what rewards give added to their parts."""
        names, calls = list(branches), []
        for hook in self.rewards:
            calls += [(hook, name) for name in (names if hook.is_per_actor else names[:1])]
        values = await wait_for_all(
            [self.call(hook, task, arguments, branches[name]) for hook, name in calls]
        )
        for (hook, name), value in zip(calls, values, strict=True):
            parts = reward_values(value, hook.name, f"{hook.path}: what {hook.name}() returned")
            for scored in [name] if hook.is_per_actor else names:
                for t in branches[scored]:
                    add_parts(t.reward_parts, t.metrics, hook, parts, arguments["actors"])
        trajectories = [t for name in names for t in branches[name]]
        for t in trajectories:
            t.reward_parts.pop("rollout", None)
            t.reward = math.fsum(t.reward_parts.values())
        return trajectories

    async def call(
        self, hook: Hook, task: Task, arguments: JSONObject, branches: list[Trajectory]
    ) -> object:
        """Calls a reward with the branch that ended last."""
        last = branches[-1]
        arguments = arguments | {"task": task, "prompt": task.messages, "messages": last.messages}
        arguments |= {"trajectory": last, "actor": last.actor}
        arguments["completion"] = last.messages[-1].get("content") or ""
        return await hook(task, arguments)


def unasked(result: object, llm: Endpoint) -> str:
    """The fix for an agent that read no reply."""
    reason = "its requests go to llm.base_url, with llm.api_key"
    if isinstance(result, CommandResult):
        reason = "a command finds the model by OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
    if llm.is_given_up:
        reason = "it closed each connection before the reply came; raise its client's timeout"
    if llm.refused:
        reason = f"its last request was refused: {llm.refused}"
    if isinstance(result, CommandResult):
        reason += f"; this one ended with {result.end}"
    return reason


def unscored_module() -> ModuleType:
    """An environment's file for a run whose clients alone give rewards."""

    async def rollout(task: Task, actors: EpisodeActors) -> list[Trajectory]:
        raise NotImplementedError  # Sessions play by their requests.

    module = ModuleType("online")
    vars(module)["rollout"] = rollout
    rollout.__module__ = module.__name__
    return module


def rewards_of(hooks: dict[str, Hook]) -> list[Hook]:
    """The rewards of a file that score one episode."""
    return [h for h in hooks.values() if not h.batched and h.name not in ARGUMENTS]


def agent_hooks(
    path: str,
    agent: Hook | Sequence[str],
    hooks: dict[str, Hook],
    box: AnyJSON = None,
    config: AgentsConfig | None = None,
) -> dict[str, Hook]:
    """Hooks of a file with an `agent`: a rollout() that calls the agent and its rewards, and the
    hooks of groups. The rollout asks for the columns that they need. `box`: the file's setting of
    that name."""
    rewards = rewards_of(hooks)
    endpoints = Endpoints(config=config)
    agent_rollout = AgentRollout(path=path, agent=agent, rewards=rewards, endpoints=endpoints)
    if box and not isinstance(agent, Hook):
        from rl_core.environments.agents.boxed import make_box

        agent_rollout.box = make_box(box, path, agent)
        if box is True or "hides" not in box:
            scored = set().union(*(hook.named - hook.ours for hook in rewards))
            shown = {*PROMPT_COLUMNS} - {"input"}  # `input` may hold hidden tests.
            agent_rollout.box.hides = sorted(scored - columns_named(agent) - shown)

    async def agent_and_rewards(
        task: Task, actors: EpisodeActors, **columns: AnyJSON
    ) -> list[Trajectory]:
        return await agent_rollout.rollout(task, actors)

    called = [*rewards]
    columns: dict[str, object] = {}
    if isinstance(agent, Hook):
        called.append(agent)
    else:
        columns = dict.fromkeys(sorted(columns_named(agent)), Parameter.empty)
    for hook in called:
        for name in sorted(hook.named - hook.ours):
            is_needed = name in hook.required
            columns[name] = Parameter.empty if is_needed else columns.get(name)
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in ("task", "actors")]
    for name, default in columns.items():
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    agent_and_rewards.__signature__ = Signature(parameters)
    # Reports of `rl-core check` name the hooks that the user wrote.
    agent_and_rewards.__name__ = ", ".join(["agent", *(hook.name for hook in rewards)])
    rollout_hook = Hook(
        name="rollout",
        function=agent_and_rewards,
        path=path,
        timeout_s=None,
        ours=frozenset({"task", "actors"}),
    )
    kept = {name: hook for name, hook in hooks.items() if hook not in rewards}
    return kept | {"rollout": rollout_hook}
