"""The parser of a command's own flags: argparse with errors of one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from rl_core.errors import nearest


class UsageError(Exception):
    """An error in the command line."""


class Parser(argparse.ArgumentParser):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        known = self._option_string_actions
        for arg in args or ():
            name = arg.partition("=")[0]
            if name.startswith("--") and name not in known and not self._subparsers:
                raise UsageError(f"unknown flag {name}; {nearest(name, known)}")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        _, required, names = text.partition("arguments are required: ")
        if required:
            known = {a.metavar or "/".join(a.option_strings) or a.dest: a for a in self._actions}
            missing = [f"{name} ({known[name].help})" for name in names.split(", ")]
            text = f"give {', '.join(missing)}; {self.prog} --help shows all"
        raise UsageError(text.replace(": expected one argument", " has no value"))
