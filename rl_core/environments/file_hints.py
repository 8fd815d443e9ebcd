"""Advice about an environment file that has no hook, wrong values or missing libraries."""

from __future__ import annotations

import inspect
import re
from importlib import metadata
from types import ModuleType

ONE_REPLY = "a reward is called for one reply: def reward_fn(completion, prompt, answer)"
OF_PEERS = {
    "completions": f"TRL passes lists, rl_core one reply: {ONE_REPLY} -> float",
    "prompts": f"TRL passes lists, rl_core one reply: {ONE_REPLY} -> float",
    "completion_ids": f"TRL passes lists of ids, rl_core one reply: {ONE_REPLY} -> float",
    "solution_str": f"verl's solution_str is `completion`: {ONE_REPLY} -> float",
}


def no_hook(module: ModuleType) -> str:
    """The error of a file without a hook."""
    if callable(getattr(module, "compute_score", None)):
        return (
            "compute_score() is verl's; add def reward_fn(completion, data_source, reward_model): "
            'return compute_score(data_source, completion, reward_model["ground_truth"])'
        )
    functions = []
    for function in filter(inspect.isfunction, vars(module).values()):
        if function.__module__ == module.__name__ and not function.__name__.startswith("_"):
            functions.append(function)
    names = " and ".join(f"{function.__name__}()" for function in functions)
    arguments = [a for function in functions for a in inspect.signature(function).parameters]
    hint = next((f"; {OF_PEERS[name]}" for name in arguments if name in OF_PEERS), "")
    return (
        f"defines no hook{f', only {names}' if names else ''}; it needs def "
        f"reward_fn(messages, ...) or def interact(messages){hint}"
    )


def install_command(module: str) -> str:
    """The command that installs the library of a module: the first extra of rl_core that has it."""
    wanted = re.sub(r"[-_.]+", "-", module.partition(".")[0]).lower()
    try:
        required = metadata.requires("rl_core") or []
    except metadata.PackageNotFoundError:  # A checkout that is not installed.
        required = []
    for line in required:
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", line)
        library = re.match(r"[\w.-]+", line)
        if extra and library and re.sub(r"[-_.]+", "-", library[0]).lower() == wanted:
            return f"pip install -e '.[{extra[1]}]'"
    return "pip install it"
