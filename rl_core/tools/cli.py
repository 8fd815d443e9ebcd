"""The command rl-core, also `python -m rl_core.tools.cli`.

Each command is tools/COMMAND.py, imported on use, so that --help and an unknown command answer at
once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NoReturn

from rl_core import __version__
from rl_core.tools.parser import UsageError

COMMANDS = {
    "init": (
        "write an environment, ten rows, a config and a tiny model that run as they are on a CPU"
    ),
    "train": (
        "train on this machine: torchrun with one rank per GPU, or --nproc_per_node N; all other "
        "flags go to the run"
    ),
    "check": (
        "try environments without a model: columns that hooks read, trained tokens, rewards of "
        "replies, failures"
    ),
    "envs": "list the environments of envs/ with their needs and the command for each",
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
    "collect": "sample episodes for SFT, optionally above a reward; resumes where it stopped",
    "show": "print conversations of a run with reward, status and reason",
    "plot": "draw a run's curves as a PNG",
    "serve": "host environments over gRPC, for runs on other machines",
    "service": "list workers and sessions of such a service, end sessions, drain a worker",
    "tinker": "train and sample for programs of the tinker client, on this machine",
    "rescore": (
        "rewards of stored episodes by a changed environment file: what changes, for replay, plot "
        "and view"
    ),
    "replay": (
        "learn a recorded step again without engines, also with another algorithm; compare with "
        "the recorded metrics"
    ),
    "view": (
        "show curves, conversations and tokens of runs in a browser; live runs update; --report "
        "writes one file"
    ),
    "sandbox": ("run a program in the sandbox of environments; print this machine's isolation"),
    "info": (
        "print versions, devices, extras, algorithms and environments; explain a metric: info "
        "metrics NAME"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns its exit status: 0, 1 for a user's mistake, 2 for a wrong
    command line, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    command, *rest = argv or [""]
    try:
        try:
            return answer(command, rest)
        finally:
            sys.stdout.flush()  # Raises here rather than at Python's exit.
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `rl-core show runs/x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from rl_core.types import RunError

        if not isinstance(error, (ValueError, OSError, RunError, UsageError)):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UsageError) else 1


def answer(command: str, rest: list[str]) -> int:
    """Runs a command and returns its exit status. Raises UsageError for an unknown command."""
    if command in ("--help", "-h", ""):
        print(usage())
        return 0 if command else 2
    if command in ("--version", "-V"):
        print(f"rl_core {__version__}")
        return 0
    if command not in COMMANDS:
        from rl_core.errors import nearest

        raise UsageError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    module = "check_online" if command == "check" and "--online" in rest else command
    return import_module(f"rl_core.tools.{module}").main(rest)


def usage() -> str:
    lines = [f"  {name:<8} {help_text}" for name, help_text in COMMANDS.items()]
    ends = ["rl-core COMMAND --help shows a command's flags; rl-core --version the version."]
    return "\n".join(["usage: rl-core COMMAND [flags]", "", *lines, "", *ends])


def command() -> NoReturn:
    """The entry point of the shell's `rl-core`."""
    status = main()
    if "torch" in sys.modules:
        from rl_core.sampling.watchdog import exit_process

        exit_process(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
