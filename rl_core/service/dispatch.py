"""--dispatch: strategies that choose a worker with room for a new session."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from rl_core.service.links import WorkerLink

# (workers with room, at least one; environment) -> the worker for the new session.
Strategy = Callable[[list[WorkerLink], str], WorkerLink]


def most_room(links: list[WorkerLink], env: str) -> WorkerLink:
    """Chooses the worker with most room."""
    return max(links, key=lambda link: link.room(env))


def sticky_env(links: list[WorkerLink], env: str) -> WorkerLink:
    """Fills one worker with an environment's sessions before the next, which keeps its containers
    warm. Rendezvous hashing: each environment has a different order of workers, and adding or
    removing a worker moves only that worker's share of environments."""

    # A CRC would not do: CRCs are linear and favour the same workers for names of equal length.
    def weight(link: WorkerLink) -> bytes:
        return blake2b(f"{link.name}\n{env}".encode(), digest_size=8).digest()

    return max(links, key=weight)


STRATEGIES: dict[str, Strategy] = {"most_room": most_room, "sticky_env": sticky_env}
