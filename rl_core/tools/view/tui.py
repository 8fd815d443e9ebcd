"""rl-core view --tui: curves, trajectories, conversations and coloured tokens in a terminal, for
machines without a browser."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from typing import Any

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import (
    DataTable,
    Footer,
    Input,
    Label,
    Sparkline,
    Static,
    TabbedContent,
    TabPane,
)
from textual.worker import get_current_worker

from rl_core.rules import printable
from rl_core.tools.view.data import Entry, RunFolder, axis_range, matching, panels_of, texts_of
from rl_core.tools.view.tokens import shown_episode

KEYS = (
    "step",
    "kind",
    "env",
    "task",
    "group",
    "actor",
    "status",
    "seat",
    "index",
    "reason",
    "reward",
)
HINT = (
    f"{':... '.join(KEYS[:3])}:... reward:0..0.5 (and {', '.join(KEYS[3:-1])}); other words are "
    "searched for"
)
COLUMNS = ("step", "kind", "env", "task", "actor", "reward", "status", "tokens", "last reply")
ROLES = {"system": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}
MAX_ROWS = 1000  # of the table; a filter finds the others
REFRESH_S = 2.0
WHILE_THERE = suppress(NoMatches)  # the widgets: when the page ends they go before its workers
SLICE_S = 0.5  # of reading, before what was read is shown

Found = list[tuple[RunFolder, Entry]]


def safe(text: Any) -> str:
    """What a model says may move no cursor."""
    return printable(str(text), also="\n")


def chosen(
    runs: list[RunFolder], filter: str, is_over: Callable[[], bool] = lambda: False
) -> Found:
    """The trajectories of `step:40 actor:bob reward:0..0.5 some words`, or some of them if
    is_over() says so meanwhile. Raises ValueError for a value of the wrong type."""
    wanted: dict[str, Any] = {}
    words = []
    for word in filter.split():
        key, colon, value = word.partition(":")
        if not colon or key not in KEYS:
            words.append(word)
        elif key == "reward":
            low, _, high = value.partition("..")
            wanted["rewards"] = float(low or -math.inf), float(high or math.inf)
        else:
            wanted[key] = int(value) if key in ("step", "index") else value
    found = []
    for run in runs:
        own = takewhile(lambda e: not is_over(), matching(run.entries, **wanted))
        found += [(run, e) for e in (run.search(" ".join(words), own) if words else own)]
    return sorted(found, key=lambda pair: -pair[1].step)


class Curves(VerticalScroll):
    """A line for each curve of each run; a run's warnings first."""

    async def show(self, runs: list[RunFolder]) -> None:
        curves = {run.name: run.curves() for run in runs}
        found: list[Label | Sparkline] = []
        for run in runs:
            for line in run.warnings:
                found.append(
                    Label(Text(f"! {run.name} step {line['step']}: {line['text']}", style="yellow"))
                )
        for title, members in panels_of({name for own in curves.values() for name in own}).items():
            found.append(Label(Text(title, style="bold")))
            for curve, metric in members.items():
                for name, own in curves.items():
                    if values := [value for _, value in own.get(metric, ())]:
                        of = f"{name}: {curve}" if len(runs) > 1 else curve
                        ends = f"{values[0]:.4g} to {values[-1]:.4g}"
                        found.append(
                            Label(
                                f"  {safe(of)}  {ends}  ({min(values):.4g} .. {max(values):.4g})",
                                markup=False,
                            )
                        )
                        # A sparkline fills its height with the smallest change.
                        if axis_range(values):
                            values = [values[-1]] * len(values)
                        found.append(
                            Sparkline(
                                values,
                                summary_function=lambda part: sum(part) / len(part),
                                name=metric,
                            )
                        )
        await self.remove_children()
        await self.mount_all(found)


class Conversation(Screen):
    """One trajectory: its messages, or its tokens coloured by a value."""

    BINDINGS = (
        ("escape", "app.pop_screen", "back"),
        ("c", "colour(1)", "tokens: next value"),
        ("m", "colour(0)", "messages"),
    )

    def __init__(self, run: RunFolder, entry: Entry):
        super().__init__()
        self.row, self.entry = shown_episode(run, entry), entry
        self.names = [
            "",
            *dict.fromkeys(name for turn in self.row["turns"] for name in turn["values"]),
        ]
        self.number = 0  # of the name by which it is coloured; 0: messages

    def compose(self) -> ComposeResult:
        yield Label(Text(self.headline(), style="bold"))
        with VerticalScroll():
            yield Static(self.messages(), id="text")
        yield Footer()

    def headline(self) -> str:
        e, row = self.entry, self.row
        parts = ", ".join(f"{name} {value:.4g}" for name, value in row["reward_parts"].items())
        reward = "no reward" if e.reward is None else f"reward {e.reward:.4g} ({parts})"
        return safe(
            f"step {e.step}  {e.task}  {e.group} #{e.index}  {e.actor}  {reward}  {e.status} "
            f"{e.error}"
        )

    def messages(self) -> Text:
        text = Text()
        for message in self.row["messages"]:
            text.append(f"[{message['role']}]\n", ROLES.get(message["role"], "bold"))
            text.append(safe("\n".join(texts_of(message))) + "\n\n")
        return text

    def action_colour(self, by: int) -> None:
        self.number = by and (self.number % (len(self.names) - 1) + 1 if len(self.names) > 1 else 0)
        self.query_one("#text", Static).update(
            self.tokens(self.names[self.number]) if self.number else self.messages()
        )

    def tokens(self, name: str) -> Text:
        """Sampled tokens with the value as background, green above and red below the middle; the
        others dim."""
        turns = self.row["turns"]
        known = [v for turn in turns for v in turn["values"].get(name, ()) if v is not None]
        middle = {"ratio": 1.0, "version": min(known, default=0) - 1}.get(name, 0.0)
        most = max((abs(value - middle) for value in known), default=0.0) or 1.0
        text = Text(
            f"{name} from {min(known, default=0):.4g} to {max(known, default=0):.4g}, {middle:g} "
            "is black\n\n"
        )
        for turn in turns:
            num = turn["num_new"]
            shown = [
                safe(part) for part in turn["texts"] or (f"{number} " for number in turn["ids"])
            ]
            text.append("".join(shown[:num]), "dim")
            for part, value in zip(
                shown[num:], turn["values"].get(name) or [None] * len(shown[num:]), strict=True
            ):
                light = 0 if value is None else round(40 + 120 * abs(value - middle) / most)
                text.append(
                    part,
                    f"white on rgb({light * (value < middle)},{light * (value > middle)},0)"
                    if light
                    else "",
                )
            text.append("\n")
        return text


class Viewer(App):
    CSS = (
        "TabPane, DataTable { height: 1fr; } Sparkline { height: 1; margin: 0 2; } #text { "
        "padding: 0 1; }"
    )
    BINDINGS = (("slash", "filter", "filter"), ("q", "quit", "quit"))

    def __init__(self, runs: list[RunFolder]):
        super().__init__()
        # How long the runs were when curves and table were made.
        self.runs, self.seen, self.listed = runs, None, None
        self.found: Found = []
        self.title = ", ".join(run.name for run in runs)

    def compose(self) -> ComposeResult:
        with TabbedContent():
            with TabPane("Curves", id="curves"):
                yield Curves()
            with TabPane("Conversations", id="conversations"):
                yield Input(placeholder=HINT)
                yield Label(id="count")
                yield DataTable(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*["run"] * (len(self.runs) > 1), *COLUMNS)
        self.look()
        self.set_interval(REFRESH_S, lambda: self.is_busy("look") or self.look())

    def is_busy(self, group: str) -> bool:
        return any(worker.group == group and not worker.is_finished for worker in self.workers)

    @work(group="look")
    async def look(self) -> None:
        """Shows what the runs wrote since. Files are read in a thread."""
        for run in self.runs:
            try:
                await asyncio.to_thread(run.refresh, SLICE_S)
            except (OSError, ValueError) as error:  # the folder is gone; the other runs go on
                self.tell(error)
        state = [(run.revision, len(run.rows), len(run.entries)) for run in self.runs]
        with WHILE_THERE:
            if state != self.seen:
                self.seen = state
                await self.query_one(Curves).show(self.runs)
            # A search is not begun again until it is done.
            if state != self.listed and not self.is_busy("find"):
                self.listed = state
                self.find(self.query_one(Input).value)

    def tell(self, error: Exception) -> None:
        with WHILE_THERE:
            self.query_one("#count").update(Text(safe(error), style="red"))

    @work(group="find", thread=True, exclusive=True)
    def find(self, filter: str) -> None:
        """Lists what is found. Words are searched for in all files, which takes seconds in a large
        run."""
        worker = get_current_worker()
        try:
            found = chosen(self.runs, filter, lambda: worker.is_cancelled)
        except (OSError, ValueError) as error:
            self.call_from_thread(self.tell, error)
        else:
            with WHILE_THERE:
                if not worker.is_cancelled:
                    self.call_from_thread(self.list_found, found)

    def list_found(self, found: Found) -> None:
        table, count, place = (
            self.query_one(DataTable),
            self.query_one("#count"),
            self.query_one(DataTable).cursor_row,
        )
        self.found = found
        table.clear()
        for run, e in self.found[:MAX_ROWS]:
            reward = "-" if e.reward is None else f"{e.reward:.4g}"
            cells = (
                e.step,
                e.kind,
                e.env,
                e.task,
                e.actor,
                reward,
                e.status,
                e.num_tokens,
                e.preview,
            )
            table.add_row(
                *(Text(safe(cell)) for cell in (*[run.name] * (len(self.runs) > 1), *cells))
            )
        table.move_cursor(row=place)
        more = f", of which the newest {MAX_ROWS} are listed" if len(self.found) > MAX_ROWS else ""
        count.update(f"{len(self.found)} trajectories{more}; Enter opens one")

    def action_filter(self) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.query_one(TabbedContent).active = "conversations"
        self.query_one(Input).focus()

    def on_input_submitted(self) -> None:
        self.query_one("#count").update("searching")
        self.find(self.query_one(Input).value)
        self.query_one(DataTable).focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        try:
            self.push_screen(Conversation(*self.found[event.cursor_row]))
        except (OSError, ValueError) as error:  # the file is gone, or another since
            self.tell(error)
