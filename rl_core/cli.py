"""rl-core: one command for what a shell is asked for most. `python -m rl_core.cli` is the same.

Whatever loads slowly is imported where it is used: --help and an unknown command answer at once.
"""

from __future__ import annotations

import logging
import signal
import sys

from rl_core.config import nearest, parse_config
from rl_core.types import RunError

COMMANDS = {
    "train": "train on this machine: torchrun with one rank per GPU, or --nproc_per_node N; all other flags go to the run",
    "check": "try an environment out without a model: what it reads, what is trained, what replies earn, how it fails",
}


def main(argv: list[str] | None = None) -> int:
    """The exit status of a command, 1 for a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("--help", "-h"):
        print(help_page())
        return 0 if argv else 1
    name, rest = argv[0], argv[1:]
    try:
        if name == "train":
            return train(rest)
        if name == "check":
            from rl_core.tools.check import check

            return check(rest)
        raise ValueError(f"unknown command {name!r}; {nearest(name, COMMANDS)}")
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RunError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def help_page() -> str:
    lines = [f"  {name:<7} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: rl-core COMMAND [flags]", "", *lines, "", "rl-core COMMAND --help shows a command's flags."]
    )


def train(argv: list[str]) -> int:
    """The exit status of a run on this machine."""
    num_ranks, flags = split_num_ranks(argv)
    parse_config(flags)  # a mistake in a flag is told once, and before any rank starts
    if num_ranks is None:
        import torch

        num_ranks = max(1, torch.cuda.device_count())
    if num_ranks == 1:
        from rl_core.train import main as train_here

        return train_here(flags)
    return launch(["--standalone", f"--nproc_per_node={num_ranks}", "-m", "rl_core.train", *flags])


def launch(argv: list[str]) -> int:
    """torchrun in this process, without its own report: a rank that fails has said why in one line."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)
    try:
        torchrun(argv)
        return 0
    except SignalException as end:
        return 128 + end.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could say nothing
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended by {name}; go on with --resume", file=sys.stderr, flush=True)
        return 1


def split_num_ranks(argv: list[str]) -> tuple[int | None, list[str]]:
    """(what --nproc_per_node says or None, all other arguments)."""
    found, rest, values = None, [], iter(argv)
    for arg in values:
        name, equals, value = arg.partition("=")
        if name not in ("--nproc_per_node", "--nproc-per-node"):
            rest.append(arg)
            continue
        found = value if equals else next(values, "")
        if not found.isdecimal() or int(found) < 1:
            raise ValueError(
                f"--nproc_per_node={found} must be a whole number of at least 1: the ranks on this machine"
            )
    return found and int(found), rest


if __name__ == "__main__":
    sys.exit(main())
