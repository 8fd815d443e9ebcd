"""Sections of flags; values from YAML or from the text of a command line; answers to unknown names.
Imports nothing heavy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import Field, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar, Union, get_args, get_origin

import yaml

from rl_core.errors import as_one_line, split

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

# Type -> brackets of a list, a pair and a table in YAML.
BRACKETS = {tuple: "[]", list: "[]", dict: "{}"}
# Flag with two values -> their meaning and an example.
PAIRS = {
    "kl_reward": "; give an estimator and its coefficient, such as k1,0.05",
    "kl_loss": "; give an estimator and its coefficient, such as k3,0.05",
    "correction_range": "; give the lowest and the highest ratio, such as 0.5,2",
    "betas": "; give AdamW's two decays, such as 0.9,0.95",
}
NONE = "rl_core has no counterpart"  # The answer to a flag of others that is left out.
# Names that other trainers give our flags, by our flag.
PEERS = Path(__file__).parent / "flag_aliases.yaml"


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
    origin = get_origin(kind)
    if origin not in BRACKETS:
        return text
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
        errors = failure.errors()
    error, location = errors[0], errors[0]["loc"]
    rules = [re.sub(r"^\w+ should", "must", one["msg"]) for one in errors]
    rule = rules[0]
    if get_origin(kind) is Union and type(None) not in get_args(kind):
        # The location is a member of the union, not a flag. Each member has a rule.
        location, rule = (), ", or ".join(rules)
    names = [name for name in (flag, *location) if isinstance(name, str)]
    name = ".".join(names).removeprefix(".").removesuffix(".[key]")
    rule = rule.replace("Field required", "must be two values")
    rule += PAIRS.get(name.rpartition(".")[2], "")
    raise ValueError(f"--{name}={error['input']} {rule}")


@cache
def adapter(kind: type[T]) -> TypeAdapter[T]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


# Commands that a message quotes (kept), a flag with or without a value, the name after `did you
# mean`.
QUOTED = re.compile(
    r"(?P<command>(?:rl-core |python -m |torchrun |pip install )[^;,]*)"
    r"|--(?P<flag>[a-z_]\w*(?:\.\w+)*)(?![-\w])"
    r"(?:=(?P<value>[^\s;,)]*)| (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?|true|false)\b)?"
    r"|(?<=did you mean )'(?P<near>[\w.]+)'"
)
# Flags for which train() has an argument.
TRAIN_ARGUMENTS = {"env_path": "env", "data.train": "data", "data.eval": "eval_data"}


def as_fields(text: str, sections: Collection[str] = ()) -> str:
    """A message about flags as one about fields of Config and arguments of train(). `sections`: the
    flags, or their sections, that are fields; (): all.

    Example: `--optim.lr=x must be a number` -> `optim={"lr": x} must be a number`.
    """
    text = text.replace("unknown flag ", "Config has no field ")
    text = text.replace("no flag has a similar name", "no field has a similar name")
    text = re.sub("(?<!train )--help ", "rl-core train --help ", text)
    return QUOTED.sub(partial(as_field, sections), text)


def as_field(sections: Collection[str], match: re.Match) -> str:
    name = match["flag"] or match["near"]
    if match["command"] or name == "help" or (match["near"] and "." not in name):
        return match[0]
    if sections and name.partition(".")[0] not in sections:
        return match[0]
    if name in TRAIN_ARGUMENTS:
        name = TRAIN_ARGUMENTS[name]
    first, *keys = name.split(".")
    value = match["value"] if match["number"] is None else match["number"]
    value = {"true": "True", "false": "False"}.get(value, value)
    if not keys:
        return first if value is None else f"{first}={value}"
    inner = "..." if value is None else value
    for key in reversed(keys):
        inner = f'{{"{key}": {inner}}}'
    return f"{first}={inner}"


def unknown(name: str, flags: Iterable[str], value: object = None) -> ValueError:
    return ValueError(f"unknown flag --{name}; {answer(name, flags, value)}")


@cache
def peers() -> dict[str, str]:
    """Name of a flag in another trainer -> our flag, or a sentence where no flag is needed."""
    answers = {}
    for ours, theirs in yaml.safe_load(PEERS.read_text()).items():
        answers |= dict.fromkeys(theirs.split(), ours)
    return answers


def answer(name: str, flags: Iterable[str], value: object = None) -> str:
    """Answer to an unknown name: our name of another trainer's flag, the flag in its section, the
    flag with nearly this spelling, or a sentence."""
    fields_by_name = flags if isinstance(flags, dict) else {}
    flags = list(flags)
    is_section = any(flag.startswith(f"{name}.") for flag in flags)
    if is_section and isinstance(value, str) and "=" in value:
        return f"write {' '.join(f'--{name}.{pair}' for pair in split(value))}"
    actor = re.match(r"(actors|envs)\.([^.]+)\.", name)
    if actor and name[actor.end() :] in flags:
        return f"--{name[actor.end() :]} is the same for all {actor[1]}"
    parts = name.replace("-", "_").lower().split(".")
    for start in range(len(parts)):
        theirs = peers().get("_".join(parts[start:]))  # rollout_n before n
        if theirs is not None:
            if not theirs.startswith("--"):
                return theirs
            return f"rl_core calls it {with_help(theirs, fields_by_name)}"
        if is_section:
            return f"{name} is a section; --help {name} lists its flags"
        if ".".join(parts[start:]) in flags and start:
            return f"rl_core calls it --{'.'.join(parts[start:])}"
    in_sections = [flag for flag in flags if flag.rpartition(".")[2] == parts[-1]]
    in_sections = [flag for flag in in_sections if "NAME" not in flag]
    if len(in_sections) == 1:
        return f"did you mean {in_sections[0]!r}?"
    return nearest_flag(name, flags, actor[2] if actor else "policy")


def with_help(flag: str, known: Mapping[str, tuple[object, Field]]) -> str:
    """A flag with its help, which has its unit. Answers with a value or a note stay as they are."""
    if flag[2:] not in known:
        return flag
    _, f = known[flag[2:]]
    return f"{flag} ({f.metadata['help']})"


def nearest_flag(name: str, flags: list[str], actor: str) -> str:
    """`actor`: the actor or environment that stands for NAME."""
    near = {flag.replace("NAME", actor): "" for flag in flags}
    if actor == "policy":
        near = {flag: "" for flag in near if not flag.startswith("envs.policy.")}
    near = peers() | near
    last = name.rpartition(".")[2]
    for close in difflib.get_close_matches(name, near, n=3, cutoff=0.8):
        ratio = difflib.SequenceMatcher(None, last, close.rpartition(".")[2]).ratio()
        if ratio < 0.6 or near[close] == NONE:  # Only the sections are equal.
            continue
        if not near[close]:
            return f"did you mean {close!r}?"
        if near[close].startswith("--"):
            return f"did you mean {close}? rl_core calls it {near[close]}"
        return f"{close}: {near[close]}"
    return "no flag has a similar name; --help WORD lists flags with a word in their name"
