"""Who did what when in one step, in Chrome's trace format (ui.perfetto.dev and chrome://tracing show it)."""

from __future__ import annotations

import itertools
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUMBERS = itertools.count()
recorded: list[dict[str, Any]] | None = None  # of the step under way; None while nobody asks


def start() -> None:
    global recorded
    recorded = []


def stop() -> list[dict[str, Any]]:
    """What this process did since start()."""
    global recorded
    events, recorded = recorded or [], None
    return events


@contextmanager
def span(track: str, name: str):
    """Spans of one track may overlap."""
    if recorded is None:
        yield
        return
    event = {"cat": track, "name": name, "id": next(NUMBERS), "tid": 0}
    recorded.append(event | {"ph": "b", "ts": time.time() * 1e6})
    try:
        yield
    finally:
        if recorded is not None:
            recorded.append(event | {"ph": "e", "ts": time.time() * 1e6})


def write(path: Path, by_rank: dict[str, list[dict[str, Any]]]) -> None:
    """One process of the trace for each rank, by its name."""
    events = []
    for pid, (name, own) in enumerate(by_rank.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events += [event | {"pid": pid} for event in own]
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    os.replace(beside, path)
