"""Texts of --help and --help WORD, a section or a word in the names of flags."""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Collection
from typing import Literal, get_args, get_origin

from rl_core.config import OWN_SECTIONS, Config, known_flags
from rl_core.config.flag_errors import peers
from rl_core.config.flag_parsing import NAMED
from rl_core.errors import nearest
from rl_core.run.plan.option_rules import CHOICES

USAGE = (
    "usage: torchrun --nproc_per_node N -m rl_core.train --model PATH --env_path FILE --out FOLDER "
    "[--flag value]"
)
TRAIN = (
    "usage: rl-core train [--nproc_per_node N] --model PATH --env_path FILE --out FOLDER [--flag "
    "value]"
)
PLAN = "usage: rl-core plan [--json] [--gpu_gib N] --model PATH --env_path FILE [--flag value]"

# Flags of sections that most runs set, shown with the general ones.
COMMON = (
    "data.train",
    "data.eval",
    "optim.lr",
    "actors.NAME.lora.rank",
    "algo.kl_coef",
    "sampling.temperature",
)


def print_help(argv: list[str], usage: str = USAGE) -> bool:
    """Prints help if the flags ask for it. True if they do."""
    for arg, after in zip(argv, [*argv[1:], "--"], strict=False):
        if arg in ("--help", "-h"):
            print(help_page("" if after.startswith("-") else after, usage))
            return True
    return False


def help_page(word: str = "", usage: str = USAGE) -> str:
    """Flags with their help and defaults: those of a section, else all with this word in their
    name; without a word, the general flags and the list of sections."""
    sections = {
        f.name: f
        for f in dataclasses.fields(Config)
        if dataclasses.is_dataclass(f.type) or f.name in NAMED
    }
    lines, width = [usage], min(shutil.get_terminal_size().columns, 120)
    for name in names_of_page(word, sections):
        value, f = known_flags()[name]
        if not word:
            name = name.replace("NAME", "policy")
        about = f.metadata["help"]
        if choices := choices_of(name, f.type):
            about += f" {{{', '.join(choices)}}}"
        if value not in (None, False, [], {}):
            about += f" [{value}]"
        lines += textwrap.wrap(
            about, width, initial_indent=f"  --{name:<26} ", subsequent_indent=" " * 31
        )
    if word == "actors":
        names = ", ".join(f"{name}.*" for name in OWN_SECTIONS)
        lines.append(f"  --actors.NAME.{{{names}}}: for this actor, instead of the global flags")
    if not word:
        lines += [
            "  --config FILE                a YAML file with the same keys; flags override it"
        ]
        lines += ["", "more, each with a page (--help SECTION); --help WORD finds flags by name:"]
        lines += [f"  {name:<10} {f.metadata['help']}" for name, f in sections.items()]
    return "\n".join(lines)


def names_of_page(word: str, sections: Collection[str]) -> list[str]:
    """Names of the flags that a page shows. Raises ValueError if there are none."""
    names = [
        name
        for name in known_flags()
        if not (name.startswith("actors.NAME.") and name.split(".")[2] in OWN_SECTIONS)
    ]
    if word in sections:
        return [name for name in names if name.startswith(f"{word}.")]
    if not word:
        general = [name for name in names if "." not in name]
        first = general.index("group_size") + 1
        return [*general[:first], *COMMON, *general[first:]]
    asked = word.lower().replace("-", "_")
    ours = re.split("[ =]", peers().get(asked, ""))[0].removeprefix("--").replace("policy", "NAME")
    if matches := [name for name in names if asked in name or name == ours]:
        return matches
    raise ValueError(
        f"--help {word}: no section and no flag has this name; {nearest(word, sections)}"
    )


def choices_of(name: str, kind: object) -> list[str]:
    """Values of a flag, from its type or from the table that they name a row of."""
    for member in (kind, *get_args(kind)):
        if get_origin(member) is Literal:
            return list(get_args(member))
    return list(CHOICES.get(name, ()))
