"""An HTTP endpoint at which a program that exists already talks to the actors of an episode.

One server per process; each episode has a random key. The program's requests become turns of the
run's own actors, so its tokens, seeds and records are those of any other episode.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rl_core.environments.agents import chat_completions, forward, messages, responses
from rl_core.environments.agents.requests import Refusal, Reply, Request
from rl_core.environments.agents.tree import Tree
from rl_core.http_guard import (
    LOOPBACK,
    MAX_LOCAL_STRANGERS,
    HttpError,
    HttpServer,
    is_key,
    read_json,
    turn_away,
)
from rl_core.sampling.actor import Actor
from rl_core.sampling.engine import EngineDied
from rl_core.scratch import scratch_prefix
from rl_core.types import Trajectory

if TYPE_CHECKING:
    from rl_core.config import AgentsConfig

DIALECTS = (chat_completions, responses, messages)
MAX_BODY_BYTES = 64 << 20
# Between comments in a stream: clients and proxies give up connections on which nothing comes.
KEEP_ALIVE_S = 10.0
# Limits of one episode: connections with its key, request bodies that are read concurrently.
MAX_CONNECTIONS = 256
MAX_READING = 8
MAX_STORED = 1024  # conversations that later requests may continue by the id of a reply
ELSEWHERE = ("192.0.2.1", 9)  # an address of documentation, which nobody has
# In a box: a folder, and what is in it.
BOX_FOLDER, SOCKET, FORWARDER = "/run/rl_core", "endpoint.sock", "forward.py"
NO_EPISODE = "the API key is of no episode that runs"
RETRY_HEADERS = ("x-stainless-retry-count", "x-retry-count")


@dataclass(eq=False)
class Endpoint:
    """Where one episode's program finds its actors. The model's name in a request says which actor
    is meant; any other name means the first."""

    server: EndpointServer
    address: str  # such as http://127.0.0.1:34567
    api_key: str
    trees: dict[str, Tree]  # actor -> its turns
    program: str  # the program's name in errors
    # Conversations up to a kept reply, by its id: the last MAX_STORED.
    stored: dict[str, Request] = field(default_factory=dict)
    # Items of /v1/responses that an `item_reference` may name, by id.
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: EngineDied | None = None
    refused: str = ""  # message of the last refused request
    # Bounds the request bodies of one program that are in memory at the same time.
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_READING))
    is_shut: bool = False

    @property
    def base_url(self) -> str:
        """As OpenAI's clients want it."""
        return f"{self.address}/v1"

    @property
    def anthropic_url(self) -> str:
        """As Anthropic's clients want it."""
        return self.address

    @property
    def model(self) -> str:
        """The first actor's name."""
        return next(iter(self.trees))

    @property
    def environ(self) -> dict[str, str]:
        """Variables by which official clients find the endpoint."""
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
        """For boxes.open(): what a box needs to run a command at this endpoint. Equal for all
        episodes of the server, so that boxes can be used again."""
        return {BOX_FOLDER: await self.server.listen_for_boxes()}

    @property
    def is_truncated(self) -> bool:
        """A request did not fit into the context, or into the episode's turns."""
        return any(tree.is_truncated for tree in self.trees.values())

    def trajectories(self, reward: float | dict[str, float], actor: str = "") -> list[Trajectory]:
        """One for each branch of what the actor was asked, by default the first; each sampled token
        is in the loss once."""
        tree = self.trees[actor or self.model]
        found = tree.trajectories(reward)
        for trajectory in found:
            if tree.is_truncated:
                trajectory.status = "truncated"
            trajectory.metrics |= self.metrics(tree, len(found))
        return found

    def metrics(self, tree: Tree, num_branches: int) -> dict[str, float]:
        overridden = {}
        for name, num_requests in tree.overridden.items():
            overridden[f"agent_overridden_{name}"] = float(num_requests)
        return overridden | {
            "agent_requests": float(tree.num_turns),
            "agent_retries": float(tree.num_retries),
            "agent_branches": float(num_branches),
            "agent_overridden": float(sum(tree.overridden.values())),
        }

    def tree_of(self, request: Request) -> Tree:
        return self.trees.get(request.model) or self.trees[self.model]

    def check_length(self, request: Request) -> None:
        """Raises Refusal for messages that cannot fit into the context, before they are encoded."""
        tree = self.tree_of(request)
        actor = tree.actor
        least = actor.chat.least_tokens(request.messages) if actor.chat else 0
        if least < actor.max_context_tokens:
            return
        tree.is_truncated = True
        limit = f"the context of {actor.max_context_tokens} tokens"
        self.server.report(f"a request of {self.program} that cannot fit into {limit}")
        text = f"the messages have at least {least} tokens, which cannot fit into {limit}"
        raise Refusal(text, code="context_length_exceeded")

    def check_schema(self, request: Request) -> None:
        """Does with a request for a JSON schema as --agents.response_format says. Raises
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
        """Puts the conversation that the request continues before its messages. Raises Refusal."""
        if request.continues is None:
            return
        earlier = self.stored.get(request.continues)
        if earlier is None:
            name = request.continues[:80]
            text = f"{name!r} is no reply of this episode; the last {MAX_STORED} are kept"
            raise Refusal(text, **dialect.NOT_KEPT)
        dialect.continued(request, earlier)

    def store(self, dialect: ModuleType, request: Request, replies: list[Reply]) -> None:
        """Keeps replies that later requests may continue."""
        if not request.is_kept:
            return
        for reply in replies:
            history = [*request.messages, reply.message]
            # Later requests have their own schema; this one may have megabytes.
            conversation = replace(request, messages=history, schema=None)
            self.stored[dialect.reply_id(reply)] = conversation
            if len(self.stored) > MAX_STORED:
                del self.stored[next(iter(self.stored))]
            if dialect is responses:
                for item in responses.output(reply):
                    self.items[item["id"]] = item

    async def answer(self, request: Request) -> list[Reply]:
        """Raises Refusal."""
        if self.is_shut:  # while the body of the request came
            raise Refusal(NO_EPISODE, status=401, code="invalid_api_key")
        self.check_length(request)
        self.check_schema(request)
        if self.failure is not None:
            raise Refusal("the engine died; the episode begins again", status=503)
        try:
            return await self.tree_of(request).answer(request)
        except EngineDied as error:
            self.failure = error
            raise Refusal("the engine died; the episode begins again", status=503) from error

    async def num_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt. Raises Refusal."""
        chat = self.tree_of(request).actor.chat
        if chat is None:
            raise Refusal("the tokens of this model are not known here")
        self.check_length(request)
        try:
            await chat.prepare(request.messages, request.tools)
            return len(chat.first_prompt(request.messages, request.tools)[1])
        except ValueError as error:
            raise Refusal(str(error)) from error


def unenforceable(actor: Actor, request: Request) -> str:
    """The reason why an actor cannot reply in the request's JSON schema, or ""."""
    if request.tools and request.reads_calls:
        return "calls of tools do not fit it; leave out the tools or set tool_choice none"
    if actor.chat is None or not all(engine.has_grammars for engine in actor.engines):
        return f"actor {actor.name} has no engine with grammars, as the embedded engine is"
    with suppress(ValueError):
        start = actor.chat.render([{"role": "user", "content": "?"}])
        if start.rstrip().endswith("<think>"):
            return "the chat template begins each reply with thoughts; switch them off"
    return ""


class EndpointServer:
    """The server of one process."""

    def __init__(self, config: AgentsConfig | None = None):
        self.config = config  # None in workers of served environments, which have no run
        self.address = ""  # as programs are told, with the port
        self.endpoints: dict[str, Endpoint] = {}  # by key
        self.server: HttpServer | None = None
        self.starting = asyncio.Lock()
        # Private to this user. What boxes see is a folder in it, which any user may enter.
        self.folder: tempfile.TemporaryDirectory | None = None
        self.is_for_boxes = False  # listens at the socket in this folder

    async def open(
        self, actors: Mapping[str, Actor], max_turns: int = 0, program: str = "a program"
    ) -> Endpoint:
        """An endpoint with a key of its own for an episode's actors."""
        async with self.starting:
            if self.server is None:
                await self.start()
        key = f"sk-{secrets.token_urlsafe(24)}"
        trees = {name: Tree(actor, max_turns) for name, actor in actors.items()}
        self.endpoints[key] = Endpoint(self, self.address, key, trees, program)
        return self.endpoints[key]

    def shut(self, endpoint: Endpoint) -> None:
        """Its key is no longer valid. Turns that are under way end unseen."""
        del self.endpoints[endpoint.api_key]
        endpoint.is_shut = True
        for tree in endpoint.trees.values():
            tree.cancel()

    def report(self, refused: str) -> None:
        """Reports a refusal on stderr, at most once a minute."""
        if self.server is not None:
            self.server.door.refusals.report(refused)

    async def start(self) -> None:
        """Listens for programs of this machine, or of the network that `config` names."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for dialect in DIALECTS:
            app.router.add_post(dialect.PATH, self.handler(dialect))
        app.router.add_post(f"{messages.PATH}/count_tokens", self.count_tokens)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.model)
        app.router.add_get("/", say_nothing)
        app.router.add_route("*", "/{path:.*}", self.no_such_path)
        server = HttpServer(
            app,
            write_error=write_error,
            max_strangers=MAX_LOCAL_STRANGERS,
            max_per_key=MAX_CONNECTIONS,
        )
        host = self.config.host if self.config else LOOPBACK
        address = self.config.public_host if self.config else None
        port = await server.listen(host)
        self.address = f"http://{address or reachable(host)}:{port}"
        self.server = server

    async def listen_for_boxes(self) -> str:
        """The folder with a Unix socket at which it listens too, and with what forwards to it."""
        async with self.starting:
            shown = self.shown_folder()
            if not self.is_for_boxes:
                await self.server.listen_at(str(shown / SOCKET))
                # Programs in boxes are other users. They are asked for a key.
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
        """Listens no more; the next open() begins anew, perhaps at another port."""
        server, self.server = self.server, None
        self.is_for_boxes = False
        if server is not None:
            await server.close()

    def endpoint_of(self, request: web.Request) -> Endpoint:
        """The endpoint of the request's key, which admits the connection. Raises Refusal, and
        HttpError if the key has too many connections."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
        for known, endpoint in self.endpoints.items():
            if is_key(key.strip(), known):
                request.protocol.door.admit(request.protocol, known)
                return endpoint
        raise Refusal(NO_EPISODE, status=401, code="invalid_api_key")

    def handler(self, dialect: ModuleType) -> Any:
        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                endpoint = self.endpoint_of(http)
                body = await body_of(http, endpoint)
                if dialect is responses:
                    body["input"] = responses.put_in(body.get("input"), endpoint.items)
                request = dialect.read(body)
                retries = [http.headers.get(name, "0") for name in RETRY_HEADERS]
                request.is_retry = any(count not in ("", "0") for count in retries)
                endpoint.put_before(dialect, request)
                if request.is_streamed:
                    return await self.send_stream(http, dialect, endpoint, request)
                replies = await endpoint.answer(request)
            except Refusal as refusal:
                if refusal.status != 401:
                    endpoint.refused = refusal.message
                return await refuse(http, refusal, dialect)
            endpoint.store(dialect, request, replies)
            return web.json_response(dialect.write(replies, request))

        return handle

    async def send_stream(
        self, http: web.Request, dialect: ModuleType, endpoint: Endpoint, request: Request
    ) -> web.StreamResponse:
        """The reply as server-sent events, once it is there: engines give whole turns."""
        answer = asyncio.ensure_future(endpoint.answer(request))
        # A request that is refused at once is answered by a plain error, as clients expect it.
        await asyncio.wait({answer}, timeout=0.05)
        if answer.done():
            answer.result()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        while not answer.done():
            done, _ = await asyncio.wait({answer}, timeout=KEEP_ALIVE_S)
            if not done:
                await response.write(b": keep-alive\n\n")
        try:
            replies = answer.result()
        except Refusal as refusal:
            endpoint.refused = refusal.message
            error = json.dumps(dialect.write_error(refusal))
            await response.write(f"event: error\ndata: {error}\n\n".encode())
            return response
        endpoint.store(dialect, request, replies)
        for event in dialect.stream(replies, request):
            await response.write(event.encode())
        return response

    async def count_tokens(self, http: web.Request) -> web.Response:
        try:
            endpoint = self.endpoint_of(http)
            request = messages.read(await body_of(http, endpoint))
            endpoint.put_before(messages, request)
            number = await endpoint.num_tokens(request)
        except Refusal as refusal:
            return await refuse(http, refusal, messages)
        return web.json_response({"input_tokens": number})

    async def no_such_path(self, http: web.Request) -> web.Response:
        refusal = Refusal(
            f"there is no {http.path}; llm.base_url ends in /v1, for OpenAI's clients, and "
            "llm.anthropic_url does not, for Anthropic's",
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
        """Any name's, as requests are answered under any name."""
        try:
            self.endpoint_of(http)
        except Refusal as refusal:
            return await refuse(http, refusal)
        return web.json_response(describe(http.match_info["name"]))


async def say_nothing(http: web.Request) -> web.Response:
    """Clients ask, without a key, whether something listens."""
    return web.Response()


def describe(name: str) -> dict[str, Any]:
    """A model, with the fields of both OpenAI's and Anthropic's clients."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "rl_core"}
    begun = "1970-01-01T00:00:00Z"
    return model | {"type": "model", "display_name": name, "created_at": begun}


def reachable(host: str) -> str:
    """By which others reach what listens at `host`."""
    if host != "0.0.0.0":
        return host
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            # UDP sends nothing when it connects. It shows the interface towards other networks.
            probe.connect(ELSEWHERE)
        except OSError:
            return socket.gethostname()
        return probe.getsockname()[0]


async def body_of(http: web.Request, endpoint: Endpoint) -> dict[str, Any]:
    """The request's JSON. Raises Refusal."""
    try:
        async with endpoint.reading:
            body = await read_json(http)
    except HttpError as error:
        raise Refusal(error.message, status=error.status) from None
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    return body


async def refuse(
    http: web.Request, refusal: Refusal, dialect: ModuleType = chat_completions
) -> web.Response:
    """The dialect's error. The connection of a request without a valid key ends."""
    response = web.json_response(dialect.write_error(refusal), status=refusal.status)
    if refusal.status == 401:
        await turn_away(http, response)
    return response


def write_error(status: int, message: str) -> dict[str, Any]:
    return chat_completions.write_error(Refusal(message, status=status))
