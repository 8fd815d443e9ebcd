"""The start of a child process that runs an engine's HTTP server; see server_process.py."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from multiprocessing import current_process

from rl_core.types import JSONObject

PR_SET_PDEATHSIG = 1
WATCH_S = 0.5


def read_order() -> JSONObject:
    """The order of the process that started this one. This process ends with it."""
    # Read from stdin, because every user of the machine can read arguments, and the order has the
    # key.
    order = json.load(sys.stdin)
    # The kernel kills this process when the thread that started it ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != order["parent"]:
        sys.exit("the process that started this one is gone")
    watch_group()
    current_process().authkey = bytes.fromhex(order["authkey"])
    return order


def watch_group() -> None:
    """Forks a process that kills this process group once this process has ended: children of a
    killed server would keep the GPU's memory."""
    server = os.getpid()
    if os.getpgrp() != server or os.fork():
        return
    while os.getppid() == server:
        time.sleep(WATCH_S)
    os.killpg(server, signal.SIGKILL)
