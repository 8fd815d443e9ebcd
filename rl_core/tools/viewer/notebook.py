"""view() for notebooks: the viewer's page below a cell, from a server in this process."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rl_core.http_guard import LOOPBACK
from rl_core.tools.viewer.data import runs_in
from rl_core.tools.viewer.server import start_server


@dataclass(kw_only=True, slots=True, frozen=True, repr=False)
class ShownPage:
    """A page of the viewer; in a notebook the last value of a cell shows it."""

    url: str
    height: int  # Pixels.

    def __repr__(self) -> str:
        return self.url

    def _repr_html_(self) -> str:
        url = escape(self.url)
        frame = (
            f'<iframe src="{url}" width="100%" height="{self.height}" style="border:0"></iframe>'
        )
        return f'{frame}<a href="{url}" target="_blank">{url}</a>'


def view(run: str | Path, *more: str | Path, height: int = 800) -> ShownPage:
    """The page of runs, or of folders of runs, as `rl-core view` shows it, until this process ends.
    Raises ValueError for a folder without a run."""
    folders = [Path(each) for each in (run, *more)]
    loop = asyncio.new_event_loop()
    server = start_server(runs_in(folders), LOOPBACK, 0, folders)
    threading.Thread(target=loop.run_forever, daemon=True, name="rl_core view").start()
    port = asyncio.run_coroutine_threadsafe(server, loop).result()
    return ShownPage(url=f"http://{LOOPBACK}:{port}/", height=height)
