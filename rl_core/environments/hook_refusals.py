"""Refusals of hooks and settings that are misspelled or would be ignored, and advice."""

from __future__ import annotations

import difflib
import dis
import inspect
from collections.abc import Callable, Iterable
from types import CodeType

from rl_core.environments.file_hints import install_command
from rl_core.sampling.env import ARGUMENTS

# Hooks and settings that a file's rollout() replaces.
OF_DIALOGUE = ARGUMENTS.keys() - {"rollout", "agent", "task_weight", "oracle", "teacher_prompt"}
OF_DIALOGUE |= {"system_prompts", "name_prefix", "truncated_reward"}


def for_rows(path: str) -> str:
    """Advice for a file of rows."""
    return (
        ", which is a Python file; see the rows by rl-core tokens --model MODEL --data.train "
        f"{path}, or try them in an environment by rl-core check ENV.py --data.train {path}"
    )


def why_not_imported(error: ModuleNotFoundError) -> str:
    return f"; {install_command(error.name or '')}, or drop the import"


def hint_of(name: str, has: dict[str, object]) -> str:
    if name == "tools" and "rollout" in has:
        return "; rename a variable of the rollout's, for example to _tools"
    if name == "reward_fn" and isinstance(has[name], (list, tuple)):
        return "; mark each of several functions with @reward (from rl_core import reward)"
    return ""


def refuse_misspelled(
    name: str, value: object, has: dict[str, object], known: Iterable[str], path: str
) -> None:
    """Raises ValueError if the name is nearly one of `known`."""
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


def check_replaced(
    has: dict[str, object], rewards: dict[str, tuple[Callable, float, bool]], path: str
) -> None:
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
