"""The HTTP endpoint of a reward model. What is asked for while it computes is its next batch.

POST /classify {"messages": [...] or [[...], ...], "tools": [...]} -> {"data": [{"index": 0, "score": 1.25}], ...}
GET  /health                                                       -> {"status": "ok", "model": "..."}
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_core.config import nearest

TokenIds = Callable[[list, "list | None"], list[int]]  # messages, tools -> tokens; ValueError if they are refused
ScoreIds = Callable[[list[list[int]]], list[float]]
SOCKET_TIMEOUT_S = 60.0  # of a client that neither sends nor reads
SCORE_TIMEOUT_S = 600.0
MAX_WAITING = 4096  # requests; beyond, clients are told to come again
KEYS = ("messages", "tools")


class RequestError(Exception):
    """A request that is answered with this status and text."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    conversations: list[list[int]]
    scores: Future = field(default_factory=Future)


class Batcher:
    """One thread that scores: requests that wait at the same time share a call."""

    def __init__(self, score_ids: ScoreIds):
        self.score_ids, self.jobs = score_ids, queue.SimpleQueue()
        threading.Thread(target=self.work, name="scores", daemon=True).start()

    def ask(self, conversations: list[list[int]]) -> list[float]:
        if self.jobs.qsize() >= MAX_WAITING:
            raise RequestError(503, f"{MAX_WAITING} requests wait already; come again")
        job = Job(conversations=conversations)
        self.jobs.put(job)
        try:
            return job.scores.result(SCORE_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(503, f"not scored within {SCORE_TIMEOUT_S:g} s") from None

    def work(self) -> None:
        while True:
            jobs = [self.jobs.get()]
            with suppress(queue.Empty):
                while True:
                    jobs.append(self.jobs.get_nowait())
            self.score(jobs)
            del jobs

    def score(self, jobs: list[Job]) -> None:
        try:
            scores = iter(self.score_ids([ids for job in jobs for ids in job.conversations]))
            for job in jobs:
                job.scores.set_result([next(scores) for _ in job.conversations])
        except Exception as error:  # the thread lives on; who asked is told
            if len(jobs) == 1:
                jobs[0].scores.set_exception(error)
                return
            for job in jobs:  # so that nobody is refused for what another asked
                self.score([job])


class ScoreServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # episodes end together, and ask together

    def __init__(self, token_ids: TokenIds, score_ids: ScoreIds, name: str, address: tuple[str, int], max_bytes: int):
        self.token_ids, self.name, self.max_bytes = token_ids, name, max_bytes
        super().__init__(address, Handler)
        self.batcher = Batcher(score_ids)

    def classify(self, body: bytes) -> dict[str, Any]:
        """The answer to a request. Raises RequestError if it is a bad one."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, f"not JSON: {error}") from None
        conversations = []
        for place, messages in conversations_of(request):
            try:
                conversations.append(self.token_ids(messages, request.get("tools") or None))
            except ValueError as error:
                raise RequestError(400, f"{place}: {error}") from None
        scores = self.batcher.ask(conversations)
        data = [{"index": i, "score": score} for i, score in enumerate(scores)]
        num_tokens = sum(map(len, conversations))
        return {"object": "list", "model": self.name, "data": data, "usage": {"prompt_tokens": num_tokens}}


def conversations_of(request: Any) -> Iterable[tuple[str, Any]]:
    """(where it stands, a conversation) of each that a request asks about."""
    if not isinstance(request, dict):
        raise RequestError(400, f"must be a JSON object with 'messages', is a {type(request).__name__}")
    unknown = sorted(request.keys() - set(KEYS))
    if unknown:
        raise RequestError(400, f"unknown key {unknown[0]!r}; {nearest(unknown[0], KEYS)}")
    if not isinstance(request.get("tools"), (list, type(None))):
        raise RequestError(400, "'tools' must be a list of OpenAI schemas")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "'messages' must be a conversation (a list of messages), or a list of conversations")
    if isinstance(messages[0], dict):
        return [("messages", messages)]
    return [(f"messages[{i}]", conversation) for i, conversation in enumerate(messages)]


class Handler(BaseHTTPRequestHandler):
    server: ScoreServer
    timeout = SOCKET_TIMEOUT_S

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200, {"status": "ok", "model": self.server.name})
        else:
            self.reply(404, {"error": f"no GET {self.path}; there are POST /classify and GET /health"})

    def do_POST(self) -> None:
        try:
            body = self.read_body()
            if self.path not in ("/classify", "/v1/classify"):
                raise RequestError(404, f"no POST {self.path}; there are POST /classify and GET /health")
            status, answer = 200, self.server.classify(body)
        except RequestError as error:
            status, answer = error.status, {"error": str(error)}
        except OSError:
            return  # the client went away
        except Exception as error:  # one request must not take the server down
            traceback.print_exc()
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        self.reply(status, answer)

    def read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError(411, "needs a Content-Length")
        left, limit = int(length), self.server.max_bytes
        if left > limit:
            # A client that still sends would not see the answer; one that sends without end is not waited for.
            for _ in range(min(left, 8 * limit) >> 16):
                self.rfile.read(1 << 16)
            raise RequestError(413, f"a request of {left} bytes; at most {limit} are read (--max_request_mib)")
        body = self.rfile.read(left)
        if len(body) < left:
            raise RequestError(400, f"the request ends after {len(body)} of {left} bytes")
        return body

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        with suppress(OSError):  # the client went away
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each episode would hide what matters."""


def serve(token_ids: TokenIds, score_ids: ScoreIds, name: str, address: tuple[str, int], max_bytes: int) -> None:
    """Answers until Ctrl-C or SIGTERM. Raises OSError if the address is taken."""
    try:
        server = ScoreServer(token_ids, score_ids, name, address, max_bytes)
    except OSError as error:
        raise OSError(f"cannot listen at {address[0]}:{address[1]}: {error.strerror}; take another --port") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"scores of {name} at http://{address[0]}:{server.server_address[1]}", flush=True)
    with server, suppress(KeyboardInterrupt):
        server.serve_forever()
    print("stopped", file=sys.stderr)
