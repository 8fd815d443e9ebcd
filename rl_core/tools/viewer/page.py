"""The page: one HTML document without anything to fetch but the runs' data, which a report has in
itself."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import fields
from functools import lru_cache
from hashlib import sha256
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.run.display.metric_table import Row, describe
from rl_core.tools.viewer.data import PANELS, Entry, RunFolder, panels_of

if TYPE_CHECKING:
    from rl_core.types import JSONObject


ASSETS = Path(__file__).parent / "assets"
# One script, in this order.
SCRIPTS = ("runs.js", "curves.js", "text.js", "talks.js", "tokens.js", "tasks.js", "page.js")
LIBRARIES = ("uPlot.iife.min.js", "marked.umd.js", "prism.min.js", "temml.min.js", "diff.min.js")
FIELDS = tuple(field.name for field in fields(Entry))[3:]  # all but the place in the file
values_of = attrgetter(*FIELDS)


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def make_page(data: JSONObject) -> str:
    """`data`: the runs by name and configuration; in a report all that the page would ask for."""
    libraries = "\n".join(asset(f"vendor/{name}") for name in LIBRARIES)
    script = "\n".join(map(asset, SCRIPTS))
    names = [run["name"] for run in data["runs"]] or ["no run"]
    title = ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"
    hashes = (b64encode(sha256(text.encode()).digest()).decode() for text in (libraries, script))
    parts = {
        "hashes": " ".join(f"'sha256-{value}'" for value in hashes),
        "title": escape(f"{title} - rl_core"),
        "style": asset("vendor/uPlot.min.css") + asset("view.css"),
        # Within a script element only `<` could end the data.
        "data": to_json(data | {"fields": FIELDS, "panels": [*PANELS]}).replace("<", "\\u003c"),
        "libraries": libraries,
        "script": script,
    }
    first, *rest = asset("view.html").split("{{")
    return first + "".join(
        parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest)
    )


def to_json(value: object) -> str:
    """For a browser, which refuses NaN and infinity: they become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None))


def outline(run: RunFolder) -> JSONObject:
    return {"name": run.name, "config": run.config, "facts": run.facts}


def summary(run: RunFolder, first: int, every: int = 1) -> JSONObject:
    """Metrics from row `first` on, every `every`-th of the steps', as a table of `names` and
    `rows`."""
    rows = [
        row
        for n, row in enumerate(run.rows[first:])
        if n % every == 0 or any(k.startswith("eval/") for k in row)
    ]
    names = names_of(rows)
    every_name = frozenset(names_of(run.rows))
    return {
        "revision": run.revision,
        "num_rows": len(run.rows),
        "names": names,
        "rows": [[row["step"], *(rounded(row.get(name)) for name in names)] for row in rows],
        "panels": panels_of(every_name),
        "about": {name: about(row) for name, row in described(every_name).items()},
        "units": {name: row.unit for name, row in described(every_name).items()},
        "warnings": run.warnings,
        "facts": run.facts,
        "notes": run.notes,
        "sessions": run.sessions,
    }


def names_of(rows: list[JSONObject]) -> list[str]:
    """Metrics that have a value in one of the rows."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    return sorted(names - {"step"})


def rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.5g}")


@lru_cache(maxsize=8)
def described(names: frozenset[str]) -> dict[str, Row]:
    """Metric -> its row in the table of metrics."""
    return {name: row for name in names if (row := describe(name))}


def about(row: Row) -> str:
    """Its meaning, unit and healthy values."""
    return f"{row.meaning} ({row.unit})" + (f"; healthy: {row.healthy}" if row.healthy else "")
