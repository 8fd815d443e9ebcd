"""Loads an environment's file, and refuses a file that contradicts itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rl_core.data.env_names import env_path
from rl_core.data.rows import JSON_FILES, TABLES, check_exists, suffix_of
from rl_core.environments.env_hooks import make_env
from rl_core.environments.hook_names import check_names
from rl_core.sampling.env import Env
from rl_core.sampling.hooks import describe_error
from rl_core.sampling.watchdog import MODULE_PREFIX

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig


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
        from rl_core.environments.hook_refusals import for_rows

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
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            from rl_core.environments.hook_refusals import why_not_imported

            hint = why_not_imported(error)
        raise ValueError(f"{path} does not load: {describe_error(error, path)}{hint}") from error
    names = names_in(code)
    if "_exit" in names and "fork" not in names:
        raise ValueError(
            f"{path}: os._exit() in a hook would end the whole run, half-done and with the status "
            "of a success; raise an error instead"
        )
    return module


def names_in(code: CodeType) -> set[str]:
    """Names and attributes that the code uses, with the code of its functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names
