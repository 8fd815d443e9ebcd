"""Engines on other ranks (--engine_ranks): torchrun's last ranks serve the engine's verbs over HTTP to the learners.

Requests are JSON: POST /ACTOR/VERB. Weights do not pass through HTTP. The first learner broadcasts them in buckets, by a process
group of itself and all ranks that sample. Each bucket has a checksum of its bits. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
from aiohttp import web
from torch import Tensor
from torch.nn.functional import pad

from rl_core.distributed import Ranks
from rl_core.sampling.engine import DeviceLease, Engine, EngineDied
from rl_core.types import Completion, RunError, SamplingParams

BUCKET_BYTES = 512 << 20
CHUNK = 1 << 18  # 32-bit numbers of a bucket that are hashed at once, in the processor's cache
ERRORS = {503: EngineDied, 500: RunError, 400: ValueError}  # how a server's error reaches the learner


async def ask(url: str, body: Any = None, token: str = "", timeout_s: float | None = None) -> tuple[int, bytes]:
    """(status, content) of a POST of JSON; of a GET without a body. Raises aiohttp.ClientError or TimeoutError if there is no
    answer. Cancelling it closes the connection."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits, method = aiohttp.ClientTimeout(total=timeout_s), "GET" if body is None else "POST"
    # One session per request: a session belongs to one event loop, and a run has several.
    connection = aiohttp.ClientSession(timeout=limits, headers=headers)
    async with connection as session, session.request(method, url, json=body) as answer:
        return answer.status, await answer.read()


@dataclass(kw_only=True, slots=True)
class WeightChannel:
    """Weights from the first learner to all ranks that sample."""

    group: dist.ProcessGroup | None  # rank 0 is the first learner; None on the other learners
    number: int  # of this rank among those that sample
    device: torch.device  # of the buckets

    def send(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Sends (name, full tensor) pairs in `dtype`. Every learner must call it: all gather, the first one sends."""
        if self.group is None:
            for _ in weights:
                pass
            return
        for bucket in in_buckets((name, value.to(dtype)) for name, value in weights):
            shapes = [[name, list(value.shape)] for name, value in bucket.items()]
            flat = torch.cat([value.reshape(-1) for value in bucket.values()]).to(self.device)
            self._broadcast_json([str(dtype).removeprefix("torch."), shapes, checksum(flat)])
            self._broadcast(flat)
        self._broadcast_json([])

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the first learner sends. Raises RunError if a bucket's checksum differs."""
        number = 0
        while facts := self._broadcast_json(None):
            dtype, shapes, sent = facts
            sizes = [torch.Size(shape).numel() for _, shape in shapes]
            flat = self._broadcast(torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device))
            if (found := checksum(flat)) != sent:
                raise RunError(
                    f"engine rank {self.number} received other weights than were sent to it: bucket {number}, from "
                    f"{shapes[0][0]} to {shapes[-1][0]}, has checksum {found:016x} instead of {sent:016x}; check the "
                    "network and the memory between it and the first learner, and go on with --resume"
                )
            for (name, shape), part in zip(shapes, flat.split(sizes), strict=True):
                yield name, part.view(shape)
            number += 1

    def _broadcast_json(self, value: Any) -> Any:
        """The first learner's value; others give None."""
        data = b"" if value is None else json.dumps(value).encode()
        size = int(self._broadcast(torch.tensor([len(data)], device=self.device)))
        content = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8).to(self.device)
        return json.loads(self._broadcast(content).cpu().numpy().tobytes())

    def _broadcast(self, tensor: Tensor) -> Tensor:
        self.group.broadcast(tensor, 0).wait()
        return tensor


def make_weight_channel(ranks: Ranks, timeout_s: float) -> WeightChannel:
    """Every rank must call it. Waits until the others do."""
    group, place = None, ranks.rank + 1 if ranks.is_engine else 0
    if ranks.is_engine or ranks.rank == 0:
        store, size = dist.PrefixStore("weights", ranks.store), ranks.engine_ranks + 1
        if ranks.device.type == "cuda":
            group = dist.ProcessGroupNCCL(store, place, size, dist.ProcessGroupNCCL.Options())
        else:
            group = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=timeout_s))
    return WeightChannel(group=group, number=ranks.rank, device=ranks.device)


class EngineServer:
    """Serves the engines of a rank that only samples. `engines` has None where another rank holds an actor's engine."""

    def __init__(self, engines: dict[str, Engine | None], lease: DeviceLease | None, ranks: Ranks, timeout_s: float):
        self.engines, self.lease, self.ranks, self.token = engines, lease, ranks, secrets.token_hex(16)
        self.channel = make_weight_channel(ranks, timeout_s)
        self.stopped: asyncio.Future[None] | None = None
        self.updating: asyncio.Task | None = None  # the update under way
        self.num_open, self.idle_s, self.idle_since, self.asked = 0, 0.0, time.monotonic(), time.monotonic()

    @property
    def all_engines(self) -> list[Engine]:
        return list(dict.fromkeys(engine for engine in self.engines.values() if engine is not None))

    async def serve(self) -> None:
        """Answers until a learner sends stop. Raises RunError if weights arrive broken."""
        self.stopped = asyncio.get_running_loop().create_future()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{actor}/{verb}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        host, bound = own_address()
        await web.TCPSite(runner, bound, 0, backlog=4096).start()
        url = f"http://{host}:{runner.addresses[0][1]}"
        capacity = {name: engine.capacity if engine else 0 for name, engine in self.engines.items()}
        facts = {"url": url, "token": self.token, "capacity": capacity}
        self.ranks.store.set(f"engine/{self.ranks.rank}", json.dumps(facts))
        try:
            await self.stopped
        finally:
            await runner.cleanup()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", ""), f"Bearer {self.token}"):
            return web.Response(status=401)
        verb, engine, body = request.match_info["verb"], self.engines.get(request.match_info["actor"]), {}
        try:
            body = await request.json()
            found = await getattr(self, f"do_{verb}")(engine, **body)
            response = web.json_response(found)
        except Exception as error:
            status = next((status for status, kind in ERRORS.items() if isinstance(error, kind)), 500)
            text = str(error) if isinstance(error, tuple(ERRORS.values())) else f"{type(error).__name__}: {error}"
            response = web.json_response(text, status=status)
        await response.prepare(request)
        await response.write_eof()
        if verb == "begin_update":  # receiving blocks this thread, so the answer goes out first
            self.updating = asyncio.create_task(self.receive(engine, **body))
        return response

    async def do_generate(self, engine: Engine, params: dict, ended: list[str], **request) -> dict:
        for session in ended:
            engine.end_session(session)
        if self.num_open == 0:
            self.idle_s += time.monotonic() - self.idle_since
        self.num_open += 1
        try:
            params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
            async with self.lease.of(engine) if self.lease else contextlib.nullcontext():
                return dataclasses.asdict(await engine.generate(params=SamplingParams(**params), **request))
        finally:
            self.num_open -= 1
            self.idle_since = time.monotonic()

    async def do_begin_update(self, engine: Engine | None, version: int, adapter: str) -> None:
        for one in self.all_engines:
            await one.pause()
            if self.lease:  # no other engine has memory while this one loads weights
                await one.sleep()

    async def receive(self, engine: Engine | None, version: int, adapter: str) -> None:
        coming = self.channel.receive()
        try:
            if engine is not None:
                await engine.update(coming, version, adapter=adapter)
        except RunError as error:  # a broken transfer cannot go on
            self.stopped.set_exception(error)
            raise
        finally:
            for _ in coming:  # a broadcast needs every rank
                pass
            for one in self.all_engines:
                await one.resume()

    async def do_end_update(self, engine: Engine | None) -> None:
        await self.updating

    async def do_wake(self, engine: Engine) -> None:
        async with self.lease.of(engine) if self.lease else contextlib.nullcontext():
            await engine.wake()

    async def do_health(self, engine: Engine | None) -> dict[str, float]:
        """Since the last call: the fraction of time without a request, and how often the engine was started again."""
        now, was_asked = time.monotonic(), self.asked
        idle_s = self.idle_s + (now - max(self.idle_since, was_asked) if self.num_open == 0 else 0.0)
        self.asked, self.idle_s = now, 0.0
        restarts = getattr(engine, "num_restarts", 0)
        if restarts:
            engine.num_restarts = 0
        return {"idle_frac": idle_s / max(now - was_asked, 1e-9), "restarts": restarts}

    async def do_stop(self, engine: Engine | None) -> None:
        if not self.stopped.done():
            self.stopped.set_result(None)


def own_address() -> tuple[str, str]:
    """(name by which other ranks reach this node, address to listen on): loopback if all ranks are on one node."""
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        return "127.0.0.1", "127.0.0.1"
    first = os.environ["MASTER_ADDR"]
    family, kind, *_, address = socket.getaddrinfo(first, int(os.environ["MASTER_PORT"]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # UDP sends nothing when it connects
        probe.connect(address)
        found = probe.getsockname()[0]
    if found.startswith("127.") or found == "::1":  # node 0, which others reach by the name that torchrun gave them
        return first, ""
    return f"[{found}]" if ":" in found else found, found


@dataclass(kw_only=True, slots=True, eq=False)
class Server:
    """One rank that samples, as a learner sees it."""

    url: str
    token: str
    capacity: int
    num_open: int = 0
    ended: list[str] = field(default_factory=list)  # sessions; sent with the next request

    async def ask(self, verb: str, timeout_s: float | None = None, **body) -> Any:
        try:
            status, content = await ask(f"{self.url}/{verb}", body, self.token, timeout_s)
        except asyncio.TimeoutError:
            raise RunError(f"{self.url} did not answer {verb!r} within --timeout_s={timeout_s:g}") from None
        except aiohttp.ClientError as error:
            raise EngineDied(f"the engine at {self.url} does not answer: {error}") from None
        if status != 200:
            raise ERRORS.get(status, RunError)(json.loads(content) if content else f"{self.url} answered {status}")
        return json.loads(content)


@dataclass(kw_only=True, eq=False)
class RemoteEngine:
    """An Engine on the ranks that only sample. A session stays with the rank that has its KV cache."""

    name: str
    servers: list[Server]
    channel: WeightChannel
    dtype: torch.dtype  # in which weights are sent
    capacity: int  # this learner's share
    timeout_s: float
    version: int = 0
    places: dict[str, Server] = field(default_factory=dict)  # of sessions

    @property
    def sampling(self) -> list[Server]:
        return [server for server in self.servers if server.capacity]

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, seed: int, session: str = "", adapter: str = ""
    ) -> Completion:
        server = self.places.get(session) or min(self.sampling, key=lambda s: s.num_open / s.capacity)
        if session:
            self.places[session] = server
        ended, server.ended = server.ended, []
        server.num_open += 1
        try:
            request = {"prompt_ids": list(prompt_ids), "seed": seed, "session": session, "adapter": adapter}
            how = {"params": dataclasses.asdict(params), "ended": ended}
            found = await server.ask(f"{self.name}/generate", **request, **how)
        finally:
            server.num_open -= 1
        return Completion(**found | {"newer_versions": [tuple(pair) for pair in found["newer_versions"]]})

    def end_session(self, session: str) -> None:
        if server := self.places.pop(session, None):
            server.ended.append(session)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int, *, adapter: str = "") -> None:
        """Requests pause between two tokens and continue with the new weights. Every learner must call it."""
        await self._tell_all("begin_update", version=version, adapter=adapter)
        self.channel.send(weights, self.dtype)
        await self._tell_all("end_update")
        self.version = version

    async def wake(self) -> None:
        """Starts engines again that died."""
        await asyncio.gather(*(server.ask(f"{self.name}/wake") for server in self.sampling))

    async def sleep(self) -> None: ...  # engines elsewhere have devices of their own

    async def pause(self) -> None: ...  # an update pauses them

    async def resume(self) -> None: ...

    async def health(self) -> list[dict[str, float]]:
        """See EngineServer.do_health, of each rank that samples."""
        return await asyncio.gather(*(server.ask(f"{self.name}/health") for server in self.sampling))

    async def close(self) -> None:
        with contextlib.suppress(EngineDied, RunError):
            await self._tell_all("stop")

    async def _tell_all(self, verb: str, **body) -> None:
        """The first learner sends it for all."""
        if self.channel.group is not None:
            how = {"timeout_s": self.timeout_s, **body}
            await asyncio.gather(*(server.ask(f"{self.name}/{verb}", **how) for server in self.servers))


def connect(names: Iterable[str], ranks: Ranks, dtype: torch.dtype, timeout_s: float) -> dict[str, RemoteEngine]:
    """A learner's engines, by actor. Waits until the ranks that sample have published their addresses."""
    channel = make_weight_channel(ranks, timeout_s)
    found = [json.loads(ranks.store.get(f"engine/{number}")) for number in range(ranks.engine_ranks)]
    engines = {}
    for name in names:
        servers = [Server(url=f["url"], token=f["token"], capacity=f["capacity"][name]) for f in found]
        capacity = -(-sum(server.capacity for server in servers) // ranks.size)
        same = {"channel": channel, "dtype": dtype, "timeout_s": timeout_s}
        engines[name] = RemoteEngine(name=name, servers=servers, capacity=capacity, **same)
    return engines


def in_buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int = 0) -> Iterator[dict[str, Tensor]]:
    """Parts of at most max_bytes, by default BUCKET_BYTES. A larger tensor is a part of its own."""
    bucket, size, limit = {}, 0, max_bytes or BUCKET_BYTES
    for name, value in weights:
        if bucket and size + value.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = value
        size += value.nbytes
    if bucket:
        yield bucket


def checksum(flat: Tensor) -> int:
    """Of a tensor's bits, the same on every device: the sum, mod 2^64, of its 32-bit numbers, each times an odd number that
    depends on its place. One changed number always changes the sum; a permutation changes it nearly always."""
    data = flat.reshape(-1).view(torch.uint8)
    end = data.numel() // 4 * 4
    parts = [*data[:end].view(torch.int32).split(CHUNK)]
    if end < data.numel():
        parts.append(pad(data[end:], (0, 4 - (data.numel() - end))).view(torch.int32))
    # Mixed as splitmix64 does it: sums of a plain 1, 3, 5 ... are alike where numbers are regular.
    places = torch.arange(max(map(len, parts), default=0), device=flat.device) * 0x1E3779B97F4A7C15
    places = (places ^ (places >> 29)) * 0x3F58476D1CE4E5B9
    places = (places ^ (places >> 32)) | 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for part in parts:
        total = total * 1_000_003 + (part * places[: len(part)]).sum()
    return int(total) % 2**64
