"""Loads an environment's file, and refuses a file that contradicts itself."""

from __future__ import annotations

import difflib
import dis
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.data.env_names import env_path
from rl_core.data.messages import shorten
from rl_core.data.rows import JSON_FILES, TABLES, check_exists, suffix_of
from rl_core.environments.env_hooks import make_env, marked_rewards
from rl_core.sampling.env import ARGUMENTS, Env
from rl_core.sampling.episode import is_list
from rl_core.sampling.hooks import describe_error
from rl_core.sampling.watchdog import MODULE_PREFIX
from rl_core.types import JSON

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig

FUNCTIONS = (*ARGUMENTS, "reward_fn", "group_reward_fn", "load_tasks", "advantage_fn")
FUNCTIONS += ("row_to_prompt",)
# Hooks and settings that a file's rollout() replaces.
OF_DIALOGUE = ARGUMENTS.keys() - {"rollout", "agent", "task_weight", "oracle", "teacher_prompt"}
OF_DIALOGUE |= {"system_prompts", "name_prefix", "truncated_reward"}


def is_agent(value: JSON) -> bool:
    return callable(value) or (is_list(value, str) and len(value) > 0)


def is_turns(value: object) -> bool:
    return isinstance(value, str) or callable(value) or is_list(value, str)


def is_prompts(value: object) -> bool:
    return isinstance(value, dict) and is_list([*value, *value.values()], str)


def is_finite(value: JSON) -> bool:
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


def load_env(
    path: str,
    *,
    module: ModuleType | None = None,
    agents: AgentsConfig | None = None,
    **limits: Any,
) -> Env:
    """The environment of a Python file, of a name in env_names, or of `module`, such as one behind
    a URL. `agents`: the address at which programs reach this process. `limits`: passed to
    make_env(). Raises ValueError for an exception in the file, with its line, and for hooks that
    are missing, misspelled or of the wrong kind."""
    if module is None:
        path = env_path(path)
        module = execute_file(path)
    if agents is not None and "networks" in vars(module):
        module.networks.update(build=agents.build_network, verify=agents.verify_network)
    check_names(module, path)
    env = make_env(module, path, agents, **limits)
    for name, hook in env.hooks.items():
        if hook.is_async and name == "task_weight":
            raise ValueError(
                f"{path}: task_weight() is called between steps, when nothing else runs; drop the "
                "async"
            )
        if not hook.is_async and name != "turns" and "actors" in hook.ours & hook.named:
            raise ValueError(
                f"{path}: {name}() names 'actors', who must be awaited; write async def {name}(...)"
            )
    return env


def execute_file(path: str) -> ModuleType:
    path = env_path(path)
    file = Path(path).expanduser()
    check_exists(file)
    if suffix_of(file) in (*JSON_FILES, *TABLES, ".zst"):
        raise ValueError(f"{path} holds rows and is not an environment{for_rows(path)}")
    name = MODULE_PREFIX + file.stem
    spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file.resolve())
    sys.modules[name] = module  # dataclasses and pickle look up classes there.
    # Files in the same folder can be imported, as in a script. The folder comes last, so that it
    # hides no library.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        # compile() gets the path as the user wrote it, since errors show it.
        code = compile(file.read_bytes(), path, "exec")
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        hint = why_not_imported(error) if isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"{path} does not load: {describe_error(error, path)}{hint}") from error
    names = names_in(code)
    if "_exit" in names and "fork" not in names:
        raise ValueError(
            f"{path}: os._exit() in a hook would end the whole run, half-done and with the status "
            "of a success; raise an error instead"
        )
    return module


def for_rows(path: str) -> str:
    return (
        ", which is a Python file; see the rows by rl-core tokens --model MODEL --data.train "
        f"{path}, or try them in an environment by rl-core check ENV.py --data.train {path}"
    )


def why_not_imported(error: ModuleNotFoundError) -> str:
    from rl_core.environments.file_hints import install_command

    return f"; {install_command(error.name or '')}, or drop the import"


def names_in(code: CodeType) -> set[str]:
    """Names and attributes that the code uses, with the code of its functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names


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
            refuse_misspelled(name, value, has, path)
    if "agent" in has and "tools" in has:
        raise ValueError(
            f"{path}: tools is a setting of conversations without an agent; an agent sends its "
            "tools with its requests. Rename the variable, for example to _tools"
        )
    for name, (is_good, rule) in RULES.items():
        if has.get(name) is not None and not is_good(has[name]):
            hint = hint_of(name, has)
            raise ValueError(f"{path}: {name} = {shorten(has[name])} must be {rule}{hint}")
    rewards = marked_rewards(module)
    if not has.keys().isdisjoint(("agent", "rollout", "box")):
        check_replaced(has, rewards, path)
    if not rewards and has.keys().isdisjoint(("interact", "rollout", "agent", "feedback_fn")):
        from rl_core.environments.file_hints import no_hook

        raise ValueError(f"{path}: {no_hook(module)}")


def hint_of(name: str, has: dict[str, object]) -> str:
    if name == "tools" and "rollout" in has:
        return "; rename a variable of the rollout's, for example to _tools"
    if name == "reward_fn" and isinstance(has[name], (list, tuple)):
        return "; mark each of several functions with @reward (from rl_core import reward)"
    return ""


def refuse_misspelled(name: str, value: object, has: dict[str, object], path: str) -> None:
    known = FUNCTIONS if callable(value) else SETTINGS
    for close in difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75):
        # Else the name is a helper of that hook, or a function that the file itself calls.
        if close not in has and not (callable(value) and is_called(name, has)):
            raise ValueError(
                f"{path}: {name!r} is not a hook; did you mean {close!r}? Begin a helper's name "
                "with _"
            )


def is_called(name: str, has: dict[str, object]) -> bool:
    """True if another function of the file reads the global `name`."""
    others = [other for key, other in has.items() if key != name and inspect.isfunction(other)]
    return any(reads(other.__code__, name) for other in others if other.__globals__ is has)


def reads(code: CodeType, name: str) -> bool:
    if any(step.opname == "LOAD_GLOBAL" and step.argval == name for step in dis.Bytecode(code)):
        return True
    return any(reads(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def check_replaced(has: dict[str, Any], rewards: dict[str, Any], path: str) -> None:
    """Raises ValueError for hooks and settings that an agent or a rollout() replaces."""
    if "box" in has and (not has.get("agent") or callable(has["agent"])):
        raise ValueError(
            f"{path}: box configures where an agent's command runs; write agent = [...], or open a "
            "box in a hook: from rl_core.sandbox import boxes"
        )
    if "agent" in has and not rewards:
        raise ValueError(
            f"{path}: an agent needs a hook that scores, such as def reward_fn(result)"
        )
    if "rollout" in has and "state_key" in has and "agent" not in has:
        raise ValueError(
            f"{path}: rollout() replaces 'state_key', which nobody would call; it sets the "
            "key of a turn itself: respond(messages, state_key=...)"
        )
    kind, replaced = "agent", OF_DIALOGUE | {"rollout"}
    if "agent" not in has:
        single = {name for name, (_, _, batched) in rewards.items() if not batched}
        kind, replaced = "rollout()", OF_DIALOGUE | single
    for name in sorted(replaced & has.keys()):
        raise ValueError(
            f"{path}: {kind} replaces {name!r}, which nobody would call; drop one of them"
        )
