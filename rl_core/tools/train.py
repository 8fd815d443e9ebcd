"""rl-core train: a run on this machine, with one rank per GPU or as many as --nproc_per_node
says. Several ranks are started by torchrun."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys

from rl_core.config import parse_config
from rl_core.run.plan.option_rules import check_options
from rl_core.run.plan.path_checks import check_paths
from rl_core.tools.help import TRAIN, print_help
from rl_core.tools.parser import Parser


def main(argv: list[str]) -> int:
    """The exit status of the run."""
    parser = Parser(add_help=False)
    parser.add_argument("--nproc_per_node", "--nproc-per-node", type=int)
    options, flags = parser.parse_known_args(argv)
    if print_help(flags, TRAIN):
        return 0
    # A mistake in a flag is an error once, before any rank starts.
    num_ranks = options.nproc_per_node
    if num_ranks is not None and num_ranks < 1:
        raise ValueError(f"--nproc_per_node={num_ranks} must be at least 1")
    config = parse_config(flags)
    check_options(config)
    check_paths(config)
    # Collecting garbage while modules load takes tenths of a second.
    gc.disable()
    try:
        return start(flags, num_ranks)
    finally:
        gc.enable()


def start(flags: list[str], num_ranks: int | None) -> int:
    """The exit status of a run on `num_ranks` ranks; None: one for each GPU."""
    from rl_core.train import main as train_here
    from rl_core.train import say_loading

    if num_ranks is None:
        say_loading()
        import torch

        num_ranks = max(1, torch.cuda.device_count())
    if num_ranks > 1:
        print(f"starting {num_ranks} ranks ...", file=sys.stderr, flush=True)
        args = ["--standalone", f"--nproc_per_node={num_ranks}"]
        return launch([*args, "-m", "rl_core.train", *flags])
    sys.path.insert(0, os.getcwd())  # As `python -m` does, for --trackers my_module:MyTracker.
    return train_here(flags)


def launch(argv: list[str]) -> int:
    """torchrun in this process, without its own report: a rank that fails has said why in one
    line."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gc.enable()
    logging.disable(logging.ERROR)
    # A rank saves at the end of its step: torchrun forwards these signals and waits an hour, not 30
    # s, before it kills a rank.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGUSR1")
    os.environ.setdefault("PET_SHUTDOWN_TIMEOUT", "3600")
    try:
        torchrun(argv)
        return 0
    except SignalException as end:
        return 128 + end.sigval
    except ChildFailedError as error:
        failures = error.failures

        def order(rank: int) -> tuple[int, bool]:
            """Killed ranks come before those that fail up to 3 s earlier: ranks that wait for a
            killed one may end before torchrun notices its death, and torchrun ends the others by
            SIGTERM."""
            code = failures[rank].exitcode
            killed = code < 0 and code != -signal.SIGTERM
            return failures[rank].timestamp - 3 * killed, not killed

        rank = min(failures, key=order)
        failure = failures[rank]
        if failure.exitcode < 0 and not os.path.isfile(failure.error_file):  # it could say nothing
            name = signal.Signals(-failure.exitcode).name
            print(
                f"error: rank {rank} was ended by {name}; continue with --resume",
                file=sys.stderr,
                flush=True,
            )
        return max(1, failure.exitcode)
