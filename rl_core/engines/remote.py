"""Engines on other ranks, served over HTTP to the ranks that play episodes: torchrun's last ranks
(--rollout_ranks), and rank groups of an actor (run/rank_group_server.py).

Requests are JSON: POST /ACTOR/VERB, where a verb is a method of Engine. Weights do not pass through
HTTP: the first learner broadcasts them in buckets to all ranks that sample. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import cast

import aiohttp
import torch
import torch.distributed as dist
from aiohttp import web
from torch import Tensor

from rl_core.distributed import ENDED_BY_SIGNAL, Ranks
from rl_core.engines.addresses import addresses_towards, is_one_node
from rl_core.engines.lease import DeviceLease
from rl_core.http_guard import (
    LOOPBACK,
    MAX_LOCAL_STRANGERS,
    GuardedConnection,
    HttpError,
    HttpServer,
    is_key,
    read_body,
)
from rl_core.metrics import KINDS, Mean, Metric, add_metrics
from rl_core.models.weight_gathering import exhaust
from rl_core.sampling.engine import Engine, EngineDied
from rl_core.types import AnyJSON, Completion, RunError, SamplingParams

dumps = partial(json.dumps, default=float)  # Converts scalars of torch and numpy.
BUCKET_BYTES = 512 << 20
STOP_S = 10.0  # Time limit for the response to "stop".
# Status of a response -> the error that the client raises.
ERRORS = {503: EngineDied, 500: RunError, 400: ValueError}


async def ask(
    url: str, body: AnyJSON = None, token: str = "", timeout_s: float | None = None
) -> tuple[int, bytes]:
    """(status, content) of a POST of JSON; of a GET without a body. Raises EngineDied if there is
    no answer in time. Cancelling it closes the connection."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    method = "GET" if body is None else "POST"
    # A session belongs to one event loop, and a run has several: each request opens one.
    connection = aiohttp.ClientSession(timeout=timeout, headers=headers)
    try:
        async with connection as session, session.request(method, url, json=body) as answer:
            return answer.status, await answer.read()
    except (TimeoutError, aiohttp.ClientError) as error:
        raise EngineDied(f"{url} does not answer ({type(error).__name__}: {error})") from None


@dataclass(kw_only=True, slots=True)
class WeightChannel:
    """Broadcast of weights from the first learner to all ranks that sample."""

    group: dist.ProcessGroup | None  # Rank 0 is the first learner; None on the other learners.
    device: torch.device  # Device of the buckets.

    def send(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
        """Sends (name, full tensor) pairs in `dtype`. Every learner must call it: all gather, the
        first one sends."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # The current device is set per thread.
        if self.group is None:
            exhaust(weights)
            return
        for bucket in in_buckets(weights, dtype):
            shapes = [[name, list(value.shape)] for name, value in bucket.items()]
            self._broadcast_json([str(dtype).removeprefix("torch."), shapes])
            values = [value.reshape(-1) for value in bucket.values()]
            flat = values[0] if len(values) == 1 else torch.cat(values)
            self._broadcast(flat.to(self.device))
            del bucket, values, flat  # Their memory is free before the next ones are gathered.
        self._broadcast_json([])

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the (name, tensor) pairs that the first learner sends."""
        while facts := self._broadcast_json(None):
            dtype, shapes = facts
            sizes = [math.prod(shape) for _, shape in shapes]
            flat = torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=self.device)
            self._broadcast(flat)
            for (name, shape), values in zip(shapes, flat.split(sizes), strict=True):
                yield name, values.view(shape)
            del flat, values

    def _broadcast_json(self, value: AnyJSON) -> AnyJSON:
        """The first learner's value; other ranks pass None."""
        data = b"" if value is None else json.dumps(value).encode()
        size = int(self._broadcast(torch.tensor([len(data)], device=self.device)))
        content = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        return json.loads(bytes(self._broadcast(content.to(self.device)).tolist()))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        assert self.group is not None
        self.group.broadcast(tensor, 0).wait()
        return tensor


def make_weight_channel(ranks: Ranks, timeout_s: float) -> WeightChannel:
    """Every rank must call it. Waits until the others do."""
    group, group_rank = None, ranks.rank + 1 if ranks.is_engine else 0
    if ranks.is_engine or ranks.rank == 0:
        store, size = dist.PrefixStore("weights", ranks.store), ranks.rollout_ranks + 1
        if ranks.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            group = dist.ProcessGroupNCCL(store, group_rank, size, options)
        else:
            timeout = timedelta(seconds=timeout_s)
            group = dist.ProcessGroupGloo(store, group_rank, size, timeout)
    # Backends without a process group around them have the same broadcast().
    return WeightChannel(group=cast(dist.ProcessGroup | None, group), device=ranks.device)


class EngineServer:
    """Serves the engines of a rank that plays no episodes. A value of `engines` is None if another
    rank holds the actor's engine."""

    def __init__(
        self,
        engines: dict[str, Engine | None],
        lease: DeviceLease | None,
        ranks: Ranks,
        channel: WeightChannel | None,
    ):
        """`channel`: receives weights from learners on other ranks, if there are any."""
        self.engines, self.lease, self.ranks = engines, lease, ranks
        self.all_engines = {engine for engine in engines.values() if engine is not None}
        self.token = secrets.token_hex(16)
        self.channel = channel
        self.stopped = asyncio.Event()
        self.signal = 0  # The number of the signal that ended the run.
        self.unfinished: dict[str, Completion] = {}  # Key of an open request -> its completion.
        self.num_open = 0
        # Seconds without an open request between asked_at, the last take_metrics(), and counted_at.
        self.idle_s = 0.0
        self.asked_at = self.counted_at = time.monotonic()

    async def serve(self) -> None:
        """Serves requests until a learner sends stop."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{actor}/{verb}", self.handle)
        server = HttpServer(
            app,
            write_error=lambda status, message: message,
            max_strangers=MAX_LOCAL_STRANGERS,
            handler_cancellation=True,
        )
        host = own_address()
        # Listens on all interfaces if other nodes send requests.
        port = await server.listen(host if host == LOOPBACK else None)
        url = f"http://{host}:{port}"
        capacity = {name: engine.capacity if engine else 0 for name, engine in self.engines.items()}
        transfers = {
            name: engine.weight_transfer for name, engine in self.engines.items() if engine
        }
        facts = {"url": url, "token": self.token, "capacity": capacity, "transfers": transfers}
        address = address_of(self.ranks.group, self.ranks.rank)
        self.ranks.store.set(address, json.dumps(facts))
        await self.stopped.wait()
        await server.close()

    async def handle(self, request: web.Request) -> web.Response:
        if not is_key(request.headers.get("Authorization", ""), f"Bearer {self.token}"):
            raise HttpError(401, "the token is missing or wrong")
        connection = cast(GuardedConnection, request.protocol)
        connection.limits.admit(connection)
        body = json.loads(await read_body(request))
        engine = self.engines.get(request.match_info["actor"])
        try:
            work = getattr(self, f"do_{request.match_info['verb']}")
            return web.json_response(await work(engine, **body), dumps=dumps)
        except Exception as error:
            for status, kind in ERRORS.items():
                if isinstance(error, kind):
                    return web.json_response(str(error), status=status)
            return web.json_response(f"{type(error).__name__}: {error}", status=500)

    def of_device(self, engine: Engine) -> contextlib.AbstractAsyncContextManager[None]:
        return self.lease.of(engine) if self.lease else contextlib.nullcontext()

    async def do_generate(
        self,
        engine: Engine,
        params: dict,
        ended: list[str],
        key: str,
        unfinished: dict | None,
        **request,
    ) -> dict:
        for session in ended:
            engine.end_session(session)
        completion = Completion(**unfinished) if unfinished else None
        if completion:
            self.unfinished[key] = completion
        self.count_idle()
        self.num_open += 1
        try:
            async with self.of_device(engine):
                done = await engine.generate(
                    params=SamplingParams(**params), unfinished=completion, **request
                )
            return dataclasses.asdict(done)
        finally:
            self.unfinished.pop(key, None)
            self.count_idle()
            self.num_open -= 1

    async def do_update_unfinished(self, engine: Engine, keys: list[str]) -> dict[str, dict]:
        """Key of each open request -> its completion up to now."""
        await engine.update_unfinished()
        return {
            key: dataclasses.asdict(self.unfinished[key]) for key in keys if key in self.unfinished
        }

    async def do_pause(self, engine: Engine | None) -> None:
        for one in self.all_engines:
            await one.pause()
            if self.lease:  # Frees the device for the engine that loads weights.
                await one.sleep()

    async def do_update(self, engine: Engine | None, version: int, adapter: str) -> None:
        """Receives the weights and loads them. Blocks this thread."""
        assert self.channel is not None
        coming = self.channel.receive()
        try:
            if engine is not None:
                await engine.update(coming, version, adapter=adapter)
                if self.lease:  # The lease wakes its holder, which may be another engine.
                    await engine.sleep()
        finally:
            for _ in coming:  # Every rank takes part in each broadcast.
                pass
            for one in self.all_engines:
                await one.resume()

    async def do_wake(self, engine: Engine) -> bool:
        """True if the engine lacks weights after wake()."""
        async with self.of_device(engine):
            await engine.wake()
        return engine.lacks_weights

    async def do_take_metrics(self, engine: Engine) -> dict[str, list]:
        """The engine's metrics, and the fraction of time without a request since the last call."""
        metrics = await engine.take_metrics()
        self.count_idle()
        metrics["time/engines_idle_frac"] = Mean(self.idle_s, self.counted_at - self.asked_at)
        self.idle_s, self.asked_at = 0.0, self.counted_at
        return sent_metrics(metrics)

    def count_idle(self) -> None:
        now = time.monotonic()
        if not self.num_open:
            self.idle_s += now - self.counted_at
        self.counted_at = now

    async def do_stop(self, engine: Engine | None) -> None:
        # Before the response, after which the learners may end, and the store with them.
        self.signal = self.ranks.number(ENDED_BY_SIGNAL)
        self.stopped.set()


def sent_metrics(metrics: dict[str, Metric]) -> dict[str, list]:
    """Metrics in the form that received_metrics() reads. Numbers may be on the device."""
    return {
        name: [type(metric).__name__, *dataclasses.astuple(metric)]
        for name, metric in metrics.items()
    }


def received_metrics(answer: dict[str, list]) -> dict[str, Metric]:
    return {name: KINDS[kind](*parts) for name, (kind, *parts) in answer.items()}


def address_of(group: int, rank: int) -> str:
    """Key of a rank's server address in the store."""
    return f"engine/{group}/{rank}"


def own_address() -> str:
    """Address at which other ranks reach this node: loopback if all ranks are on one node."""
    if is_one_node():
        return LOOPBACK
    first = os.environ["MASTER_ADDR"]
    host, _ = addresses_towards(first, int(os.environ["MASTER_PORT"]))
    # Node 0, which other nodes reach by the name that torchrun set.
    if host.startswith("127.") or host == "::1":
        return first
    return f"[{host}]" if ":" in host else host


@dataclass(kw_only=True, slots=True, eq=False)
class EngineClient:
    """HTTP client of an actor's engine on one rank."""

    url: str  # http://HOST:PORT/ACTOR
    token: str
    capacity: int
    num_open: int = 0
    ended: list[str] = field(default_factory=list)  # Sessions to end; sent with the next request.

    async def ask(self, verb: str, timeout_s: float | None = None, **body) -> AnyJSON:
        status, content = await ask(f"{self.url}/{verb}", body, self.token, timeout_s)
        answer = json.loads(content)
        if status != 200:
            raise ERRORS.get(status, RunError)(answer)
        return answer


@dataclass(kw_only=True, eq=False)
class RemoteEngine(Engine):
    """An Engine on ranks that play no episodes. A session stays with the rank that has its KV
    cache. sleep() does nothing: no learner shares the device, and update() pauses the ranks."""

    has_grammars = True  # EngineFactory.check() refuses engines without.

    servers: list[EngineClient]
    is_first: bool  # True on the rank that sends updates and control requests for all.
    capacity: int  # Share of this rank.
    timeout_s: float
    channel: WeightChannel | None = None  # None: the engine's ranks learn the weights.
    dtype: torch.dtype | None = None  # Type in which weights are sent.
    version: int = 0
    weight_transfer: str = ""  # From the ranks that sample to their servers.
    session_servers: dict[str, EngineClient] = field(default_factory=dict)
    # Key of an open request -> its completion.
    unfinished: dict[str, Completion] = field(default_factory=dict)

    @property
    def sampling(self) -> list[EngineClient]:
        return [server for server in self.servers if server.capacity]

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        session: str = "",
        adapter: str = "",
        unfinished: Completion | None = None,
    ) -> Completion:
        server = self.session_servers.get(session)
        if server is None:
            server = min(self.sampling, key=lambda s: s.num_open / s.capacity)
        if session:
            self.session_servers[session] = server
        ended, server.ended = server.ended, []
        key = secrets.token_hex(8)
        if unfinished is not None:
            self.unfinished[key] = unfinished
        server.num_open += 1
        try:
            answer = await server.ask(
                "generate",
                prompt_ids=list(prompt_ids),
                params=dataclasses.asdict(params),
                seed=seed,
                session=session,
                adapter=adapter,
                unfinished=unfinished and dataclasses.asdict(unfinished),
                key=key,
                ended=ended,
            )
        finally:
            self.unfinished.pop(key, None)
            server.num_open -= 1
        return Completion(**answer)

    async def update_unfinished(self) -> None:
        """See Engine. Each server responds with the tokens that it has sampled."""
        if not self.unfinished:
            return
        asked = []
        for server in self.sampling:
            asked.append(
                server.ask(
                    "update_unfinished", timeout_s=self.timeout_s, keys=list(self.unfinished)
                )
            )
        for answer in await asyncio.gather(*asked):
            for key in answer.keys() & self.unfinished.keys():
                for name, value in answer[key].items():
                    setattr(self.unfinished[key], name, value)

    def end_session(self, session: str) -> None:
        if server := self.session_servers.pop(session, None):
            server.ended.append(session)

    async def update(
        self, weights: Iterable[tuple[str, Tensor]], version: int, *, adapter: str = ""
    ) -> None:
        """Requests pause between two tokens and continue with the new weights. Every learner must
        call it."""
        assert self.channel is not None and self.dtype is not None
        await self._ask_all("pause")
        # In a thread, because this one asks the ranks that sample to receive.
        sending = asyncio.to_thread(self.channel.send, weights, self.dtype)
        await asyncio.gather(sending, self._ask_all("update", version=version, adapter=adapter))
        self.version, self.lacks_weights = version, False

    async def wake(self) -> None:
        """Restarts engines that died."""
        lacking = await asyncio.gather(*(server.ask("wake") for server in self.sampling))
        self.lacks_weights = any(lacking)

    async def take_metrics(self) -> dict[str, Metric]:
        """See Engine. The first learner collects the metrics of all ranks."""
        metrics: dict[str, Metric] = {}
        if self.is_first:
            for server in self.sampling:
                answer = await server.ask("take_metrics", timeout_s=self.timeout_s)
                add_metrics(metrics, received_metrics(answer))
        return metrics

    async def close(self) -> None:
        """See Engine. Waits at most STOP_S for a rank that hangs."""
        timeout_s = min(self.timeout_s, STOP_S)
        with contextlib.suppress(EngineDied, RunError):
            await self._ask_all("stop", timeout_s=timeout_s)

    async def _ask_all(self, verb: str, timeout_s: float | None = None, **body) -> None:
        """Sends a request to every server, from the first learner only."""
        timeout_s = timeout_s or self.timeout_s
        if self.is_first:
            asked = [server.ask(verb, timeout_s=timeout_s, **body) for server in self.servers]
            await asyncio.gather(*asked)


def connect(
    names: Iterable[str], ranks: Ranks, dtype: torch.dtype, timeout_s: float
) -> dict[str, Engine]:
    """A learner's engines by actor. Waits until the ranks that sample have published their
    addresses."""
    channel = make_weight_channel(ranks, timeout_s)
    size = ranks.rollout_ranks
    return {**engines_at(1, size, names, ranks, timeout_s, channel=channel, dtype=dtype)}


def engines_at(
    group: int, size: int, names: Iterable[str], ranks: Ranks, timeout_s: float, **weights
) -> dict[str, RemoteEngine]:
    """Engines by actor on the `size` ranks of a process group. Waits for their addresses.
    `weights`: arguments of RemoteEngine about weight sync."""
    facts = [json.loads(ranks.store.get(address_of(group, rank))) for rank in range(size)]
    engines = {}
    for name in names:
        servers = []
        for fact in facts:
            url, capacity = f"{fact['url']}/{name}", fact["capacity"][name]
            servers.append(EngineClient(url=url, token=fact["token"], capacity=capacity))
        total = sum(server.capacity for server in servers)
        transfers = {fact["transfers"].get(name) for fact in facts} - {None, ""}
        engines[name] = RemoteEngine(
            servers=servers,
            is_first=ranks.rank == 0,
            capacity=-(-total // ranks.size),
            timeout_s=timeout_s,
            weight_transfer=" and ".join(sorted(transfers)),
            **weights,
        )
    return engines


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor]]:
    """Buckets of at most BUCKET_BYTES, in `dtype` or each tensor's own. A larger tensor has its own
    bucket. No reference to a yielded tensor is kept."""
    bucket, size = {}, 0
    for name, value in weights:
        value = value.to(dtype or value.dtype)
        if bucket and size + value.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = value
        size += value.nbytes
        del value
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
    if bucket:
        yield bucket
