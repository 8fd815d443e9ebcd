"""Admin functions of a service in Python: `list_sessions("grpc://host:50051")`. Each function
raises ValueError if the service does not answer or refuses the request."""

from __future__ import annotations

from typing import Any

import grpc

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.address import access_to, read_url
from rl_core.environments.service.wire import (
    CHANNEL_OPTIONS,
    ENVIRONMENTS,
    METHODS,
    REPLIES,
    REQUESTS,
)

TIMEOUT_S = 30.0  # Longer than the three heartbeats for which a hub waits for a blocked worker.


def list_workers(url: str) -> pb.WorkersReply:
    return ask(url, "workers")


def list_sessions(
    url: str, *, env: str = "", owner: str = "", worker: str = ""
) -> pb.ListSessionsReply:
    """The sessions of an environment, owner and worker, the oldest first; "" matches any."""
    return ask(url, "list_sessions", env=env, owner=owner, worker=worker)


def cancel_all(url: str, *, env: str = "", owner: str = "", worker: str = "") -> pb.CancelAllReply:
    """Cancels the sessions that list_sessions() returns for the same arguments, and returns their
    number."""
    return ask(url, "cancel_all", env=env, owner=owner, worker=worker)


def drain(url: str, worker: str, *, replace: bool = False) -> pb.DrainReply:
    """Drains a worker and returns the number of its open sessions. The worker exits after its last
    session. replace: another worker then starts and loads the files again."""
    return ask(url, "drain", worker=worker, replace=replace)


def ask(url: str, verb: str, **fields: Any) -> Any:
    parts, settings = read_url(url, "the service", "HOST:PORT")
    access = access_to(
        settings.get("token_file", ""), settings.get("ca", ""), parts.scheme == "grpcs"
    )
    with access.channel(parts.netloc, CHANNEL_OPTIONS) as channel:
        method = channel.unary_unary(
            f"/{ENVIRONMENTS}/{METHODS[verb]}",
            request_serializer=REQUESTS[verb].SerializeToString,
            response_deserializer=REPLIES[verb].FromString,
        )
        try:
            return method(REQUESTS[verb](**fields), metadata=access.metadata(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            plain_url = url.partition("?")[0]
            raise ValueError(f"{plain_url}: {error.code().name}: {error.details()}") from None
