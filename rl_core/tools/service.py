"""rl-core info --service grpc://HOST:PORT: the workers of a service."""

from __future__ import annotations

from rl_core.service import needing_grpc

with needing_grpc("rl-core info --service"):
    import grpc
    from google.protobuf import json_format

    from rl_core.service import environments_pb2 as pb
    from rl_core.service.address import access_to, read_url
    from rl_core.service.wire import CHANNEL_OPTIONS, ENVIRONMENTS


def service(url: str, as_json: bool) -> str:
    """A table of a service's workers, or all that it says of them as JSON. Raises ValueError if it
    does not answer."""
    reply = ask(url)
    if as_json:
        return json_format.MessageToJson(reply, preserving_proto_field_name=True)
    rows = [["worker", "host", "pid", "MiB", "heard", "env", "sessions", "interactions", "ended"]]
    for worker in reply.workers:
        state = "draining" if worker.draining else f"{worker.silent_s:.1f} s ago"
        first = [
            worker.name,
            worker.host,
            str(worker.pid),
            f"{worker.memory_bytes / 2**20:.0f}",
            state,
        ]
        for load in worker.loads:
            ended = ", ".join(
                f"{n} {status.replace('_', ' ')}" for status, n in sorted(load.ended.items())
            )
            rows.append(
                [
                    *first,
                    load.env,
                    f"{load.sessions} of {load.capacity}",
                    str(load.interactions),
                    ended,
                ]
            )
            first = [""] * len(first)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    waiting = ", ".join(f"{n} of {env}" for env, n in sorted(reply.queued.items()) if n) or "none"
    return "\n".join([*lines, f"starts that wait: {waiting}; up for {reply.uptime_s:.0f} s"])


def ask(url: str) -> pb.WorkersReply:
    parts, settings = read_url(url, "--service", "HOST:PORT")
    access = access_to(
        settings.get("token_file", ""), settings.get("ca", ""), parts.scheme == "grpcs"
    )
    with access.channel(parts.netloc, CHANNEL_OPTIONS) as channel:
        workers = channel.unary_unary(
            f"/{ENVIRONMENTS}/Workers",
            request_serializer=pb.WorkersRequest.SerializeToString,
            response_deserializer=pb.WorkersReply.FromString,
        )
        try:
            return workers(pb.WorkersRequest(), metadata=access.metadata(), timeout=10)
        except grpc.RpcError as error:
            raise ValueError(f"--service {url}: {error.code().name}: {error.details()}") from None
