"""rl-core serve ENV.py ...: hosts environments over gRPC, for runs with --env_path
grpc://host:port/name. docs/service.md"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rl_core.errors import split
from rl_core.tools.parser import Parser


def main(argv: list[str]) -> int:
    args = read_flags(argv)
    from rl_core.data.env_names import env_path
    from rl_core.data.rows import check_exists
    from rl_core.environments.service import needing_grpc

    args.envs = [env_path(path) for paths in args.envs for path in split(paths)]
    for path in args.envs:
        check_exists(Path(path).expanduser())
    with needing_grpc("rl-core serve"):
        from rl_core.environments.service.security import Access
        from rl_core.environments.service.server import serve

        access = Access.of(args)
        if args.http_port is not None:
            from rl_core.environments.service import gateway  # noqa: F401
    return asyncio.run(serve(args, access))


def read_flags(argv: list[str]) -> argparse.Namespace:
    """Raises ValueError for flags that contradict each other."""
    from rl_core.environments.service.flags import add_flags

    parser = Parser(prog="rl-core serve", description=__doc__)
    add_flags(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; others than loopback need a token",
    )
    parser.add_argument("--port", type=int, default=50051, help="of gRPC; 0 picks one")
    parser.add_argument(
        "--http_port",
        type=int,
        help="HTTP with JSON, and /metrics for Prometheus; 0 picks one; default: off",
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument(
        "--controller", action="store_true", help="no environments: workers of other hosts --join"
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=10_000,
        help="starts of each environment that may wait for room",
    )
    parser.add_argument(
        "--heartbeat_s",
        type=float,
        default=2.0,
        help="a worker that is silent for three is removed",
    )
    parser.add_argument(
        "--drain_s", type=float, default=30.0, help="on SIGTERM, seconds that sessions have to end"
    )
    args = parser.parse_args(argv)
    if bool(args.envs) == args.controller:
        raise ValueError("name environment files, or --controller: one of them")
    if args.join and (args.controller or args.http_port is not None or args.tls_cert):
        hint = "leave out --controller, --http_port and --tls_cert (for TLS to the hub: --tls_ca)"
        raise ValueError(f"--join {args.join} opens no hub: {hint}")
    host, _, port = args.join.rpartition(":")
    if args.join and not (host and port.isdecimal() and "," not in host):
        raise ValueError(f"--join {args.join} must be HOST:PORT of one controller")
    for flag in ("workers", "capacity", "queue", "heartbeat_s", "idle_s", "hook_timeout_s"):
        if getattr(args, flag) <= 0:
            raise ValueError(f"--{flag} {getattr(args, flag)} must be above 0")
    # GRPC takes the remainder.
    if any(not 0 <= port < 1 << 16 for port in (args.port, args.http_port or 0)):
        raise ValueError(
            f"--port {args.port} and --http_port {args.http_port or 0} must be from 0 to 65535"
        )
    return args
