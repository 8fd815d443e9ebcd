"""Environments as Python values, for train()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, cast

from rl_core.config import Config, EnvConfig
from rl_core.types import Row

if TYPE_CHECKING:
    from pandas import DataFrame

Rows = Sequence[Row]  # a list, or a table of `datasets`
Source = str | Path | ModuleType | Callable | list[Callable]
# The argument `env` of train(): one environment, or several.
AnyEnv: TypeAlias = "Source | Environment"
AnyEnvs: TypeAlias = "list[str] | list[Environment] | list[AnyEnv] | tuple[AnyEnv, ...]"
Environments: TypeAlias = "AnyEnv | AnyEnvs | None"


@dataclass
class Environment:
    """An environment of a run. `math + code` is a list of both, which train() takes.

    `source`: its file, its module, a function that is its reward_fn, or a list of functions whose
    rewards are summed. `name`: in metrics, by default that of the file. `data`, `eval_data`: rows
    instead of load_tasks(). `weight`: --envs.NAME.weight.
    `max_tokens`, `max_turns`: limits below those of the run.
    """

    source: Source
    name: str = ""
    data: Rows | None = None
    eval_data: Rows | None = None
    weight: float | None = None
    max_tokens: int | None = None
    max_turns: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            self.name = Path(self.path.partition("?")[0]).stem

    def __add__(self, other: Environment | list[Environment]) -> list[Environment]:
        return [self, *as_list(other)]

    def __radd__(self, others: list[Environment]) -> list[Environment]:
        return [*others, self]

    @property
    def path(self) -> str:
        """The name in errors."""
        if isinstance(self.source, ModuleType):
            return getattr(self.source, "__file__", None) or self.source.__name__
        from rl_core.environments.hook_names import FUNCTIONS

        if not self.is_functions:
            return str(self.source)
        name = getattr(self.source, "__name__", "")  # "<lambda>" is not an identifier.
        return name if name.isidentifier() and name not in FUNCTIONS else "reward_fn"

    @property
    def is_functions(self) -> bool:
        return callable(self.source) or is_rewards(self.source)

    @property
    def flag(self) -> str:
        """The value of --env_path: the file, if the run would name it so, else the name."""
        is_named_so = Path(self.path.partition("?")[0]).stem == self.name
        return self.path if is_named_so else self.name

    @property
    def rows(self) -> dict[str, Rows]:
        sources = {"train": self.data, "eval": self.eval_data}
        return {split: rows for split, rows in sources.items() if rows is not None}

    @property
    def is_file(self) -> bool:
        """True if --env_path alone names the environment."""
        return self.flag == self.path and not (self.rows or self.is_functions)

    def module(self) -> ModuleType:
        """A copy of its module, whose load_tasks gives its rows."""
        from rl_core.environments.env_file import execute_file

        if isinstance(self.source, ModuleType):
            module = self.source
        elif callable(self.source):
            module = ModuleType(self.name)
            vars(module)["reward_fn"] = self.source
            if self.path != "reward_fn":
                module = rewards_module([self.source], self.name)
        elif is_rewards(self.source):
            module = rewards_module(self.source, self.name)
        elif "://" in self.path:
            from rl_core.environments.service.served_module import load_served

            module = load_served(self.path)
        else:
            module = execute_file(self.path)
        copy = ModuleType(module.__name__)
        vars(copy).update(vars(module))
        if self.rows:
            load, rows = getattr(module, "load_tasks", lambda split: []), self.rows
            vars(copy)["load_tasks"] = lambda split: rows[split] if split in rows else load(split)
        return copy


def as_rows(name: str, data: Rows | str | Path | None) -> Rows | str | None:
    """Rows of an argument of train(): a list, a table of `datasets` or pandas; text where it names
    a file or a set on the hub. Raises ValueError with the argument's name."""
    if data is None or isinstance(data, (str, Path)):
        return data if data is None else str(data)
    if hasattr(data, "to_dict") and hasattr(data, "iloc"):
        from rl_core.data.tables import pandas_rows

        return pandas_rows(cast("DataFrame", data))
    if isinstance(data, dict):
        splits = ", ".join(map(repr, data))
        raise ValueError(
            f"{name} is a {type(data).__name__} of {splits}; give one of its splits, such as "
            f"{name}={name}[{next(iter(data), 'train')!r}]"
        )
    if not hasattr(data, "__len__"):
        raise ValueError(
            f"{name} is a {type(data).__name__}, which has no length; give {name}=list(...), or a "
            "file or hub name with Config(data={'streaming': True})"
        )
    if name == "data" and not len(data):
        raise ValueError("data is empty; it must have at least one row")
    return data


def is_rewards(source: object) -> TypeGuard[list[Callable]]:
    """True for a list of at least two reward functions."""
    if not isinstance(source, (list, tuple)) or len(source) < 2:
        return False
    return all(callable(item) and not isinstance(item, ModuleType) for item in source)


def rewards_module(functions: Sequence[Callable], name: str) -> ModuleType:
    """A module with these functions as rewards. Each function's name becomes the name of its part.
    Raises ValueError if two functions have the same name."""
    module = ModuleType(name)
    for function in functions:
        function_name = getattr(function, "__name__", type(function).__name__)
        if function_name in vars(module):
            raise ValueError(
                f"two reward functions have the name {function_name!r}, under which metrics log "
                "them: define each with another name"
            )
        if not hasattr(function, "reward_mark"):  # @reward sets (weight, is_batched).
            function = wraps(function)(partial(function))
            vars(function)["reward_mark"] = (1.0, False)
        setattr(module, function_name, function)
    return module


def as_list(env: Environments) -> list[Environment]:
    """Environments of train()'s argument: one or several of files, modules, functions and
    Environments. A list of functions alone is one environment."""
    if env is None:
        return []
    if is_rewards(env):
        return [Environment(list(env))]
    if isinstance(env, (list, tuple)):
        return [one for item in env for one in as_list(item)]
    return [env if isinstance(env, Environment) else Environment(env)]


def with_environments(
    config: Config, environments: list[Environment], rows: dict[str, Rows]
) -> tuple[Config, list[Environment]]:
    """The configuration that names them. `rows`: of the only one. Raises ValueError if two have one
    name."""
    if rows and len(environments) > 1:
        raise ValueError(
            f"data and eval_data are rows of one environment, these are {len(environments)}: give "
            "each its own by Environment(source, data=..., eval_data=...)"
        )
    if rows and environments:
        data, eval_data = rows.get("train"), rows.get("eval")
        environments = [replace(environments[0], data=data, eval_data=eval_data)]
    names = [env.name for env in environments]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two environments have the name {name!r}: give Environment(source, name=...)"
            )
    sections = dict(config.envs)
    for env in environments:
        limits = {"weight": env.weight, "max_tokens": env.max_tokens, "max_turns": env.max_turns}
        if EnvConfig(**limits) != EnvConfig():
            sections[env.name] = replace(sections.get(env.name, EnvConfig()), **limits)
    if environments:
        path = ",".join(env.flag for env in environments)
        config = replace(config, env_path=path, envs=sections)
    for split in rows:
        setattr(config.data, split, None)
    return config, environments
