"""Discovery of the hubs that a worker joins: each address of --join, and all addresses of a host
name there (a headless service of Kubernetes)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

LOOK_S = 5.0  # Interval of name lookups.


async def join_all(join: str, uplinks: list[Any], open_uplink: Callable[[str, str], Any]) -> None:
    """Keeps one uplink per hub in `uplinks`. open_uplink(address, host) makes an uplink; `host` is
    the name in the hub's certificate."""
    known: dict[str, dict[str, str]] = {}  # Item of --join -> its addresses.
    links: dict[str, Any] = {}
    while True:
        for item in join.split(","):
            known[item] = await addresses(item) or known.get(item, {})
        wanted = {address: host for hosts in known.values() for address, host in hosts.items()}
        for address in links.keys() - wanted.keys():
            links[address].is_over.set()  # The uplink stops when its connection ends.
            uplinks.remove(links.pop(address))
        for address in wanted.keys() - links.keys():
            links[address] = open_uplink(address, wanted[address])
            uplinks.append(links[address])
        await asyncio.sleep(LOOK_S if all(known.values()) else 1.0)


async def addresses(item: str) -> dict[str, str]:
    """Address -> host name for a HOST:PORT or unix:PATH. A name with one address stays as written.
    Returns {} if the name cannot be resolved (yet)."""
    host, colon, port = item.rpartition(":")
    if item.startswith("unix:"):
        return {item: ""}
    if not colon or not port.isdecimal():
        raise ValueError(f"--join {item} must be HOST:PORT, or several separated by commas")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except OSError as error:
        print(f"--join {item}: {error}; retrying soon", file=sys.stderr, flush=True)
        return {}
    # A hub with IPv4 and IPv6 addresses counts once.
    family = min(family for family, *_ in infos)
    ips = {address[0] for kind, *_, address in infos if kind == family}
    if len(ips) == 1:
        return {item: host}
    return {f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}": host for ip in ips}
