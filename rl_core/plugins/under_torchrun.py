"""What a rank is to torchrun: it ends with its launcher, and one rank tells why a run failed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.types import RunError

if TYPE_CHECKING:
    from rl_core.distributed import Ranks

PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """A rank whose launcher is killed outright, so that it can tell its ranks nothing, ends too
    (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tell_failure(error: Exception, ranks: Ranks | None) -> None:
    """Prints one line, after the traceback if the error is not the user's, and leaves it to
    torchrun's summary, which is the last that torchrun prints. Only the first rank that fails knows
    the cause."""
    if not is_first_to_fail(ranks):
        return
    if os.environ.get("RL_CORE_DEBUG") or not isinstance(error, (ValueError, OSError, RunError)):
        traceback.print_exception(error)
    text = f"error: {' '.join(str(error).split())}"
    print(text, file=sys.stderr, flush=True)
    with suppress(LookupError, OSError):  # not started by torchrun
        # torchrun shows the earliest failure. Those of the other ranks follow from it, perhaps in
        # the same second.
        about = {"message": text, "extraInfo": {"timestamp": int(time.time()) - 1}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": about}))


def is_first_to_fail(ranks: Ranks | None) -> bool:
    """True on one rank. Before ranks meet, on one of each node."""
    try:
        if ranks is not None:
            return ranks.add("failures", 1) == 1
        # torchrun gives each rank of a node a folder of its own in a new one.
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1].joinpath("rl_core_failed").touch(
            exist_ok=False
        )
        return True
    except LookupError:
        return os.environ.get("LOCAL_RANK", "0") == "0"  # not started by torchrun
    except (RuntimeError, OSError):
        return False  # another rank told the cause; the store went with it
