"""Runs a rank from its first step until everything is closed."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Protocol

from rl_core.distributed import Ranks


class Runnable(Protocol):
    """A Trainer, or a rank that serves engines."""

    ranks: Ranks

    async def fit(self) -> None: ...
    async def close(self) -> None: ...


async def run_to_end(rank: Runnable) -> None:
    """Runs the steps and closes everything that the run started."""
    gc.collect()
    # Rows and modules live as long as the run; looking through them again and again costs tenths of
    # a second.
    gc.freeze()
    heartbeat = rank.ranks.heartbeat
    try:
        with heartbeat.watching() if heartbeat else nullcontext():
            await rank.fit()
    finally:
        await rank.close()
        # Otherwise models would stay in a notebook's memory, and libraries would report leaks at
        # the end of the process.
        gc.unfreeze()
