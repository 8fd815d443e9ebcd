"""Routes of a run that stays open: sessions begin, are rated and end; the endpoint of agents
answers their requests. AReaL 1.0 has the same routes."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from hashlib import sha256

from aiohttp import web

from rl_core.config import AgentsConfig
from rl_core.environments.agents.endpoint import (
    NO_EPISODE,
    Endpoint,
    EndpointServer,
    body_of,
    key_of,
    parsed,
    refuse,
)
from rl_core.environments.agents.requests import Refusal
from rl_core.environments.agents.sessions import OnlineSession, Sessions
from rl_core.errors import nearest
from rl_core.http_guard import is_key
from rl_core.types import JSON, JSONObject

# Fewest characters of a key that a client chooses.
MIN_KEY = 16
MAX_TASK_ID = 200
MAX_BYTES = 1 << 20  # Of a body that is no request to the model.
Answer = Callable[[web.Request], Awaitable[JSONObject]]


def hashed(key: str) -> str:
    return sha256(key.encode(errors="replace")).hexdigest()


class OnlineServer(EndpointServer):
    """The server of a run that stays open."""

    def __init__(self, config: AgentsConfig, port: int, sessions: Sessions, admin_key: str):
        """`config`: with --online.host as its host."""
        super().__init__(config, port)
        self.sessions = sessions
        self.admin = Endpoint(self, "", hashed(admin_key), {}, "the admin")
        self.version = 0  # Of the weights that answer.

    def add_routes(self, router: web.UrlDispatcher) -> None:
        super().add_routes(router)
        router.add_get("/health", self.health)
        router.add_post("/rl/start_session", self.answering(self.start_session))
        router.add_post("/rl/set_reward", self.answering(self.set_reward))
        router.add_post("/rl/end_session", self.answering(self.end_session))

    def answering(self, answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(http: web.Request) -> web.Response:
            try:
                return web.json_response(await answer(http))
            except Refusal as refusal:
                return await refuse(http, refusal)

        return handle

    def endpoint_of(self, request: web.Request) -> Endpoint:
        """See EndpointServer. Keys are known by their hashes."""
        key = hashed(key_of(request))
        session = self.sessions.by_key.get(key)
        if session is not None:
            self.admit(request, session)
            return session
        if key in self.sessions.over:
            raise Refusal(f"{self.sessions.over[key]} is over", status=410, code="session_over")
        if is_key(key, self.admin.api_key):
            text = "this is the admin key; use the api_key that /rl/start_session answers"
            raise Refusal(text, status=401, code="invalid_api_key")
        raise Refusal(NO_EPISODE.replace("episode", "session"), status=401, code="invalid_api_key")

    def session_of(self, http: web.Request) -> OnlineSession:
        session = self.endpoint_of(http)
        assert isinstance(session, OnlineSession)
        return session

    async def health(self, http: web.Request) -> web.Response:
        state = "ok" if self.sessions.gate.is_set() else "learning"
        return web.json_response({"status": state, "version": self.version})

    async def start_session(self, http: web.Request) -> JSONObject:
        if not is_key(hashed(key_of(http)), self.admin.api_key):
            text = "the API key is not the run's admin key"
            raise Refusal(text, status=401, code="invalid_api_key")
        self.admit(http, self.admin)
        body = await fields_of(http, self.admin, "task_id", "api_key")
        task_id = checked_text(body, "task_id", MAX_TASK_ID) or "session"
        key = checked_text(body, "api_key", MAX_TASK_ID) or f"sk-sess-{secrets.token_urlsafe(24)}"
        if len(key) < MIN_KEY:
            raise Refusal(f"api_key must have at least {MIN_KEY} characters; leave it out")
        if is_key(hashed(key), self.admin.api_key):
            raise Refusal("api_key is bound to the admin", status=409, code="key_bound")
        session = self.sessions.start(self, task_id, hashed(key))
        return {"session_id": session.id, "api_key": key}

    async def set_reward(self, http: web.Request) -> JSONObject:
        session = self.session_of(http)
        body = await fields_of(http, session, "reward", "text", "interaction_id")
        session.rate(body.get("reward"), body.get("text"), body.get("interaction_id"))
        return {}

    async def end_session(self, http: web.Request) -> JSONObject:
        session = self.session_of(http)
        session.end((await fields_of(http, session, "info")).get("info"))
        return {}


async def fields_of(http: web.Request, endpoint: Endpoint, *known: str) -> JSONObject:
    """The body's fields; an empty body has none. Raises Refusal for an unknown field."""
    data = await body_of(http, endpoint)
    if len(data) > MAX_BYTES:
        raise Refusal(f"the body has more than {MAX_BYTES:,} bytes", status=413)
    body = parsed(data or b"{}")
    for name in body:
        if name not in known:
            raise Refusal(f"{name[:80]!r} is not a field of {http.path}; {nearest(name, known)}")
    return body


def checked_text(body: JSONObject, name: str, max_chars: int) -> str:
    value: JSON = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > max_chars:
        raise Refusal(f"{name} must be a text of at most {max_chars} characters")
    return value
