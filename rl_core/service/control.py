"""Admin requests of a hub: list sessions, cancel many of them, drain a worker. `hub` is a Hub of
hub.py, which imports this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc import StatusCode

from rl_core.service import environments_pb2 as pb
from rl_core.service.wire import ServiceError

if TYPE_CHECKING:
    from rl_core.service.hub import Hub


async def list_sessions(hub: Hub, request: pb.ListSessionsRequest) -> pb.ListSessionsReply:
    """The sessions of all workers, the oldest first, and the workers that did not answer."""
    replies, silent = await ask_workers(hub, "list_sessions", request)
    total = pb.ListSessionsReply(silent=silent)
    for reply in replies:
        total.sessions.extend(reply.sessions)
    total.sessions.sort(key=lambda info: -info.age_s)
    return total


async def cancel_all(hub: Hub, request: pb.CancelAllRequest) -> pb.CancelAllReply:
    """Cancels sessions. Returns their number and the workers that did not answer."""
    replies, silent = await ask_workers(hub, "cancel_all", request)
    return pb.CancelAllReply(ended=sum(reply.ended for reply in replies), silent=silent)


async def ask_workers(
    hub: Hub, verb: str, request: pb.ListSessionsRequest | pb.CancelAllRequest
) -> tuple[list[pb.ListSessionsReply | pb.CancelAllReply], list[str]]:
    """(replies, names of workers that did not answer). Raises ServiceError for an unknown
    environment or worker."""
    if request.env and hub.envs:  # Before a worker joins, the hub knows no environments.
        await hub.must_know(request.env)
    names = list(hub.links)
    if request.worker:
        names = [must_be_here(hub, request.worker)]
    # One Request per worker: each link writes its number into the request.
    replies = await hub.ask_all({name: pb.Request(**{verb: request}) for name in names})
    good, silent = [], []
    for name in names:
        if name in replies and not replies[name].code:
            good.append(getattr(replies[name], verb))
        else:
            silent.append(name)
    return good, silent


async def drain(hub: Hub, request: pb.DrainRequest) -> pb.DrainReply:
    """Drains a worker and returns the number of its open sessions. Raises ServiceError for an
    unknown worker."""
    reply = await hub.links[must_be_here(hub, request.worker)].answer(pb.Request(drain=request))
    if reply is None:
        message = f"the connection to worker {request.worker} broke; retry"
        raise ServiceError(StatusCode.UNAVAILABLE, message)
    if reply.code:
        raise ServiceError(StatusCode.INTERNAL, reply.error)
    return reply.drain


def must_be_here(hub: Hub, worker: str) -> str:
    if worker not in hub.links:
        known = ", ".join(sorted(hub.links)) or "none"
        message = f"there is no worker {worker[:80]!r}; there are {known}"
        raise ServiceError(StatusCode.NOT_FOUND, message)
    return worker


CONTROLS = {"list_sessions": list_sessions, "cancel_all": cancel_all, "drain": drain}
