"""The names of a file's hooks and settings, and the types of their values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType

from rl_core.data.messages import shorten
from rl_core.environments.env_hooks import marked_rewards
from rl_core.sampling.env import ARGUMENTS
from rl_core.sampling.episode import is_list
from rl_core.types import AnyJSON

FUNCTIONS = (*ARGUMENTS, "reward_fn", "group_reward_fn", "load_tasks", "advantage_fn")
FUNCTIONS += ("row_to_prompt",)


def is_agent(value: AnyJSON) -> bool:
    return callable(value) or (is_list(value, str) and len(value) > 0)


def is_turns(value: object) -> bool:
    return isinstance(value, str) or callable(value) or is_list(value, str)


def is_prompts(value: object) -> bool:
    return isinstance(value, dict) and is_list([*value, *value.values()], str)


def is_finite(value: AnyJSON) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


# Setting -> (True if a value is valid, the rule).
SETTINGS = {
    "agent": (is_agent, "a function, or a command: a list of texts"),
    "box": (lambda v: v is True or isinstance(v, dict), "True, or a dict of a box's settings"),
    "max_turns": (lambda v: type(v) is int and v >= 1, "a whole number of at least 1"),
    "tools": (
        lambda v: is_list(v, Callable | dict),
        "a list of functions or OpenAI schemas (dictionaries)",
    ),
    "turns": (is_turns, "a schedule, a list of names or a function"),
    "system_prompts": (is_prompts, "a dict of names and texts"),
    "name_prefix": (lambda v: isinstance(v, bool), "True or False"),
    "truncated_reward": (is_finite, "None or a finite number"),
}
RULES = dict.fromkeys(FUNCTIONS, (callable, "a function")) | SETTINGS


def check_names(module: ModuleType, path: str) -> None:
    """Raises ValueError for misspelled hooks, settings of the wrong type, and a file without a hook
    that scores."""
    has = vars(module)
    for name, value in has.items():
        is_imported = callable(value) and getattr(value, "__module__", "") != module.__name__
        # Constants and names with a leading _ are free.
        if name.startswith("_") or name.isupper() or inspect.ismodule(value) or is_imported:
            continue
        if name not in RULES:
            from rl_core.environments.hook_refusals import refuse_misspelled

            known = FUNCTIONS if callable(value) else SETTINGS
            refuse_misspelled(name, value, has, known, path)
    if "agent" in has and "tools" in has:
        raise ValueError(
            f"{path}: tools is a setting of conversations without an agent; an agent sends its "
            "tools with its requests. Rename the variable, for example to _tools"
        )
    for name, (is_good, rule) in RULES.items():
        if has.get(name) is not None and not is_good(has[name]):
            from rl_core.environments.hook_refusals import hint_of

            hint = hint_of(name, has)
            raise ValueError(f"{path}: {name} = {shorten(has[name])} must be {rule}{hint}")
    rewards = marked_rewards(module)
    if not has.keys().isdisjoint(("agent", "rollout", "box")):
        from rl_core.environments.hook_refusals import check_replaced

        check_replaced(has, rewards, path)
    if not rewards and has.keys().isdisjoint(("interact", "rollout", "agent", "feedback_fn")):
        from rl_core.environments.file_hints import no_hook

        raise ValueError(f"{path}: {no_hook(module)}")
