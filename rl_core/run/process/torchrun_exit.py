"""Ranks under torchrun: a rank ends with its launcher, and one rank reports why a run failed."""

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
    """Lets this rank end if its launcher is killed without a chance to signal its ranks (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def report_failure(error: Exception, ranks: Ranks | None, out: Path | None = None) -> None:
    """Prints the error in one line, after the traceback if it is not the user's error, and stores
    it for torchrun's summary, which torchrun prints last. Only the first rank that fails knows the
    cause. `out`: the folder of a run that has begun; a line before the error says how to continue
    it."""
    if not is_first_to_fail(ranks):
        return
    if os.environ.get("RL_CORE_DEBUG") or not isinstance(error, (ValueError, OSError, RunError)):
        traceback.print_exception(error)
    if out and "--resume" not in str(error):
        print(
            f"{out}/failure.txt has the traceback; mend the cause, and give the same command with "
            "--resume, or with another --out",
            file=sys.stderr,
        )
    text = f"error: {' '.join(str(error).split())}"
    print(text, file=sys.stderr, flush=True)
    with suppress(LookupError, OSError):  # Not started by torchrun.
        # torchrun shows the earliest failure. Failures of other ranks follow from this one, perhaps
        # in the same second.
        about = {"message": text, "extraInfo": {"timestamp": int(time.time()) - 1}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": about}))


def is_first_to_fail(ranks: Ranks | None) -> bool:
    """True on one rank of each node: the log of a node says why it ended, and the store of all
    ranks may be gone with another node. Without torchrun, on one rank."""
    try:
        # torchrun makes a new folder with a subfolder for each rank of a node.
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1]
        folder.joinpath("rl_core_failed").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False
    except OSError:  # The folder is gone: each rank prints its error, rather than none.
        return True
    except LookupError:
        if ranks is None:
            return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        return ranks.add("failures", 1) == 1
    except RuntimeError:
        return False  # Another rank reported the cause, and its end closed the store.
