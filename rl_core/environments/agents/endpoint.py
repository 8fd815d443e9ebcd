"""An HTTP endpoint through which an existing program talks to the actors of an episode.

One server per process; each episode has a random key. Requests become turns of the run's actors,
so tokens, seeds and records are the same as in any other episode.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import secrets
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, cast

from aiohttp import web

from rl_core.data.chat_threads import num_prompt_tokens
from rl_core.data.messages import without_prefix
from rl_core.environments.agents import chat_completions, forward, messages, responses
from rl_core.environments.agents.requests import Refusal, Reply, Request, has_image_parts
from rl_core.environments.agents.tree import Attempt, Tree, digest_of
from rl_core.http_guard import (
    LOOPBACK,
    MAX_LOCAL_STRANGERS,
    GuardedConnection,
    HttpError,
    HttpServer,
    is_key,
    parse_json,
    read_body,
    turn_away,
)
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import EngineDied
from rl_core.scratch import scratch_prefix
from rl_core.types import JSONObject, Trajectory

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DIALECTS = (chat_completions, responses, messages)
MAX_BODY_BYTES = 64 << 20
# Interval of comments in a stream: clients and proxies drop silent connections.
KEEP_ALIVE_S = 10.0
# Limits of one episode: connections with its key, request bodies that are read concurrently.
MAX_CONNECTIONS = 256
MAX_READING = 8
SHORT_BYTES = 1 << 14  # Longer bodies are read in a thread.
MAX_VALUES = 1_000_000  # Limit of commas and opened brackets of a body, which take time to parse.
MAX_STORED = 1024  # Conversations that later requests may continue by the id of a reply.
ELSEWHERE = ("192.0.2.1", 9)  # An address reserved for documentation.
# A folder in each box, and the names of its files.
BOX_FOLDER, SOCKET, FORWARDER = "/run/rl_core", "endpoint.sock", "forward.py"
NO_EPISODE = "the API key is of no episode that runs"
RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count")


@dataclass(eq=False)
class Endpoint:
    """One episode's endpoint. The model's name in a request selects an actor; an unknown name
    selects the first."""

    server: EndpointServer
    address: str  # For example http://127.0.0.1:34567.
    api_key: str
    trees: dict[str, Tree]  # Actor -> turns.
    program: str  # The program's name in errors.
    # Id of a kept reply -> conversation up to it; the last MAX_STORED.
    stored: dict[str, Request] = field(default_factory=dict)
    # Items of /v1/responses that an `item_reference` may name, by id.
    items: dict[str, JSONObject] = field(default_factory=dict)
    refused: str = ""  # Message of the last refused request.
    # Bounds the request bodies of one program that are in memory at the same time.
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_READING))
    is_shut: bool = False

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.address}/v1"

    @property
    def anthropic_url(self) -> str:
        """Base URL for Anthropic's clients."""
        return self.address

    @property
    def model(self) -> str:
        """The first actor's name."""
        return next(iter(self.trees))

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables that point official clients to the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }

    async def binds(self) -> dict[str, str]:
        """Mounts for boxes.open() with which a box reaches this endpoint. They are equal for all
        episodes of the server, so boxes can be reused."""
        return {BOX_FOLDER: await self.server.listen_for_boxes()}

    @property
    def failure(self) -> EngineDied | None:
        return next(filter(None, (tree.failure for tree in self.trees.values())), None)

    @property
    def is_given_up(self) -> bool:
        """True if the program asked, and read no reply."""
        trees = self.trees.values()
        has_asked = any(any(tree.attempts.values()) for tree in trees)
        return has_asked and not any(tree.num_read for tree in trees)

    @property
    def is_truncated(self) -> bool:
        """True if a request did not fit into the context or the episode's turns."""
        return any(tree.is_truncated for tree in self.trees.values())

    def trajectories(self, reward: float | dict[str, float], actor: str = "") -> list[Trajectory]:
        """One trajectory per branch of an actor's requests (default: the first actor). Each sampled
        token is in the loss once."""
        tree = self.trees[actor or self.model]
        trajectories = tree.trajectories(reward)
        for trajectory in trajectories:
            if tree.is_truncated:
                trajectory.status = "truncated"
            trajectory.metrics |= self.metrics(tree, len(trajectories))
        return trajectories

    def metrics(self, tree: Tree, num_branches: int) -> dict[str, float]:
        overridden = {}
        for name, num_requests in tree.overridden.items():
            overridden[f"agent_overridden_{name}"] = float(num_requests)
        return overridden | {
            "agent_requests": float(tree.num_read),
            "agent_retries": float(tree.num_retries),
            "agent_branches": float(num_branches),
            "agent_overridden": float(sum(tree.overridden.values())),
        }

    def tree_of(self, request: Request) -> Tree:
        return self.trees.get(request.model) or self.trees[self.model]

    async def check_length(self, request: Request) -> None:
        """Raises Refusal before encoding if the messages cannot fit into the context."""
        tree = self.tree_of(request)
        actor, least = tree.actor, 0
        if actor.chat:
            measure = partial(actor.chat.least_tokens, request.messages)
            least = await self.server.off_loop(request.is_long, measure)
        if least < actor.max_context_tokens:
            return
        tree.truncate()
        limit = f"the context of {actor.max_context_tokens} tokens"
        self.server.report(f"a request of {self.program} that cannot fit into {limit}")
        text = f"the messages have at least {least} tokens, which cannot fit into {limit}"
        raise Refusal(text, code="context_length_exceeded")

    def check_schema(self, request: Request) -> None:
        """Ignores, enforces or refuses a JSON schema, by --agents.response_format. Raises
        Refusal."""
        if request.schema is None:
            return
        config = self.server.config
        policy = config.response_format if config else "ignore"
        if policy == "ignore":
            request.overridden.append("response_format")
            return
        reason = "ask for JSON in the messages"
        if policy == "enforce":
            reason = unenforceable(self.tree_of(request).actor, request)
            request.is_enforced = not reason
        if reason:
            raise Refusal(f"--agents.response_format {policy}: no reply in a JSON schema; {reason}")

    def put_before(self, dialect: ModuleType, request: Request) -> None:
        """Prepends the conversation that the request continues. Raises Refusal if it is unknown."""
        if request.continues is None:
            return
        earlier = self.stored.get(request.continues)
        if earlier is None:
            name = request.continues[:80]
            text = f"{name!r} is no reply of this episode; the last {MAX_STORED} are kept"
            raise Refusal(text, **dialect.NOT_KEPT)
        dialect.continued(request, earlier)
        request.is_long = True

    def store(self, dialect: ModuleType, request: Request, replies: list[Reply]) -> None:
        """Called before replies are sent. Keeps those that later requests may name."""
        for reply in replies:
            reply.is_stored = True
            if not request.is_kept:
                continue
            history = [*without_prefix(request.messages)[0], reply.message]
            # Later requests have their own schema; this one may have megabytes.
            conversation = replace(request, messages=history, schema=None)
            self.stored[dialect.reply_id(reply)] = conversation
            if len(self.stored) > MAX_STORED:
                del self.stored[next(iter(self.stored))]
            if dialect is responses:
                for item in responses.output(reply):
                    self.items[item["id"]] = item

    async def attempt(self, request: Request) -> Attempt:
        """The attempt that answers a request. Raises Refusal."""
        await self.check_length(request)
        self.check_schema(request)
        digest = await self.server.off_loop(request.is_long, digest_of, request)
        if self.is_shut:  # It was shut while the body was read.
            raise Refusal(NO_EPISODE, status=401, code="invalid_api_key")
        if self.failure is not None:
            raise Refusal("the engine died; the episode begins again", status=503)
        return self.tree_of(request).attempt(request, digest)

    async def replies(self, attempt: Attempt) -> list[Reply]:
        """Waits for the replies of an attempt. Raises Refusal."""
        try:
            return await attempt.replies()
        except EngineDied as error:
            raise Refusal("the engine died; the episode begins again", status=503) from error

    def note_sent(self, attempt: Attempt) -> None:
        """Called once a connection took replies, or was lost while they were sent."""

    async def num_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt. Raises Refusal."""
        chat = self.tree_of(request).actor.chat
        if chat is None:
            raise Refusal("the tokens of this model are not known here")
        await self.check_length(request)
        limit = self.tree_of(request).actor.max_context_tokens
        try:
            return await num_prompt_tokens(chat, request.messages, request.tools, limit)
        except ValueError as error:
            raise Refusal(str(error)) from error


def unenforceable(actor: Actor, request: Request) -> str:
    """The reason why an actor cannot reply in the request's JSON schema, or ""."""
    if request.tools and request.reads_calls:
        return "calls of tools do not fit it; leave out the tools or set tool_choice none"
    if request.messages[-1].get("prefix"):
        return "a reply that continues a message does not begin the JSON; end with a user's message"
    if actor.chat is None or not all(engine.has_grammars for engine in actor.engines):
        return f"actor {actor.name} has no engine with grammars, as the embedded engine is"
    with suppress(ValueError):
        start = actor.chat.render([{"role": "user", "content": "?"}])
        if start.rstrip().endswith("<think>"):
            return "the chat template begins each reply with thoughts; switch them off"
    return ""


class EndpointServer:
    """The server of one process."""

    def __init__(self, config: AgentsConfig | None = None, port: int = 0):
        self.config = config  # None in workers of served environments, which have no run.
        self.port = port  # 0: a free one.
        self.address = ""  # URL for programs, with the port.
        self.endpoints: dict[str, Endpoint] = {}  # Key -> endpoint.
        self.server: HttpServer | None = None
        self.starting = asyncio.Lock()
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="requests")
        # Private to this user. Boxes see a subfolder, which any user may enter.
        self.folder: tempfile.TemporaryDirectory | None = None
        self.is_for_boxes = False  # True if it listens at the socket in this folder.

    async def open(
        self, actors: Mapping[str, Actor], max_turns: int = 0, program: str = "a program"
    ) -> Endpoint:
        """Opens an endpoint with a new key for an episode's actors."""
        async with self.starting:
            if self.server is None:
                await self.start()
        key = f"sk-{secrets.token_urlsafe(24)}"
        trees = {name: Tree(actor, max_turns) for name, actor in actors.items()}
        self.endpoints[key] = Endpoint(self, self.address, key, trees, program)
        return self.endpoints[key]

    def shut(self, endpoint: Endpoint) -> None:
        """Revokes the endpoint's key and cancels its running turns."""
        del self.endpoints[endpoint.api_key]
        endpoint.is_shut = True
        for tree in endpoint.trees.values():
            tree.cancel()

    def report(self, refused: str) -> None:
        """Reports a refusal on stderr, at most once a minute."""
        if self.server is not None:
            self.server.limits.reporter.report(refused)

    async def start(self) -> None:
        """Listens for programs on this machine, or on the network that `config` names."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.add_routes(app.router)
        app.router.add_route("*", "/{path:.*}", self.no_such_path)
        server = HttpServer(
            app,
            write_error=write_error,
            max_strangers=MAX_LOCAL_STRANGERS,
            max_per_key=MAX_CONNECTIONS,
            handler_cancellation=True,
        )
        host = self.config.host if self.config else LOOPBACK
        address = self.config.public_host if self.config else None
        port = await server.listen(host, self.port)
        self.address = f"http://{address or reachable(host)}:{port}"
        self.server = server

    def add_routes(self, router: web.UrlDispatcher) -> None:
        for dialect in DIALECTS:
            router.add_post(dialect.PATH, self.handler(dialect))
        router.add_post(f"{messages.PATH}/count_tokens", self.count_tokens)
        router.add_get("/v1/models", self.models)
        router.add_get("/v1/models/{name:.+}", self.model)
        router.add_get("/", say_nothing)

    async def listen_for_boxes(self) -> str:
        """Listens at a Unix socket too. Returns the folder with the socket and the forwarder."""
        async with self.starting:
            shown = self.shown_folder()
            if not self.is_for_boxes:
                assert self.server is not None
                await self.server.listen_at(str(shown / SOCKET))
                # Programs in boxes run as other users and need a key.
                (shown / SOCKET).chmod(0o666)
                self.is_for_boxes = True
            return str(shown)

    def shown_folder(self) -> Path:
        if self.folder is None:
            # The path of a socket has at most 107 bytes.
            self.folder = tempfile.TemporaryDirectory(prefix=scratch_prefix("endpoint"), dir="/tmp")
            shown = Path(self.folder.name, "shown")
            shown.mkdir(mode=0o755)
            shutil.copy(forward.__file__, shown / FORWARDER)
        return Path(self.folder.name, "shown")

    async def close(self) -> None:
        """Stops listening. The next open() starts again, perhaps at another port."""
        server, self.server = self.server, None
        self.is_for_boxes = False
        if server is not None:
            await server.close()

    def endpoint_of(self, request: web.Request) -> Endpoint:
        """The endpoint of the request's key. Admits the connection. Raises Refusal for an unknown
        key, HttpError if the key has too many connections."""
        key = key_of(request)
        for known, endpoint in self.endpoints.items():
            if is_key(key, known):
                self.admit(request, endpoint)
                return endpoint
        raise Refusal(NO_EPISODE, status=401, code="invalid_api_key")

    def admit(self, request: web.Request, endpoint: Endpoint) -> None:
        """Counts the connection as one of the endpoint's. Raises HttpError if it has too many."""
        connection = cast(GuardedConnection, request.protocol)
        connection.limits.admit(connection, endpoint.api_key)

    def handler(self, dialect: ModuleType) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                endpoint = self.endpoint_of(http)
                request = await self.read(http, dialect, endpoint)
                retries = [http.headers.get(name, "0") for name in RETRY_HEADERS]
                request.is_retry = any(count not in ("", "0") for count in retries)
                endpoint.put_before(dialect, request)
                attempt = await endpoint.attempt(request)
                # A cancelled handler has lost its client.
                with attempt.waited():
                    send = self.send_stream if request.is_streamed else self.send
                    try:
                        return await send(http, dialect, endpoint, request, attempt)
                    finally:
                        endpoint.note_sent(attempt)
            except Refusal as refusal:
                if refusal.status != 401:
                    endpoint.refused = refusal.message
                return await refuse(http, refusal, dialect)

        return handle

    async def send(
        self,
        http: web.Request,
        dialect: ModuleType,
        endpoint: Endpoint,
        request: Request,
        attempt: Attempt,
    ) -> web.StreamResponse:
        replies = await endpoint.replies(attempt)
        endpoint.store(dialect, request, replies)
        response = web.json_response(dialect.write(replies, request))
        await response.prepare(http)
        await response.write_eof()
        for reply in replies:
            reply.num_sent = math.inf
        return response

    async def read(self, http: web.Request, dialect: ModuleType, endpoint: Endpoint) -> Request:
        """The request in a body. Large requests and images are read in one thread, so that they
        delay neither other requests nor hooks. Raises Refusal."""
        body = await body_of(http, endpoint)
        is_long = len(body) > SHORT_BYTES
        value = await self.off_loop(is_long, parsed, body)
        if dialect is responses:
            value["input"] = responses.put_in(value.get("input"), endpoint.items)
        is_long = is_long or has_image_parts(value)
        request = await self.off_loop(is_long, dialect.read, value)
        request.is_long = is_long
        return request

    async def off_loop(self, is_long: bool, work: Callable[..., T], *args: object) -> T:
        """Returns work(*args), called in the thread if it takes long."""
        if not is_long:
            return work(*args)
        context, loop = contextvars.copy_context(), asyncio.get_running_loop()
        return await loop.run_in_executor(self.reader, lambda: context.run(work, *args))

    async def send_stream(
        self,
        http: web.Request,
        dialect: ModuleType,
        endpoint: Endpoint,
        request: Request,
        attempt: Attempt,
    ) -> web.StreamResponse:
        """Sends the finished reply as server-sent events; engines return complete turns."""
        answer = asyncio.ensure_future(endpoint.replies(attempt))
        try:
            # Clients expect a plain error if the request is refused at once.
            await asyncio.wait({answer}, timeout=0.05)
            if answer.done():
                answer.result()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            while not answer.done():
                done, _ = await asyncio.wait({answer}, timeout=KEEP_ALIVE_S)
                if not done:
                    await response.write(b": keep-alive\n\n")
        finally:
            answer.cancel()  # The client has gone.
        try:
            replies = answer.result()
            endpoint.store(dialect, request, replies)
        except Refusal as refusal:
            endpoint.refused = refusal.message
            error = json.dumps(dialect.write_error(refusal))
            await response.write(f"event: error\ndata: {error}\n\n".encode())
            return response
        for event in dialect.stream(replies, request):
            await response.write(event.encode())
        return response

    async def count_tokens(self, http: web.Request) -> web.Response:
        try:
            endpoint = self.endpoint_of(http)
            request = await self.read(http, messages, endpoint)
            endpoint.put_before(messages, request)
            number = await endpoint.num_tokens(request)
        except Refusal as refusal:
            return await refuse(http, refusal, messages)
        return web.json_response({"input_tokens": number})

    async def no_such_path(self, http: web.Request) -> web.Response:
        refusal = Refusal(
            f"there is no {http.method} {http.path}; the base URL of OpenAI's clients ends in /v1, "
            "that of Anthropic's does not",
            status=404,
        )
        return await refuse(http, refusal)

    async def models(self, http: web.Request) -> web.Response:
        try:
            names = list(self.endpoint_of(http).trees)
        except Refusal as refusal:
            return await refuse(http, refusal)
        models = [describe(name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]}
        return web.json_response({"object": "list", "data": models, "has_more": False} | ends)

    async def model(self, http: web.Request) -> web.Response:
        """Describes a model of any name, since requests may use any name."""
        try:
            self.endpoint_of(http)
        except Refusal as refusal:
            return await refuse(http, refusal)
        return web.json_response(describe(http.match_info["name"]))


def key_of(request: web.Request) -> str:
    """The key that a request sends, or ""."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    key = request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
    return key.strip()


async def say_nothing(http: web.Request) -> web.Response:
    """Answers clients that probe the server without a key."""
    return web.Response()


def describe(name: str) -> JSONObject:
    """A model, with the fields of both OpenAI's and Anthropic's clients."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "rl_core"}
    epoch = "1970-01-01T00:00:00Z"
    return model | {"type": "model", "display_name": name, "created_at": epoch}


def reachable(host: str) -> str:
    """The address at which other machines reach a server that listens at `host`."""
    if host != "0.0.0.0":
        return host
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            # Connecting UDP sends nothing, but selects the interface towards other networks.
            probe.connect(ELSEWHERE)
        except OSError:
            return socket.gethostname()
        return probe.getsockname()[0]


async def body_of(http: web.Request, endpoint: Endpoint) -> bytes:
    """The request's body. Raises Refusal."""
    try:
        async with endpoint.reading:
            return await read_body(http)
    except HttpError as error:
        raise Refusal(error.message, status=error.status) from None


def parsed(body: bytes) -> JSONObject:
    """The JSON of a body. Raises Refusal."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Refusal(f"the body has more than {MAX_VALUES:,} values; send a shorter one")
    try:
        value = parse_json(body)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("the body must be a JSON object")
    return value


async def refuse(
    http: web.Request, refusal: Refusal, dialect: ModuleType = chat_completions
) -> web.Response:
    """Responds with an error in the dialect. Closes connections without a valid key."""
    response = web.json_response(dialect.write_error(refusal), status=refusal.status)
    if refusal.retry_after_s:
        response.headers["Retry-After"] = str(refusal.retry_after_s)
    if refusal.status == 401:
        await turn_away(http, response)
    return response


def write_error(status: int, message: str) -> JSONObject:
    return chat_completions.write_error(Refusal(message, status=status))
