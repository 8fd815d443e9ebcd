"""A user's environment file -> an Env, whose rollout() plays an episode. Wrong files are refused
here.

A file with a rollout() plays its episodes itself. All others are compiled to one: episode.py's
Dialogue, in which actors take turns, and hooks answer and score. Nobody above asks which it was.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.data.rows import check_exists
from rl_core.data.tasks import shorten
from rl_core.sampling.actor import EpisodeActors
from rl_core.sampling.episode import Dialogue, checked, is_list, score_group
from rl_core.sampling.hooks import Hook, describe_error, finite
from rl_core.types import Message, RunError, Task, Trajectory

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
FUNCTIONS = (*ARGUMENTS, "reward_fn", "group_reward_fn", "load_tasks", "advantage_fn")
# Those without a mark: weight, whether batched.
REWARDS = {"reward_fn": (1.0, False), "group_reward_fn": (1.0, True)}
# Hashes of the files that an episode's sessions at a service began with, the newest last. Two
# workers may hold two files.
SESSION_CODES: ContextVar[list[str]] = ContextVar("SESSION_CODES")
UNUSED_BY_ROLLOUT = {
    "start",
    "interact",
    "turns",
    "system_prompts",
    "name_prefix",
    "truncated_reward",
}


def is_tools(value: Any) -> bool:
    return is_list(value, Callable | dict)


def is_turns(value: Any) -> bool:
    return isinstance(value, str) or callable(value) or is_list(value, str)


def is_prompts(value: Any) -> bool:
    return isinstance(value, dict) and is_list([*value, *value.values()], str)


# Setting -> (whether a value is good, what it must be).
SETTINGS = {
    "max_turns": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    "tools": (is_tools, "a list of functions or OpenAI schemas (dictionaries)"),
    "turns": (is_turns, "a schedule, a list of names or a function"),
    "system_prompts": (is_prompts, "a dict of names and texts"),
    "name_prefix": (lambda v: isinstance(v, bool), "True or False"),
    "truncated_reward": (
        lambda v: type(v) in (int, float) and math.isfinite(v),
        "None or a finite number",
    ),
}


@dataclass(kw_only=True)
class Env:
    name: str  # the file's stem
    path: str
    # One episode.
    rollout: Callable[[Task, EpisodeActors], Awaitable[list[Trajectory]]]
    hooks: dict[str, Hook]  # for who calls one by its name: a service, the curriculum, a check
    dialogue: Dialogue  # what the file says of turns; of no use to a rollout() of its own
    load_tasks: Callable[[str], Sequence[dict[str, Any]]] | None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None  # rewards of a group -> advantages
    max_turns: int  # of all actors together
    tools: list[dict[str, Any]] | None
    # Hash of the file; of a served one, which may change, the last that was heard.
    code: Callable[[], str]

    @property
    def rewards(self) -> list[Hook]:
        return self.dialogue.rewards

    @property
    def group_rewards(self) -> list[Hook]:
        return [hook for hook in self.rewards if hook.batched]

    async def score_group(
        self, task: Task, trajectories: Sequence[Trajectory], actors: EpisodeActors
    ) -> None:
        """Adds the group rewards."""
        await score_group(self.group_rewards, task, trajectories, actors)

    def opening(self, task: Task, actor: str) -> list[Message]:
        """An actor's messages before the first turn."""
        return self.dialogue.opening(task, actor)

    def speakers(self, names: Sequence[str] = ()) -> list[str] | None:
        """Names of actors that may speak; without `names`, those in the file. None if only a
        function of the file decides. Raises ValueError for a schedule that names others."""
        if "rollout" in self.hooks:
            return None
        turns = self.dialogue.turns
        return list(names) if turns is None else turns.speakers(names)

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        """The task with the order of speakers in info["turns"], drawn once for a group. Raises
        ValueError, HookError or TimeoutError if `turns` fails."""
        if self.dialogue.turns is None:
            return task
        order = await self.dialogue.turns.draw(task, names, seed)
        return replace(task, info=task.info | {"turns": order})


def load_env(
    path: str,
    *,
    hook_timeout_s: float = 60.0,
    max_turns: int | None = None,
    module: ModuleType | None = None,
) -> Env:
    """The environment of a Python file, or of a module that there is already, as that of a URL.
    `max_turns` overrides the file's. Raises ValueError, with file and line for what the file
    raises, and for hooks that are missing, misspelled or of the wrong kind."""
    module = module or execute_file(path)
    has = vars(module)
    marked = marked_rewards(module)
    check_names(module, marked, path)
    hooks = make_hooks(has, marked, path, hook_timeout_s)
    turns = make_turns(has.get("turns"), hooks, path)
    longest = 8 if hooks.keys() & {"interact", "rollout"} else 1
    if turns is not None:
        longest = turns.longest
    tools, prompts = has.get("tools"), has.get("system_prompts")
    if tools or prompts:
        from rl_core.sampling.prompts import load_prompts, tool_schemas

        tools = tool_schemas(tools, path) if tools else None
        prompts = load_prompts(prompts or {}, path)
    dialogue = Dialogue(
        path=path,
        hooks=hooks,
        rewards=[hooks[name] for name in marked],
        turns=turns,
        tools=tools or None,
        system_prompts=prompts or {},
        name_prefix=has.get("name_prefix", False),
        truncated_reward=has.get("truncated_reward"),
    )
    load, advantages = has.get("load_tasks"), has.get("advantage_fn")
    is_served = "://" in path
    return Env(
        name=Path(path.partition("?")[0]).stem,
        path=path,
        rollout=partial(play, hooks["rollout"]) if "rollout" in hooks else dialogue.rollout,
        hooks=hooks,
        dialogue=dialogue,
        load_tasks=load and partial(rows_of, load, path=path),
        advantage_fn=advantages and partial(advantages_of, advantages, path=path),
        max_turns=max_turns or has.get("max_turns") or longest,
        tools=dialogue.tools,
        code=module.heard_code if is_served else partial(str, hash_of(module)),
    )


async def play(hook: Hook, task: Task, actors: EpisodeActors) -> list[Trajectory]:
    """An episode by the file's own rollout()."""
    returned = await hook(task, {"task": task, "actors": actors})
    return checked(returned, hook.path, actors)


def make_hooks(
    has: dict[str, Any],
    marked: dict[str, tuple[Callable, float, bool]],
    path: str,
    timeout_s: float,
) -> dict[str, Hook]:
    functions = {name: (has[name], 1.0, False) for name in ARGUMENTS if callable(has.get(name))}
    if "turns" in functions:
        from rl_core.sampling.schedule import listed

        functions["turns"] = (listed(has["turns"]), 1.0, False)
    hooks = {}
    for name, (function, weight, batched) in (functions | marked).items():
        ours = ARGUMENTS.get(name) or (OF_GROUP if batched else SPOKEN)
        if "start" in has and ours is SPOKEN:
            ours = ours | {"state"}
        # An episode has its own deadline, and a served hook that of its service.
        has_deadline = name not in ("rollout", "task_weight") and "://" not in path
        hooks[name] = hook = Hook(
            name=name,
            function=function,
            path=path,
            timeout_s=timeout_s if has_deadline else None,
            ours=ours,
            weight=weight,
            batched=batched,
        )
        if hook.is_async and name == "task_weight":
            raise ValueError(
                f"{path}: task_weight() is called between steps, when nothing else runs; drop the "
                "async"
            )
        if not hook.is_async and name != "turns" and "actors" in hook.ours & hook.named:
            raise ValueError(
                f"{path}: {name}() names 'actors', who must be awaited; write async def {name}(...)"
            )
    return hooks


def make_turns(
    turns: str | Sequence[str] | Callable | None, hooks: dict[str, Hook], path: str
) -> Any:
    """A sampling.schedule.Schedule or TurnsFunction. None: the only actor speaks."""
    if turns is None:
        return None
    from rl_core.sampling.schedule import Schedule, TurnsFunction

    if "turns" in hooks:
        return TurnsFunction(hook=hooks["turns"])
    text = turns if isinstance(turns, str) else " -> ".join(turns)
    return Schedule(text=text, path=path)


def hash_of(module: ModuleType) -> str:
    """The first 12 hex digits of the file's SHA-256; "" for a module without a file."""
    file = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def execute_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    check_exists(file)
    name = f"rl_core_env_{file.stem}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file.resolve())
    sys.modules[name] = module  # dataclasses and pickle look a class up there
    # Files beside it can be imported, as in a script; last, so that they hide no library.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        # compile() gets the path as the user wrote it: errors show that one.
        exec(compile(file.read_bytes(), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = "; pip install it, or drop the import"
        raise ValueError(f"{path} does not load: {describe_error(error, path)}{hint}") from error
    return module


def marked_rewards(module: ModuleType) -> dict[str, tuple[Callable, float, bool]]:
    """Name -> (function, weight, whether it is batched). One that has two names counts once."""
    rewards: dict[str, tuple[Callable, float, bool]] = {}
    known = []
    for name, value in vars(module).items():
        mark = getattr(value, "__dict__", {}).get("reward_mark", REWARDS.get(name))
        if mark and callable(value) and not any(value is function for function in known):
            known.append(value)
            weight, batched = mark
            rewards[name] = (value, weight, batched or name == "group_reward_fn")
    return rewards


def check_names(
    module: ModuleType, marked: dict[str, tuple[Callable, float, bool]], path: str
) -> None:
    """Raises ValueError for misspelled hooks, settings of the wrong kind, and a file without a hook
    that scores."""
    has = vars(module)
    for name, value in has.items():
        is_imported = callable(value) and getattr(value, "__module__", "") != module.__name__
        if name.startswith("_") or inspect.ismodule(value) or is_imported:
            continue
        known = FUNCTIONS if callable(value) else SETTINGS
        for close in difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75):
            # Where the hook itself is there, a similar name is a helper of it; TURNS and
            # SYSTEM_PROMPT are anybody's.
            is_constant = name.isupper() and close in ("turns", "system_prompts")
            if close not in has and not is_constant:
                raise ValueError(
                    f"{path}: {name!r} is no hook; did you mean {close!r}? Begin a helper's name "
                    "with _"
                )
    rules = dict.fromkeys(FUNCTIONS, (callable, "a function")) | SETTINGS
    for name, (is_good, rule) in rules.items():
        if has.get(name) is not None and not is_good(has[name]):
            raise ValueError(f"{path}: {name} = {shorten(has[name])} must be {rule}")
    if not marked and has.keys().isdisjoint(("interact", "rollout")):
        raise ValueError(
            f"{path}: defines no hook; it needs def reward_fn(messages, ...) or def "
            "interact(messages)"
        )
    if "rollout" in has:
        single = {name for name, (_, _, batched) in marked.items() if not batched}
        for name in sorted(UNUSED_BY_ROLLOUT & has.keys() | single):
            raise ValueError(
                f"{path}: rollout() replaces {name!r}, which nobody would call; drop one of them"
            )


def rows_of(load_tasks: Callable, split: str, path: str) -> Sequence[dict[str, Any]]:
    """What the user's load_tasks(split) gives: a table of `datasets`, or a list of rows."""
    try:
        rows = load_tasks(split)
        if inspect.iscoroutine(rows):
            rows = asyncio.run(rows)
        rows = rows if hasattr(rows, "column_names") else list(rows)
    except Exception as error:
        raise ValueError(
            f"{path}: load_tasks({split!r}) failed: {describe_error(error, path)}"
        ) from error
    if isinstance(rows, list) and not is_list(rows, dict):
        raise ValueError(
            f"{path}: load_tasks({split!r}) must give dictionaries, gives {shorten(rows)}"
        )
    return rows


def advantages_of(advantage_fn: Callable, rewards: list[float], path: str) -> list[float]:
    """What the user's advantage_fn(rewards) gives for a group. Raises RunError unless it is a
    finite number for each."""
    try:
        values = [finite(value, "an advantage") for value in advantage_fn(list(rewards))]
        if len(values) != len(rewards):
            raise ValueError(f"it gave {len(values)} values; it must give one for each reward")
        return values
    except Exception as error:
        raise RunError(
            f"{path}: advantage_fn({rewards}) failed: {describe_error(error, path)}"
        ) from error
