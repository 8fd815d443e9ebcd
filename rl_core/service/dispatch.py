"""--dispatch: strategies that choose a worker with room for a new session."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from rl_core.service import environments_pb2 as pb
from rl_core.service.flags import DISPATCH
from rl_core.service.links import WorkerLink

# (workers with room, at least one; the start) -> the worker for the new session.
Strategy = Callable[[list[WorkerLink], pb.StartRequest], WorkerLink]


def most_room() -> Strategy:
    """Chooses the worker with most room."""
    return lambda links, start: max(links, key=lambda link: link.room(start.env))


def round_robin() -> Strategy:
    """Chooses workers in turn by name, separately for each environment."""
    last: dict[str, str] = {}

    def choose(links: list[WorkerLink], start: pb.StartRequest) -> WorkerLink:
        by_name = sorted(links, key=lambda link: link.name)
        after = [link for link in by_name if link.name > last.get(start.env, "")]
        link = (after or by_name)[0]
        last[start.env] = link.name
        return link

    return choose


def priority() -> Strategy:
    """Chooses the worker with the highest --priority; most room breaks ties."""
    return lambda links, start: max(
        links, key=lambda link: (link.beat.priority, link.room(start.env))
    )


def sticky_env() -> Strategy:
    """Fills one worker with an environment's sessions before the next, which keeps its containers
    warm. Each environment has a different order of workers."""
    return lambda links, start: max(links, key=lambda link: weight(link, start.env))


def sticky_task() -> Strategy:
    """Sends sessions of the same task to the same worker while that worker has room."""
    return lambda links, start: max(
        links, key=lambda link: weight(link, f"{start.env}\n{start.task_id or start.row}")
    )


def weight(link: WorkerLink, text: str) -> bytes:
    """Rendezvous hashing: adding or removing a worker moves only its share of sessions. A CRC would
    not do: CRCs are linear and favour the same few workers for texts of equal length."""
    return blake2b(f"{link.name}\n{text}".encode(), digest_size=8).digest()


MAKERS: tuple[Callable[[], Strategy], ...] = (
    most_room,
    round_robin,
    priority,
    sticky_env,
    sticky_task,
)
STRATEGIES = dict(zip(DISPATCH, MAKERS, strict=True))
