"""Garbage of a process that serves."""

import subprocess
import sys

PROGRAM = """
import asyncio, gc, weakref
from rl_core.environments.service.wire import collect_rarely

class State:
    def __init__(self):
        self.own = self

async def main():
    collect_rarely()
    ended = asyncio.Event()
    state = State()
    weakref.finalize(state, ended.set)
    gc.collect()  # It is as old as a session's state.
    del state
    await asyncio.wait_for(ended.wait(), 30)
    print("collected")

asyncio.run(main())
"""


def test_a_state_in_a_cycle_is_collected_without_a_new_object():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "collected\n", done.stderr
