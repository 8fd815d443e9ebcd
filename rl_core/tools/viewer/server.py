"""The page's server on this machine. It answers from the runs that were named; no path comes
from a request."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from aiohttp import web

from rl_core.http_guard import MAX_STRANGERS, HttpServer
from rl_core.tools.viewer.data import UNREADABLE, RunFolder, inner_runs, is_run
from rl_core.tools.viewer.page import make_page, outline, summary, to_json, values_of
from rl_core.tools.viewer.tokens import shown_episode

SLICE_S = 0.8  # Seconds of reading or searching, in which others wait.
HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:@/\[\]]+)(?::\d+)?")  # The port is optional.
LOCAL = {"localhost", "127.0.0.1", "::1"}


class Viewer:
    """Requests name a run by its number, and a trajectory by its number in the index. A page that
    is loaded again shows the runs that have been started since in `folders`."""

    def __init__(self, runs: list[RunFolder], folders: Iterable[Path] = ()):
        self.runs, self.folders = runs, list(folders)
        self.locks = [threading.Lock() for _ in runs]

    def find_new(self) -> None:
        known = {run.path for run in self.runs}
        for folder in self.folders:
            for path in inner_runs(folder):
                if path not in known:
                    self.locks.append(threading.Lock())
                    self.runs.append(RunFolder(path))

    def page(self) -> str:
        self.find_new()
        is_folder = any(not is_run(folder) for folder in self.folders)
        return make_page({"runs": [outline(run) for run in self.runs], "is_folder": is_folder})

    def facts(self) -> str:
        return to_json([run.facts for run in self.runs])

    async def answer(self, work, request: web.Request) -> web.Response:
        def locked():
            number = int(request.match_info["run"])
            with self.locks[number]:
                return to_json(work(self.runs[number], request))

        return await in_thread(locked)

    def app(self, hosts: set[str]) -> web.Application:
        app = web.Application(middlewares=[host_check(hosts)])

        async def page(request: web.Request) -> web.Response:
            html = await asyncio.to_thread(self.page)
            return web.Response(text=html, content_type="text/html")

        app.router.add_get("/", page)
        app.router.add_get("/api/facts", lambda request: in_thread(self.facts))
        if hosts:  # Only this machine writes.
            app.router.add_post(r"/api/{run:\d+}/note", partial(self.answer, take_note))
        for name, work in (("new", news), ("episode", episode), ("search", search)):
            app.router.add_get(rf"/api/{{run:\d+}}/{name}", partial(self.answer, work))
        return app


async def in_thread(work: Callable[[], str]) -> web.Response:
    """The JSON that `work` returns in a thread, where files are read."""
    try:
        return web.json_response(text=await asyncio.to_thread(work))
    except (OSError, *UNREADABLE) as error:
        return web.json_response({"error": str(error)}, status=404)


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


def take_note(run: RunFolder, request: web.Request) -> dict:
    """Stars a conversation or writes a note about it. Pages of other sites cannot send the header
    without the server's consent."""
    if "X-Rl-Core" not in request.headers:
        raise ValueError("the header X-Rl-Core is missing")
    query = request.query
    run.add_note(query["key"], query["star"] == "true", query["text"])
    return run.notes


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
        numbers = {id(e): n for n, e in enumerate(block, number)}
        hits += [numbers[id(e)] for e in run.search(request.query["q"], block)]
        number += len(block)
        if time.monotonic() > deadline:
            break
    return {"found": hits, "next": number if number < len(run.entries) else None}


async def start_server(
    runs: list[RunFolder], host: str, port: int, folders: Iterable[Path] = ()
) -> int:
    """The port. A loopback address answers only requests that name it."""
    hosts = LOCAL if host in LOCAL else set()
    app = Viewer(runs, folders).app(hosts)
    server = HttpServer(app, has_keys=False, max_strangers=MAX_STRANGERS)
    try:
        return await server.listen(host, port)
    except OSError as error:
        raise ValueError(f"--port={port}: {error.strerror}; --port 0 takes a free one") from None


async def serve(runs: list[RunFolder], host: str, port: int, folders: Iterable[Path] = ()) -> None:
    """Until Ctrl-C."""
    port = await start_server(runs, host, port, folders)
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/    Ctrl-C ends it", flush=True)
    await asyncio.Event().wait()
