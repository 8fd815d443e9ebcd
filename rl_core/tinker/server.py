"""The HTTP server that the tinker client 0.38.0 talks to. docs/tinker.md

A request of a model or a sampler is answered with a promise, whose result the client polls for.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler

from rl_core.http_guard import (
    MAX_STRANGERS,
    GuardedConnection,
    HttpError,
    HttpServer,
    is_key,
    parse_json,
    read_body,
)
from rl_core.tinker.queue import Promise
from rl_core.tinker.tenants import Tenants
from rl_core.tinker.wire import (
    PROTOBUF,
    CreateModel,
    LoadWeights,
    OfModel,
    OfSession,
    OptimStep,
    R,
    Retrieve,
    Sample,
    SamplingSession,
    SavedPath,
    SaveForSampler,
    SaveWeights,
    read_forward_backward,
    read_request,
)
from rl_core.types import JSONObject

MAX_BODY_BYTES, MAX_JSON_BYTES = 64 << 20, 16 << 20
# Larger bodies are parsed in a thread, and at most MAX_LARGE of a tenant are read at once.
SMALL_BYTES, MAX_LARGE = 1 << 16, 4
MAX_CONNECTIONS = 2048  # Of a key.
KEEP_ALIVE_S = 60.0  # Seconds between signs of life to other ranks.
# Flags that the client asks for. Others keep the client's defaults.
CLIENT_CONFIG = {"sample_max_concurrent_requests": 512, "fwdbwd_max_chunk_len": 1024}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
TENANT = web.RequestKey("tenant", str)
V = TypeVar("V")


class TinkerServer:
    def __init__(self, tenants: Tenants, keys: dict[str, str]):
        """`keys`: of each tenant."""
        self.tenants, self.keys = tenants, keys
        self.large: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_LARGE)
        )
        posts = {
            "client/config": constant(CLIENT_CONFIG),
            "client/dynamic_config": constant(DYNAMIC_CONFIG),
            # Events may have the headers of a request, and with them the key: they are dropped.
            "telemetry": constant({"status": "accepted"}),
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish_session,
            "get_info": self.info,
            "unload_model": self.unload,
            "create_model": self.promised(CreateModel, tenants.create_model),
            "forward_backward": self.forward_backward,
            "optim_step": self.promised(OptimStep, tenants.optim_step),
            "save_weights": self.promised(SaveWeights, tenants.save_weights),
            "load_weights": self.promised(LoadWeights, tenants.load_weights),
            "save_weights_for_sampler": self.promised(SaveForSampler, tenants.save_for_sampler),
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampler,
            "asample": self.promised(Sample, tenants.sample),
            "retrieve_future": self.retrieve,
            "cancel_future": self.cancel,
        }
        gets = {
            "healthz": constant({"status": "ok"}),
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.sampler,
        }
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.identify])
        app.add_routes([web.post(f"/api/v1/{path}", posts[path]) for path in posts])
        app.add_routes([web.get(f"/api/v1/{path}", gets[path]) for path in gets])
        app.add_routes([web.route("*", "/{path:.*}", self.not_built)])
        self.http = HttpServer(app, max_strangers=MAX_STRANGERS, max_per_key=MAX_CONNECTIONS)

    @web.middleware
    async def identify(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Notes the tenant of the request's key."""
        header, tenant = request.headers.get("X-API-Key", ""), ""
        for name, key in self.keys.items():
            if is_key(header, key):
                tenant = name
        if not tenant:
            raise HttpError(401, "the key in TINKER_API_KEY is not one of this server's")
        assert isinstance(request.protocol, GuardedConnection)
        self.http.limits.admit(request.protocol, tenant)
        request[TENANT] = tenant
        try:
            return await handler(request)
        except ValueError as error:
            raise HttpError(422, str(error)) from None

    def promised(
        self, kind: type[R], submit: Callable[[str, R], Promise]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of requests with a promise."""

        async def handler(request: web.Request) -> web.StreamResponse:
            return answer(submit(request[TENANT], await self.read(request, kind)))

        return handler

    async def parsed(self, request: web.Request, parse: Callable[[bytes], V]) -> V:
        """parse(body) of a request, in a thread if the body is large."""
        length = request.content_length
        if length is not None and length <= SMALL_BYTES:
            return parse(await read_body(request))
        async with self.large[request[TENANT]]:
            body = await read_body(request)
            return await asyncio.to_thread(parse, body)

    async def read(self, request: web.Request, kind: type[R]) -> R:
        """The request of this kind in a JSON body."""

        def parse(body: bytes) -> R:
            if len(body) > MAX_JSON_BYTES:
                raise HttpError(413, f"the body is larger than {MAX_JSON_BYTES} bytes")
            try:
                value = parse_json(body)
            except ValueError as error:
                raise HttpError(400, f"the body is not JSON: {error}") from None
            return read_request(kind, value)

        return await self.parsed(request, parse)

    async def forward_backward(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != PROTOBUF:
            raise HttpError(415, f"forward_backward reads {PROTOBUF}, as tinker 0.38.0 sends it")
        asked, body = await self.parsed(request, lambda body: (read_forward_backward(body), body))
        return answer(self.tenants.forward_backward(request[TENANT], asked, body))

    async def capabilities(self, request: web.Request) -> web.StreamResponse:
        model = {
            "model_name": self.tenants.model,
            "max_context_length": self.tenants.lora.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def create_session(self, request: web.Request) -> web.StreamResponse:
        await read_body(request)
        session = self.tenants.create_session(request[TENANT])
        message = "saved weights stay until you delete them: ttl_seconds is ignored"
        return web.json_response(
            {"type": "create_session", "session_id": session.id, "info_message": message}
        )

    async def heartbeat(self, request: web.Request) -> web.StreamResponse:
        asked = await self.read(request, OfSession)
        self.tenants.session(request[TENANT], asked.session_id)
        return web.json_response({"type": "session_heartbeat"})

    async def finish_session(self, request: web.Request) -> web.StreamResponse:
        await read_body(request)
        session = self.tenants.session(request[TENANT], request.match_info["session_id"])
        self.tenants.end_session(session)
        return web.json_response({})

    async def info(self, request: web.Request) -> web.StreamResponse:
        asked = await self.read(request, OfModel)
        return web.json_response(self.tenants.info(request[TENANT], asked.model_id))

    async def unload(self, request: web.Request) -> web.StreamResponse:
        asked = await self.read(request, OfModel)
        tenant = request[TENANT]
        self.tenants.unload(self.tenants.find_model(tenant, asked.model_id))
        promise = self.tenants.promises.add(tenant, f"{asked.model_id}:unload")
        self.tenants.promises.finish(promise, {"type": "unload_model", "model_id": asked.model_id})
        return answer(promise)

    async def weights_info(self, request: web.Request) -> web.StreamResponse:
        asked, saved = await self.read(request, SavedPath), self.tenants.saved_facts
        _, facts = await asyncio.to_thread(saved, request[TENANT], asked.tinker_path)
        lora = facts["lora"]
        parts = {name: lora[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return web.json_response(
            {"base_model": facts["base_model"], "is_lora": True, "lora_rank": lora["rank"], **parts}
        )

    async def create_sampler(self, request: web.Request) -> web.StreamResponse:
        asked = await self.read(request, SamplingSession)
        entry = await self.tenants.create_sampler(request[TENANT], asked)
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": entry.id}
        )

    async def sampler(self, request: web.Request) -> web.StreamResponse:
        entry = self.tenants.find_sampler(request[TENANT], request.match_info["sampler_id"])
        facts: JSONObject = {"sampler_id": entry.id, "base_model": self.tenants.model}
        return web.json_response(facts | {"model_path": entry.path or None})

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        asked = await self.read(request, Retrieve)
        promises = self.tenants.promises
        result = await promises.wait(promises.find(request[TENANT], asked.request_id))
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(result)

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Cancels samples. Other requests run: those behind them wait for them."""
        asked = await self.read(request, Retrieve)
        promise = self.tenants.promises.find(request[TENANT], asked.request_id)
        if promise.task is not None:
            promise.task.cancel()
        return web.json_response({})

    async def not_built(self, request: web.Request) -> web.StreamResponse:
        raise HttpError(
            404,
            f"{request.method} {request.path[:100]} is not built: this server trains, samples and "
            "saves, and has no management API; saved weights are folders (docs/tinker.md)",
        )


def constant(value: JSONObject) -> Handler:
    """The handler of requests whose answer is always the same."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await read_body(request)
        return web.json_response(value)

    return handler


def answer(promise: Promise) -> web.Response:
    return web.json_response({"request_id": promise.request_id, **promise.facts})


async def serve(
    tenants: Tenants, keys: dict[str, str], key_file: Path, host: str, port: int
) -> None:
    """Serves until SIGINT or SIGTERM. Raises OSError, and RunError if ranks cannot continue."""
    stopped, lora = asyncio.Event(), tenants.lora
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = TinkerServer(tenants, keys)
    await tenants.sampler.start()
    working = asyncio.create_task(tenants.turns.work())
    working.add_done_callback(lambda _: stopped.set())
    port = await server.http.listen(host, port)
    print(f"TINKER_BASE_URL=http://{host}:{port}", flush=True)
    if sys.stdout.isatty():
        for name, key in keys.items():
            print(f"TINKER_API_KEY={key}  # {name}", flush=True)
    else:  # A log, which others may read.
        print(f"keys: {key_file}", flush=True)
    while not stopped.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), KEEP_ALIVE_S)
        if lora.ranks.size > 1 and not stopped.is_set():
            run = tenants.turns.thread.submit(lora.call, "keep_alive")
            await asyncio.wrap_future(run)
    working.cancel()
    await server.http.close()
    # In a thread: a request that makes a snapshot waits for this event loop.
    await asyncio.to_thread(tenants.turns.thread.shutdown)
    await asyncio.to_thread(tenants.sampler.close)
    with suppress(asyncio.CancelledError):
        await working
    if lora.ranks.size > 1:
        lora.call("end")
