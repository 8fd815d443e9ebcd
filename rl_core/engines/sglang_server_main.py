"""The child process that runs SGLang's HTTP server. `python -m rl_core.engines.sglang_server_main`
reads its arguments as JSON from standard input. Only this file imports sglang."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from multiprocessing import current_process

PR_SET_PDEATHSIG = 1


def main() -> None:
    # Read from stdin, because every user of the machine can read arguments, and the order has the
    # key.
    order = json.load(sys.stdin)
    # The kernel kills this process when the thread that started it ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != order["parent"]:
        sys.exit("the process that started this one is gone")
    current_process().authkey = bytes.fromhex(order["authkey"])
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*order["args"], "--api-key", order["key"]]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
