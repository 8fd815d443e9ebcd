"""Addresses at which machines reach each other."""

from __future__ import annotations

import os
import socket


def is_one_node() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")


def addresses_towards(host: str, port: int) -> tuple[str, str]:
    """(address of this machine, address of the host) as they reach each other."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # UDP sends nothing when it connects.
        probe.connect(address)
        return probe.getsockname()[0], probe.getpeername()[0]
