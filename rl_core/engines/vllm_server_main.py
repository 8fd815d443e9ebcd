"""The child process that runs vLLM's HTTP server. `python -m rl_core.engines.vllm_server_main`
reads its arguments as JSON from standard input. Only this file and vllm_worker.py import vllm."""

from __future__ import annotations

import asyncio
import sys

from rl_core.engines.server_child import read_order


def main() -> None:
    order = read_order()
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.middleware import authenticate
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM itself leaves the routes that change weights open to every user of the machine.
    if not hasattr(authenticate, "GUARDED_PREFIX"):
        sys.exit("rl_core cannot protect the routes of this version of vLLM; install vllm==0.32.0")
    authenticate.GUARDED_PREFIX = "/"
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args([*order["args"], "--api-key", order["key"]])
    validate_parsed_serve_args(args)
    asyncio.run(run_server(args))


if __name__ == "__main__":
    main()
