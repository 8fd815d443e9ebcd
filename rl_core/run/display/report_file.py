"""report.html of a run that is done."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

PATIENCE_S = 10.0  # Seconds without a line that says why the run waits.
# For a disk that does not answer; torchrun ends nodes that are done 300 s before the last.
MAX_WAIT_S = 240.0


def write_report(out: Path) -> None:
    """Writes report.html by a process of the viewer. A failure is a warning, since the run itself
    went well."""
    file = out / "report.html"
    command = ["view", str(out), "--report", str(file)]
    try:
        reason = run_viewer(command, file)
    except OSError as error:  # The machine starts no more processes.
        reason = str(error)
    if reason:
        hint = f"rl-core {shlex.join(command)} does it again"
        print(f"warning: {file} was not written: {reason}; {hint}", file=sys.stderr, flush=True)


def run_viewer(command: list[str], file: Path) -> str:
    """Reason why the viewer did not write its file; "" if it did."""
    viewer = subprocess.Popen(
        [sys.executable, "-m", "rl_core.tools.cli", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        try:
            _, errors = viewer.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            print(f"writing {file}", flush=True)
            _, errors = viewer.communicate(timeout=MAX_WAIT_S)
    except subprocess.TimeoutExpired:
        viewer.kill()
        return "it took too long"
    if viewer.returncode == 0:
        return ""
    reason = errors.strip().rpartition("\n")[2].removeprefix("error: ")
    return reason or f"the viewer ended with status {viewer.returncode}"
