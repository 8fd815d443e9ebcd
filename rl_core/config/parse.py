"""Command line and YAML -> a checked Config.

config = parse_config(["--model", "m", "--data.train", "rows.jsonl", "--env_path", "envs/x.py",
"--out", "runs/x"])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rl_core.config.actors import OWN_SECTIONS, ActorConfig, LoraConfig
from rl_core.config.config import Config
from rl_core.config.data import EnvConfig
from rl_core.config.flag_parsing import flags_in, is_table, typed, validated
from rl_core.config.rules import check

if TYPE_CHECKING:
    from rl_core.types import AnyJSON, JSONObject


@cache
def known_flags() -> dict[str, tuple[object, dataclasses.Field]]:
    """Name -> (default, field) of every flag, with NAME for the name of an actor or an
    environment."""
    every, known = Config(actors={"NAME": ActorConfig()}, envs={"NAME": EnvConfig()}), {}
    for name, default, f in flags_in(every):
        known[name] = default, f
        if name.partition(".")[0] in OWN_SECTIONS:
            known[f"actors.NAME.{name}"] = None, f
    for section in OWN_SECTIONS:
        del known[f"actors.NAME.{section}"]
    return known


def parse_config(argv: list[str]) -> Config:
    """The checked configuration of a command line. Raises ValueError with the value, the rule and
    the fix."""
    return checked(read_config(argv))


def checked(config: Config) -> Config:
    """The configuration with short forms written out: --model is the actor policy's, and an
    actor that shares a model takes the owner's, and its LoRA where it has none. Raises
    ValueError with the value, the rule and the fix."""
    actors = dict(config.actors)
    if config.model is not None:
        other = actors.get("policy", ActorConfig()).model
        if other not in (None, config.model):
            raise ValueError(
                f"--model {config.model} is short for --actors.policy.model, which is {other}: "
                "give one of them"
            )
        actors["policy"] = replace(actors.get("policy", ActorConfig()), model=config.model)
    for name, actor in actors.items():
        if owner := actors.get(actor.lora_base or ""):
            actors[name] = sharing(actor, owner)
    config = replace(config, actors=actors)
    check(config)
    return config


def sharing(actor: ActorConfig, owner: ActorConfig) -> ActorConfig:
    lora = actor.lora
    if actor.is_trained and lora == LoraConfig():
        lora = replace(owner.lora)
    elif actor.is_trained and lora.quantize == "none":
        lora = replace(lora, quantize=owner.lora.quantize)
    return replace(actor, model=actor.model or owner.model, lora=lora)


def read_config(argv: list[str]) -> Config:
    """The configuration of a command line; its flags override the files of --config. Raises
    ValueError for unknown names and wrong types."""
    files, flags = [], []
    for name, value in given_flags(argv):
        if name == "config":
            files.append(read_file(value))
        else:
            for key in reversed(name.split(".")):
                value = {key: value}
            flags.append(value)
            for layer in files:
                forget_replaced(layer, name)
    check_names(flags)
    return from_sections(*files, *flags)


def check_names(flags: list[JSONObject]) -> None:
    """Raises ValueError for all unknown flags and wrong values at once."""
    errors = []
    for sections in flags:
        try:
            add(sections, {})
        except ValueError as error:
            errors.append(str(error))
    if len(errors) > 1:
        raise ValueError("; ".join(errors))


def forget_replaced(layer: JSONObject, flag: str) -> None:
    """Removes from a file's sections what another name of the same setting replaces: the policy's
    model, and the length of the run."""
    policy = (layer.get("actors") or {}).get("policy") or {}
    if flag == "model":
        policy.pop("model", None)
    elif flag == "actors.policy.model":
        layer.pop("model", None)
    elif flag == "num_steps":
        layer.pop("num_epochs", None)


def read_file(path: str) -> JSONObject:
    """The sections of a YAML file. Raises ValueError, with its name, for all that is wrong in
    them."""
    try:
        sections = yaml.safe_load(Path(path).read_text())
        from_sections(sections)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; name a YAML file of flags") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    return sections


def from_sections(*layers: JSONObject) -> Config:
    """The configuration of flags in sections, as YAML holds them; later layers override."""
    tree: JSONObject = {}
    for layer in layers:
        add(layer, tree)
    if tree.get("online", {}).get("on") is True:
        tree = add_online_defaults(tree)
    return validated("", tree, Config)


def add_online_defaults(tree: JSONObject) -> JSONObject:
    """The flags with the defaults of a run that stays open: sessions have no group, so that a
    preset that compares a group gets a running baseline."""
    from rl_core.config.online import DEFAULTS

    if tree.get("algorithm", "grpo") == "grpo" and tree.get("group_size", 1) == 1:
        tree.setdefault("algo", {}).setdefault("baseline", "running")
    return DEFAULTS | tree


def given_flags(argv: list[str]) -> list[tuple[str, AnyJSON]]:
    """(name, value) of each flag; the value is True where none follows."""
    flags: list[tuple[str, AnyJSON]] = []
    for arg in argv:
        name, equals, value = arg.partition("=")
        name = "--online.on" if name == "--online" else name
        if name.startswith("--") and " " not in name:  # "--quantization fp8" is a value
            flags.append((name[2:], value if equals else True))
        elif flags and flags[-1][1] is True:
            flags[-1] = flags[-1][0], arg
        else:
            from rl_core.config.flag_errors import answer

            near = answer(name, known_flags())
            raise ValueError(f"argument {arg!r} has no flag before it; write --name value; {near}")
    return flags


def add(sections: JSONObject, tree: JSONObject, prefix: str = "", parent: str = "") -> None:
    """Puts the flags of sections into a tree. `parent`: as `prefix`, with NAME for the name of an
    actor or an environment. Raises ValueError for an unknown name."""
    if not isinstance(sections, dict):
        raise ValueError(f"here belong keys with values, not {sections!r}")
    flags = known_flags()
    for key, value in sections.items():
        name = f"{prefix}{key}"
        known = f"{parent}NAME" if parent in ("actors.", "envs.") else f"{parent}{key}"
        if known in flags:
            kind = flags[known][1].type
            assert not isinstance(kind, str), kind
            if isinstance(value, dict) and not takes_table(known, kind):
                raise unknown_flag(f"{name}.{next(iter(flat(value)), '')}", flags)
            tree[str(key)] = typed(name, value, kind)
        elif value is None or isinstance(value, dict):
            add(value or {}, tree.setdefault(str(key), {}), f"{name}.", f"{known}.")
        else:
            raise unknown_flag(name, flags, value)


def unknown_flag(name: str, flags: Iterable[str], value: object = None) -> ValueError:
    from rl_core.config.flag_errors import unknown

    return unknown(name, flags, value)


def takes_table(name: str, kind: object) -> bool:
    """True if a flag's value may be a table: names of held-out sets, or a dictionary."""
    return is_table(kind) or name in ("data.eval", "envs.NAME.eval")


def to_yaml(config: Config) -> str:
    """The configuration as --config reads it."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def flat(tree: JSONObject, prefix: str = "") -> JSONObject:
    """Dotted name -> value."""
    values = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values
