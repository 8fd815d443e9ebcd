"""Checks that a machine can run the boxes and sandboxes of an environment file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rl_core.sandbox import boxes
from rl_core.sandbox.sandbox import Sandbox


def machine_check(has: dict[str, object]) -> Callable[[], object] | None:
    """A check for the boxes that a file uses: by `box`, by an import of `boxes`, or by an import of
    a function whose module has that import. Also for its sandboxes, if their programs run in remote
    boxes or this is not Linux."""
    sandboxes = [value for value in has.values() if isinstance(value, Sandbox)]
    is_linux = sys.platform == "linux"
    checks: list[Callable[[], object]] = [
        each.check for each in sandboxes if each.driver or not is_linux
    ]
    box = has.get("box")
    modules = [has, *(getattr(value, "__globals__", {}) for value in has.values())]
    if box or any(module.get("boxes") is boxes for module in modules):
        options = box if isinstance(box, dict) else {}
        drivers = []
        with suppress(ModuleNotFoundError):  # A worker may lack packages of Harbor's tasks.
            from rl_core.environments.agents.harbor import TaskBoxes

            drivers = [value.driver for value in has.values() if isinstance(value, TaskBoxes)]
        driver = options.get("driver", "") or "".join(drivers[:1])
        image = options.get("image", "")
        checks.append(partial(boxes.check_machine, driver, image, has_agent=bool(box)))
    return (lambda: [check() for check in checks]) if checks else None
