"""`rl-core serve`: the hub, and worker processes that are started again when they die."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import suppress

import grpc

from rl_core.service.hub import Hub
from rl_core.service.security import Access
from rl_core.service.wire import CHANNEL_OPTIONS

DRAIN_S = 30.0


async def serve(args: argparse.Namespace, access: Access) -> int:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    server, join = None, args.join
    if not join:
        hub = Hub(access, heartbeat_s=args.heartbeat_s, max_queue=args.queue)
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        hub.add_to(server)
        address = f"{args.host}:{args.port}"
        if access.cert:
            credentials = grpc.ssl_server_credentials([(access.key, access.cert)])
            port = server.add_secure_port(address, credentials)
        else:
            port = server.add_insecure_port(address)
        join = f"127.0.0.1:{port}"
        await server.start()
        print(f"serving on {args.host}:{port}", flush=True)
    keepers = [asyncio.ensure_future(keep_worker(args, join)) for _ in range(args.workers if args.envs else 0)]
    try:
        await stop.wait()
    finally:
        for keeper in keepers:
            keeper.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*keepers, return_exceptions=True)
        if server:
            await server.stop(1.0)
    return 0


async def keep_worker(args: argparse.Namespace, join: str) -> None:
    """One worker process, and the next one when it dies."""
    dead, wait_s = "", 0.5
    while True:
        command = [sys.executable, "-m", "rl_core.service.worker", *args.envs, "--join", join, "--replaces", dead]
        for name in ("capacity", "idle_s", "hook_timeout_s"):
            command += [f"--{name}", str(getattr(args, name))]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            line = (await process.stdout.readline()).decode().split()
            dead = line[1] if len(line) == 2 else ""
            await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                with suppress(ProcessLookupError):
                    process.kill()
        print(f"worker {dead} ended ({process.returncode}); starting another", file=sys.stderr, flush=True)
        await asyncio.sleep(wait_s)
