"""The child process that runs SGLang's HTTP server. `python -m rl_core.engines.sglang_server_main`
reads its arguments as JSON from standard input. Only this file and sglang_images/ import sglang."""

from __future__ import annotations

import os

from rl_core.engines.server_child import read_order


def main() -> None:
    order = read_order()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*order["args"], "--api-key", order["key"]]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
