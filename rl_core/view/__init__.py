"""The viewer. `from rl_core import view` gives this module, which is called as a function."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from rl_core.view.notebook import ShownPage


class CallableViewer(ModuleType):
    def __call__(self, run: str | Path, *more: str | Path, height: int = 800) -> ShownPage:
        """Calls view() of rl_core/view/notebook.py."""
        from rl_core.view.notebook import view

        return view(run, *more, height=height)


sys.modules[__name__].__class__ = CallableViewer
