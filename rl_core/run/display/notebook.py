"""A live chart instead of step lines, if the run's process is the kernel of a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import import_module

from rl_core.plugin import RunState
from rl_core.run.display.terminal import Terminal, values_of
from rl_core.run.display.warnings import read_lines
from rl_core.types import JSONObject

MOST_POINTS = 300  # Points of a curve; longer curves are thinned.
WIDTH, HEIGHT = 200, 50


class Chart(Terminal):
    """Terminal with one display, which each step updates: its line and a curve for each number of
    the line."""

    def __init__(self, trainer: RunState):
        super().__init__(trainer)
        self.curves: dict[str, list[tuple[int, float]]] = {}  # (step, value)
        self.handle = None  # IPython's DisplayHandle.

    def load(self, state: JSONObject) -> None:
        super().load(state)
        for row in read_lines(self.trainer.out / "metrics.jsonl"):  # Of steps before --resume.
            self.add(row["step"], {name: v for name, v in row.items() if v is not None})

    async def after_step(self, step: int, metrics: dict[str, float]) -> None:
        self.add(step, metrics)
        await super().after_step(step, metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        actors = self.trainer.config.trained
        for actor in actors:
            for label, value in values_of(metrics, actor, self.trainer.config.is_rl).items():
                if label != "failed":
                    title = f"{actor} {label}" if len(actors) > 1 else label
                    self.curves.setdefault(title, []).append((step, value))

    def show(self, line: str) -> None:
        charts = "".join(curve(title, points) for title, points in self.curves.items())
        row = f'<div style="display:flex;flex-wrap:wrap;gap:1em">{charts}</div>'
        content = {"text/plain": line, "text/html": f"<pre>{escape(line)}</pre>{row}"}
        if self.handle is None:
            display = import_module("IPython.display").display
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


def curve(title: str, points: Sequence[tuple[int, float]]) -> str:
    """An SVG with a line through the points (step, value), and the range of the values."""
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    across, up = WIDTH / ((steps[-1] - steps[0]) or 1), HEIGHT / ((high - low) or 1)
    line = " ".join(
        f"{(step - steps[0]) * across:.1f},{(high - value) * up:.1f}"
        for step, value in points[:: math.ceil(len(points) / MOST_POINTS)]
    )
    return (
        f"<div>{escape(title)} {values[-1]:.4g}<br>"
        f'<svg width="{WIDTH}" height="{HEIGHT + 4}" viewBox="0 -2 {WIDTH} {HEIGHT + 4}">'
        f'<polyline points="{line}" fill="none" stroke="#4a7fd4" stroke-width="1.5"/></svg><br>'
        f"<small>{low:.4g} to {high:.4g}</small></div>"
    )
