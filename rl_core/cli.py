"""rl-core: one command for what a shell is asked for most. `python -m rl_core.cli` is the same.

Whatever loads slowly is imported where it is used: --help and an unknown command answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile

from rl_core.config import parse_config
from rl_core.rules import nearest
from rl_core.tools.check import check
from rl_core.types import RunError

USAGE = """usage: rl-core COMMAND [flags]

  train   train on this machine: torchrun with one rank per GPU, or --nproc_per_node N; all other flags go to the run
  check   try an environment out without a model: what it reads, what is trained, what replies earn, how it fails
  plan    print data, tokens of a step, parameters and memory of a run with these flags, on WORLD_SIZE ranks

rl-core COMMAND --help shows a command's flags."""


def main(argv: list[str] | None = None) -> int:
    """The exit status of a command, 1 for a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("--help", "-h"):
        print(USAGE)
        return 0 if argv else 1
    commands = {"train": train, "check": check, "plan": plan}
    try:
        if argv[0] not in commands:
            raise ValueError(f"unknown command {argv[0]!r}; {nearest(argv[0], commands)}")
        return commands[argv[0]](argv[1:])
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RunError, argparse.ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def plan(argv: list[str]) -> int:
    """Prints the plan of a run with these flags. It makes no folder."""
    with tempfile.TemporaryDirectory() as out:
        config = parse_config([*argv, "--out", out])
        from rl_core.build import make_plan
        from rl_core.tools.plan import describe

        print(describe(make_plan(config)))
    return 0


def train(argv: list[str]) -> int:
    """The exit status of a run on this machine."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", type=int)
    given, flags = parser.parse_known_args(argv)
    parse_config(flags)  # a mistake in a flag is told once, and before any rank starts
    if (num_ranks := given.nproc_per_node) is None:
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
    # A rank saves at the end of a step: torchrun passes signals on, and kills no rank after its 30 s.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    os.environ.setdefault("PET_SHUTDOWN_TIMEOUT", "3600")
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
        return max(1, failure.exitcode)


if __name__ == "__main__":
    sys.exit(main())
