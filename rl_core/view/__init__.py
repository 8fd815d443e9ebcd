"""The viewer. `from rl_core import view` gives this module, which is called as a function."""

import sys
from types import ModuleType
from typing import Any


class CallableViewer(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls view() of rl_core/view/notebook.py."""
        from rl_core.view.notebook import view

        return view(*args, **kwargs)


sys.modules[__name__].__class__ = CallableViewer
