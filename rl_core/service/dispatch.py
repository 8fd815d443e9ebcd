"""--dispatch: on which of the workers with room a session starts."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from rl_core.service import environments_pb2 as pb
from rl_core.service.flags import DISPATCH
from rl_core.service.links import WorkerLink

# The workers that have room for a start, which are never none -> the one where it begins.
Strategy = Callable[[list[WorkerLink], pb.StartRequest], WorkerLink]


def most_room() -> Strategy:
    """The worker with most room."""
    return lambda links, start: max(links, key=lambda link: link.room(start.env))


def round_robin() -> Strategy:
    """Workers in turn, in the order of their names; each environment has a turn of its own."""
    last: dict[str, str] = {}

    def choose(links: list[WorkerLink], start: pb.StartRequest) -> WorkerLink:
        by_name = sorted(links, key=lambda link: link.name)
        after = [link for link in by_name if link.name > last.get(start.env, "")]
        link = (after or by_name)[0]
        last[start.env] = link.name
        return link

    return choose


def priority() -> Strategy:
    """The worker with the highest --priority; of several the one with most room."""
    return lambda links, start: max(
        links, key=lambda link: (link.beat.priority, link.room(start.env))
    )


def sticky_env() -> Strategy:
    """Sessions of an environment fill one worker before the next, so that its containers are warm.
    The order of workers is another for each environment."""
    return lambda links, start: max(links, key=lambda link: weight(link, start.env))


def sticky_task() -> Strategy:
    """Sessions of the same task go to the same worker, while it has room."""
    return lambda links, start: max(
        links, key=lambda link: weight(link, f"{start.env}\n{start.task_id or start.row}")
    )


def weight(link: WorkerLink, text: str) -> bytes:
    """Rendezvous hashing: a worker that comes or goes moves its own share alone. No CRC, which is
    linear: of texts of one length it would choose between the same few workers."""
    return blake2b(f"{link.name}\n{text}".encode(), digest_size=8).digest()


MAKERS: tuple[Callable[[], Strategy], ...] = (
    most_room,
    round_robin,
    priority,
    sticky_env,
    sticky_task,
)
STRATEGIES = dict(zip(DISPATCH, MAKERS, strict=True))
