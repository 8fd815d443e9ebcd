"""A browser for the tests of the viewer's page: one for each file."""

from __future__ import annotations

import asyncio
import threading

import pytest
from view_parts import CHROMIUM, QUIET, SCREENS, TIMEOUT_MS

from rl_core.tools.viewer.data import runs_in
from rl_core.tools.viewer.server import Viewer


# Playwright has an event loop that runs as long as it is there: tests of other files have their own.
@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        result = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield result
        result.close()


@pytest.fixture
def serve():
    """serve(folder, ...) -> the address of the viewer's server, in a thread."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners = []

    async def start(folders) -> str:
        app = Viewer(runs_in(folders), folders).app({"127.0.0.1"})
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}/"

    yield lambda *folders: asyncio.run_coroutine_threadsafe(start(folders), loop).result()
    for runner in runners:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def page_of(browser):
    """page_of(address, screen) -> a page. At the end no console said anything, and nothing left the
    machine."""
    contexts, faults = [], []

    def make(address: str, screen: str = "light", **more):
        scheme, width, height = SCREENS[screen]
        contexts.append(
            browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": height}, **more
            )
        )
        page = contexts[-1].new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: is_local(request.url) or faults.append(request.url))
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(address)
        return page

    yield make
    for context in contexts:
        context.close()
    assert not faults


def is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file:///", "data:"))
