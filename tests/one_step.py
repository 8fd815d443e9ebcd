"""What a default run loads until its second step is done, and which functions that step enters, as
JSON: python tests/one_step.py MODEL ENV OUT

A process of its own, because tests import more than a run does. Engines are left out of the step:
which of their functions run hangs on what is sampled.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
OURS = f"{ROOT}/rl_core/"
# How the second step is found, not what a run of the command has.
NOT_COUNTED = tuple(f"rl_core.tools.python_{name}" for name in ("api", "envs", "parts"))


class Recorder:
    """The functions of rl_core that are entered between the ends of two steps."""

    def __init__(self) -> None:
        self.entered: set[tuple[str, int]] = set()  # (file, line of the function)
        self.loaded: list[str] = []
        self.modules: list[str] = []  # all that Python loaded

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_function = not code.co_name.startswith("<")
        if event == "call" and is_function and code.co_filename.startswith(OURS):
            self.entered.add((code.co_filename.removeprefix(OURS), code.co_firstlineno))

    def on_step(self, step: int, metrics: dict) -> None:
        hook = self if step == 1 else None
        threading.setprofile(hook)
        sys.setprofile(hook)
        self.loaded = loaded_files()
        self.modules = sorted(sys.modules)


def loaded_files() -> list[str]:
    files = {
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if name not in NOT_COUNTED
    }
    return sorted(file.removeprefix(OURS) for file in files if file.startswith(OURS))


def main(model: str, env: str, out: str) -> None:
    from rl_core import Config, train

    recorder = Recorder()
    config = Config(
        model=model,
        out=out,
        env_path=env,
        num_steps=2,
        tasks_per_step=2,
        group_size=2,
        max_tokens=8,
        max_prompt_tokens=24,
    )
    train(config, on_step=recorder.on_step)
    entered = sorted(place for place in recorder.entered if not place[0].startswith("engines/"))
    found = {"loaded": recorder.loaded, "modules": recorder.modules, "entered": entered}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
