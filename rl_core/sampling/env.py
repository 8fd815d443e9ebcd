"""A user's environment file -> an Env; its rollout(task, actors) plays one episode. Wrong files are refused here."""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.config import nearest
from rl_core.data.rows import check_exists
from rl_core.data.tasks import shorten
from rl_core.sampling.actor import Cast, at_most, copied
from rl_core.sampling.episode import Reward, play, score_group, task_copy
from rl_core.sampling.hooks import Hook, describe_error, finite
from rl_core.types import Message, RunError, Task, Trajectory, counter_seed, option

MAX_TURNS = 10_000  # that are taken of a turns() that yields for ever
# What each hook may name besides the data's columns. `state` joins SPOKEN if there is a start().
BEFORE = frozenset({"messages", "prompt", "task"})
SPOKEN = BEFORE | {"completion", "trajectory", "actor", "actors"}
OF_GROUP = frozenset({"trajectories", "prompt", "task", "actor", "actors"})
ARGUMENTS = {
    "start": BEFORE | {"actor", "actors"},
    "interact": SPOKEN,
    "turns": BEFORE | {"actors"},  # their names: they cannot speak yet
    "rollout": frozenset({"task", "actors"}),
    "task_weight": frozenset({"tries", "success_rate", "mean_reward"}),
}
UNUSED_BY_ROLLOUT = {"start", "interact", "turns", "system_prompts", "name_prefix", "truncated_reward"}
FUNCTIONS = (*ARGUMENTS, "reward_fn", "group_reward_fn", "load_tasks", "advantage_fn")
# Setting -> (whether a value is good, what it must be).
SETTINGS = {
    "max_turns": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    "tools": (lambda v: is_list(v, dict), "a list of OpenAI schemas (dictionaries)"),
    "turns": (
        lambda v: isinstance(v, str) or callable(v) or (v and is_list(v, str)),
        "a schedule such as 'bob -> alice', a list of names, or a function that yields names",
    ),
    "system_prompts": (
        lambda v: isinstance(v, dict) and is_list([*v, *v.values()], str),
        "a dictionary of actors' names and texts",
    ),
    "name_prefix": (lambda v: isinstance(v, bool), "True or False"),
    "truncated_reward": (
        lambda v: type(v) in (int, float) and abs(v) < float("inf"),
        "None, or the finite reward of an episode that was cut off",
    ),
}


def is_list(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


@dataclass(kw_only=True)
class Env:
    name: str  # the file's stem
    path: str
    hooks: dict[str, Hook]
    rewards: list[Reward]
    load_tasks: Callable[[str], Sequence[dict[str, Any]]] | None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None  # rewards of a group -> advantages
    turns: str | Hook | None  # a schedule, or the function that gives an order
    max_turns: int | None  # of all actors together; None: as each actor says
    max_tokens: int | None = None  # upper bound of one turn
    tools: list[dict[str, Any]] | None
    system_prompts: dict[str, Any]  # actor -> SystemPrompt
    name_prefix: bool
    truncated_reward: float | None

    @property
    def group_rewards(self) -> list[Reward]:
        return [reward for reward in self.rewards if reward.batched]

    @property
    def is_multi_turn(self) -> bool:
        return self.turns is not None or "interact" in self.hooks or "rollout" in self.hooks

    def check_columns(self, rows: Sequence[dict[str, Any]], source: str) -> None:
        """Raises ValueError if a hook or a system prompt names what is neither ours nor a column of every row."""
        wanted = [(f"{hook.name}()", hook.required - hook.ours, hook.ours) for hook in self.hooks.values()]
        wanted += [(f"system_prompts[{name!r}]", p.columns, set()) for name, p in self.system_prompts.items()]
        columns = getattr(rows, "column_names", None)  # a table's rows all have the same
        for number, row in enumerate([dict.fromkeys(columns)] if columns is not None else rows, 1):
            for what, names, ours in wanted:
                for name in sorted(names - row.keys()):
                    hint = "it needs start(task)" if name == "state" else nearest(name, sorted({*ours, *row}))
                    raise ValueError(
                        f"{self.path}: {what} names {name!r}, which is neither one of its arguments nor a column of "
                        f"row {number} of {source}; {hint}"
                    )

    def check_actors(self, names: Sequence[str]) -> None:
        """Raises ValueError unless these actors can play."""
        for name in self.system_prompts:
            self._check_actor(name, names, "system_prompts")
        if isinstance(self.turns, str):
            self._schedule(names)
        elif self.turns is None and len(names) > 1 and "rollout" not in self.hooks:
            raise ValueError(
                f"{self.path}: there are {len(names)} actors, {', '.join(names)}, and nothing says whose turn it is; add "
                f'turns = "{" -> ".join(names)}", or write async def rollout(task, actors)'
            )

    def _check_actor(self, name: str, names: Sequence[str], where: str) -> None:
        if name not in names:
            raise ValueError(f"{self.path}: {where}: {name!r} is no actor; {nearest(str(name), sorted(names))}")

    def _schedule(self, names: Sequence[str] = ()) -> tuple:
        try:
            return option("rl_core.options.schedule:parse_schedule")(self.turns, sorted(names))
        except ValueError as error:
            raise ValueError(f"{self.path}: turns: {error}") from None

    def speakers(self, names: Sequence[str] = ()) -> list[str] | None:
        """Names of actors that may speak; without `names`, those in the file. None if only a function of the file decides."""
        if "rollout" in self.hooks or isinstance(self.turns, Hook):
            return None
        return option("rl_core.options.schedule:speakers_of")(self._schedule(names)) if self.turns else list(names)

    def opening(self, task: Task, actor: str) -> list[Message]:
        """An actor's messages before the first turn. Its system prompt replaces the task's own."""
        if actor not in self.system_prompts:
            return copied(task.messages)
        has_own = bool(task.messages) and task.messages[0].get("role") == "system"
        text = self.system_prompts[actor].render(task)
        return [{"role": "system", "content": text}, *copied(task.messages[has_own:])]

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        """The task with the order of speakers in info["turns"], drawn once for a group. Raises ValueError, HookError or
        TimeoutError if `turns` fails."""
        if self.turns is None:
            return task
        if isinstance(self.turns, str):
            order = option("rl_core.options.schedule:draw_turns")(self._schedule(names), seed)
        else:
            given = {name: lambda: copied(task.messages) for name in ("messages", "prompt")}
            given |= {"task": lambda: task_copy(task), "actors": lambda: list(names)}
            order = await self.turns(task.id, task.row, given)
            for name in order:
                self._check_actor(name, names, f"turns() for task {task.id}")
        return replace(task, info=task.info | {"turns": list(order)})

    async def rollout(self, task: Task, actors: Cast) -> list[Trajectory]:
        """The trajectories of one episode."""
        for actor in actors.values():
            actor.params, actor.max_turns = at_most(actor.params, self.max_tokens), self.max_turns or actor.max_turns
        if "rollout" in self.hooks:
            given = {"task": lambda: task_copy(task), "actors": lambda: actors}
            return self._checked(await self.hooks["rollout"](task.id, task.row, given), task, actors)
        if self.turns is not None and "turns" not in task.info:
            task = await self.draw(task, list(actors), counter_seed(task.id, "schedule"))
        return await play(self, task, actors)

    def _checked(self, found: Any, task: Task, actors: Cast) -> list[Trajectory]:
        """What the user's rollout() returned. Raises ValueError unless it is a list of scored trajectories."""
        if not found or not is_list(found, Trajectory):
            fix = "it must be a list of at least one Trajectory: return [reply.trajectory(reward=...)]"
            raise ValueError(f"{self.path}: what rollout() returned is {shorten(found)}; {fix}")
        last = [id(t.turns[-1]) for t in found if t.turns]
        if len(set(last)) < len(last):
            raise ValueError(f"{self.path}: two trajectories of rollout() end in the same reply; fork() it before")
        for t in found:
            what = f"{self.path}: a trajectory of {t.actor!r} that rollout() returned"
            self._check_actor(t.actor, list(actors), "a trajectory that rollout() returned")
            t.reward = finite(t.reward, f"the reward of {what}")
            if t.turn_rewards and len(t.turn_rewards) != len(t.turns):
                raise ValueError(f"{what} has {len(t.turn_rewards)} turn_rewards for {len(t.turns)} turns")
            t.task_id, t.env = task.id, task.env
        return list(found)

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory], actors: Cast) -> None:
        """Adds the rewards of hooks for a group. Raises what they raise, and ValueError for what is no reward."""
        await score_group(self.group_rewards, task, trajectories, actors)


def load_env(path: str, *, hook_timeout_s: float = 60.0) -> Env:
    """The environment of a Python file. Raises ValueError, with file and line for what the file raises, and for hooks that
    are missing, misspelled or of the wrong kind."""
    file = Path(path).expanduser()
    check_exists(file)
    module = execute_file(file, path)
    has, marked = vars(module), marked_rewards(module)
    check_names(module, path)
    plain = {name: has[name] for name in ARGUMENTS if callable(has.get(name))}
    hooks = {}
    for name, function in (plain | {name: function for name, (function, *_) in marked.items()}).items():
        ours = ARGUMENTS.get(name) or (OF_GROUP if marked[name][2] else SPOKEN)
        hooks[name] = hook = Hook(
            name=name,
            function=listed(function, path) if name == "turns" else function,
            path=path,
            timeout_s=None if name in ("rollout", "task_weight") else hook_timeout_s,  # an episode has its own deadline
            ours=ours | {"state"} if "start" in has and ours is SPOKEN else ours,
        )
        if hook.is_async and name == "task_weight":
            raise ValueError(f"{path}: task_weight() is called between steps, when nothing else runs; drop the async")
        if not hook.is_async and name != "turns" and "actors" in hook.ours & (hook.required | hook.optional):
            raise ValueError(f"{path}: {name}() names 'actors', who must be awaited; write async def {name}(...)")
    turns, load, advantages = hooks.get("turns", has.get("turns")), has.get("load_tasks"), has.get("advantage_fn")
    turns = " -> ".join(turns) if isinstance(turns, (list, tuple)) else turns
    prompts = has.get("system_prompts")
    env = Env(
        name=file.stem,
        path=path,
        hooks=hooks,
        rewards=[Reward(hook=hooks[name], weight=w, batched=b) for name, (_, w, b) in marked.items()],
        load_tasks=load and functools.partial(rows_of, load, path=path),
        advantage_fn=advantages and functools.partial(advantages_of, advantages, path=path),
        turns=turns,
        max_turns=has.get("max_turns"),
        tools=has.get("tools"),
        system_prompts=option("rl_core.options.system_prompts:load_prompts")(prompts, path) if prompts else {},
        name_prefix=has.get("name_prefix", False),
        truncated_reward=has.get("truncated_reward"),
    )
    if isinstance(turns, str):
        env.max_turns = env.max_turns or option("rl_core.options.schedule:num_turns")(env._schedule())
    return env


def execute_file(file: Path, path: str) -> ModuleType:
    name = f"rl_core_env_{file.stem}"
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None, origin=path))
    module.__file__ = str(file.resolve())
    sys.modules[name] = module  # dataclasses and pickle look a class up there
    # Files beside it can be imported, as in a script; last, so that they hide no library.
    if str(file.resolve().parent) not in sys.path:
        sys.path.append(str(file.resolve().parent))
    try:
        # compile() gets the path as the user wrote it: errors show that one.
        exec(compile(file.read_bytes(), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        hint = "; pip install it, or drop the import" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{path} does not load: {describe_error(error, path)}{hint}") from error
    return module


def marked_rewards(module: ModuleType) -> dict[str, tuple[Callable, float, bool]]:
    """Name -> (function, weight, whether it is batched). One that has two names counts once."""
    found: dict[str, tuple[Callable, float, bool]] = {}
    for name, value in vars(module).items():
        plain = {"reward_fn": (1.0, False), "group_reward_fn": (1.0, True)}.get(name)
        mark = getattr(value, "__dict__", {}).get("reward_mark", plain)
        if mark and callable(value) and all(value is not known[0] for known in found.values()):
            found[name] = (value, mark[0], mark[1] or name == "group_reward_fn")
    return found


def check_names(module: ModuleType, path: str) -> None:
    """Raises ValueError for misspelled hooks, settings of the wrong kind, and a file without a hook that scores."""
    has, marked = vars(module), marked_rewards(module)
    for name, value in has.items():
        is_own = not callable(value) or getattr(value, "__module__", "") == module.__name__
        if name.startswith("_") or inspect.ismodule(value) or not is_own:
            continue
        close = difflib.get_close_matches(name.lower(), FUNCTIONS if callable(value) else SETTINGS, n=1, cutoff=0.75)
        # Where the hook itself is there, a similar name is a helper of it; TURNS and SYSTEM_PROMPT are anybody's.
        if close and close[0] not in has and not (name.isupper() and close[0] in ("turns", "system_prompts")):
            raise ValueError(f"{path}: {name!r} is no hook; did you mean {close[0]!r}? Begin a helper's name with _")
    for name in FUNCTIONS:
        if name in has and name not in SETTINGS and not callable(has[name]):
            raise ValueError(f"{path}: {name} must be a function, is {shorten(has[name])}")
    for name, (is_good, rule) in SETTINGS.items():
        if has.get(name) is not None and not is_good(has[name]):
            raise ValueError(f"{path}: {name} = {shorten(has[name])} must be {rule}")
    if "interact" not in has and "rollout" not in has and not marked:
        raise ValueError(f"{path}: defines no hook; it needs def reward_fn(messages, ...) or def interact(messages)")
    if "rollout" in has:
        unused = [*(UNUSED_BY_ROLLOUT & has.keys()), *(n for n, (_, _, batched) in marked.items() if not batched)]
        for name in sorted(unused):
            raise ValueError(f"{path}: rollout() replaces {name!r}, which nobody would call; drop one of them")


def listed(turns: Callable, path: str) -> Callable:
    """The user's turns() as a function that gives a list: it may yield names for ever."""

    @functools.wraps(turns)
    def call(*args, **kwargs) -> list[str]:
        order = turns(*args, **kwargs)
        if isinstance(order, str) or not hasattr(order, "__iter__"):
            raise ValueError(f"turns() gave {shorten(order)}; it must yield names, or return a list of them")
        return list(itertools.islice(order, MAX_TURNS))

    return call


def rows_of(load_tasks: Callable, split: str, path: str) -> Sequence[dict[str, Any]]:
    """What the user's load_tasks(split) gives: a table of `datasets`, or a list of rows."""
    try:
        rows = load_tasks(split)
        rows = asyncio.run(rows) if inspect.iscoroutine(rows) else rows
        rows = rows if hasattr(rows, "column_names") else list(rows)
    except Exception as error:
        raise ValueError(f"{path}: load_tasks({split!r}) failed: {describe_error(error, path)}") from error
    if isinstance(rows, list) and not is_list(rows, dict):
        raise ValueError(f"{path}: load_tasks({split!r}) must give dictionaries, gives {shorten(rows)}")
    return rows


def advantages_of(advantage_fn: Callable, rewards: list[float], path: str) -> list[float]:
    """What the user's advantage_fn(rewards) gives for a group. Raises RunError unless it is a finite number for each."""
    try:
        values = [finite(value, "an advantage") for value in advantage_fn(list(rewards))]
        if len(values) != len(rewards):
            raise ValueError(f"it gave {len(values)} values; it must give one for each reward")
        return values
    except Exception as error:
        raise RunError(f"{path}: advantage_fn({rewards}) failed: {describe_error(error, path)}") from error
