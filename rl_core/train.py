"""torchrun --nproc_per_node N -m rl_core.train: the command. It reads the flags, builds the run and starts the loop.

Whatever loads slowly is imported inside functions: --help and an error in a flag answer at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import traceback
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.config import parse_config
from rl_core.types import RunError

if TYPE_CHECKING:
    from rl_core.distributed import Ranks

PLAN = "rl_core.tools.plan"  # what --dry_run prints; the spine imports no tool


def main(argv: list[str] | None = None) -> int:
    """The exit status. A user's mistake is one line; --debug shows where it was found."""
    ranks: Ranks | None = None
    argv = sys.argv[1:] if argv is None else argv
    end_with_torchrun()
    try:
        config = parse_config(argv)
        from rl_core.build import build, is_sharded, make_plan
        from rl_core.distributed import barrier, close_ranks, explain_timeouts, init_ranks
        from rl_core.loop import run_rank
        from rl_core.run_folder import locked

        plan = make_plan(config)
        size, is_first = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("RANK", "0") == "0"
        if config.dry_run:
            if is_first:
                print(import_module(PLAN).describe(plan, size))
            return 0
        parts = {n: getattr(config, n) for n in ("dp_replicate", "cp", "tp", "engine_ranks")}
        ranks = init_ranks(config.timeout_s, is_sharded=is_sharded(config), **parts)
        with explain_timeouts("start, log or save", ranks, config.timeout_s):
            barrier(ranks)  # every rank has seen that the folder is free
            is_writer = ranks.rank == 0 and (ranks.link is None or not ranks.link.is_engine)
            with locked(Path(config.out)) if is_writer else nullcontext():
                asyncio.run(run_rank(build(plan, ranks)))
            close_ranks(ranks)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if is_first_to_fail(ranks):
            if "--debug" in argv or not isinstance(error, (ValueError, OSError, RunError)):
                traceback.print_exc()
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1


def end_with_torchrun() -> None:
    """A rank whose launcher is killed outright, so that it can tell its ranks nothing, ends too (Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def is_first_to_fail(ranks: Ranks | None) -> bool:
    """True on one rank: the first that failed knows the cause, the others lost it. Before ranks meet, all see the same."""
    if ranks is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return ranks.store is None or ranks.store.add("failures", 1) == 1
    except (RuntimeError, OSError):
        return False  # the store went with the rank that told the cause


if __name__ == "__main__":
    sys.exit(main())
