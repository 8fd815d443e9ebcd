"""rl-core service WHAT grpc://HOST:PORT: the workers and the sessions of an `rl-core serve`; ends
sessions; lets one worker leave. docs/service.md"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rl_core.environments.service import needing_grpc
from rl_core.errors import nearest
from rl_core.tools.parser import Parser

if TYPE_CHECKING:
    from google.protobuf.message import Message

ABOUT = {
    "workers": "workers, their sessions, and starts that wait",
    "sessions": "sessions: id, environment, worker, owner, age, turns, state",
    "cancel": "ends sessions: needs --env, --owner, --worker or --all",
    "drain": "--worker takes no new sessions, and leaves with the end of its last one",
}


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="rl-core service",
        description=__doc__,
        epilog="; ".join(f"{name}: {text}" for name, text in ABOUT.items()),
    )
    parser.add_argument("what", help=", ".join(ABOUT))
    parser.add_argument("url", metavar="URL", help="grpc://HOST:PORT, or grpcs:// with TLS")
    parser.add_argument("--env", default="", help="only sessions of this environment")
    parser.add_argument("--owner", default="", help="only sessions of this owner")
    parser.add_argument("--worker", default="", help="only sessions of this worker; whom to drain")
    parser.add_argument("--all", action="store_true", help="cancel every session of the service")
    parser.add_argument(
        "--replace", action="store_true", help="another worker starts where the drained one was"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.what not in ABOUT:
        raise ValueError(f"rl-core service {args.what}: {nearest(args.what, ABOUT)}")
    chosen = {"env": args.env, "owner": args.owner, "worker": args.worker}
    if args.what == "cancel" and any(chosen.values()) == args.all:
        raise ValueError("rl-core service cancel needs --env, --owner or --worker, or else --all")
    if args.what == "drain" and not args.worker:
        raise ValueError("rl-core service drain needs --worker NAME; `rl-core service workers`")
    with needing_grpc("rl-core service"):
        from rl_core.environments.service import manage
    if args.what == "workers":
        reply = manage.list_workers(args.url)
        text = workers_table(reply)
    elif args.what == "drain":
        reply = manage.drain(args.url, args.worker, replace=args.replace)
        text = f"{args.worker} leaves after {reply.sessions} sessions"
    elif args.what == "cancel":
        reply = manage.cancel_all(args.url, **chosen)
        text = f"{reply.ended} sessions ended"
    else:
        reply = manage.list_sessions(args.url, **chosen)
        text = sessions_table(reply)
    print(as_json(reply) if args.json else text)
    return 1 if silent(reply, args.what) else 0


def silent(reply: Message, command: str) -> bool:
    """Warns of workers that did not answer. True if there are any."""
    names = list(getattr(reply, "silent", ()))
    if names:
        text = (
            f"warning: {command}: no answer from {', '.join(names)}, which may hold more sessions"
        )
        print(text, file=sys.stderr)
    return bool(names)


def as_json(reply: Message) -> str:
    from google.protobuf import json_format

    return json_format.MessageToJson(reply, preserving_proto_field_name=True)


def sessions_table(reply) -> str:
    """`reply`: a ListSessionsReply."""
    from rl_core.environments.service import environments_pb2 as pb

    names = "session", "env", "worker", "owner", "task", "age s", "idle s", "turns", "state"
    rows: list[list[str]] = [[*names]]
    for info in reply.sessions:
        # The generated module builds its names at import.
        state = pb.Status.Name(info.status).lower().replace("_", " ")  # pyright: ignore[reportAttributeAccessIssue]
        times = f"{info.age_s:.0f}", f"{info.idle_s:.0f}", str(info.turns)
        texts = info.session, info.env, info.worker, info.owner, info.task_id
        rows.append([*texts, *times, state])
    return "\n".join([*table(rows), f"{len(reply.sessions)} sessions"])


def workers_table(reply) -> str:
    """`reply`: a WorkersReply."""
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
    waiting = ", ".join(f"{n} of {env}" for env, n in sorted(reply.queued.items()) if n) or "none"
    return "\n".join([*table(rows), f"starts that wait: {waiting}; up for {reply.uptime_s:.0f} s"])


def table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
