"""PythonSession: Python in a box that keeps its variables from call to call. docs/sandbox.md"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rl_core.sandbox.box_settings import Box

SCRIPT = Path(__file__).with_name("interpreter.py")
IN_BOX = "/tmp/rl_core_interpreter.py"
RESTARTED = "the next call has a new interpreter, without variables"


class PythonSession:
    """An interpreter in a box, with the box's limits, that ends with the box. Runs one call at a
    time; others wait. Kills all processes of the box after a call that ended the interpreter."""

    def __init__(self, box: Box, timeout_s: float = 10.0):
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be above 0, such as 10")
        self.box, self.timeout_s = box, timeout_s
        self.is_ready = False
        self.num_started = 0
        self.lock = asyncio.Lock()

    @property
    def socket(self) -> str:
        return f"/tmp/rl_core_interpreter_{self.num_started}"

    async def run(self, code: str) -> str:
        """Runs code and returns its output, at most 16 KB, with the traceback of an error and the
        value of a last expression. Returns a line in brackets instead if the interpreter ended: the
        call exceeded timeout_s, called os._exit(), or was killed. Raises BoxEnded, OSError."""
        async with self.lock:
            if not self.is_ready:
                await self.start()
            # After a cancellation the interpreter may still be busy; the next call replaces it.
            self.is_ready = False
            command = ["python3", "-I", IN_BOX, "call", self.socket]
            code = code.encode(errors="replace").decode()
            done = await self.box.exec(command, stdin=code, timeout_s=self.timeout_s)
            if done.code == 0 and not done.timed_out:
                self.is_ready = True
                return done.stdout
            await self.box.end_processes()
            why = "the interpreter ended"
            if done.timed_out:
                why = f"ended: the call took longer than {self.timeout_s:g} s"
            return f"[{why}; {RESTARTED}]"

    async def start(self) -> None:
        if self.num_started:
            await self.box.end_processes()
        self.num_started += 1
        await self.box.put(IN_BOX, SCRIPT)
        command = f"python3 -I {IN_BOX} serve {self.socket} </dev/null >/dev/null 2>&1 &"
        done = await self.box.exec(command, timeout_s=self.timeout_s)
        if done.code != 0:
            raise OSError(f"python3 does not begin in this box: {done.stderr[-500:]}")
