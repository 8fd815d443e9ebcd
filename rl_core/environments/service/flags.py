"""Flags of rl-core serve and of its workers. Imports no gRPC, so that --help answers without it."""

from __future__ import annotations

import argparse

from rl_core.sandbox.remote_driver import add_box_flags

TOKEN_VARIABLE = "RL_CORE_SERVICE_TOKEN"


def add_access(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--token_file",
        default="",
        help=f"file with the token; default: environment variable {TOKEN_VARIABLE}",
    )
    parser.add_argument("--tls_cert", default="", help="PEM file: the server's certificate chain")
    parser.add_argument("--tls_key", default="", help="PEM file: the server's private key")
    parser.add_argument(
        "--tls_ca", default="", help="PEM file: trusted CA for --join with TLS, or: system"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of rl-core serve and of its workers."""
    parser.add_argument("envs", nargs="*", metavar="ENV.py", help="environment files")
    parser.add_argument(
        "--capacity", type=int, default=1_000, help="max sessions per environment in one worker"
    )
    parser.add_argument(
        "--idle_s",
        type=float,
        default=600.0,
        help="a session expires after this time without a request",
    )
    parser.add_argument(
        "--hook_timeout_s", type=float, default=60.0, help="deadline of each hook call"
    )
    parser.add_argument(
        "--join", default="", metavar="HOST:PORT", help="the controller that the workers join"
    )
    add_box_flags(parser)
    add_access(parser)
