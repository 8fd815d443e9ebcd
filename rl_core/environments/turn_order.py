"""Turn orders in a short notation: "bob -> alice -> (bob/alice)*5".

schedule := piece ("->" piece)*
piece    := item [ "*" INT | "*" "(" INT ".." INT ")" ]          # inclusive; 0 means no turn
item     := NAME | "*" | "(" NAME ("/" NAME)+ ")" | "(" schedule ")"

`*` is any actor. A choice is drawn anew for every repetition. Names are case-sensitive; spaces are
ignored.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rl_core.data.task_rows import shorten
from rl_core.errors import nearest
from rl_core.sampling.episode import check_name, is_list
from rl_core.sampling.hooks import Hook
from rl_core.types import Task

MAX_TURNS = 10_000  # Most turns of one episode.
TOKEN = re.compile(r"->|\.\.|\d+|[^\W\d]\w*(?:-\w+)*|\S")
NAME = re.compile(r"[^\W\d]")


def make_turns(
    turns: str | Sequence[str] | Callable, path: str, hooks: dict[str, Hook]
) -> Schedule | TurnsFunction:
    """Compiles an environment file's `turns`. Raises ValueError for a text that does not parse."""
    if callable(turns):
        return TurnsFunction(hooks["turns"])
    return Schedule(turns if isinstance(turns, str) else " -> ".join(turns), path)


class Schedule:
    """`turns` as a text."""

    def __init__(self, text: str, path: str):
        self.text = text
        self.path = path
        self.longest = num_turns(self.parse())

    def parse(self, names: Sequence[str] = ()) -> tuple[ScheduleItem, ...]:
        try:
            return parse_schedule(self.text, sorted(names))
        except ValueError as error:
            raise ValueError(f"{self.path}: turns: {error}") from None

    def speakers(self, names: Sequence[str]) -> list[str]:
        return speakers_of(self.parse(names))

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> list[str]:
        return draw_turns(self.parse(names), seed)


class TurnsFunction:
    """`turns` as a function of the file."""

    text = ""
    longest = 8

    def __init__(self, hook: Hook):
        self.hook = hook

    def speakers(self, names: Sequence[str]) -> None:
        """None, because only the function decides."""

    async def draw(self, task: Task, names: Sequence[str], seed: int) -> list[str]:
        arguments = {"messages": task.messages, "prompt": task.messages, "task": task}
        order = await self.hook(task, arguments | {"actors": list(names)})
        if not is_list(order, str):
            raise ValueError(
                f"{self.hook.path}: turns() gave {shorten(order)}; it must yield names, or return "
                "a list of names"
            )
        for name in order:
            check_name(self.hook.path, name, names, f"turns() for task {task.id}")
        return order


@dataclass(kw_only=True, slots=True, frozen=True)
class ScheduleItem:
    """One of `names`, or all `pieces` in order, repeated `low` to `high` times."""

    names: tuple[str, ...] = ()
    pieces: tuple[ScheduleItem, ...] = ()
    low: int = 1
    high: int = 1


def parse_schedule(text: str, actors: Sequence[str] = ()) -> tuple[ScheduleItem, ...]:
    """The pieces of a schedule. Raises ValueError with a mark at the error if the text does not
    parse, names an actor that is not one of `actors`, has no turn, or may last longer than
    MAX_TURNS. Without `actors` any name is allowed, and `*` stays."""
    reader = ScheduleParser(text, actors)
    tree = reader.schedule()
    if reader.token:
        reader.refuse("expected '->' or the end")
    longest = num_turns(tree)
    if not 1 <= longest <= MAX_TURNS:
        raise ValueError(f"{text!r} lasts at most {longest} turns; it must be 1 to {MAX_TURNS}")
    return tree


def draw_turns(tree: Sequence[ScheduleItem], seed: int) -> list[str]:
    """Names in the order in which they speak; the same seed gives the same order."""
    return draw(tree, random.Random(seed))


def draw(tree: Sequence[ScheduleItem], rng: random.Random) -> list[str]:
    order = []
    for piece in tree:
        for _ in range(rng.randint(piece.low, piece.high)):
            order += [rng.choice(piece.names)] if piece.names else draw(piece.pieces, rng)
    return order


def num_turns(tree: Sequence[ScheduleItem]) -> int:
    """Turns of the longest order."""
    return sum(piece.high * (num_turns(piece.pieces) if piece.pieces else 1) for piece in tree)


def speakers_of(tree: Sequence[ScheduleItem]) -> list[str]:
    """Names that an order may have, as ordered in the text."""
    names = []
    for piece in tree:
        if piece.high:
            names += [*piece.names, *speakers_of(piece.pieces)]
    return list(dict.fromkeys(names))


class ScheduleParser:
    """A recursive-descent parser of schedules."""

    def __init__(self, text: str, actors: Sequence[str]):
        self.text, self.actors = text, tuple(actors)
        end = ("", len(text))
        self.tokens = [*((match[0], match.start()) for match in TOKEN.finditer(text)), end, end]
        self.index = 0

    @property
    def token(self) -> str:
        """The current token; "" at the end."""
        return self.tokens[self.index][0]

    def accept(self, token: str) -> bool:
        """True if this is the current token; then moves on."""
        is_current = self.token == token
        self.index += is_current
        return is_current

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.refuse(f"expected {token!r}")

    def refuse(self, why: str) -> NoReturn:
        start = self.tokens[self.index][1]
        shown = re.sub(r"\s", " ", self.text)
        # Errors are printed as one line, in which a caret below the text would be lost.
        raise ValueError(f"{why}; at >>> in {shown[:start]}>>>{shown[start:]}")

    def schedule(self) -> tuple[ScheduleItem, ...]:
        pieces = [self.piece()]
        while self.accept("->"):
            pieces.append(self.piece())
        return tuple(pieces)

    def piece(self) -> ScheduleItem:
        names, pieces = self.item()
        low, high = self.times() if self.accept("*") else (1, 1)
        if pieces and not num_turns(pieces):
            low = high = 0  # Repeating no turn gives no turn.
        return ScheduleItem(names=names, pieces=pieces, low=low, high=high)

    def item(self) -> tuple[tuple[str, ...], tuple[ScheduleItem, ...]]:
        if self.accept("*"):
            return self.actors or ("*",), ()
        if not self.accept("("):
            return (self.name(),), ()
        names, pieces = [], ()
        if self.tokens[self.index + 1][0] == "/":
            names = [self.name()]
            while self.accept("/"):
                names.append(self.name())
        else:
            pieces = self.schedule()
        self.expect(")")
        return tuple(names), pieces

    def name(self) -> str:
        if not NAME.match(self.token):
            self.refuse("expected an actor's name, '*' or '('")
        if self.actors and self.token not in self.actors:
            near = nearest(self.token, sorted(self.actors))
            more = f"--actors.{self.token}.model PATH adds one"
            self.refuse(f"{self.token!r} is not an actor; {near} ({more})")
        self.index += 1
        return self.tokens[self.index - 1][0]

    def times(self) -> tuple[int, int]:
        if not self.accept("("):
            number = self.number()
            return number, number
        low = self.number()
        self.expect("..")
        if self.token.isdecimal() and int(self.token) < low:
            self.refuse(f"expected at least {low}")
        high = self.number()
        self.expect(")")
        return low, high

    def number(self) -> int:
        if not self.token.isdecimal() or len(self.token) > 5:
            self.refuse(f"expected a number of repetitions, up to {MAX_TURNS}")
        self.index += 1
        return int(self.tokens[self.index - 1][0])
