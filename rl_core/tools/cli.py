"""The command rl-core. `python -m rl_core.tools.cli` is the same.

Each command is tools/COMMAND.py, imported when it is asked for: --help and an unknown command
answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import NoReturn

from rl_core import __version__

COMMANDS = {
    "init": (
        "write an environment, ten rows, a config and a tiny model that run as they are on a CPU"
    ),
    "train": (
        "train on this machine: torchrun with one rank per GPU, or --nproc_per_node N; all other "
        "flags go to the run"
    ),
    "check": (
        "try environments out without a model: what they read, what is trained, what replies earn, "
        "how they fail"
    ),
    "envs": "list the environments of envs/: what each is and needs, and how it is run",
    "datasets": "list data sets of the hub that are used most, each with the command for it",
    "tokens": "print each row with the trained text between « and », and values mapped or refused",
    "plan": (
        "print data, tokens of a step, parameters and memory of a run with these flags, on "
        "WORLD_SIZE ranks"
    ),
    "eval": (
        "score models (folders, hub names, OpenAI endpoints) in environments: greedy, avg@k, "
        "pass@k, side by side"
    ),
    "collect": "sample episodes that SFT reads, above a reward if wanted; goes on where it stopped",
    "show": "print conversations of a run with reward, status and reason",
    "plot": "draw a run's curves as a PNG",
    "serve": "host environments over gRPC, for runs on other machines",
    "service": "list workers and sessions of such a service, end sessions, drain a worker",
    "replay": (
        "learn a recorded step again without engines, also with another algorithm; compare with "
        "what was recorded"
    ),
    "view": (
        "show curves, conversations and tokens of runs in a browser; live runs update; --report "
        "writes one file"
    ),
    "sandbox": (
        "run a program as environments run what models write; say how this machine closes it in"
    ),
    "info": (
        "print versions, devices, extras, algorithms and environments; what a metric is: info "
        "metrics NAME"
    ),
}


class UsageError(Exception):
    """The command line itself is wrong."""


def main(argv: list[str] | None = None) -> int:
    """The exit status of a command: 0, 1 for a user's mistake, 2 for a wrong command line, 130 for
    Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    command, *rest = argv or [""]
    try:
        try:
            return answer(command, rest)
        finally:
            sys.stdout.flush()  # an error of it comes here, not when Python ends
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `rl-core show runs/x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from rl_core.types import RunError

        if not isinstance(
            error, (ValueError, OSError, RunError, argparse.ArgumentError, UsageError)
        ):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, (argparse.ArgumentError, UsageError)) else 1


def answer(command: str, rest: list[str]) -> int:
    """The exit status of a command that ends by itself. Raises UsageError for an unknown one."""
    if command in ("--help", "-h", ""):
        print(usage())
        return 0 if command else 2
    if command in ("--version", "-V"):
        print(f"rl_core {__version__}")
        return 0
    if command not in COMMANDS:
        from rl_core.errors import nearest

        raise UsageError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    return import_module(f"rl_core.tools.{command}").main(rest)


def usage() -> str:
    lines = [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    ends = ["rl-core COMMAND --help shows a command's flags; rl-core --version the version."]
    return "\n".join(["usage: rl-core COMMAND [flags]", "", *lines, "", *ends])


def command() -> NoReturn:
    """The process of a shell's `rl-core`."""
    status = main()
    if "torch" in sys.modules:
        from rl_core.sampling.watchdog import exit_process

        exit_process(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
