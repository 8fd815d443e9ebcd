"""--sandbox.* of this process, for modules of boxes, which a run imports with its first box."""

from collections.abc import Callable
from typing import Any

process: int = 0  # The pid of the process that set the flags.
flags: dict[str, Any] = {}
is_imported = False  # True if this process has imported Sandbox or boxes.
at_end: list[Callable[[], None]] = []  # Functions that end this process's remote boxes.


def end_boxes() -> None:
    for function in at_end:
        function()
