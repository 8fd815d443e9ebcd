"""The page's server on this machine. It answers from the runs that were named; no path comes
from a request."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from functools import partial

from aiohttp import web

from rl_core.http_guard import MAX_STRANGERS, HttpServer
from rl_core.view.data import UNREADABLE, RunFolder
from rl_core.view.page import make_page, outline, summary, to_json, values_of
from rl_core.view.tokens import shown_episode

SLICE_S = 0.8  # Seconds of reading or searching, in which others wait.
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:@/\[\]]+)(?::\d+)?")  # The port is optional.
LOCAL = {"localhost", "127.0.0.1", "::1"}


class Viewer:
    """Requests name a run by its number on the command line, and a trajectory by its number in the
    index."""

    def __init__(self, runs: list[RunFolder]):
        self.runs, self.locks = runs, [threading.Lock() for _ in runs]

    async def answer(self, work, request: web.Request) -> web.Response:
        def locked():
            number = int(request.match_info["run"])
            with self.locks[number]:
                return to_json(work(self.runs[number], request))

        return await in_thread(locked)

    def app(self, hosts: set[str]) -> web.Application:
        app = web.Application(middlewares=[host_check(hosts)])
        html = make_page({"runs": [outline(run) for run in self.runs]})
        app.router.add_get("/", lambda request: page_response(html))
        for name, work in (("new", news), ("episode", episode), ("search", search)):
            app.router.add_get(rf"/api/{{run:\d+}}/{name}", partial(self.answer, work))
        return app


async def in_thread(work: Callable[[], str]) -> web.Response:
    """The JSON that `work` returns in a thread, where files are read."""
    try:
        return web.json_response(text=await asyncio.to_thread(work))
    except (OSError, *UNREADABLE) as error:
        return web.json_response({"error": str(error)}, status=404)


async def page_response(html: str) -> web.Response:
    return web.Response(text=html, content_type="text/html")


def host_check(hosts: set[str]):
    @web.middleware
    async def check(request: web.Request, handler) -> web.StreamResponse:
        # A page elsewhere whose name is made to resolve to this machine would have another Host.
        match = HOST.fullmatch(request.headers.get("Host", ""))
        if hosts and (match is None or match[1].strip("[]").lower() not in hosts):
            raise web.HTTPForbidden(text="unknown host")
        response = await handler(request)
        response.headers["Cache-Control"] = "no-store"
        return response

    return check


def news(run: RunFolder, request: web.Request) -> dict:
    """Data that the page lacks: lines of metrics from `rows` on, trajectories from `entries` on;
    all of them, if the page has another revision."""
    revision = int(request.query["revision"])
    lost = ""
    try:
        # Alone: the first curves, however long a disk takes for the rollouts.
        if "metrics" in request.query:
            run.read_metrics()
            is_complete = False
        else:
            # The first at once.
            is_complete = run.refresh(SLICE_S if int(request.query["entries"]) else SLICE_S / 8)
    except (OSError, ValueError) as error:  # Data that was read stays.
        is_complete, lost = True, str(error)
    is_same = revision == run.revision
    rows, entries = (int(request.query[name]) if is_same else 0 for name in ("rows", "entries"))
    return summary(run, rows) | {
        "entries": [values_of(e) for e in run.entries[entries:]],
        "is_complete": is_complete,
        "is_live": run.is_live,
        "lost": lost or run.note,
    }


def check_revision(run: RunFolder, request: web.Request) -> None:
    if int(request.query["revision"]) != run.revision:
        raise ValueError("the run was resumed; its conversations are read again")


def episode(run: RunFolder, request: web.Request) -> dict:
    check_revision(run, request)
    return shown_episode(run, run.entries[int(request.query["number"])])


def search(run: RunFolder, request: web.Request) -> dict:
    """Numbers of trajectories in which the text stands, from `first` on, as far as a moment
    suffices."""
    check_revision(run, request)
    deadline, number, hits = time.monotonic() + SLICE_S, int(request.query["first"]), []
    while number < len(run.entries):
        block = run.entries[number : number + 64]
        places = {id(e): n for n, e in enumerate(block, number)}
        hits += [places[id(e)] for e in run.search(request.query["q"], block)]
        number += len(block)
        if time.monotonic() > deadline:
            break
    return {"found": hits, "next": number if number < len(run.entries) else None}


async def serve(runs: list[RunFolder], host: str, port: int) -> None:
    """Until Ctrl-C. A loopback address answers only requests that name it."""
    hosts = LOCAL if host in LOCAL else set()
    app = Viewer(runs).app(hosts)
    server = HttpServer(app, has_keys=False, max_strangers=MAX_STRANGERS)
    try:
        port = await server.listen(host, port)
    except OSError as error:
        raise ValueError(f"--port={port}: {error.strerror}; --port 0 takes a free one") from None
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/    Ctrl-C ends it", flush=True)
    await asyncio.Event().wait()
