"""A sandbox for code that models write, and boxes for agents' commands: docs/sandbox.md."""

import os
from typing import Any

from rl_core.sandbox import run_flags


def __getattr__(name: str):
    """Imported when asked for: the process that forks programs needs none of it."""
    if name in ("Sandbox", "Result", "Limits"):
        from rl_core.sandbox import sandbox

        return getattr(sandbox, name)
    raise AttributeError(f"module 'rl_core.sandbox' has no attribute {name!r}")


def configure(**flags: Any) -> None:
    """boxes.configure(), once something imports boxes. Raises ValueError for an unknown driver."""
    run_flags.process, run_flags.flags = os.getpid(), flags
    if flags["box_driver"] or run_flags.is_imported:
        from rl_core.sandbox import boxes

        boxes.configure(**flags)
