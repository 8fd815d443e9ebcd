"""Sections of flags; values from YAML or from the text of a command line; answers to unknown names.
Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, fields
from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeVar, get_args, get_origin

import yaml

from rl_core.errors import as_one_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

# Type -> brackets of a list, a pair and a table in YAML.
BRACKETS = {tuple: "[]", list: "[]", dict: "{}"}


class Section:
    """Flags that begin with `prefix`, as a dataclass. An unknown name in Python raises the error of
    the command line, with fields of Config instead of flags."""

    prefix: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field]]

    def __init_subclass__(cls, prefix: str = ""):
        cls.prefix = prefix

    def __new__(cls, *args: object, **values: object):
        for name in values:
            cls.check_name(name)
        return object.__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        self.check_name(name)
        object.__setattr__(self, name, value)

    @classmethod
    def check_name(cls, name: str) -> None:
        names = cls.__dataclass_fields__
        if name not in names:
            from rl_core.config.flag_errors import as_fields, unknown

            error = unknown(cls.prefix + name, [cls.prefix + known for known in names])
            raise as_one_line(ValueError(as_fields(str(error))))


# Sections that hold one section for each name that the user gives.
NAMED = ("actors", "envs")


def flags_in(section: Section, prefix: str = "") -> Iterator[tuple[str, object, Field]]:
    """(name, value, field) of every flag, those of named actors and environments too."""
    for f in fields(section):
        value, name = getattr(section, f.name), f"{prefix}{f.name}"
        if isinstance(value, Section):
            yield from flags_in(value, f"{name}.")
        elif f.name in NAMED:
            for key, named_section in value.items():
                yield from flags_in(named_section, f"{name}.{key}.")
        else:
            yield name, value, f


def typed(name: str, value: object, kind: type[T]) -> T:
    """A flag's value from YAML, or from the text of a command line. Raises ValueError if it is of
    another type."""
    return validated(name, readable(name, value, kind), kind)


BOOLS = {"true": True, "false": False}  # As a command line writes them in a table.


def readable(name: str, value: object, kind: object) -> object:
    """The value of a flag as pydantic reads values."""
    if value == "null":
        return None
    if type(None) in get_args(kind):
        kind, _ = get_args(kind)
    if isinstance(value, bool) and kind is not bool:
        raise ValueError(f"--{name} has no value")
    if isinstance(value, str):
        return from_text(value, kind)
    return from_table(value, kind) if isinstance(value, (dict, list)) else value


def from_table(value: dict | list, kind: object) -> object:
    """The value of a flag that YAML or Python gives as a table or a list."""
    if kind is str and isinstance(value, dict):
        value = [f"{key}={text}" for key, text in value.items()]
    if kind is str and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ",".join(value)
    if get_args(kind)[1:] == (object,) and isinstance(value, dict):
        return {key: BOOLS.get(str(item), item) for key, item in value.items()}
    return value


def is_table(kind: object) -> bool:
    """True if a flag of this type holds a dictionary."""
    return dict in (kind, get_origin(kind), *map(get_origin, get_args(kind)))


def from_text(text: str, kind: object) -> object:
    """The list, pair or table that is written as YAML or without brackets: 0.9,0.95 and
    temperature=0.6,top_p=0.95. Returns the text itself for other types and for other text."""
    return from_brackets(text, kind) if get_origin(kind) in BRACKETS else text


def from_brackets(text: str, kind: object) -> object:
    origin = get_origin(kind)
    left, right = BRACKETS[origin]
    if not text.startswith(left):
        pairs = text.replace("=", ": ") if origin is dict else text
        text = left + pairs + right
    try:
        if get_args(kind)[-1] is not str:
            return yaml.safe_load(text)
        # Among texts `no`, `7` and `=` are texts.
        texts = yaml.load(text, yaml.BaseLoader)
        return {key: item or None for key, item in texts.items()} if origin is dict else texts
    except yaml.YAMLError:
        return text


def validated(flag: str, value: object, kind: type[T]) -> T:
    """The value as this type. Raises ValueError with the flag, its value and the rule."""
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_python(value)
    except ValidationError as failure:
        from rl_core.config.flag_errors import wrong_value

        raise wrong_value(flag, failure.errors(), kind) from None


@cache
def adapter(kind: type[T]) -> TypeAdapter[T]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
