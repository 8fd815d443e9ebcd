"""The command line and YAML files -> a checked Config; help pages. jsonargparse reads values, the rest is ours: an error in a
flag is told before torch is loaded.

    config = parse_config(["--model", "m", "--data.train", "rows.jsonl", "--env_path", "envs/x.py", "--out", "runs/x"])
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import textwrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from rl_core.checks import check_config
from rl_core.config import ActorConfig, Config, nearest


def sections() -> dict[str, type]:
    """Section name -> its dataclass; the dictionary of actors counts as one."""
    found = {}
    for name, hint in get_type_hints(Config).items():
        section = get_args(hint)[1] if get_origin(hint) is dict else hint
        if dataclasses.is_dataclass(section):
            found[name] = section
    return found


def flags_of(cls: type, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any]]:
    """Dotted name -> its field and type, those of nested dataclasses included."""
    found, hints = {}, get_type_hints(cls)
    for f in dataclasses.fields(cls):
        name, hint = prefix + f.name, hints[f.name]
        found |= flags_of(hint, f"{name}.") if dataclasses.is_dataclass(hint) else {name: (f, hint)}
    return found


def named_sections() -> list[str]:
    """Sections that hold one dataclass for each name that the user gives."""
    return [name for name, hint in get_type_hints(Config).items() if get_origin(hint) is dict]


def flag_names(given: dict[str, list[str]] | None = None) -> dict[str, dataclasses.Field]:
    """Every dotted flag name -> its field. `given`: the names that the user gave in the sections that take any."""
    given = {"actors": ["policy"], "envs": ["NAME"]} | {k: v for k, v in (given or {}).items() if v}
    names = {f.name: f for f in dataclasses.fields(Config) if f.name not in sections()}
    for section, cls in sections().items():
        prefixes = [f"{section}.{name}" for name in given[section]] if section in given else [section]
        names |= {name: f for prefix in prefixes for name, (f, _) in flags_of(cls, f"{prefix}.").items()}
    return names


def help_page(section: str = "") -> str:
    """One section's flags with their help and defaults; without a name, the general flags and the list of sections."""
    if section and section not in sections():
        raise ValueError(f"--help {section}: no such section; {nearest(section, sections())}")
    prefix = f"{section}.NAME." if section in named_sections() else f"{section}." if section else ""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [
        "usage: torchrun --nproc_per_node N -m rl_core.train --model PATH --env_path FILE --out FOLDER [--flag value]"
    ]
    flags = (
        flags_of(sections()[section])
        if section
        else {n: (f, get_type_hints(Config)[n]) for n, f in flag_names().items() if "." not in n}
    )
    for name, (f, hint) in flags.items():
        value = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        choices = [c for part in (hint, *get_args(hint)) if get_origin(part) is Literal for c in get_args(part)]
        about = f.metadata["help"] + (f" {{{', '.join(choices)}}}" if choices else "")
        about += "" if value in (None, [], False) else f" [{value}]"
        lines += textwrap.wrap(about, width, initial_indent=f"  --{prefix + name:<26} ", subsequent_indent=" " * 31)
    if not section:
        lines.append("  --config FILE                a YAML file with the same keys; flags override it")
        lines += ["", "more, each with a page of its own (--help SECTION):"]
        lines += [
            f"  {name:<10} {f.metadata['help']}" for f in dataclasses.fields(Config) if (name := f.name) in sections()
        ]
    return "\n".join(lines)


def check_flags(argv: list[str]) -> list[str]:
    """argv with bare boolean flags spelled out. Raises ValueError for an unknown flag, with the nearest known one."""
    known = flag_names(
        {
            section: sorted({a.split(".")[1] for a in argv if a.startswith(f"--{section}.") and a.count(".") > 1})
            for section in named_sections()
        }
    )
    out: list[str] = []
    for i, arg in enumerate(argv):
        name = arg[2:].split("=")[0]
        if not arg.startswith("--") and (i == 0 or not argv[i - 1].startswith("--") or "=" in argv[i - 1]):
            raise ValueError(f"argument {arg!r} has no flag before it")
        if arg.startswith("--") and name != "config" and name not in known:
            raise ValueError(f"unknown flag --{name}; {nearest(name, known)}")
        following = argv[i + 1] if i + 1 < len(argv) else "--"
        if arg.startswith("--") and name in known and known[name].type == "bool" and "=" not in arg:
            arg += "" if following.lower() in ("true", "false") else "=true"
        out.append(arg)
    return out


def check_file(path: str) -> None:
    """Raises ValueError if a YAML file is not there, does not parse, or has a key that is no flag."""
    if not os.path.isfile(path):
        raise ValueError(f"--config {path}: no such file")
    with open(path) as file:
        try:
            content = yaml.safe_load(file) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold keys and values, holds a {type(content).__name__}")
    known = flag_names({section: [str(name) for name in content.get(section) or {}] for section in named_sections()})

    def walk(node: dict, prefix: str) -> None:
        for key, value in node.items():
            name = f"{prefix}{key}"
            is_group = name in sections() or any(k.startswith(f"{name}.") for k in known)
            if is_group and isinstance(value, dict):
                walk(value, name + ".")
            elif name not in known and not (is_group and value is None):
                raise ValueError(f"--config {path}: unknown key {name!r}; {nearest(name, known)}")

    walk(content, "")


def parse_config(argv: list[str]) -> Config:
    """The checked configuration of a command line. Raises ValueError that says the value, the rule and the fix; prints
    and exits on --help."""
    if "--help" in argv or "-h" in argv:
        at = argv.index("--help" if "--help" in argv else "-h")
        print(help_page(argv[at + 1] if at + 1 < len(argv) and not argv[at + 1].startswith("-") else ""))
        raise SystemExit(0)
    argv = check_flags(argv)
    files = [
        a.split("=", 1)[1] if "=" in a else (argv[i + 1 : i + 2] or [""])[0]
        for i, a in enumerate(argv)
        if a.split("=")[0] == "--config"
    ]
    if len(files) > 1:
        raise ValueError(f"--config is given {len(files)} times; give one file, and flags for what differs")
    for path in files:
        check_file(path)
    config = to_config(argv)
    check_config(config)
    return config


def to_config(argv: list[str]) -> Config:
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config)
    try:
        values = parser.parse_args(argv)
        config = parser.instantiate_classes(values)
    except (jsonargparse.ArgumentError, TypeError) as error:
        raise ValueError(one_line(" ".join(str(error).split()))) from None
    made = Config(**{f.name: config[f.name] for f in dataclasses.fields(Config)})
    if made.model is not None:
        made.actors.setdefault("policy", ActorConfig()).model = made.model
    return made


def one_line(error: str) -> str:
    """jsonargparse's message about a value, as flag, value and rule."""
    found = re.match(r'Parser key "([\w.]+)":.*(?:Got value|Given value): (.*)', error)
    if not found:
        return error
    section, _, rest = found[1].partition(".")
    known = flag_names({section: [rest.partition(".")[0]]} if section in named_sections() else None)
    hint = str(known[found[1]].type) if found[1] in known else "of another type"
    return f"--{found[1]}={found[2]} must be {hint.replace('Optional', '').replace('Literal', 'one of ')}"
