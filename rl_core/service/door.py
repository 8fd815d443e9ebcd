"""Who may hold a connection of the HTTP port. One that has not shown the token is a stranger's: it
has seconds to do so, there are few of them, and what is refused is told once a minute."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

FIRST_S = 10.0  # until a connection has shown the token
MAX_STRANGERS = 256
MAX_OPEN_FILES = 1 << 16
TOLD_S = 60.0


class Refusals:
    """Tells on stderr what was refused: of each kind one line a minute at most, with how often it
    happened."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.told_s = {}
        self.num_untold = Counter()

    def tell(self, kind: str) -> None:
        self.num_untold[kind] += 1
        now_s = self.clock()
        if now_s - self.told_s.get(kind, -math.inf) < TOLD_S:
            return
        self.told_s[kind] = now_s
        times = self.num_untold.pop(kind)
        more = f" ({times} times)" if times > 1 else ""
        print(f"HTTP: refused {kind}{more}", file=sys.stderr, flush=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """Of aiohttp's log: its tracebacks of what strangers send are one kind."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            self.tell("what is no HTTP")
            return False
        return True

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Of the event loop: it has a traceback for each connection that it has no file for."""
        if context["message"].startswith("socket.accept()"):
            self.tell("connections: this process has no open files left (ulimit -n)")
        else:
            loop.default_exception_handler(context)


class Door:
    """Ends connections that do not show the token in time, and the oldest of them where there are
    too many."""

    def __init__(self, refusals: Refusals):
        self.refusals = refusals
        self.most = min(MAX_STRANGERS, raise_open_files() // 4)
        self.strangers: dict[Visitor, asyncio.TimerHandle] = {}

    def meet(self, visitor: Visitor) -> None:
        if len(self.strangers) >= self.most:
            self.end(
                next(iter(self.strangers)),
                f"connections beside {self.most} others that have not shown the token",
            )
        late = f"connections that had not shown the token after {FIRST_S:g} s"
        timer = asyncio.get_running_loop().call_later(FIRST_S, self.end, visitor, late)
        self.strangers[visitor] = timer

    def admit(self, visitor: Visitor) -> None:
        """It has shown the token, or is gone."""
        timer = self.strangers.pop(visitor, None)
        if timer is not None:
            timer.cancel()

    def end(self, visitor: Visitor, kind: str) -> None:
        self.refusals.tell(kind)
        self.admit(visitor)
        if visitor.transport is not None:
            visitor.transport.abort()


class Visitor(web.RequestHandler):
    """A connection."""

    def __init__(self, server: web.Server, door: Door, **how: Any):
        super().__init__(server, **how)
        self.door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.door.meet(self)

    def connection_lost(self, error: BaseException | None) -> None:
        self.door.admit(self)
        super().connection_lost(error)


def raise_open_files() -> int:
    """How many files this process may have open: as many as the system lets it, up to
    MAX_OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # macOS has a lower limit beside the hard one
            return soft
    return most


def make_log(refusals: Refusals) -> logging.Logger:
    log = logging.Logger("rl_core.service.http", logging.WARNING)
    log.addFilter(refusals.filter)
    return log
