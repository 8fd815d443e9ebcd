"""`rl-core serve`: the hub, and worker processes that are restarted when they die."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import secrets
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rl_core.environments.service.flags import TOKEN_VARIABLE
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.security import Access, Admission
from rl_core.environments.service.wire import (
    CHANNEL_OPTIONS,
    ENVIRONMENTS,
    HUB,
    REPLACED,
    UNUSABLE,
    collect_rarely,
)
from rl_core.sandbox.remote_driver import box_flags
from rl_core.scratch import scratch_prefix

# Without so_reuseport a second server on the port fails instead of sharing the clients. Idle
# workers send pings, which must not count as abuse.
SERVER_OPTIONS = [("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
SERVER_OPTIONS += [("grpc.http2.min_ping_interval_without_data_ms", 5_000)]
NEW_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())'"


async def serve(args: argparse.Namespace, access: Access) -> int:
    """Serves until SIGTERM or SIGINT, then drains until all sessions have ended, for --drain_s at
    most. Raises ValueError for files that cannot be served."""
    collect_rarely()
    stop = asyncio.Event()
    now = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(
            sign, lambda: (now if stop.is_set() else stop).set()
        )
    async with AsyncExitStack() as stack:
        hub, join = (None, args.join) if args.join else await open_hub(args, access, stack)
        keepers = [
            asyncio.ensure_future(keep_worker(args, access.token, join, hub, stop))
            for _ in range(args.workers if args.envs else 0)
        ]
        try:
            await first_of(stop.wait(), *keepers)
            if stop.is_set() and keepers:
                print(
                    f"draining for up to {args.drain_s:g} s; a second signal stops at once",
                    flush=True,
                )
                if hub:
                    hub.starts.drain()
                    hub.tell()
                await asyncio.wait_for(first_of(now.wait(), asyncio.wait(keepers)), args.drain_s)
        except TimeoutError:
            print(f"sessions were still open after {args.drain_s:g} s", file=sys.stderr, flush=True)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
    return 0


async def first_of(*waits) -> None:
    """Returns when the first awaitable does, and raises its exception. Cancels `waits[0]`; the
    others belong to the caller."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        tasks[0].cancel()


def check_host(args: argparse.Namespace, access: Access) -> None:
    """Raises ValueError if other machines could start sessions without a token: a session runs the
    environment's code."""
    host = args.host.strip("[]")
    with suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return
    if not access.token:
        raise ValueError(
            f"--host {args.host} is reachable from other machines and needs a token: set "
            f"{TOKEN_VARIABLE} or --token_file (to make a token: {NEW_TOKEN})"
        )
    if not access.cert:
        print(
            "warning: without --tls_cert the token and all messages are sent in plain text",
            file=sys.stderr,
            flush=True,
        )


async def open_hub(
    args: argparse.Namespace, access: Access, stack: AsyncExitStack
) -> tuple[Hub, str]:
    """Starts the hub. Returns (hub, address for workers of this machine); the address is a socket
    in a private folder and needs no TLS."""
    check_host(args, access)
    hub = Hub(heartbeat_s=args.heartbeat_s, max_queue=args.queue)
    admission = Admission(access, (ENVIRONMENTS, HUB))
    server = grpc.aio.server(interceptors=[admission], options=[*CHANNEL_OPTIONS, *SERVER_OPTIONS])
    hub.add_to(server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection(
        [ENVIRONMENTS, HUB, health.SERVICE_NAME, reflection.SERVICE_NAME], server
    )
    host = args.host.strip("[]")
    address = f"[{host}]:{args.port}" if ":" in host else f"{host}:{args.port}"
    try:
        if access.cert:
            port = server.add_secure_port(
                address, grpc.ssl_server_credentials([(access.key, access.cert)])
            )
        else:
            port = server.add_insecure_port(address)
    except RuntimeError:
        raise ValueError(
            f"cannot listen on {address}: the port is in use, or the host is not an address of "
            "this machine; --port 0 picks a free port"
        ) from None
    join = ""
    if args.envs:
        # A path below TMPDIR may exceed the 107 bytes of a socket's path.
        made = tempfile.TemporaryDirectory(prefix=scratch_prefix("serve"), dir="/tmp")
        folder = stack.enter_context(made)
        join = f"unix:{folder}/hub"
        server.add_insecure_port(join)
    await server.start()
    stack.push_async_callback(server.stop, 1.0)
    for task in (hub.watch(), tell_health(hub, servicer)):
        stack.callback(asyncio.ensure_future(task).cancel)
    lines = [f"serving on {address.rpartition(':')[0]}:{port}"]
    if args.http_port is not None:
        from rl_core.environments.service.gateway import open_http

        http_port = await open_http(hub, access, args, stack)
        lines.append(f"HTTP on {address.rpartition(':')[0]}:{http_port}")
    stack.callback(asyncio.ensure_future(tell_address(hub, lines, args)).cancel)
    return hub, join


async def tell_address(hub: Hub, lines: list[str], args: argparse.Namespace) -> None:
    """Prints the addresses once a worker has loaded the files, so that load errors come first."""
    while args.envs and not hub.links:
        await hub.changed.wait()
    print("\n".join(lines), flush=True)


async def tell_health(hub: Hub, servicer: health.aio.HealthServicer) -> None:
    """Updates the health of each service: "" and the hub serve until they drain; ENVIRONMENTS also
    needs a worker."""
    status = health_pb2.HealthCheckResponse
    while True:
        up = not hub.starts.draining
        for service, is_up in {"": up, HUB: up, ENVIRONMENTS: up and bool(hub.links)}.items():
            await servicer.set(service, status.SERVING if is_up else status.NOT_SERVING)
        await hub.changed.wait()


def worker_command(
    args: argparse.Namespace, join: str, name: str, dead: str, has_token: bool
) -> list[str]:
    command = [sys.executable, "-m", "rl_core.environments.service.worker", *args.envs]
    command += ["--join", join, "--replaces", dead, "--name", name, "--parent", str(os.getpid())]
    for flag in ("capacity", "idle_s", "hook_timeout_s"):
        command += [f"--{flag}", str(getattr(args, flag))]
    flags = box_flags(args)
    flags["max_boxes"] //= args.workers
    for flag, value in flags.items():
        command += [f"--sandbox.{flag}", str(value)]
    return command + (["--token_file", "/dev/stdin"] if has_token else [])


async def keep_worker(
    args: argparse.Namespace, token: str, join: str, hub: Hub | None, stop: asyncio.Event
) -> None:
    """Runs a worker process and restarts it when it dies, but not after a drain. Raises ValueError
    if the worker cannot start at all."""
    name = ""
    wait_s = 0.5
    while not stop.is_set():
        dead = name
        name = secrets.token_hex(6)
        began_s = time.monotonic()
        command = worker_command(args, join, name, dead, bool(token))
        command += ["--tls_ca", args.tls_ca] if args.tls_ca and hub is None else []
        # The token goes through stdin: /proc shows environment variables to all programs that the
        # worker's environments start.
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, start_new_session=True)
        process.stdin.write(token.encode())
        process.stdin.close()
        drainer = asyncio.ensure_future(drain(process, stop))
        try:
            code = await process.wait()
        finally:
            drainer.cancel()
            if process.returncode is None:
                process.kill()
                await process.wait()
        if hub:
            hub.died(name)
        if code == UNUSABLE:
            raise ValueError("a worker cannot start; its error is above")
        if code == 0 and not stop.is_set():
            print(f"worker {name} exited: it was drained", file=sys.stderr, flush=True)
            await stop.wait()
        if code == REPLACED:
            print(f"worker {name} exited; another one starts", file=sys.stderr, flush=True)
        elif not stop.is_set():
            wait_s = 0.5 if time.monotonic() - began_s > 60 else min(2 * wait_s, 30.0)
            text = f"worker {name} ended with status {code}; another one starts in {wait_s:g} s"
            print(text, file=sys.stderr, flush=True)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), wait_s)


async def drain(process: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    """Sends SIGTERM once the server stops; the worker exits after its last session."""
    await stop.wait()
    with suppress(ProcessLookupError):
        process.terminate()
