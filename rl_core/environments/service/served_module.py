"""A served environment as a module of hooks, by its address."""

from __future__ import annotations

from types import ModuleType


def load_served(address: str) -> ModuleType:
    """`address`: grpc://HOST:PORT/ENV, or http+agentbench://HOST:PORT/ENV. Raises ValueError if
    the service does not answer."""
    if "+agentbench://" in address:
        from rl_core.environments.service.agentbench import load_module
    else:
        from rl_core.environments.service.client import load_module

    return load_module(address)
