"""Ranks of this machine that are forked from one process, which has imported what each of them
needs. They begin as ranks of torchrun do, with its variables."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType

from rl_core.run.process.signals import SIGNALS
from rl_core.sampling.watchdog import end_without_teardown
from rl_core.scratch import scratch_prefix

PORT_DIGITS = 8
FAILED_S = 0.1  # Ranks that fail with the first have time to do so by themselves.
END_S = 30.0  # SIGKILL follows SIGTERM after this time, as in torchrun.
POLL_S = 0.05


def can_fork() -> bool:
    """True if ranks can be forked: a driver of a device, or a second thread, might not work in them.
    Imports the modules that ranks need."""
    if sys.platform != "linux" or num_threads() > 1:
        return False
    # As torchrun sets it for its ranks. It is read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if torch.accelerator.is_available():
        return False
    from transformers import GenerationMixin, PreTrainedTokenizerFast  # noqa: F401

    import rl_core.plan.model_checks
    import rl_core.plan.plan
    import rl_core.trainer  # noqa: F401

    return num_threads() == 1


def num_threads() -> int:
    """The number of threads of this process, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def fork_ranks(flags: list[str], num_ranks: int) -> int:
    """The exit status of a run on `num_ranks` ranks, 128 + its number after a signal."""
    from torch.distributed import TCPStore

    folder = tempfile.mkdtemp(prefix=scratch_prefix("ranks"))
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()
    # None arrives between a fork and the handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ranks: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            os.close(send)
            run_rank(flags, rank, num_ranks, folder, receive)
        ranks[pid] = rank
    gc.unfreeze()
    received = pass_signals_on(ranks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # Made after the forks, for it starts a thread. Each rank reads the port once.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, f"{store.port:0{PORT_DIGITS}d}".encode() * num_ranks)
    try:
        status = wait_for(ranks, received)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 128 + received[0] if received else status


def run_rank(flags: list[str], rank: int, num_ranks: int, folder: str, receive: int) -> None:
    """The life of a rank, which never returns."""
    from rl_core.train import main

    status = 1
    try:
        os.setsid()  # Ctrl-C reaches the launcher alone.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(int(os.read(receive, PORT_DIGITS))),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "rl_core",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_ERROR_FILE": str(Path(folder, str(rank), "error.json")),
        }
        status = main(flags)
        threading._shutdown()  # As Python does at its end: waits for threads.
    finally:
        end_without_teardown(status)


def pass_signals_on(ranks: dict[int, int]) -> list[int]:
    """Forwards this process's signals to the ranks and records them in the list."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        send_to(ranks, number)

    for number in SIGNALS:
        signal.signal(number, receive)
    return received


def send_to(ranks: dict[int, int], number: int) -> None:
    for pid in list(ranks):
        os.kill(pid, number)  # No rank is reaped, so each process id is still valid.


def wait_for(ranks: dict[int, int], received: list[int]) -> int:
    """0 once all ranks have ended well. After the first that did not, the others get SIGTERM, and
    those that do not end by it, such as a frozen one, get SIGKILL after END_S."""
    status, kill_at = 0, math.inf
    while ranks:
        # A rank stays in the table until it is reaped: a signal never reaches another process.
        options = os.WEXITED | os.WNOWAIT | (os.WNOHANG if status else 0)
        ended = os.waitid(os.P_ALL, 0, options)
        if ended is None:
            if time.monotonic() > kill_at:
                send_to(ranks, signal.SIGKILL)
            time.sleep(POLL_S)
            continue
        rank = ranks.pop(ended.si_pid, None)
        code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
        if rank is None or code == 0 or status:
            continue
        status = max(1, code)
        if code < 0 and not received:
            name = signal.Signals(-code).name
            text = f"error: rank {rank} was ended by {name}; continue with --resume"
            print(text, file=sys.stderr, flush=True)
        time.sleep(FAILED_S)
        send_to(ranks, signal.SIGTERM)
        kill_at = time.monotonic() + END_S
    return status
