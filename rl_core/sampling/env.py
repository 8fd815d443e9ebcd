"""A user's environment file -> an Env: its hooks and settings. Wrong files are refused here."""

from __future__ import annotations

import asyncio
import difflib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.data.rows import CHECKED_ROWS, check_exists, row_place
from rl_core.data.tasks import shorten
from rl_core.rules import nearest
from rl_core.sampling.hooks import Hook, describe_error, finite
from rl_core.types import Message, RunError, Task, option

SERVED = "rl_core.service.client:load_module"
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
# Setting -> (whether a value is good, what it must be).
SETTINGS = {
    "max_turns": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    "tools": (
        lambda v: (
            isinstance(v, (list, tuple)) and all(callable(t) or isinstance(t, dict) for t in v)
        ),
        "a list of functions or OpenAI schemas (dictionaries)",
    ),
    "turns": (
        lambda v: isinstance(v, str) or callable(v) or is_list(v, str),
        "a schedule, a list of names or a function",
    ),
    "system_prompts": (
        lambda v: isinstance(v, dict) and is_list([*v, *v.values()], str),
        "a dict of names and texts",
    ),
    "name_prefix": (lambda v: isinstance(v, bool), "True or False"),
    "truncated_reward": (
        lambda v: type(v) in (int, float) and math.isfinite(v),
        "None or a finite number",
    ),
}


def is_list(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)


@dataclass(kw_only=True)
class Env:
    name: str  # the file's stem
    path: str
    hooks: dict[str, Hook]
    rewards: list[Hook]  # those that score
    load_tasks: Callable[[str], Sequence[dict[str, Any]]] | None  # split -> rows
    advantage_fn: Callable[[list[float]], list[float]] | None  # rewards of a group -> advantages
    turns: str | Hook | None  # a schedule, or the function that gives an order
    max_turns: int  # of all actors together
    tools: list[dict[str, Any]] | None
    system_prompts: dict[str, Any]  # actor -> SystemPrompt
    name_prefix: bool
    truncated_reward: float | None
    # Hash of the file; of a served one, which may change, the last that was heard.
    code: Callable[[], str]

    @property
    def group_rewards(self) -> list[Hook]:
        return [hook for hook in self.rewards if hook.batched]

    def check_columns(
        self, rows: Sequence[dict[str, Any]], origin: str = "", split: str = "train"
    ) -> None:
        """Raises ValueError if a hook or a system prompt names what is neither ours nor a column of
        every row."""
        wanted = [
            (f"{hook.name}()", hook.required - hook.ours, hook.ours) for hook in self.hooks.values()
        ]
        wanted += [
            (f"system_prompts[{name!r}]", p.columns, set())
            for name, p in self.system_prompts.items()
        ]
        columns = getattr(rows, "column_names", None)  # a table's rows all have the same
        for index, row in enumerate([dict.fromkeys(columns)] if columns is not None else rows):
            if index >= CHECKED_ROWS and not isinstance(rows, list):
                break
            for what, names, ours in wanted:
                for name in sorted(names - row.keys()):
                    hint = (
                        "it needs start(task)"
                        if name == "state"
                        else nearest(name, sorted({*ours, *row}))
                    )
                    hint += (
                        f"; read another column by --data.columns {name}=COLUMN" if origin else ""
                    )
                    raise ValueError(
                        f"{self.path}: {what} names {name!r}, which is neither one of its "
                        "arguments nor a column of "
                        f"{row_place(f'{split}/{index}', origin)}; {hint}"
                    )

    def check_actors(self, names: Sequence[str]) -> None:
        """Raises ValueError unless these actors can play."""
        for name in self.system_prompts:
            self.check_name(name, names, "system_prompts")
        if isinstance(self.turns, str):
            parse_turns(self.turns, self.path, names)
        elif self.turns is None and len(names) > 1 and "rollout" not in self.hooks:
            raise ValueError(
                f"{self.path}: there are {len(names)} actors, {', '.join(names)}, and nothing says "
                "whose turn it is; add "
                f'turns = "{names[0]}" if hooks ask the others, as a judge, or turns = '
                f'"{" -> ".join(names)}", or write '
                "async def rollout(task, actors)"
            )

    def check_name(self, name: str, names: Iterable[str], where: str) -> None:
        if name not in names:
            raise ValueError(
                f"{self.path}: {where}: {name!r} is no actor; {nearest(str(name), sorted(names))}"
            )

    def speakers(self, names: Sequence[str] = ()) -> list[str] | None:
        """Names of actors that may speak; without `names`, those in the file. None if only a
        function of the file decides."""
        if "rollout" in self.hooks or isinstance(self.turns, Hook):
            return None
        if self.turns is None:
            return list(names)
        return option("rl_core.plugins.schedule:speakers_of")(
            parse_turns(self.turns, self.path, names)
        )

    def opening(self, task: Task, actor: str) -> list[Message]:
        """An actor's messages before the first turn. Its system prompt replaces the task's own."""
        if actor not in self.system_prompts:
            return list(task.messages)
        has_system = bool(task.messages) and task.messages[0].get("role") == "system"
        text = self.system_prompts[actor].render(task)
        return [{"role": "system", "content": text}, *task.messages[has_system:]]

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> Task:
        """The task with the order of speakers in info["turns"], drawn once for a group. Raises
        ValueError, HookError or TimeoutError if `turns` fails."""
        if self.turns is None:
            return task
        if isinstance(self.turns, str):
            order = option("rl_core.plugins.schedule:draw_turns")(
                parse_turns(self.turns, self.path, names), seed
            )
        else:
            given = {
                "messages": task.messages,
                "prompt": task.messages,
                "task": task,
                "actors": list(names),
            }
            order = await self.turns(task, given)
            for name in order:
                self.check_name(name, names, f"turns() for task {task.id}")
        return replace(task, info=task.info | {"turns": order})


def load_env(
    path: str,
    *,
    hook_timeout_s: float = 60.0,
    max_turns: int | None = None,
    module: ModuleType | None = None,
) -> Env:
    """The environment of a Python file, or of a module that there is already. `max_turns` overrides
    the file's. Raises ValueError, with file and line for what the file raises, and for hooks that
    are missing, misspelled or of the wrong kind."""
    module = module or (option(SERVED)(path) if "://" in path else execute_file(path))
    has, marked = vars(module), marked_rewards(module)
    check_names(module, marked, path)
    functions = {
        name: (has[name], 1.0, False) for name in ARGUMENTS if callable(has.get(name))
    } | marked
    hooks = {}
    for name, (function, weight, batched) in functions.items():
        ours = ARGUMENTS.get(name) or (OF_GROUP if batched else SPOKEN)
        hooks[name] = hook = Hook(
            name=name,
            function=listed(function) if name == "turns" else function,
            path=path,
            # An episode has its own deadline, and a served hook that of its service.
            timeout_s=None
            if name in ("rollout", "task_weight") or "://" in path
            else hook_timeout_s,
            ours=ours | {"state"} if "start" in has and ours is SPOKEN else ours,
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
    turns, load, advantages = (
        hooks.get("turns", has.get("turns")),
        has.get("load_tasks"),
        has.get("advantage_fn"),
    )
    turns = " -> ".join(turns) if isinstance(turns, (list, tuple)) else turns
    longest = 8 if hooks.keys() & {"interact", "rollout", "turns"} else 1
    if isinstance(turns, str):
        longest = option("rl_core.plugins.schedule:num_turns")(parse_turns(turns, path))
    prompts, tools = has.get("system_prompts"), has.get("tools")
    return Env(
        name=Path(path.partition("?")[0]).stem,
        path=path,
        hooks=hooks,
        rewards=[hooks[name] for name in marked],
        load_tasks=load and functools.partial(rows_of, load, path=path),
        advantage_fn=advantages and functools.partial(advantages_of, advantages, path=path),
        turns=turns,
        max_turns=max_turns or has.get("max_turns") or longest,
        tools=option("rl_core.plugins.tool_schemas:schemas")(tools, path) if tools else None,
        system_prompts=option("rl_core.plugins.system_prompts:load_prompts")(prompts, path)
        if prompts
        else {},
        name_prefix=has.get("name_prefix", False),
        truncated_reward=has.get("truncated_reward"),
        code=module.heard_code if "://" in path else functools.partial(str, hash_of(module)),
    )


def hash_of(module: ModuleType) -> str:
    """The first 12 hex digits of the file's SHA-256; "" for a module without a file."""
    file = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def parse_turns(turns: str, path: str, names: Sequence[str] = ()) -> tuple:
    """The pieces of a file's schedule. Without `names` any name is allowed."""
    try:
        return option("rl_core.plugins.schedule:parse_schedule")(turns, sorted(names))
    except ValueError as error:
        raise ValueError(f"{path}: turns: {error}") from None


def execute_file(path: str) -> ModuleType:
    file = Path(path).expanduser()
    check_exists(file)
    name = f"rl_core_env_{file.stem}"
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(name, loader=None, origin=path)
    )
    module.__file__ = str(file.resolve())
    sys.modules[name] = module  # dataclasses and pickle look a class up there
    # Files beside it can be imported, as in a script; last, so that they hide no library.
    if str(file.resolve().parent) not in sys.path:
        sys.path.append(str(file.resolve().parent))
    try:
        # compile() gets the path as the user wrote it: errors show that one.
        exec(compile(file.read_bytes(), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        hint = (
            "; pip install it, or drop the import" if isinstance(error, ModuleNotFoundError) else ""
        )
        raise ValueError(f"{path} does not load: {describe_error(error, path)}{hint}") from error
    return module


def marked_rewards(module: ModuleType) -> dict[str, tuple[Callable, float, bool]]:
    """Name -> (function, weight, whether it is batched). One that has two names counts once."""
    rewards: dict[str, tuple[Callable, float, bool]] = {}
    for name, value in vars(module).items():
        mark = getattr(value, "__dict__", {}).get("reward_mark", REWARDS.get(name))
        if (
            mark
            and callable(value)
            and all(value is not function for function, *_ in rewards.values())
        ):
            rewards[name] = (value, mark[0], mark[1] or name == "group_reward_fn")
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
        close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
        # Where the hook itself is there, a similar name is a helper of it; TURNS and SYSTEM_PROMPT
        # are anybody's.
        if (
            close
            and close[0] not in has
            and not (name.isupper() and close[0] in ("turns", "system_prompts"))
        ):
            raise ValueError(
                f"{path}: {name!r} is no hook; did you mean {close[0]!r}? Begin a helper's name "
                "with _"
            )
    for name, (is_good, rule) in (
        dict.fromkeys(FUNCTIONS, (callable, "a function")) | SETTINGS
    ).items():
        if has.get(name) is not None and not is_good(has[name]):
            raise ValueError(f"{path}: {name} = {shorten(has[name])} must be {rule}")
    if "interact" not in has and "rollout" not in has and not marked:
        raise ValueError(
            f"{path}: defines no hook; it needs def reward_fn(messages, ...) or def "
            "interact(messages)"
        )
    if "rollout" in has:
        unused = [
            *(UNUSED_BY_ROLLOUT & has.keys()),
            *(n for n, (_, _, batched) in marked.items() if not batched),
        ]
        for name in sorted(unused):
            raise ValueError(
                f"{path}: rollout() replaces {name!r}, which nobody would call; drop one of them"
            )


def listed(turns: Callable) -> Callable:
    """The user's turns() as a function that gives a list: it may yield names for ever."""

    @functools.wraps(turns)
    def call(*args, **kwargs) -> list[str]:
        order = turns(*args, **kwargs)
        if isinstance(order, str) or not hasattr(order, "__iter__"):
            raise ValueError(
                f"turns() gave {shorten(order)}; it must yield names, or return a list of them"
            )
        return list(itertools.islice(order, MAX_TURNS))

    return call


def rows_of(load_tasks: Callable, split: str, path: str) -> Sequence[dict[str, Any]]:
    """What the user's load_tasks(split) gives: a table of `datasets`, or a list of rows."""
    try:
        rows = load_tasks(split)
        rows = asyncio.run(rows) if inspect.iscoroutine(rows) else rows
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
