"""What a user's environment file may hold: its names, settings, rows, templates. All that can be refused is refused here."""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_core.data.tasks import shorten
from rl_core.sampling.hooks import describe_error
from rl_core.sampling.rewards import marked_rewards
from rl_core.sampling.schedule import MAX_TURNS, num_turns, parse_schedule
from rl_core.types import Task

FUNCTIONS = (
    "start", "interact", "reward_fn", "group_reward_fn", "rollout", "load_tasks", "advantage_fn", "task_weight",
)  # fmt: skip
SETTINGS = ("tools", "max_turns", "turns", "system_prompts", "name_prefix", "truncated_reward")


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
        kind = FUNCTIONS if callable(vars(module)[name]) else SETTINGS
        close = difflib.get_close_matches(name.lower(), kind, n=1, cutoff=0.75)
        # Where the hook itself is there, a similar name is a helper of it; TURNS and SYSTEM_PROMPT are anybody's.
        if close and not hasattr(module, close[0]) and not (name.isupper() and close[0] in ("turns", "system_prompts")):
            raise ValueError(f"{path}: {name!r} is no hook; did you mean {close[0]!r}? Begin a helper's name with _")
    for name in FUNCTIONS:
        if hasattr(module, name) and not callable(getattr(module, name)):
            raise ValueError(f"{path}: {name} must be a function, is {shorten(getattr(module, name))}")
    if not any(hasattr(module, name) for name in ("interact", "rollout")) and not marked_rewards(vars(module)):
        raise ValueError(f"{path}: defines no hook; it needs def reward_fn(messages, ...) or def interact(messages)")
    for name in marked_rewards(vars(module)):
        if name in (*FUNCTIONS, *SETTINGS) and name not in ("reward_fn", "group_reward_fn"):
            raise ValueError(
                f"{path}: @reward marks {name!r}, which is another hook; give what scores a name of its own"
            )
    if hasattr(module, "rollout"):
        check_rollout(module, path)
    for name, (is_good, rule) in setting_rules().items():
        if hasattr(module, name) and getattr(module, name) is not None and not is_good(getattr(module, name)):
            raise ValueError(f"{path}: {name} = {shorten(getattr(module, name))} must be {rule}")


def setting_rules() -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Setting -> (whether a value is good, what it must be)."""

    def are_all(kind: type, values: Any) -> bool:
        return bool(values) and all(isinstance(value, kind) for value in values)

    return {
        "max_turns": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
        "tools": (
            lambda v: isinstance(v, (list, tuple)) and all(isinstance(t, dict) for t in v),
            "a list of OpenAI schemas (dictionaries)",
        ),
        "turns": (
            lambda v: isinstance(v, str) or callable(v) or (isinstance(v, (list, tuple)) and are_all(str, v)),
            "a schedule such as 'bob -> alice', a list of names, or a function that yields names",
        ),
        "system_prompts": (
            lambda v: isinstance(v, dict) and are_all(str, [*v, *v.values()]),
            "a dictionary of actors' names and texts",
        ),
        "name_prefix": (lambda v: isinstance(v, bool), "True or False"),
        "truncated_reward": (
            lambda v: type(v) in (int, float) and abs(v) < float("inf"),
            "None, or the finite reward of an episode that was cut off",
        ),
    }


def check_rollout(module: ModuleType, path: str) -> None:
    if not inspect.iscoroutinefunction(module.rollout):
        raise ValueError(f"{path}: rollout waits for replies; write async def rollout(task, actors)")
    ignored = [
        n
        for n in ("start", "interact", "turns", "system_prompts", "name_prefix", "truncated_reward")
        if hasattr(module, n)
    ]
    ignored += [name for name, (_, _, batched) in marked_rewards(vars(module)).items() if not batched]
    if ignored:
        raise ValueError(
            f"{path}: rollout() does all that {ignored[0]!r} is for, which nobody would call; drop one of them. A function that "
            "rollout() itself calls may have any other name, such as _score"
        )


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


def listed(turns: Callable, path: str) -> Callable:
    """The user's turns() as a function that gives a list: it may yield names for ever."""

    @functools.wraps(turns)
    def call(*args, **kwargs) -> list[str]:
        order = turns(*args, **kwargs)
        if isinstance(order, str) or not hasattr(order, "__iter__"):
            raise ValueError(f"{path}: turns() gave {shorten(order)}; it must yield names, or return a list of them")
        return list(itertools.islice(order, MAX_TURNS))

    return call


def longest_order(turns: str | list[str], path: str) -> int:
    if isinstance(turns, list):
        return len(turns)
    try:
        return num_turns(parse_schedule(turns))
    except ValueError as error:
        raise ValueError(f"{path}: turns: {error}") from None


class SystemPrompts:
    """Actor -> Jinja2 template over the data's columns. What a template may do is bounded; a name that it does not know is
    an error."""

    def __init__(self, texts: Mapping[str, str], path: str):
        self.path = path
        self.templates: dict[str, Any] = {}
        self.columns: dict[str, set[str]] = {}  # those that each template needs
        if not texts:
            return
        from jinja2 import StrictUndefined, TemplateSyntaxError, meta
        from jinja2.sandbox import SandboxedEnvironment

        sandbox = SandboxedEnvironment(undefined=StrictUndefined)
        for actor, text in texts.items():
            try:
                self.columns[actor] = meta.find_undeclared_variables(sandbox.parse(text))
                self.templates[actor] = sandbox.from_string(text)
            except TemplateSyntaxError as error:
                line = (text.splitlines() or [""])[min(error.lineno, len(text.splitlines())) - 1]
                raise ValueError(
                    f"{path}: system_prompts[{actor!r}] does not parse: {error.message}, in line {error.lineno}:\n  {line}"
                ) from None

    def render(self, actor: str, task: Task) -> str | None:
        """None for an actor without one."""
        if actor not in self.templates:
            return None
        try:
            return self.templates[actor].render(task.row)
        except Exception as error:  # a template is a hook too: filters raise what they like
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{self.path}: system_prompts[{actor!r}] fails for task {task.id}: {what}") from error
