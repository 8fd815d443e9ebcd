"""The service's requests over HTTP with JSON, and metrics for Prometheus."""

from __future__ import annotations

import argparse
import os
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack

from aiohttp import web
from google.protobuf import json_format
from grpc import StatusCode
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rl_core import http_guard
from rl_core.environments.service import environments_pb2 as pb
from rl_core.environments.service.hub import Hub
from rl_core.environments.service.security import Access
from rl_core.environments.service.wire import (
    CODES,
    MAX_REQUEST,
    REQUESTS,
    ServiceError,
    failed,
    wrong,
)
from rl_core.http_guard import HttpError, HttpServer, parse_json, read_body, turn_away

# Mapping of google.rpc.Code to HTTP status codes.
HTTP = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


async def open_http(
    hub: Hub, access: Access, args: argparse.Namespace, stack: AsyncExitStack
) -> int:
    """Starts the HTTP server and returns its port."""
    context = None
    metrics = Metrics(hub)
    if access.cert:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(args.tls_cert, args.tls_key)
    server = HttpServer(
        make_app(hub, access, metrics),
        write_error=write_error,
        max_strangers=http_guard.MAX_STRANGERS,
        handler_cancellation=True,
    )
    stack.push_async_callback(server.close)
    try:
        return await server.listen(args.host.strip("[]"), args.http_port, context)
    except OSError as error:
        raise ValueError(
            f"--http_port {args.http_port} of {args.host}: {os.strerror(error.errno)}; "
            "--http_port 0 picks a free port"
        ) from None


def write_error(status: int, message: str) -> dict[str, str]:
    codes = (code for code, number in HTTP.items() if number == status)
    return {"code": next(codes, "UNKNOWN"), "message": message}


def check_admission(access: Access, request: web.Request) -> None:
    """Raises ServiceError for requests that are refused before their body is read."""
    # Any web page could otherwise reach a local service that has no token.
    if "Origin" in request.headers:
        raise ServiceError(
            StatusCode.PERMISSION_DENIED, "requests of web pages (header Origin) are not allowed"
        )
    if not access.is_right(request.headers.get("Authorization", "")):
        raise ServiceError(
            StatusCode.UNAUTHENTICATED,
            "the token is missing or wrong; send Authorization: Bearer TOKEN",
        )


def as_response(reply: pb.Reply) -> web.Response:
    """The HTTP response for an error reply."""
    code = CODES[reply.code].name
    return web.json_response({"code": code, "message": reply.error}, status=HTTP.get(code, 500))


def make_app(hub: Hub, access: Access, metrics: Metrics) -> web.Application:
    """The app: POST /v1/start, /v1/interact ...; GET /metrics, which needs no token."""

    async def answer(verb: str, request: web.Request) -> pb.Reply:
        if verb not in REQUESTS:
            raise ServiceError(
                StatusCode.NOT_FOUND,
                f"unknown verb {verb[:40]!r}; known: {', '.join(REQUESTS)}",
            )
        try:
            body = parse_json(await read_body(request) or b"{}")
            if not isinstance(body, dict):
                raise wrong("the body must be a JSON object")
            message = json_format.ParseDict(body, REQUESTS[verb]())
            timeout_s = float(request.query.get("timeout_s", 0))
        except HttpError as error:
            if error.status != 413:
                raise wrong(error.message) from None
            raise ServiceError(
                StatusCode.RESOURCE_EXHAUSTED, f"a request may have at most {MAX_REQUEST} bytes"
            ) from None
        except (ValueError, LookupError, json_format.ParseError) as error:
            raise wrong(f"the body is not a {REQUESTS[verb].DESCRIPTOR.name}: {error}") from None
        return await hub.answer(pb.Request(timeout_s=timeout_s, **{verb: message}))

    async def post(request: web.Request) -> web.Response:
        verb = request.match_info["verb"]
        try:
            check_admission(access, request)
        except ServiceError as error:
            request.protocol.limits.reporter.report(f"requests: {error.message}")
            response = as_response(failed(0, error))
            await turn_away(request, response)
            return response
        request.protocol.limits.admit(request.protocol)
        try:
            reply = await answer(verb, request)
        except ServiceError as error:
            reply = failed(0, error)
        if reply.code:
            return as_response(reply)
        text = json_format.MessageToJson(
            getattr(reply, verb),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
            indent=None,
        )
        return web.Response(text=text, content_type="application/json")

    async def get_metrics(_: web.Request) -> web.Response:
        response = web.Response(body=generate_latest(metrics.registry), content_type="text/plain")
        response.force_close()
        return response

    app = web.Application(client_max_size=MAX_REQUEST)
    app.add_routes([web.post("/v1/{verb}", post), web.get("/metrics", get_metrics)])
    return app


class Metrics:
    """Prometheus metrics of a hub, collected on each scrape."""

    def __init__(self, hub: Hub):
        self.hub = hub
        self.registry = CollectorRegistry()
        about = "Seconds from a request's arrival to its reply, time in the queue included"
        self.seconds = Histogram(
            "rl_core_request_seconds", about, ["verb"], buckets=BUCKETS, registry=self.registry
        )
        self.of_verb = {verb: self.seconds.labels(verb) for verb in (*REQUESTS, "none")}
        self.registry.register(self)
        hub.observe = lambda verb, seconds: self.of_verb[verb].observe(seconds)

    def describe(self) -> list:
        return []

    def collect(self) -> Iterator[Metric]:
        beats = [link.beat for link in self.hub.links.values()]
        yield GaugeMetricFamily("rl_core_workers", "Connected workers", value=len(beats))
        open_now = Counter()
        capacity = Counter()
        interactions = Counter()
        ended = Counter()
        for load in (load for beat in beats for load in beat.loads):
            open_now[load.env] += load.sessions
            capacity[load.env] += load.capacity
        for load in (load for beat in (*beats, *self.hub.past.values()) for load in beat.loads):
            interactions[load.env] += load.interactions
            for status, num in load.ended.items():
                ended[load.env, status] += num
        queued = {env: len(self.hub.starts.queues.get(env, ())) for env in self.hub.envs}
        for name, about, values in (
            ("sessions", "Running sessions", open_now),
            ("capacity", "Maximum number of sessions", capacity),
            ("queue", "Starts that wait for a worker with room", queued),
        ):
            gauge = GaugeMetricFamily(f"rl_core_{name}", about, labels=["env"])
            for env, value in values.items():
                gauge.add_metric([env], value)
            yield gauge
        counter = CounterMetricFamily(
            "rl_core_interactions", "Interactions of current and past workers", labels=["env"]
        )
        for env, value in interactions.items():
            counter.add_metric([env], value)
        yield counter
        counter = CounterMetricFamily(
            "rl_core_ended", "Ended sessions by final status", labels=["env", "status"]
        )
        for labels, value in ended.items():
            counter.add_metric(labels, value)
        yield counter
