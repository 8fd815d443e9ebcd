"""Errors about flags: wrong values, and answers to unknown names. Loaded when one is raised."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import Field
from functools import cache, partial
from pathlib import Path
from typing import Union, get_args, get_origin

import yaml

from rl_core.errors import near_name, split
from rl_core.types import AnyJSON

# Flag with two values -> their meaning and an example.
PAIRS = {
    "kl_reward": "; give an estimator and its coefficient, such as k1,0.05",
    "kl_loss": "; give an estimator and its coefficient, such as k3,0.05",
    "correction_range": "; give the lowest and the highest ratio, such as 0.5,2",
    "resume": "; it continues the run in --out",
    "betas": "; give AdamW's two decays, such as 0.9,0.95",
}
NONE = "rl_core has no counterpart"  # The answer to a flag of others that is left out.
# Names that other trainers give our flags, by our flag.
PEERS = Path(__file__).parent / "flag_aliases.yaml"


def wrong_value(flag: str, errors: Sequence[AnyJSON], kind: object) -> ValueError:
    """The error of pydantic's errors, with the flag, its value and the rule."""
    error, location = errors[0], errors[0]["loc"]
    rules = [re.sub(r"^\w+ should", "must", one["msg"]) for one in errors]
    rule = rules[0]
    if get_origin(kind) is Union and type(None) not in get_args(kind):
        # The location is a member of the union, not a flag. Each member has a rule.
        location, rule = (), ", or ".join(rules)
    names = [name for name in (flag, *location) if isinstance(name, str)]
    name = ".".join(names).removeprefix(".").removesuffix(".[key]")
    rule = rule.replace("Field required", "must be two values")
    rule = rule.replace("a valid boolean, unable to interpret input", "true or false")
    rule += PAIRS.get(name.rpartition(".")[2], "")
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        near = near_name(error["input"], re.findall("'([^']+)'", rule))
        rule += f"; did you mean {near!r}?" if near else ""
    return ValueError(f"--{name}={error['input']} {rule}")


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
