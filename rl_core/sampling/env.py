"""A user's environment file -> one async function, rollout(task, actors) -> trajectories.

Whatever hooks the file has, everything above this file knows that one shape.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.config import nearest
from rl_core.data.tasks import check_exists, check_messages, shorten
from rl_core.sampling.hooks import Hook, HookThreads, describe_error
from rl_core.types import Message, RunError, Task, Trajectory

if TYPE_CHECKING:
    from rl_core.sampling.actor import Conversation, Speaker

# What each hook may name besides the data's columns. `state` joins them if there is a start().
SPOKEN = frozenset({"messages", "prompt", "completion", "task", "trajectory", "actor"})
ARGUMENTS = {"start": frozenset({"messages", "prompt", "task", "actor"}), "interact": SPOKEN, "reward_fn": SPOKEN}
FUNCTIONS = (*ARGUMENTS, "load_tasks", "advantage_fn")
SETTINGS = ("tools", "max_turns")
NOT_SUPPORTED = ("turns", "system_prompts", "rollout", "group_reward_fn")


@dataclass(kw_only=True)
class Env:
    name: str  # the file's stem
    path: str
    hooks: dict[str, Hook]
    rollout: Callable[[Task, Mapping[str, Speaker]], Awaitable[list[Trajectory]]]
    load_tasks: Callable[[str], Sequence[dict[str, Any]]] | None = None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None = None  # rewards of a group -> advantages
    max_turns: int | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def is_multi_turn(self) -> bool:
        return "interact" in self.hooks

    def check_columns(self, rows: Sequence[dict[str, Any]], source: str) -> None:
        """Raises ValueError if a hook names something that is neither ours nor a column of every row."""
        columns = getattr(rows, "column_names", None)  # a table's rows all have the same
        for hook in self.hooks.values():
            wanted = hook.required - hook.ours
            for number, row in enumerate([dict.fromkeys(columns)] if columns is not None else rows, 1):
                missing = sorted(wanted - row.keys())
                if missing:
                    raise ValueError(
                        f"{self.path}: {hook.name}() names {missing[0]!r}, which is neither an argument of hooks nor a "
                        f"column of row {number} of {source}; {missing_hint(hook, missing[0], row)}"
                    )


def missing_hint(hook: Hook, name: str, row: Mapping[str, Any]) -> str:
    if name == "state" and hook.name != "start":
        return "define start(task), which makes it"
    if name in SPOKEN:
        return f"it does not exist yet when {hook.name}() is called"
    return nearest(name, sorted({*hook.ours, *row}))


def load_env(path: str, *, hook_timeout_s: float = 60.0) -> Env:
    """The environment of a Python file. Raises ValueError with file and line for what the file raises, and for hooks
    that are missing, misspelled or of the wrong kind."""
    file = Path(path).expanduser()
    check_exists(file)
    module = execute_file(file, path)
    check_names(module, path)
    has_start = hasattr(module, "start")
    threads = HookThreads()
    hooks = {
        name: Hook(name=name, function=getattr(module, name), path=path, timeout_s=hook_timeout_s, threads=threads,
                   ours=known | {"state"} if has_start and name != "start" else known)
        for name, known in ARGUMENTS.items() if hasattr(module, name)
    }  # fmt: skip
    tools = getattr(module, "tools", None)
    load = getattr(module, "load_tasks", None)
    advantages = getattr(module, "advantage_fn", None)
    return Env(
        name=file.stem,
        path=path,
        hooks=hooks,
        rollout=make_rollout(hooks, tools, path),
        load_tasks=load and (lambda split: rows_of(load, split, path)),
        advantage_fn=advantages and (lambda rewards: advantages_of(advantages, rewards, path)),
        max_turns=getattr(module, "max_turns", None),
        tools=tools,
    )


def execute_file(file: Path, path: str) -> ModuleType:
    name = f"rl_core_env_{file.stem}"
    # compile() below gets the path as the user wrote it: that is what errors and tracebacks then say.
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file.resolve())
    # Dataclasses and pickle look a class up through its module's name.
    sys.modules[name] = module
    # Files beside it can be imported, as in a script; last, so that they hide no library.
    if str(file.resolve().parent) not in sys.path:
        sys.path.append(str(file.resolve().parent))
    try:
        exec(compile(file.read_bytes(), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        hint = "; pip install it, or drop the import" if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{path} does not load: {describe_error(error, path)}{hint}") from error
    return module


def check_names(module: ModuleType, path: str) -> None:
    own = [
        name for name, value in vars(module).items()
        if not name.startswith("_") and (not callable(value) or getattr(value, "__module__", "") == module.__name__)
        and not inspect.ismodule(value)
    ]  # fmt: skip
    for name in own:
        if name in NOT_SUPPORTED:
            raise ValueError(f"{path}: {name!r} is the name of a hook that is not supported yet; rename it")
        kind = FUNCTIONS if callable(vars(module)[name]) else SETTINGS
        close = difflib.get_close_matches(name.lower(), kind, n=1, cutoff=0.75)
        # Where the hook itself is there, a similar name is a helper of it.
        if close and not hasattr(module, close[0]):
            raise ValueError(f"{path}: {name!r} is no hook; did you mean {close[0]!r}? Begin a helper's name with _")
    if not hasattr(module, "reward_fn") and not hasattr(module, "interact"):
        raise ValueError(f"{path}: defines no hook; it needs def reward_fn(messages, ...) or def interact(messages)")
    for name in FUNCTIONS:
        if hasattr(module, name) and not callable(getattr(module, name)):
            raise ValueError(f"{path}: {name} must be a function, is {shorten(getattr(module, name))}")
    turns, tools = getattr(module, "max_turns", None), getattr(module, "tools", None)
    if turns is not None and (type(turns) is not int or turns < 1):
        raise ValueError(f"{path}: max_turns = {shorten(turns)} must be a whole number of at least 1")
    if tools is not None and not (isinstance(tools, (list, tuple)) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"{path}: tools = {shorten(tools)} must be a list of OpenAI schemas (dictionaries)")


def rows_of(load_tasks: Callable, split: str, path: str) -> Sequence[dict[str, Any]]:
    """What the user's load_tasks(split) gives: a table of `datasets`, or a list of rows."""
    try:
        rows = load_tasks(split)
        rows = asyncio.run(rows) if inspect.iscoroutine(rows) else rows
        rows = rows if hasattr(rows, "column_names") or rows is None else list(rows)
    except Exception as error:
        raise ValueError(f"{path}: load_tasks({split!r}) failed: {describe_error(error, path)}") from error
    for number, row in enumerate(rows if isinstance(rows, list) else [], 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: load_tasks({split!r}): row {number} must be a dict, is {shorten(row)}")
    if rows is None:
        raise ValueError(f"{path}: load_tasks({split!r}) returned None; it must return a list of rows")
    return rows


def advantages_of(advantage_fn: Callable, rewards: list[float], path: str) -> list[float]:
    """What the user's advantage_fn(rewards) gives for a group. Raises RunError unless it is a finite number for each."""
    try:
        values = advantage_fn(list(rewards))
        values = values.tolist() if hasattr(values, "tolist") else list(values)
    except Exception as error:
        raise RunError(f"{path}: advantage_fn({rewards}) failed: {describe_error(error, path)}") from error
    if len(values) != len(rewards):
        raise RunError(f"{path}: advantage_fn({rewards}) gave {len(values)} values; it must give one for each reward")
    try:
        return [finite_reward(value) for value in values]
    except ValueError:
        raise RunError(f"{path}: advantage_fn({rewards}) gave {values}; all must be finite numbers") from None


@dataclass(kw_only=True, slots=True)
class Episode:
    """One attempt by one actor at one task, and what its hooks can see of it."""

    task: Task
    speaker: Speaker
    conversation: Conversation | None = None  # None while start() runs
    state: Any = None
    rewards: dict[str, float]

    async def call(self, hook: Hook) -> Any:
        task = self.task
        # Made only when named, and copied: a hook can spoil neither the conversation nor the task of the next episode.
        given = {
            "messages": lambda: copied(self.conversation.messages if self.conversation else task.messages),
            "prompt": lambda: copied(task.messages),
            "completion": lambda: self.conversation.turns[-1].completion.text,
            "task": lambda: replace(task, row=dict(task.row), messages=copied(task.messages)),
            "trajectory": lambda: copy.deepcopy(self.trajectory(reward=None)),
            "actor": lambda: self.speaker.name,
            "state": lambda: self.state,
        }
        return await hook(task.id, task.row, given)

    def trajectory(self, reward: float | None) -> Trajectory:
        return self.conversation.trajectory(self.task, reward=reward, reward_parts=dict(self.rewards), metrics={})


def copied(messages: Sequence[Message]) -> list[Message]:
    return [dict(message) for message in messages]


def make_rollout(hooks: dict[str, Hook], tools: Sequence[dict] | None, path: str) -> Callable:
    """The adapter: start, then replies and interact in turn, then reward_fn, for one actor."""
    start, interact, reward_fn = (hooks.get(name) for name in ("start", "interact", "reward_fn"))

    async def rollout(task: Task, actors: Mapping[str, Speaker]) -> list[Trajectory]:
        if len(actors) != 1:
            raise ValueError(f"{path}: this environment is for one actor, there are {', '.join(actors) or 'none'}")
        episode = Episode(task=task, speaker=next(iter(actors.values())), rewards={})
        if start:
            episode.state = await episode.call(start)
        episode.conversation = episode.speaker.converse(copied(task.messages), list(tools) if tools else None)
        await converse(episode, interact)
        if reward_fn:
            add_rewards(episode.rewards, reward_parts(await episode.call(reward_fn), "reward_fn", path), path)
        elif not episode.rewards:
            episode.rewards["interact"] = 0.0  # it never gave one
        return [episode.trajectory(reward=math.fsum(episode.rewards.values()))]

    return rollout


async def converse(episode: Episode, interact: Hook | None) -> None:
    conversation = episode.conversation
    while True:
        await conversation.respond()
        if conversation.truncated or interact is None:
            return
        messages, reward, is_done = check_reply(await episode.call(interact), interact.path)
        if reward is not None:
            episode.rewards["interact"] = episode.rewards.get("interact", 0.0) + reward
        if is_done:
            # Seen by reward_fn, but nobody answers them, so that they need no room among the tokens.
            conversation.messages.extend(messages)
            return
        # After the last turn only its reward counts: what it says would stand unanswered.
        if len(conversation.turns) >= episode.speaker.max_turns or not conversation.add(messages):
            return


def check_reply(reply: Any, path: str) -> tuple[list[Message], float | None, bool]:
    """(messages, reward, whether the episode is over) of what interact returned."""
    if reply is None or (isinstance(reply, (list, tuple)) and not reply):
        return [], None, True
    reward, is_done = None, False
    try:
        if isinstance(reply, dict):
            for key in reply.keys() - {"messages", "reward", "done"}:
                raise ValueError(f"has an unknown key {key!r}; known: messages, reward, done")
            reward, is_done = reply.get("reward"), bool(reply.get("done"))
            reward = None if reward is None else finite_reward(reward)
            reply = reply.get("messages")
            if reply is None or (isinstance(reply, (list, tuple)) and not reply):
                return [], reward, True
        return check_messages(reply), reward, is_done
    except ValueError as error:
        raise ValueError(f"{path}: what interact() returned {error}") from None


def reward_parts(value: Any, name: str, path: str) -> dict[str, float]:
    """A dict's parts, or the one number under its hook's name."""
    parts = value if isinstance(value, dict) else {name: value}
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{path}: {name}() returned {shorten(value)}; a dict must name each part, as 'format': 0.5")
    checked = {}
    for part, number in parts.items():
        try:
            checked[part] = finite_reward(number)
        except ValueError as error:
            where = f"part {part!r} of what {name}() returned" if isinstance(value, dict) else f"what {name}() returned"
            raise ValueError(f"{path}: {where} {error}") from None
    return checked


def add_rewards(rewards: dict[str, float], parts: dict[str, float], path: str) -> None:
    for part in rewards.keys() & parts.keys():
        raise ValueError(f"{path}: the reward part {part!r} is given by two hooks; name it otherwise in reward_fn")
    rewards.update(parts)


def finite_reward(value: Any) -> float:
    """A Python float of a bool, an int, a float, or a scalar of numpy or torch."""
    number = value
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1:
        number = value.item()
    if not isinstance(number, numbers.Real):
        raise ValueError(f"is {shorten(value)}; a reward must be a finite number, or a dict of them")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"is {shorten(value)}; a reward must be finite")
    return number
