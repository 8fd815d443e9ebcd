"""The page of a service of environments: workers, sessions, waiting starts, and rates between two
looks. Nothing is asked while no page is open."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from rl_core.service import environments_pb2 as pb
from rl_core.service.address import access_to, read_url
from rl_core.service.manage import list_sessions, list_workers

EVERY_S = 2.0  # Pages that ask sooner get the last answer.
PAGE = 50  # Sessions in one answer.
NUM_OWNERS = 50
TURNS = "interactions"
# Ends that somebody should look into; all others are a client's or a model's.
BAD = {
    "environment_error": "with an error of the environment",
    "expired": "because their client was silent",
}
ORDERS = {
    "oldest": lambda info: -info.age_s,
    "idle": lambda info: -info.idle_s,
    "turns": lambda info: -info.turns,
}
# (worker, environment, status or TURNS) -> how many since the worker's start.
Counts = dict[tuple[str, str, str], int]


class ServiceWatch:
    """A service, and its last answer. Raises ValueError or OSError for a wrong URL, or one that
    names a missing file."""

    def __init__(self, url: str):
        parts, settings = read_url(url, "--service", "HOST:PORT")
        access_to(settings.get("token_file", ""), settings.get("ca", ""), parts.scheme == "grpcs")
        self.url = url
        self.address = f"{parts.scheme}://{parts.netloc}"
        self.lock = threading.Lock()
        self.asked_s = -EVERY_S
        self.heard_s: float | None = None
        self.between_s: float | None = None
        self.error = ""
        self.workers = pb.WorkersReply()
        self.sessions = pb.ListSessionsReply()
        self.changes: Counts = {}
        self.gone: dict[str, tuple[pb.Worker, float]] = {}  # name -> as it was, and when it left

    def outline(self) -> dict[str, Any]:
        """Data of the page at its start."""
        return {"service": self.address, "page": PAGE}

    def look(self) -> None:
        """Asks the service, unless that was a moment ago. What was heard stays if it is away."""
        now_s = time.monotonic()
        if now_s - self.asked_s < EVERY_S:
            return
        try:
            workers = list_workers(self.url)
            sessions = list_sessions(self.url)
        except (ValueError, OSError) as error:  # OSError: a file of its URL was removed
            self.error = str(error)
        else:
            self.error = ""
            self.take(workers, sessions, time.monotonic())
        self.asked_s = time.monotonic()

    def take(self, workers: pb.WorkersReply, sessions: pb.ListSessionsReply, now_s: float) -> None:
        before = {worker.name: worker for worker in self.workers.workers}
        names = {worker.name for worker in workers.workers}
        known = [worker for worker in workers.workers if worker.name in before]
        earlier = counts(before.values())
        self.changes = {key: num - earlier.get(key, 0) for key, num in counts(known).items()}
        self.between_s = None if self.heard_s is None else now_s - self.heard_s
        self.gone |= {name: (before[name], now_s) for name in before.keys() - names}
        for name in names & self.gone.keys():  # a connection that broke
            del self.gone[name]
        self.workers, self.sessions, self.heard_s = workers, sessions, now_s

    def answer(self, *, first: int, find: str, order: str) -> dict[str, Any]:
        """All that the page shows, with sessions from `first` on of those in which `find`
        stands."""
        with self.lock:
            self.look()
            return self.shown(first=first, find=find, order=order)

    def shown(self, *, first: int, find: str, order: str) -> dict[str, Any]:
        now_s = time.monotonic()
        matching = [info for info in self.sessions.sessions if has(info, find.lower())]
        matching.sort(key=ORDERS[order])
        return {
            "error": self.error,
            "heard_s": None if self.heard_s is None else now_s - self.heard_s,
            "uptime_s": self.workers.uptime_s,
            "between_s": self.between_s,
            "problems": self.problems(now_s),
            "envs": self.envs(),
            "workers": [self.worker(worker) for worker in self.workers.workers],
            "owners": owners(matching),
            "num_sessions": len(self.sessions.sessions),
            "num_found": len(matching),
            "sessions": [session(info) for info in matching[first : first + PAGE]],
        }

    def rate(self, *, worker: str = "", env: str = "", kind: str) -> float | None:
        """A second, between the last two looks. Workers that were in both of them count."""
        if not self.between_s:
            return None
        wanted = worker, env, kind
        chosen = (
            num
            for key, num in self.changes.items()
            if all(value in ("", field) for value, field in zip(wanted, key, strict=True))
        )
        return sum(chosen) / self.between_s

    def totals(self) -> Counter:
        """(environment, status or TURNS) -> sum over all workers that were seen."""
        seen = [*self.workers.workers, *(worker for worker, _ in self.gone.values())]
        totals = Counter()
        for (_, env, kind), num in counts(seen).items():
            totals[env, kind] += num
        return totals

    def problems(self, now_s: float) -> list[str]:
        """Problems that need attention, workers first."""
        lines = [
            f"worker {name} does not answer: it may hold more sessions"
            for name in self.sessions.silent
        ]
        for worker, at_s in reversed(self.gone.values()):
            held = sum(load.sessions for load in worker.loads)
            # An idle worker that was drained leaves at once.
            if held and not worker.draining:
                who = f"worker {worker.name} ({worker.host}, PID {worker.pid})"
                lines.append(f"{who} left {now_s - at_s:.0f} s ago; it held {held} sessions")
        for (env, status), num in sorted(self.totals().items()):
            if status in BAD and num:
                rate = self.rate(env=env, kind=status)
                recent = f", {rate:.2g} a second since the last look" if rate else ""
                lines.append(f"{env}: {num} sessions ended {BAD[status]}{recent}")
        for env in self.envs():
            if env["queued"]:
                room = f"{env['sessions']} of {env['capacity']} sessions run"
                lines.append(f"{env['env']}: {env['queued']} starts wait for room; {room}")
        return lines

    def envs(self) -> list[dict[str, Any]]:
        loads = [load for worker in self.workers.workers for load in worker.loads]
        totals = self.totals()
        names = {load.env for load in loads} | {*self.workers.queued} | {env for env, _ in totals}
        return [
            {
                "env": name,
                "sessions": sum(load.sessions for load in loads if load.env == name),
                "capacity": sum(load.capacity for load in loads if load.env == name),
                "queued": self.workers.queued.get(name, 0),
                "turns": totals[name, TURNS],
                "turns_per_s": self.rate(env=name, kind=TURNS),
                "ended": [
                    [kind, num, self.rate(env=name, kind=kind)]
                    for (env, kind), num in sorted(totals.items())
                    if env == name and kind != TURNS
                ],
            }
            for name in sorted(names)
        ]

    def worker(self, worker: pb.Worker) -> dict[str, Any]:
        return {
            "name": worker.name,
            "host": worker.host,
            "pid": worker.pid,
            "memory_mib": worker.memory_bytes / 2**20,
            "silent_s": worker.silent_s,
            "draining": worker.draining,
            "sessions": sum(load.sessions for load in worker.loads),
            "capacity": sum(load.capacity for load in worker.loads),
            "turns_per_s": self.rate(worker=worker.name, kind=TURNS),
            "errors": sum(load.ended.get("environment_error", 0) for load in worker.loads),
        }


def counts(workers: Any) -> Counts:
    numbers = {}
    for worker in workers:
        for load in worker.loads:
            numbers[worker.name, load.env, TURNS] = load.interactions
            for status, num in load.ended.items():
                numbers[worker.name, load.env, status] = num
    return numbers


def has(info: pb.SessionInfo, text: str) -> bool:
    names = info.session, info.env, info.worker, info.owner, info.task_id
    return any(text in name.lower() for name in names)


def owners(sessions: list[pb.SessionInfo]) -> list[dict[str, Any]]:
    """Sums by owner and environment, most sessions first. Beyond NUM_OWNERS one row, whose owner is
    None."""
    groups: dict[tuple[str, str], list[pb.SessionInfo]] = {}
    for info in sessions:
        groups.setdefault((info.owner, info.env), []).append(info)
    ranked = sorted(groups.items(), key=lambda pair: -len(pair[1]))
    rows = [owner_row(*key, infos) for key, infos in ranked[:NUM_OWNERS]]
    rest = [info for _, infos in ranked[NUM_OWNERS:] for info in infos]
    if rest:
        rows.append(owner_row(None, f"{len(ranked) - NUM_OWNERS} more", rest))
    return rows


def owner_row(owner: str | None, env: str, sessions: list[pb.SessionInfo]) -> dict[str, Any]:
    return {
        "owner": owner,
        "env": env,
        "sessions": len(sessions),
        "oldest_s": max(info.age_s for info in sessions),
        "idle_s": max(info.idle_s for info in sessions),
        "turns": sum(info.turns for info in sessions),
    }


def session(info: pb.SessionInfo) -> dict[str, Any]:
    return {
        "session": info.session,
        "env": info.env,
        "worker": info.worker,
        "owner": info.owner,
        "task": info.task_id,
        "age_s": info.age_s,
        "idle_s": info.idle_s,
        "turns": info.turns,
        "state": pb.Status.Name(info.status).lower().replace("_", " "),
    }
