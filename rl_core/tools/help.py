"""Texts of --help and --help SECTION."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from typing import Literal, get_args, get_origin

from rl_core.config import OWN_SECTIONS, Config, known_flags
from rl_core.config.flag_parsing import NAMED
from rl_core.errors import nearest
from rl_core.plan.option_rules import CHOICES

USAGE = (
    "usage: torchrun --nproc_per_node N -m rl_core.train --model PATH --env_path FILE --out FOLDER "
    "[--flag value]"
)
TRAIN = (
    "usage: rl-core train [--nproc_per_node N] --model PATH --env_path FILE --out FOLDER [--flag "
    "value]"
)
PLAN = "usage: rl-core plan [--json] [--gpu_gib N] --model PATH --env_path FILE [--flag value]"


def print_help(argv: list[str], usage: str = USAGE) -> bool:
    """Prints help if the flags ask for it. True if they do."""
    for arg, after in zip(argv, [*argv[1:], "--"], strict=False):
        if arg in ("--help", "-h"):
            print(help_page("" if after.startswith("-") else after, usage))
            return True
    return False


def help_page(section: str = "", usage: str = USAGE) -> str:
    """One section's flags with their help and defaults; without a name, the general flags and the
    list of sections."""
    sections = {
        f.name: f
        for f in dataclasses.fields(Config)
        if dataclasses.is_dataclass(f.type) or f.name in NAMED
    }
    if section and section not in sections:
        raise ValueError(f"--help {section}: no such section; {nearest(section, sections)}")
    lines, width = [usage], min(shutil.get_terminal_size().columns, 120)
    for name, (value, f) in known_flags().items():
        if name.rpartition(".")[0].partition(".")[0] != section:
            continue
        if name.startswith("actors.NAME.") and name.split(".")[2] in OWN_SECTIONS:
            continue
        about = f.metadata["help"]
        if choices := choices_of(name, f.type):
            about += f" {{{', '.join(choices)}}}"
        if value not in (None, False, [], {}):
            about += f" [{value}]"
        lines += textwrap.wrap(
            about, width, initial_indent=f"  --{name:<26} ", subsequent_indent=" " * 31
        )
    if section == "actors":
        names = ", ".join(f"{name}.*" for name in OWN_SECTIONS)
        lines.append(f"  --actors.NAME.{{{names}}}: for this actor, instead of the global flags")
    if not section:
        lines += [
            "  --config FILE                a YAML file with the same keys; flags override it"
        ]
        lines += ["", "more, each with a page (--help SECTION):"]
        lines += [f"  {name:<10} {f.metadata['help']}" for name, f in sections.items()]
    return "\n".join(lines)


def choices_of(name: str, kind: object) -> list[str]:
    """Values of a flag, from its type or from the table that they name a row of."""
    for member in (kind, *get_args(kind)):
        if get_origin(member) is Literal:
            return list(get_args(member))
    return list(CHOICES.get(name, ()))
