"""A user's environment file -> one async function, rollout(task, speakers) -> trajectories.

Whatever hooks the file has, everything above this file knows that one shape.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.config import nearest
from rl_core.data.rows import check_exists
from rl_core.sampling.env_file import SystemPrompts, check_names, execute_file, listed, longest_order, rows_of
from rl_core.sampling.episode import Rules, play
from rl_core.sampling.hooks import Hook, HookThreads
from rl_core.sampling.replies import Voices, check_trajectories
from rl_core.sampling.rewards import (
    Reward,
    advantages_of,
    copied,
    finite_reward,
    marked_rewards,
    score_group,
    task_copy,
)
from rl_core.sampling.schedule import check_speaker, draw_turns, parse_schedule, speakers_of
from rl_core.types import Message, Task, Trajectory, counter_seed

if TYPE_CHECKING:
    from rl_core.sampling.actor import Speaker

# What each hook may name besides the data's columns. `state` joins them if there is a start().
BEFORE = frozenset({"messages", "prompt", "task"})
SPOKEN = BEFORE | {"completion", "trajectory", "actor", "actors"}
OF_GROUP = frozenset({"trajectories", "prompt", "task", "actor", "actors"})
ARGUMENTS = {
    "start": BEFORE | {"actor", "actors"},
    "interact": SPOKEN,
    "turns": BEFORE | {"actors"},  # their names: nobody can be asked yet
    "rollout": frozenset({"task", "actors"}),
    "task_weight": frozenset({"tries", "success_rate", "mean_reward"}),
}


@dataclass(kw_only=True)
class Env:
    name: str  # the file's stem
    path: str
    hooks: dict[str, Hook]
    rollout: Callable[[Task, Mapping[str, Speaker]], Awaitable[list[Trajectory]]]
    load_tasks: Callable[[str], Sequence[dict[str, Any]]] | None = None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None = None  # rewards of a group -> advantages
    max_turns: int | None = None  # of all actors together
    tools: list[dict[str, Any]] | None = None
    turns: str | list[str] | Hook | None = None
    system_prompts: SystemPrompts
    group_rewards: list[Reward] = field(default_factory=list)

    @property
    def is_multi_turn(self) -> bool:
        return self.turns is not None or "interact" in self.hooks or "rollout" in self.hooks

    def check_columns(self, rows: Sequence[dict[str, Any]], source: str) -> None:
        """Raises ValueError if a hook or a system prompt names what is neither ours nor a column of every row."""
        columns = getattr(rows, "column_names", None)  # a table's rows all have the same
        wanted = [(hook, hook.required - hook.ours) for hook in self.hooks.values()]
        for number, row in enumerate([dict.fromkeys(columns)] if columns is not None else rows, 1):
            for hook, names in wanted:
                if missing := sorted(names - row.keys()):
                    raise ValueError(
                        f"{self.path}: {hook.name}() names {missing[0]!r}, which is neither an argument of hooks nor a "
                        f"column of row {number} of {source}; {missing_hint(hook, missing[0], row)}"
                    )
            for actor, names in self.system_prompts.columns.items():
                if missing := sorted(names - row.keys()):
                    raise ValueError(
                        f"{self.path}: system_prompts[{actor!r}] names {missing[0]!r}, which is no column of row {number} of "
                        f"{source}; {nearest(missing[0], sorted(row))}"
                    )

    def check_actors(self, names: Sequence[str]) -> None:
        """Raises ValueError unless these actors can play: those that `turns` and `system_prompts` name are among them, and
        with several somebody says whose turn it is."""
        for actor in self.system_prompts.templates:
            self.check_name(actor, names, "system_prompts")
        if len(names) > 1:
            if self.turns is None and "rollout" not in self.hooks:
                raise ValueError(
                    f"{self.path}: there are {len(names)} actors, {', '.join(names)}, and nothing says whose turn it is; add "
                    f'turns = "{" -> ".join(names)}", or write async def rollout(task, actors)'
                )
            start = self.hooks.get("start")
            if start and "actor" in start.required:
                raise ValueError(
                    f"{self.path}: start() names 'actor', but is called before one of {', '.join(names)} speaks; drop it"
                )
        if isinstance(self.turns, str):
            self.parsed(names)
        elif isinstance(self.turns, list):
            for name in self.turns:
                self.check_name(name, names, "turns")

    def speakers(self, names: Sequence[str]) -> set[str] | None:
        """Those of the actors that may speak; None where only a function of the file knows."""
        if "rollout" in self.hooks or isinstance(self.turns, Hook):
            return None
        return speakers_of(self.parsed(names)) if isinstance(self.turns, str) else set(self.turns or names)

    def check_name(self, name: str, names: Sequence[str], where: str) -> None:
        try:
            check_speaker(name, names)
        except ValueError as error:
            raise ValueError(f"{self.path}: {where}: {error}") from None

    def parsed(self, names: Sequence[str]) -> tuple:
        try:
            return parse_schedule(self.turns, sorted(names))
        except ValueError as error:
            raise ValueError(f"{self.path}: turns: {error}") from None

    def opening(self, task: Task, actor: str) -> list[Message]:
        """What an actor sees before anybody has spoken. Its system prompt takes the place of the task's own."""
        messages = copied(task.messages)
        prompt = self.system_prompts.render(actor, task)
        if prompt is None:
            return messages
        own = messages[:1] if messages[:1] and messages[0].get("role") == "system" else []
        return [{"role": "system", "content": prompt}, *messages[len(own) :]]

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        """The task with who speaks when in info["turns"], the same for all episodes of a group. Raises ValueError, HookError
        or TimeoutError if `turns` cannot say."""
        if self.turns is None:
            return task
        if isinstance(self.turns, str):
            order = draw_turns(self.parsed(names), seed)
        elif isinstance(self.turns, list):
            order = self.turns
        else:
            given = {
                "messages": lambda: copied(task.messages),
                "prompt": lambda: copied(task.messages),
                "task": lambda: task_copy(task),
                "actors": lambda: list(names),
            }
            order = await self.turns(task.id, task.row, given)
            for name in order:
                self.check_name(name, names, f"turns() for task {task.id}")
        return replace(task, info=task.info | {"turns": list(order)})

    async def score_group(
        self, task: Task, trajectories: Sequence[Trajectory], speakers: Mapping[str, Speaker]
    ) -> None:
        """Adds what the hooks for a whole group give. Raises what they raise, ValueError for what is no reward."""
        await score_group(self.group_rewards, task, trajectories, Voices(speakers, task))


def missing_hint(hook: Hook, name: str, row: Mapping[str, Any]) -> str:
    if name == "trajectories":
        return "mark it by @reward(batched=True), or call it group_reward_fn: it then gets those of a whole group"
    if "trajectories" in hook.ours and name in SPOKEN | {"state"}:
        return f"{hook.name}() is called once for a group, and finds what was said in `trajectories`"
    if hook.name == "task_weight" and name in SPOKEN | {"state"}:
        return f"it is asked before a task is drawn: it may name {', '.join(sorted(hook.ours))} and columns"
    if name == "state" and hook.name not in ("start", "turns", "rollout"):
        return "define start(task), which makes it"
    if name in SPOKEN and hook.name != "rollout":
        return f"it does not exist yet when {hook.name}() is called"
    return nearest(name, sorted({*hook.ours, *row}))


def load_env(path: str, *, hook_timeout_s: float = 60.0) -> Env:
    """The environment of a Python file. Raises ValueError with file and line for what the file raises, and for hooks
    that are missing, misspelled or of the wrong kind."""
    file = Path(path).expanduser()
    check_exists(file)
    module = execute_file(file, path)
    check_names(module, path)
    threads = HookThreads()

    def hook_of(name: str, function: Callable, ours: frozenset[str], has_deadline: bool = True) -> Hook:
        is_outside = name in ("start", "turns", "rollout", "task_weight") or ours is OF_GROUP
        knows_state = hasattr(module, "start") and not is_outside
        hook = Hook(
            name=name, function=function, path=path, timeout_s=hook_timeout_s if has_deadline else None, threads=threads,
            ours=ours | {"state"} if knows_state else ours,
        )  # fmt: skip
        asks = name != "turns" and "actors" in hook.ours & (hook.required | hook.optional)
        if asks and not hook.is_async:
            raise ValueError(
                f"{path}: {name}() names 'actors', whose replies must be awaited; write async def {name}(...)"
            )
        return hook

    hooks = {n: hook_of(n, getattr(module, n), ARGUMENTS[n]) for n in ("start", "interact") if hasattr(module, n)}
    rewards = []
    for name, (function, weight, batched) in marked_rewards(vars(module)).items():
        hooks[name] = hook_of(name, function, OF_GROUP if batched else SPOKEN)
        rewards.append(Reward(hook=hooks[name], weight=weight, batched=batched))
    turns = getattr(module, "turns", None)
    max_turns = getattr(module, "max_turns", None)
    if callable(turns):
        turns = hooks["turns"] = hook_of("turns", listed(turns, path), ARGUMENTS["turns"])
    elif turns is not None:
        turns = turns if isinstance(turns, str) else list(turns)
        max_turns = max_turns or longest_order(turns, path)
    if hasattr(module, "rollout"):
        # It waits for whole conversations; the episode has a deadline of its own.
        hooks["rollout"] = hook_of("rollout", module.rollout, ARGUMENTS["rollout"], has_deadline=False)
    if hasattr(module, "task_weight"):
        hooks["task_weight"] = hook_of("task_weight", module.task_weight, ARGUMENTS["task_weight"], has_deadline=False)
        if hooks["task_weight"].is_async:
            raise ValueError(f"{path}: task_weight() is asked between steps, when nothing else runs; drop the async")
    load = getattr(module, "load_tasks", None)
    advantages = getattr(module, "advantage_fn", None)
    env = Env(
        name=file.stem,
        path=path,
        hooks=hooks,
        rollout=None,
        load_tasks=load and (lambda split: rows_of(load, split, path)),
        advantage_fn=advantages and (lambda rewards: advantages_of(advantages, rewards, path)),
        max_turns=max_turns,
        tools=getattr(module, "tools", None),
        turns=turns,
        system_prompts=SystemPrompts(getattr(module, "system_prompts", {}), path),
        group_rewards=[reward for reward in rewards if reward.batched],
    )
    env.rollout = make_rollout(env, module, rewards)
    return env


def make_rollout(env: Env, module: ModuleType, rewards: list[Reward]) -> Callable:
    """The adapter: the user's own rollout(), or one episode by the other hooks."""
    if "rollout" in env.hooks:
        return functools.partial(free_rollout, env)
    truncated_reward = getattr(module, "truncated_reward", None)
    rules = Rules(
        path=env.path,
        start=env.hooks.get("start"),
        interact=env.hooks.get("interact"),
        rewards=[reward for reward in rewards if not reward.batched],
        opening=env.opening,
        tools=env.tools,
        is_grouped=bool(env.group_rewards),
        has_order=env.turns is not None,
        name_prefix=getattr(module, "name_prefix", False),
        truncated_reward=None if truncated_reward is None else finite_reward(truncated_reward),
    )
    return functools.partial(turn_taking_rollout, env, rules)


async def turn_taking_rollout(env: Env, rules: Rules, task: Task, speakers: Mapping[str, Speaker]) -> list[Trajectory]:
    if env.turns is None and len(speakers) != 1:
        env.check_actors(list(speakers))
    if env.turns is not None and "turns" not in task.info:
        task = await env.draw(task, list(speakers), counter_seed(task.id, "schedule"))
    return await play(rules, task, speakers, task.info["turns"] if env.turns is not None else None)


async def free_rollout(env: Env, task: Task, speakers: Mapping[str, Speaker]) -> list[Trajectory]:
    given = {"task": lambda: task_copy(task), "actors": lambda: Voices(speakers, task)}
    found = await env.hooks["rollout"](task.id, task.row, given)
    return check_trajectories(found, task, speakers, env.path)
