"""Cost of `rl-core serve` with many sessions, and the effects of a killed worker and controller.

    python scripts/bench_serve.py         # up to 10,000 sessions, then the kills: 2 minutes
    python scripts/bench_serve.py --sessions 300 --seconds 3 --out out.json

The client runs on the same machine. Each interaction sends 1 KB. The environment counts the
interactions of each session, and the client checks every count. CPU time is that of the server's
processes; the client's is a separate column.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import psutil
from script_tools import ROOT, make_parser, write_json

from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.wire import CHANNEL_OPTIONS, CODES, ENVIRONMENTS

ENV = """
max_turns = 1_000_000_000

def start(task):
    return {"count": 0}

async def interact(messages, state):
    state["count"] += 1
    return [{"role": "user", "content": str(state["count"])}]

async def reward_fn(state):
    return state["count"]
"""
SAID = pb.Said(messages=json.dumps([{"role": "assistant", "content": "x" * 1000}]), keep=1)


def start_server(*args: Any) -> tuple[subprocess.Popen, str]:
    """Starts a server. Returns its process and address as soon as it has a worker; the address of a
    host that joins a controller is ""."""
    command = [sys.executable, "-m", "rl_core.tools.cli", "serve", *map(str, args)]
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "start_new_session": True}
    process = subprocess.Popen(command, **options)
    for line in process.stdout:
        if line.startswith("serving on"):
            return process, line.split()[-1]
        if "--join" in args:
            return process, ""
    raise RuntimeError(f"{command} ended")


class Client:
    """One stream to a server. After a failure the client reconnects and
    resends unanswered requests."""

    def __init__(self, address: str):
        self.address, self.last_id = address, 0
        self.waiting: dict[int, tuple[pb.Request, asyncio.Future]] = {}
        self.out, self.filled = [], asyncio.Event()
        self.task = asyncio.ensure_future(self.run())

    def ask(self, **verb: Any) -> asyncio.Future:
        self.last_id += 1
        request, future = (
            pb.Request(id=self.last_id, **verb),
            asyncio.get_running_loop().create_future(),
        )
        self.waiting[request.id] = request, future
        self.out.append(request)
        self.filled.set()
        return future

    async def run(self) -> None:
        while True:
            async with grpc.aio.insecure_channel(self.address, CHANNEL_OPTIONS) as channel:
                stream = channel.stream_stream(
                    f"/{ENVIRONMENTS}/Stream",
                    request_serializer=pb.Requests.SerializeToString,
                    response_deserializer=pb.Replies.FromString,
                )()
                self.out = [request for request, _ in self.waiting.values()]
                self.filled.set()
                writer = asyncio.ensure_future(self.write(stream))
                try:
                    while (message := await stream.read()) is not grpc.aio.EOF:
                        for reply in message.replies:
                            self.waiting.pop(reply.id)[1].set_result(reply)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.2)
                finally:
                    writer.cancel()

    async def write(self, stream: Any) -> None:
        while True:
            await self.filled.wait()
            self.filled.clear()
            while batch := self.out[:500]:
                del self.out[:500]
                await stream.write(pb.Requests(requests=batch))

    async def workers(self, at_least: int, timeout_s: float = 60.0) -> list[pb.Worker]:
        deadline = time.monotonic() + timeout_s
        while True:
            workers = (await self.ask(workers=pb.WorkersRequest())).workers.workers
            if len(workers) >= at_least:
                return list(workers)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(workers)} of {at_least} workers after {timeout_s:g} s")
            await asyncio.sleep(0.05)


class Load:
    """Sessions of one client, and the replies to each session."""

    def __init__(self, address: str):
        self.client = Client(address)
        self.names, self.numbers = [], []
        self.busy: set[int] = set()
        self.lost: dict[int, str] = {}  # Session -> status code that ended the session.
        self.wrong, self.seconds = 0, []

    async def open(self, num: int, env: str) -> None:
        row = json.dumps({"prompt": "count"})
        starts = [pb.StartRequest(env=env, key=f"{os.getpid()}/{n}", row=row) for n in range(num)]
        replies = await asyncio.gather(*(self.client.ask(start=start) for start in starts))
        assert not any(reply.code for reply in replies), next(
            reply for reply in replies if reply.code
        )
        self.names, self.numbers = [reply.start.session for reply in replies], [0] * num

    async def interact(self, n: int) -> None:
        self.numbers[n] += 1
        number, began_s = self.numbers[n], time.perf_counter()
        request = pb.InteractRequest(session=self.names[n], number=number, said=SAID)
        reply = await self.client.ask(interact=request)
        self.seconds.append(time.perf_counter() - began_s)
        self.busy.discard(n)
        if reply.code:
            self.lost[n] = CODES[reply.code].name
        elif json.loads(reply.interact.messages)[0]["content"] != str(number):
            self.wrong += 1

    async def run(self, per_s: float, seconds: float, at: dict[float, Any] | None = None) -> None:
        """Sends per_s interactions a second, to sessions in turn; calls at[s] after s seconds."""
        began_s, sent, turn, at = time.perf_counter(), 0, 0, dict(at or {})
        tasks: set[asyncio.Task] = set()
        while (now_s := time.perf_counter() - began_s) < seconds:
            for when in [when for when in at if now_s > when]:
                await at.pop(when)()
            while sent < now_s * per_s:
                sent, turn = sent + 1, (turn + 1) % len(self.names)
                if turn not in self.busy and turn not in self.lost:
                    self.busy.add(turn)
                    tasks.add(task := asyncio.ensure_future(self.interact(turn)))
                    task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)

    async def counts(self) -> list[float | None]:
        """The environment's count of each session; None for a lost session."""
        asked = {
            n: pb.ScoreRequest(session=name)
            for n, name in enumerate(self.names)
            if n not in self.lost
        }
        for n, request in asked.items():
            request.number = self.numbers[n] + 1
        scores = await asyncio.gather(*(self.client.ask(score=r) for r in asked.values()))
        replies = dict(zip(asked, scores, strict=True))
        self.lost |= {n: CODES[reply.code].name for n, reply in replies.items() if reply.code}
        return [
            None if n in self.lost else replies[n].score.scores[0].parts["reward_fn"]
            for n in range(len(self.names))
        ]

    async def close(self) -> None:
        requests = [pb.CancelRequest(session=name, status=pb.COMPLETED) for name in self.names]
        await asyncio.gather(*(self.client.ask(cancel=request) for request in requests))
        self.client.task.cancel()
        await asyncio.wait([self.client.task])


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(
    path: Path, num: int, per_s: float, seconds: float, num_workers: int
) -> dict[str, float]:
    capacity = num // num_workers + 100
    process, address = start_server(
        path, "--port", 0, "--workers", num_workers, "--capacity", capacity
    )
    try:
        load = Load(address)
        await load.client.workers(num_workers)
        top = psutil.Process(process.pid)
        server, client = [top, *top.children(recursive=True)], [psutil.Process()]
        began_s = time.perf_counter()
        await load.open(num, path.stem)
        open_s = time.perf_counter() - began_s
        await load.run(per_s, 1.0)
        load.seconds.clear()
        before, client_before, began_s = cpu_s(server), cpu_s(client), time.perf_counter()
        await load.run(per_s, seconds)
        wall_s, done = time.perf_counter() - began_s, len(load.seconds)
        cpu, client_cpu = cpu_s(server) - before, cpu_s(client) - client_before
        mib = sum(p.memory_info().rss for p in server) / 2**20
        right = sum(
            count == number for count, number in zip(await load.counts(), load.numbers, strict=True)
        )
        await load.close()
    finally:
        stop(process)
    times = sorted(load.seconds)
    row = {
        "sessions": num,
        "open_s": open_s,
        "per_s": done / wall_s,
        "p50_ms": 1000 * times[len(times) // 2],
    }
    row |= {"p99_ms": 1000 * times[int(len(times) * 0.99)], "cpu_ms_each": 1000 * cpu / done}
    return row | {
        "client_cpu_ms_each": 1000 * client_cpu / done,
        "mib": mib,
        "right": right,
        "wrong": load.wrong,
    }


async def kill(
    path: Path, num: int, per_s: float, seconds: float, num_workers: int
) -> dict[str, float]:
    """Kills a worker after a third of the time, and kills and restarts the controller after two
    thirds."""
    hub, address = start_server("--controller", "--port", 0, "--heartbeat_s", 2)
    host = None
    try:
        capacity = num // num_workers + 100
        host, _ = start_server(
            path, "--join", address, "--workers", num_workers, "--capacity", capacity
        )
        load = Load(address)
        workers = await load.client.workers(num_workers)
        await load.open(num, path.stem)
        killed = workers[0]

        async def kill_worker() -> None:
            os.kill(killed.pid, signal.SIGKILL)

        async def kill_hub() -> None:
            nonlocal hub
            hub.kill()
            hub.wait()
            hub, _ = start_server(
                "--controller", "--port", address.rpartition(":")[2], "--heartbeat_s", 2
            )

        await load.run(per_s, seconds, {seconds / 3: kill_worker, 2 * seconds / 3: kill_hub})
        counts = await load.counts()
        of_killed = {n for n, name in enumerate(load.names) if name.startswith(killed.name)}
        await load.close()
    finally:
        stop(*filter(None, (host, hub)))
    right = sum(count == number for count, number in zip(counts, load.numbers, strict=True))
    row = {"sessions": num, "interactions": len(load.seconds), "of_killed_worker": len(of_killed)}
    row |= {
        "lost_of_it": len(of_killed & load.lost.keys()),
        "lost_of_others": len(load.lost.keys() - of_killed),
    }
    row |= {f"reported_{code}": n for code, n in Counter(load.lost.values()).items()}
    return row | {"right_counts": right, "wrong_replies": load.wrong}


def stop(*processes: subprocess.Popen) -> None:
    """Kills servers and their workers."""
    for process in processes:
        for child in [process, *psutil.Process(process.pid).children(recursive=True)]:
            child.kill()
        process.wait()


async def measure_all(args: argparse.Namespace) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counter.py"
        path.write_text(ENV)
        more = args.seconds, args.workers
        rows = [await measure(path, num, args.per_s, *more) for num in args.sessions]
        return [
            *rows,
            await kill(
                path, max(args.sessions), args.per_s / 2, args.seconds, max(2, args.workers)
            ),
        ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sessions", type=int, nargs="*", default=[100, 1_000, 10_000], help="concurrent sessions"
    )
    parser.add_argument(
        "--per_s", type=float, default=2_200, help="interactions a second over all sessions"
    )
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    rows = asyncio.run(measure_all(args))
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    machine = {"cores": os.cpu_count(), "kernel": platform.release()}
    write_json(args.out, {**machine, "rows": rows})


if __name__ == "__main__":
    main()
