"""The viewer. `from rl_core import view` gives this module, which is called as a function."""

import sys
from types import ModuleType


class CallableViewer(ModuleType):
    def __call__(self, *args: object, **kwargs: object) -> object:
        """Calls view() of rl_core/view/notebook.py."""
        from rl_core.view.notebook import view

        return view(*args, **kwargs)


sys.modules[__name__].__class__ = CallableViewer
