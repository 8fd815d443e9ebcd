"""torchrun --nproc_per_node N -m rl_core.train: the command. It reads the flags, builds the run and starts the loop.

Whatever loads slowly is imported inside functions: --help and an error in a flag answer at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from typing import TYPE_CHECKING

from rl_core.config import parse_config
from rl_core.types import RunError

if TYPE_CHECKING:
    from rl_core.distributed import Ranks


def main(argv: list[str] | None = None) -> int:
    """The exit status. A user's mistake is one line; --debug shows where it was found."""
    ranks: Ranks | None = None
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = parse_config(argv)
        import torch

        from rl_core.build import build, compute_dtype, describe, make_plan
        from rl_core.distributed import close_ranks, init_ranks
        from rl_core.loop import train

        plan = make_plan(config)
        if config.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(describe(plan, int(os.environ.get("WORLD_SIZE", 1))))
            return 0
        ranks = init_ranks(config.timeout_s, is_sharded=compute_dtype(config) != torch.float32)
        asyncio.run(train(build(plan, ranks)))
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
