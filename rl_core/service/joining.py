"""Which hubs a worker joins: each address of --join, and each that a name in it means (a headless
service of Kubernetes)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

LOOK_S = 5.0  # how often names are looked up again


async def join_all(join: str, uplinks: list[Any], open_uplink: Callable[[str, str], Any]) -> None:
    """Keeps a link to each hub in `uplinks`. open_uplink(address, host) makes one; host is the name
    in its certificate."""
    known: dict[str, dict[str, str]] = {}  # item of join -> its addresses
    links: dict[str, Any] = {}
    while True:
        for item in join.split(","):
            known[item] = await addresses(item) or known.get(item, {})
        wanted = {address: host for found in known.values() for address, host in found.items()}
        for address in links.keys() - wanted.keys():
            links[address].is_over.set()  # it ends when its connection does
            uplinks.remove(links.pop(address))
        for address in wanted.keys() - links.keys():
            links[address] = open_uplink(address, wanted[address])
            uplinks.append(links[address])
        await asyncio.sleep(LOOK_S if all(known.values()) else 1.0)


async def addresses(item: str) -> dict[str, str]:
    """Address -> host of a HOST:PORT or unix:PATH: itself if it has one address. Empty if the name
    is not known (yet)."""
    host, colon, port = item.rpartition(":")
    if item.startswith("unix:"):
        return {item: ""}
    if not colon or not port.isdecimal():
        raise ValueError(f"--join {item} must be HOST:PORT, or several with commas")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
    except OSError as error:
        print(f"--join {item}: {error}; looked up again soon", file=sys.stderr, flush=True)
        return {}
    # A hub that has addresses of both families is one hub.
    family = min(family for family, *_ in found)
    ips = {address[0] for kind, *_, address in found if kind == family}
    if len(ips) == 1:
        return {item: host}
    return {f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}": host for ip in ips}
